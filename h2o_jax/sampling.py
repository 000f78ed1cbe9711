"""Choosing the next token from logits. Letters: B rows, V vocabulary."""

import jax
import jax.numpy as jnp


def greedy(logits: jax.Array) -> jax.Array:
    """[B] int32: the most likely token of each row of `logits` [B, V]; the lower id where equal."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample_top_p(logits: jax.Array, keys: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """Samples from the smallest set of tokens whose probability reaches `top_p` (arXiv:1904.09751).

    Args:
        logits: [B, V] float32.
        keys: [B] random keys, one a row, so that a row's draw does not depend on the others.
        temperature: scalar > 0, divides the logits.
        top_p: scalar in (0, 1]; 1 samples from all tokens.

    Returns:
        [B] int32 tokens.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1) / temperature
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # the first token has 0 before it: always kept
    ranked = jnp.where(before < top_p, ranked, -jnp.inf)
    choice = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
