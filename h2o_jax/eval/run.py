"""Running cells: prefills are shared, and a task's inputs are dropped before those of the next are made."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from h2o_jax.eval import coverage, perplexity
from h2o_jax.eval.budget import DENSE
from h2o_jax.eval.cells import COVERAGE, PASSKEY, Cell
from h2o_jax.eval.layerwise import Layerwise
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
                f"context: expected at most {limit - new} tokens before {new} new ones, since the model's "
                f"context is {limit}; got {self.context}"
            )

    def key(self) -> dict[str, Any]:
        """What results depend on beside the cell, the model's name and the device."""
        return {
            "text": hashlib.sha256(self.text.encode()).hexdigest()[:12],
            "dtype": self.model.dtype.name,
            "context": self.context,
            "steps": self.steps,
            "rows": self.rows,
        }


def evaluate(
    setup: Setup, cells: Iterable[Cell], progress: Callable[[int], None] = lambda tokens: None
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The results of each cell, as soon as they are there.

    Args:
        setup: what the cells share.
        cells: best with those of a task together; see `grid`.
        progress: called in a prefill with the tokens of a row done so far.

    Raises:
        ValueError: a text too short for the windows.
    """
    model = Layerwise(setup.model)
    source = None
    for cell in cells:
        kind = Passkeys if cell.task == PASSKEY else Windows
        if not isinstance(source, kind):
            source = None  # before the next one takes its room
            source = (_passkeys if kind is Passkeys else _windows)(setup, model, progress)
        yield cell, _measure(cell, source)


def _measure(cell: Cell, source: Windows | Passkeys) -> dict[str, Any]:
    policy, page_size = cell.resolve(), cell.page_size
    if cell.task == PASSKEY:
        return source.measure(policy, page_size)
    if cell.task == COVERAGE:
        return coverage.measure(source, policy, page_size)
    predictions = source.dense if cell.policy.name == DENSE else source.run(policy, page_size)[1]
    return perplexity.summarise(predictions)


def _windows(setup: Setup, model: Layerwise, progress) -> Windows:
    tokens = np.array(setup.tokenizer.encode(setup.text, add_special_tokens=False), np.int32)
    opening = setup.tokenizer.encode("")
    return Windows(model, opening, tokens, setup.context, setup.steps, setup.rows, progress)


def _passkeys(setup: Setup, model: Layerwise, progress) -> Passkeys:
    return Passkeys(model, setup.tokenizer, setup.text, setup.context, setup.rows, progress)
