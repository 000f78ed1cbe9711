"""Quality against budget, as a picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from h2o_jax._outputs import os_errors_name
from h2o_jax.eval.budget import DENSE
from h2o_jax.eval.cells import COVERAGE, PASSKEY, PERPLEXITY
from h2o_jax.eval.report import policy_of

_DPI = 120
_WIDTH, _HEIGHT, _LEGEND = 5.2, 4.0, 0.18  # of a panel, and the height of a line of the legend, in inches


class _Panel(NamedTuple):
    task: str
    metric: str
    label: str
    factor: float = 100  # shares are drawn in percent
    is_log: bool = False
    limits: tuple[float, float] | None = None


_PANELS = (
    _Panel(PERPLEXITY, "kl", "KL(dense || policy) [nats]", 1, True),
    _Panel(PERPLEXITY, "top1", "same top token as dense [%]"),
    _Panel(PASSKEY, "accuracy", "passkeys found [%]", limits=(-3, 103)),
    _Panel(COVERAGE, "mass", "dense attention on pages read [%]"),
)
_MARKERS = "osD^vPX*"


def check_plot(path: Path) -> None:
    """Raises before anything has run what `write_plot` would raise of a path or a missing library.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: an ending that is no format of pictures.
    """
    figure = _pyplot().figure()
    formats = figure.canvas.get_supported_filetypes()
    _pyplot().close(figure)
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(f"--plot: expected a file ending such as .png or .svg, got {path.name!r}")


def _pyplot() -> Any:
    """matplotlib.pyplot, on a backend that needs no display."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"--plot: {error}; it needs: pip install 'h2o-jax[notebooks]'") from error
    return pyplot


def write_plot(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Draws a panel for each metric there is, with a line for each policy and page size.

    Args:
        path: the picture; its ending says the format.
        records: finished cells.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no policy but dense attention in the records, or nothing finite.
    """
    pyplot = _pyplot()
    panels = [panel for panel in _PANELS if any(_points(panel, records))]
    if not panels:
        raise ValueError("--plot: expected a policy with a budget and finite results, got none to draw")
    policies = list(dict.fromkeys(str(policy_of(record)) for record in records if record["policy"] != DENSE))
    sizes = sorted({record["page_size"] for record in records if record["policy"] != DENSE})
    colours = pyplot.get_cmap("tab20" if len(policies) > 10 else "tab10")
    style = {
        (policy, size): dict(color=colours(i), marker=_MARKERS[j % len(_MARKERS)], linestyle=_line(j))
        for i, policy in enumerate(policies)
        for j, size in enumerate(sizes)
    }

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained")
    drawn = {}
    for axis, panel in zip(axes.flat, panels):
        lines: dict[tuple[str, int], list] = {}
        for key, budget, value in _points(panel, records):
            lines.setdefault(key, []).append((budget, value))
        for key, points in lines.items():
            (drawn[key],) = axis.plot(*zip(*sorted(points)), **style[key], markersize=5, linewidth=1.5)
        _label(axis, panel, sorted({budget for points in lines.values() for budget, _ in points}))
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    order = sorted(drawn, key=lambda key: (policies.index(key[0]), key[1]))
    names = [f"{policy}, pages of {size}" for policy, size in order]
    figure.set_size_inches(_WIDTH * columns, _HEIGHT * rows + _LEGEND * -(-len(order) // columns))
    figure.legend([drawn[key] for key in order], names, loc="outside lower center", ncols=columns, fontsize=8)
    figure.suptitle(_title(records), fontsize=10)
    with os_errors_name(path):
        figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def _line(index: int) -> str:
    return ("-", "--", ":", "-.")[index % 4]


def _points(panel: _Panel, records: Iterable[Mapping[str, Any]]):
    for record in records:
        if record["task"] == panel.task and record["policy"] != DENSE and record[panel.metric] is not None:
            key = (str(policy_of(record)), record["page_size"])
            yield key, record["budget"], record[panel.metric] * panel.factor


def _label(axis, panel: _Panel, budgets: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.minorticks_off()
    axis.set_xlabel("budget [tokens read in a step]")
    axis.set_ylabel(panel.label)
    if panel.is_log:
        axis.set_yscale("log")
    if panel.limits:
        axis.set_ylim(panel.limits)
    axis.grid(alpha=0.3)


def _title(records: Sequence[Mapping[str, Any]]) -> str:
    first = records[0]
    sizes = f"{first['dtype']}, context of {first['context']} tokens"
    return f"{first['model']}, {sizes}, {first['device']}, {first['date']}"
