"""What `h2o-jax eval` shows: progress while it runs, and tables at the end."""

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from h2o_jax.eval import Cell
from h2o_jax.eval.report import table

_WIDTH_WITHOUT_TERMINAL = 160


class Reporter:
    """Says which cell runs and how long the rest may take: a bar on a terminal, else a line a cell.

    Args:
        console: where to.
        total: cells to run.
        context: tokens of a prefill.
    """

    def __init__(self, console: Console, total: int, context: int):
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=3600,  # a cell may take longer than the usual 30 seconds
        )
        self._task = self._bar.add_task("", total=total)
        self._console, self._total, self._context = console, total, context
        self._cells: list[Cell] = []  # begun, the current one last
        self._started = time.monotonic()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def begin(self, cell: Cell) -> None:
        """Shows that this cell is next; a second time, after a prefill, that it runs now."""
        is_new = cell not in self._cells
        if is_new:
            self._cells.append(cell)
        done = len(self._cells) - 1
        self._bar.update(self._task, completed=done, description=str(cell))
        if self._bar.disable and is_new:
            left = (time.monotonic() - self._started) / done * (self._total - done) if done else None
            rest = "" if left is None else f", about {datetime.timedelta(seconds=round(left))} left"
            line = f"[{done + 1}/{self._total}] {cell}{rest}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def prefilled(self, tokens: int) -> None:
        """Shows how far the prefill before the current cell has come."""
        share = min(tokens / self._context, 1)
        self._bar.update(self._task, description=f"{self._cells[-1]} (prefill {share:.0%})")


def print_tables(records: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each task."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    for task in dict.fromkeys(record["task"] for record in records):
        header, rows = table(task, records)
        shown = Table(title=task, title_justify="left")
        for i, name in enumerate(header):
            shown.add_column(name, justify="right" if i else "left", overflow="fold")
        last = None
        for row in rows:
            if last not in (None, row[1:3]):
                shown.add_section()
            last = row[1:3]
            shown.add_row(*map(Text, row))  # as Text: a name is not markup
        console.print(shown)
