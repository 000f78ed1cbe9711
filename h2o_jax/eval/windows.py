"""Windows of a text, prefilled once: what perplexity and coverage are measured on.

Letters: R windows, n decode steps, V vocabulary.
"""

from collections.abc import Callable

import jax
import numpy as np

from h2o_jax.eval.forced import Predictions, decode
from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.eval.prefix import Prefix, prefill
from h2o_jax.generate import DEFAULT_PAGE_SIZE
from h2o_jax.policy import Policy, get_policy
from h2o_jax.state import PagedState

_DENSE = get_policy("dense_attention")


class Windows:
    """R windows of a text, equally far apart: a dense prefill of each, then n steps of decode.

    Args:
        model: the model.
        opening: tokens that open every text of this model, such as a BOS token.
        text: [tokens] int32, the whole text.
        context: tokens of the prefill, the opening included.
        steps: n.
        rows: R.
        progress: see `prefill`.

    Raises:
        ValueError: a text too short for the windows not to overlap.
    """

    def __init__(
        self,
        model: Layerwise,
        opening: list[int],
        text: np.ndarray,
        context: int,
        steps: int,
        rows: int,
        progress: Callable[[int], None],
    ):
        need = context - len(opening) + steps + 1
        if len(text) < rows * need:
            raise ValueError(
                f"text: expected at least {rows * need} tokens for {rows} windows, got {len(text)}"
            )
        starts = [row * (len(text) // rows) for row in range(rows)]
        windows = np.array([[*opening, *text[start : start + need]] for start in starts], np.int32)
        self._model, self._tokens = model, windows[:, context:]
        self._prefix: Prefix = prefill(model, windows[:, :context], progress)
        self.dense, self._dense_logits = self._dense()

    def compile(self, policy: Policy, page_size: int) -> None:
        """Compiles what `run` takes."""
        self._prefix.compile(self._model, policy, page_size, self._tokens.shape[1] - 1)

    def run(self, policy: Policy, page_size: int) -> tuple[PagedState, Predictions]:
        """Decodes all windows under a policy; the state after it, and what was predicted."""
        state, predictions, _ = self._decode(policy, page_size, self._dense_logits)
        return state, predictions

    def _dense(self) -> tuple[Predictions, list[jax.Array]]:
        _, predictions, logits = self._decode(_DENSE, DEFAULT_PAGE_SIZE, None)
        return predictions, logits

    def _decode(self, policy, page_size, dense):
        steps = self._tokens.shape[1] - 1
        state = self._prefix.state_for(policy, page_size, steps)
        counts = np.full(len(self._tokens), steps)
        return decode(self._model, state, self._tokens, counts, policy=policy, dense=dense)
