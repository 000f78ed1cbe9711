"""How far a policy's predictions are from those of dense attention, on the same text.

Letters: n tokens of the continuation, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from h2o_jax.generate import GenerationLoop, advance, check_prompt
from h2o_jax.models import Llama
from h2o_jax.policy import Policy
from h2o_jax.state import PagedState


class Agreement(NamedTuple):
    """Agreement of a policy's predictions with those of dense attention.

    Attributes:
        top1: share of positions where both have the same most likely token.
        mean_kl: mean over positions of KL(dense || policy), in nats.
    """

    top1: float
    mean_kl: float


def teacher_forced_logits(
    model: Llama,
    prompt: Sequence[int],
    continuation: Sequence[int],
    *,
    policy: Policy,
    page_size: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Logits that predict each token of a given continuation, in decode steps after a dense prefill.

    Args:
        model: a model of `h2o_jax.models`.
        prompt: token ids.
        continuation: n token ids, fed one by one whatever the model predicts.
        policy: the policy of the decode steps.
        page_size: tokens a page; None is the policy's own where it has one, else 16.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        [n, V] float32; row i is the prediction of `continuation[i]`. Row 0 comes from the prefill.

    Raises:
        ValueError: as `generate`, or an empty continuation.
    """
    tokens = check_prompt("continuation", continuation, model.config.vocab_size)
    loop = GenerationLoop(
        model,
        [prompt],
        policy=policy,
        max_new_tokens=len(tokens),
        page_size=page_size,
        implementation=implementation,
    )
    for _ in loop.prefill():
        pass
    state, hidden = loop.hand_over()
    graphdef, params = nnx.split(model)
    return _forced_decode(
        params, state, hidden, tokens, graphdef=graphdef, policy=policy, implementation=implementation
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "policy", "implementation"))
def _forced_decode(
    params: nnx.State,
    state: PagedState,
    hidden: jax.Array,
    tokens: jax.Array,
    *,
    graphdef: nnx.GraphDef[Llama],
    policy: Policy,
    implementation: str | None,
) -> jax.Array:
    model = nnx.merge(graphdef, params)
    one = jnp.ones(1, jnp.int32)

    def step(state: PagedState, token: jax.Array) -> tuple[PagedState, jax.Array]:
        state, last = advance(
            model, state, token.reshape(1, 1), one, policy=policy, implementation=implementation
        )
        return state, model.logits(last)[0]

    first = model.logits(hidden)
    _, rest = jax.lax.scan(step, state, tokens[:-1])
    return jnp.concatenate([first, rest])


def agreement(dense_logits: jax.Array, policy_logits: jax.Array) -> Agreement:
    """Compares two sets of logits [n, V] that predict the same text; the first is the dense one.

    Raises:
        ValueError: two shapes, or no position to compare.
        FloatingPointError: logits that are not finite, which agree in nothing.
    """
    if dense_logits.shape != policy_logits.shape or not dense_logits.size:
        raise ValueError(
            "dense_logits, policy_logits: expected one shape [n, V] with n of at least 1; got "
            f"{list(dense_logits.shape)}, {list(policy_logits.shape)}"
        )
    for name, logits in (("dense_logits", dense_logits), ("policy_logits", policy_logits)):
        if not jnp.isfinite(logits).all():
            raise FloatingPointError(f"{name}: expected finite numbers, got NaN or infinity")
    kl, same = divergence(dense_logits, policy_logits)
    return Agreement(top1=float(same.mean()), mean_kl=float(kl.mean()))


def divergence(dense_logits: jax.Array, policy_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Position by position: KL(dense || policy) in nats, float32, and whether both have the same top token.

    Args:
        dense_logits, policy_logits: [..., V].

    Returns:
        Two arrays [...].
    """
    dense, other = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (dense_logits, policy_logits))
    return (jnp.exp(dense) * (dense - other)).sum(-1), dense.argmax(-1) == other.argmax(-1)
