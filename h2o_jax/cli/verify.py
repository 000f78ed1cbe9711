"""`h2o-jax verify`: reference runs beside the published figures."""

import argparse

from h2o_jax import verification
from h2o_jax.cli.info import devices, implementations, section, versions
from h2o_jax.verification import DEFAULT_SEED
from pallas_kernels._dispatch import IMPLEMENTATIONS, require_runnable

FAILED = 1
_WIDTH_WITHOUT_TERMINAL = 160


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its options."""
    parser = subparsers.add_parser(
        "verify",
        help="check this installation against published figures",
        description="Runs the reference runs here and prints them beside the published figures. "
        "The exit code is 1 if a line fails.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: the best here, op by op")
    seed_help = f"of the inputs; default {DEFAULT_SEED}"
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help=seed_help)


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `h2o-jax verify --help`."""
    from rich.console import Console

    if args.seed < 0:
        raise ValueError(f"--seed: expected a number >= 0, got {args.seed}")
    require_runnable(args.implementation)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    checks = []
    with Console(stderr=True).status("running") as status:
        for check in verification.verify(args.implementation, args.seed):
            checks.append(check)
            status.update(f"{check.section}: {check.name}")
    failed = sum(not check.passed for check in checks)

    console.print(_table(checks))
    print(f"{len(checks) - failed} of {len(checks)} passed (seed {args.seed})\n")
    print(section("versions", versions()))
    print(section("devices", devices()))
    used = [("all", f"{args.implementation}, as asked")] if args.implementation else implementations()
    print(section("implementation of each op", used))
    return FAILED if failed else 0


def _table(checks: list[verification.Check]):
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "here", "published", "passes if", "")
    last = None
    for check in checks:
        if check.section != last:
            table.add_section()
            table.add_row(Text(check.section, style="bold"))
            last = check.section
        verdict = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        # As Text: what a check says is not markup.
        table.add_row(*map(Text, (check.name, check.measured, check.published, check.criterion)), verdict)
    return table
