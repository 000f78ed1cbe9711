"""Given texts, decoded token by token whatever the model predicts, and how well each token was predicted.

Letters: R rows, n decode steps, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.policy import Policy
from h2o_jax.state import PagedState
from h2o_jax.teacher_forcing import divergence


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What each decode step said of the token after the one it was fed.

    Attributes:
        surprise: [n, R] float32, -log of the probability of the true token, in nats.
        correct: [n, R] bool, whether the true token was the most likely one.
        kl: [n, R] float32, KL(dense || policy) in nats.
        same: [n, R] bool, whether the most likely token is that of dense attention.
    """

    surprise: np.ndarray
    correct: np.ndarray
    kl: np.ndarray
    same: np.ndarray


def decode(
    model: Layerwise,
    state: PagedState,
    tokens: np.ndarray,
    counts: np.ndarray,
    *,
    policy: Policy,
    dense: list[jax.Array] | None = None,
) -> tuple[PagedState, Predictions, list[jax.Array]]:
    """Feeds each row its tokens, one a step, and judges the prediction of each next one.

    Args:
        model: the model.
        state: the state after prefill (its pools are donated), with room for n more tokens a row.
        tokens: [R, n + 1] int32, of each row the tokens that follow its prompt, right-padded.
        counts: [R], how many predictions of each row are real, at most n; what is judged past them means
            nothing.
        policy: of the decode steps.
        dense: n arrays [R, V], what dense attention made of the same steps; None judges a run against itself.

    Returns:
        The state, the predictions, and the logits of each step, n arrays [R, V] float32.
    """
    judged, steps = [], []
    for step in range(tokens.shape[1] - 1):
        num_tokens = (step < counts).astype(np.int32)
        state, hidden = model.advance(state, tokens[:, step : step + 1], num_tokens, policy=policy)
        logits = model.logits(hidden)
        judged.append(_judge(logits, tokens[:, step + 1], logits if dense is None else dense[step]))
        if dense is None:
            steps.append(logits)
    return state, Predictions(*(np.stack(column) for column in zip(*jax.device_get(judged)))), steps


@jax.jit
def _judge(logits, target, dense):
    surprise = -jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]
    kl, same = divergence(dense, logits)
    return surprise, logits.argmax(-1) == target, kl, same
