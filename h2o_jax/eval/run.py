"""Running cells: they share prefills, and compile ahead of their turn."""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from h2o_jax.eval import coverage, perplexity
from h2o_jax.eval.budget import DENSE
from h2o_jax.eval.cells import COVERAGE, PASSKEY, Cell
from h2o_jax.eval.fingerprint import fingerprint
from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.eval.observed import observe
from h2o_jax.eval.passkey import QUESTION_TOKENS, Passkeys
from h2o_jax.eval.windows import Windows
from h2o_jax.models import Llama, Tokenizer


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all cells of a run share.

    Attributes:
        model, tokenizer: as `h2o_jax.models.load` gives them.
        text: windows of it are predicted, and numbers are hidden in it.
        context: tokens of the dense prefill.
        steps: decode steps of perplexity and coverage.
        rows: windows of the text, and numbers hidden at each depth.

    Raises:
        ValueError: a size that is not positive, or more tokens than the model's context.
    """

    model: Llama
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)
    context: int
    steps: int
    rows: int

    def __post_init__(self):
        for name in ("context", "steps", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        new, limit = max(self.steps, QUESTION_TOKENS), self.model.config.max_position_embeddings
        if self.context + new > limit:
            raise ValueError(
                f"context + steps: expected at most {limit} tokens, the model's context, "
                f"got {self.context} + {new}" + (" for a question" if new > self.steps else "")
            )

    def key(self) -> dict[str, Any]:
        """What results depend on beside the cell, the model's name and the device."""
        return {
            "text": hashlib.sha256(self.text.encode()).hexdigest()[:12],
            "fingerprint": fingerprint(self.model, self.tokenizer),
            "dtype": self.model.dtype.name,
            "context": self.context,
            "steps": self.steps,
            "rows": self.rows,
        }


def evaluate(
    setup: Setup,
    cells: Iterable[Cell],
    begin: Callable[[Cell], None] = lambda cell: None,
    prefilled: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The results of each cell, as soon as they are there.

    Args:
        setup: what the cells share.
        cells: best in the order of `grid`, since those that follow each other share their prefill.
        begin: called with each cell before it runs.
        prefilled: called in a prefill with the tokens of a row done so far.

    Raises:
        ValueError: a text too short for the windows.
    """
    model = Layerwise(setup.model)
    for source, group in itertools.groupby(
        cells, lambda cell: _passkeys if cell.task == PASSKEY else _windows
    ):
        yield from _evaluate(source, setup, model, list(group), begin, prefilled)


def _evaluate(source, setup, model, cells, begin, prefilled):
    begin(cells[0])
    inputs = source(setup, model, prefilled)
    for cell in _compiled_ahead(inputs, cells):
        begin(cell)
        yield cell, _measure(cell, inputs)


def _compiled_ahead(inputs: Windows | Passkeys, cells: list[Cell]) -> Iterator[Cell]:
    """The cells in order, each once it is compiled; those to come compile meanwhile, on all cores."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        compiled = [pool.submit(inputs.compile, _policy(cell), cell.page_size) for cell in cells]
        for cell, done in zip(cells, compiled):
            done.result()
            yield cell
    finally:
        pool.shutdown(cancel_futures=True)


def _policy(cell: Cell) -> Any:
    """The policy that runs for a cell; for coverage, under observation."""
    policy = cell.resolve()
    return observe(coverage.scored(policy, cell.page_size)) if cell.task == COVERAGE else policy


def _measure(cell: Cell, inputs: Any) -> dict[str, Any]:
    if cell.task == PASSKEY:
        return inputs.measure(_policy(cell), cell.page_size)
    if cell.task == COVERAGE:
        return coverage.measure(inputs, _policy(cell), cell.page_size)
    is_dense = cell.policy.name == DENSE
    return perplexity.summarise(inputs.dense if is_dense else inputs.run(_policy(cell), cell.page_size)[1])


def _windows(setup: Setup, model: Layerwise, prefilled) -> Windows:
    tokens = np.array(setup.tokenizer.encode(setup.text, add_special_tokens=False), np.int32)
    opening = setup.tokenizer.encode("")
    return Windows(model, opening, tokens, setup.context, setup.steps, setup.rows, prefilled)


def _passkeys(setup: Setup, model: Layerwise, prefilled) -> Passkeys:
    return Passkeys(model, setup.tokenizer, setup.text, setup.context, setup.rows, prefilled)
