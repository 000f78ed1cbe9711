"""`h2o-jax eval`: what reading fewer tokens costs in quality."""

import argparse
import dataclasses
import datetime
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from h2o_jax._outputs import check_outputs
from h2o_jax.cli.files import add_model_option, path_option, read_option
from h2o_jax.cli.info import versions
from h2o_jax.eval import TASKS, Cell, PolicySpec, Setup, Store, budget_tokens, evaluate, grid, policy_names
from h2o_jax.eval.plot import check_plot, write_plot
from h2o_jax.eval.report import write_csv
from h2o_jax.models import load
from h2o_jax.models.loading import default_model_path

_VERSIONS = ("h2o-jax", "jax", "jaxlib", "python")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What runs when nothing is said: on a CPU of two cores, some minutes.

    Attributes:
        policies, page_sizes, budgets: as on the command line.
        context, steps, rows: as in `Setup`.
    """

    policies: Sequence[str]
    page_sizes: Sequence[int]
    budgets: Sequence[Fraction]
    context: int
    steps: int
    rows: int


_ON_CPU = Defaults(
    policies=(
        "dense_attention",
        "gqa_h2o_sparse_attention",
        "gqa_h2o_token_sparse_attention",
        "sink_recent_attention",
        "random",
    ),
    page_sizes=(1, 16),
    budgets=(Fraction(1, 8), Fraction(1, 4)),
    context=1024,
    steps=64,
    rows=1,
)
_ON_GPU = Defaults(
    policies=policy_names(),
    page_sizes=(1, 16, 32),
    budgets=(Fraction(1, 16), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2)),
    context=4096,
    steps=128,
    rows=4,
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its options."""
    parser = subparsers.add_parser(
        "eval",
        help="measure what a policy costs in quality",
        description="Compares policies with dense attention at equal budgets of tokens, after the same dense "
        "prefill: perplexity of a text, with KL and top-1 agreement; coverage of exact attention; and "
        "passkeys found.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"some of {', '.join(TASKS)}; default all")
    add_model_option(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU"
    )
    parser.add_argument(
        "--text", type=path_option, help="a UTF-8 text file; default the prose of Python's help topics"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"of {', '.join(policy_names())}; default some on a CPU, all on a GPU",
    )
    parser.add_argument(
        "--page-sizes",
        nargs="+",
        type=int,
        metavar="P",
        help="tokens of a page; default 1 16, on a GPU also 32",
    )
    budgets_help = "tokens read in a step, or fractions of the context, such as 1/16,1/4"
    parser.add_argument("--budgets", type=_budgets, metavar="B,...", help=budgets_help)
    parser.add_argument("--context", type=int, help="tokens of the dense prefill")
    parser.add_argument("--steps", type=int, help="decode steps of perplexity and coverage")
    rows_help = "windows of the text, and passkeys at each depth; all are one batch"
    parser.add_argument("--rows", type=int, help=rows_help)
    output_help = "JSON lines, one a finished cell; they are not run again"
    parser.add_argument("--output", type=path_option, metavar="FILE", help=output_help)
    parser.add_argument("--csv", type=path_option, metavar="FILE", help="also write the table")
    parser.add_argument(
        "--plot", type=path_option, metavar="FILE", help="also draw quality against budget, such as out.png"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `h2o-jax eval --help`."""
    defaults = _ON_GPU if jax.default_backend() == "gpu" else _ON_CPU
    chosen = dataclasses.asdict(defaults)
    chosen |= {name: given for name in chosen if (given := getattr(args, name)) is not None}
    context, page_sizes = chosen["context"], chosen["page_sizes"]
    policies = [PolicySpec.parse(text) for text in chosen["policies"]]
    budgets = budget_tokens(chosen["budgets"], context, page_sizes)
    cells = grid(args.tasks or TASKS, policies, page_sizes, budgets, context)
    check_outputs(output=args.output, csv=args.csv, plot=args.plot)
    if args.plot:
        check_plot(args.plot)
    text = _text(args.text)
    with Store(args.output) as store:
        return _run(args, chosen, cells, budgets, text, store)


def _run(args, chosen, cells: list[Cell], budgets: list[int], text: str, store: Store) -> int:
    from rich.console import Console

    from h2o_jax.cli.eval_report import Reporter, print_tables

    console = Console(stderr=True)
    if store.note:
        console.print(store.note, highlight=False)
    with console.status("loading the model"):
        model, tokenizer = load(args.model, dtype=args.dtype)
    setup = Setup(model, tokenizer, text, chosen["context"], chosen["steps"], chosen["rows"])
    environment = {
        "model": Path(os.path.abspath(args.model or default_model_path())).name,  # "." has no name
        "device": jax.devices()[0].device_kind,
        **setup.key(),
    }
    keys = {cell: cell.key() | environment for cell in cells}
    missing = [cell for cell in cells if store.find(keys[cell]) is None]
    print(_plan(cells, missing, setup, environment, chosen["page_sizes"], budgets), flush=True)

    around = {"date": datetime.date.today().isoformat()}
    around |= {name: version for name, version in versions() if name in _VERSIONS}
    with Reporter(console, len(missing), setup.context) as reporter:
        for cell, results in evaluate(setup, missing, reporter.begin, reporter.prefilled):
            store.append(keys[cell] | around, results)
    records: list[Any] = [store.find(keys[cell]) for cell in cells]
    print_tables(records)
    if args.csv:
        write_csv(args.csv, records)
    if args.plot:
        write_plot(args.plot, records)
    return 0


def _budgets(text: str) -> list[Fraction | int]:
    try:
        return [Fraction(part) if "/" in part else int(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"expected budgets such as 1/16,1/4 or 256,512, got {text!r}"
        ) from None


def _text(path: Path | None) -> str:
    if path is None:
        import pydoc_data.topics  # half a megabyte, for this command alone

        return "\n".join(pydoc_data.topics.topics.values())
    return read_option("--text", path)


def _plan(cells: list[Cell], missing: list[Cell], setup: Setup, environment, page_sizes, budgets) -> str:
    tasks = ", ".join(
        f"{task} {number}" for task in TASKS if (number := sum(cell.task == task for cell in cells))
    )
    finished = len(cells) - len(missing)
    return (
        f"{len(cells)} cells ({tasks})" + (f", {finished} of them finished before" if finished else "") + "\n"
        f"{environment['model']} in {environment['dtype']} on {environment['device']}; "
        f"context {setup.context} tokens, {setup.steps} steps, {setup.rows} rows\n"
        f"page sizes {', '.join(map(str, page_sizes))}; budgets {', '.join(map(str, budgets))} tokens\n"
        f"policies {', '.join(dict.fromkeys(str(cell.policy) for cell in cells))}\n"
    )
