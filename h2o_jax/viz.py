"""Pictures of a decode loop: scores and selections over its steps, and the page table.

Needs matplotlib, from the `notebooks` extra. Each function draws into an Axes and returns it.

Letters: S steps, M logical pages of a row, W budget in pages.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from h2o_jax.state import PageTable

try:
    import matplotlib.pyplot as plt
    from matplotlib import color_sequences
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.image import AxesImage
    from matplotlib.patches import Rectangle
except ModuleNotFoundError as error:
    raise ImportError("h2o_jax.viz needs matplotlib: pip install 'h2o-jax[notebooks]'") from error

_PAGES_PER_LINE = 16
_OUTSIDE, _FREE, _CHOSEN = "0.85", "0.93", "tab:blue"


def plot_scores(scores: npt.ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Heatmap of one row's and one KV head's scores: steps from left to right, logical pages upwards.

    Args:
        scores: [S, M], such as `Selection.scores[b, h]` of each step; -inf (outside the window) and NaN are
            drawn grey.
        ax: where to draw; None is a new figure.

    Returns:
        The Axes, its image [M, S] and a colour bar beside it.

    Raises:
        ValueError: `scores` is not [S, M].
    """
    scores = _matrix("scores", scores, "[S, M]").astype(np.float64)
    ax = _axes(ax)
    colours = plt.get_cmap("viridis").with_extremes(bad=_OUTSIDE)
    image = _heatmap(ax, np.ma.masked_invalid(scores.T), cmap=colours)
    ax.figure.colorbar(image, ax=ax, label="score")
    return ax


def plot_selections(pages: npt.ArrayLike, num_logical: int, *, ax: Axes | None = None) -> Axes:
    """Which logical pages one row and KV head read: steps from left to right, logical pages upwards.

    Args:
        pages: [S, W] integers, such as `Selection.pages[b, h]` of each step; entries outside
            [0, num_logical), NO_PAGE among them, name no page.
        num_logical: M, logical pages to draw.
        ax: where to draw; None is a new figure.

    Returns:
        The Axes, its image [M, S] 1 where a page is read and 0 elsewhere.

    Raises:
        ValueError: `pages` is not [S, W] integers, or `num_logical` is not positive.
    """
    pages = _matrix("pages", pages, "[S, W]")
    if not np.issubdtype(pages.dtype, np.integer):
        raise ValueError(f"pages: expected integers, got {pages.dtype}")
    if num_logical < 1:
        raise ValueError(f"num_logical: expected at least 1, got {num_logical}")
    step, entry = np.nonzero((pages >= 0) & (pages < num_logical))
    read = np.zeros((num_logical, len(pages)))
    read[pages[step, entry], step] = 1
    ax = _axes(ax)
    _heatmap(ax, read, cmap=ListedColormap(["white", _CHOSEN]), vmin=0, vmax=1)
    return ax


def plot_page_table(table: PageTable, *, ax: Axes | None = None) -> Axes:
    """The pool's physical pages: whose each is, and how far it is filled.

    A page that row b owns carries `b:i`, i being the logical page, and is filled with that row's colour as far
    as it holds tokens. The rest is grey, as are free pages.

    Args:
        table: page table, not a traced one.
        ax: where to draw; None is a new figure.

    Returns:
        The Axes, with a rectangle for each physical page and for the filled part of each owned one.

    Raises:
        ValueError: `table` is not a PageTable.
    """
    if not isinstance(table, PageTable):
        raise ValueError(f"table: expected a PageTable, got {type(table).__name__}")
    ax = _axes(ax)
    num_pages, page_size = table.num_pages, table.page_size
    columns = min(num_pages, _PAGES_PER_LINE)
    lines = -(-num_pages // columns)
    corners = [(page % columns, page // columns) for page in range(num_pages)]
    for x, y in corners:
        ax.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=_FREE, edgecolor="0.6"))
    colours = color_sequences["tab10"]
    rows = zip(np.asarray(table.pages), np.asarray(table.seq_lens), np.asarray(table.pages_in_use))
    for row, (pages, seq_len, in_use) in enumerate(rows):
        colour = colours[row % len(colours)]
        for logical, page in enumerate(pages[:in_use]):
            x, y = corners[page]
            filled = min(seq_len - logical * page_size, page_size) / page_size
            label = f"row {row}: {seq_len} tokens" if logical == 0 else None
            ax.add_patch(Rectangle((x, y), 0.9 * filled, 0.9, facecolor=colour, alpha=0.6, label=label))
            ax.text(x + 0.45, y + 0.45, f"{row}:{logical}", ha="center", va="center")
    ax.set(xlim=(-0.1, columns), ylim=(lines, -0.1), aspect="equal")
    ax.set_xticks(np.arange(columns) + 0.45, [str(page) for page in range(columns)])
    ax.set_yticks(np.arange(lines) + 0.45, [str(page) for page in range(0, num_pages, columns)])
    ax.tick_params(length=0)
    ax.set(
        xlabel="physical page",
        ylabel="first page of the line",
        title=f"{int(table.num_free)} of {num_pages} pages free",
    )
    if (table.seq_lens > 0).any():
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return ax


def _axes(ax: Axes | None) -> Axes:
    return plt.subplots(layout="constrained")[1] if ax is None else ax


def _matrix(name: str, value: npt.ArrayLike, letters: str) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name}: expected {letters}, none of them 0, got shape {list(array.shape)}")
    return array


def _heatmap(ax: Axes, image: np.ndarray, **options: Any) -> AxesImage:
    height, width = image.shape
    drawn = ax.imshow(
        image,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, width + 0.5, -0.5, height - 0.5),
        **options,
    )
    ax.set(xlabel="decode step", ylabel="logical page")
    return drawn
