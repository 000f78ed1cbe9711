"""Straightforward `jax.numpy` versions over contiguous tokens, whose errors set the tolerance.

Each works on one row of one step and is mapped over many: L tokens (padded), M pages, Hkv KV heads, G group.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import tolerance

HIGHEST = jax.lax.Precision.HIGHEST


def _queries(q, num_kv_heads, policy):
    q = q.astype(jnp.float32).reshape(num_kv_heads, -1, q.shape[-1])
    return q if policy.startswith("gqa") else q.mean(axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnames="scale")
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))
def attention(q, keys, values, chosen, scale):
    """Attention over chosen tokens.

    Args:
        q: [Hq, D].
        keys, values: [L, Hkv, D].
        chosen: [Hkv, L] bool.
        scale: factor of the logits.
    """
    grouped = q.astype(jnp.float32).reshape(keys.shape[1], -1, q.shape[-1])
    logits = scale * jnp.einsum("hgd,lhd->hgl", grouped, keys.astype(jnp.float32), precision=HIGHEST)
    weights = jax.nn.softmax(jnp.where(chosen[:, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("hgl,lhd->hgd", weights, values.astype(jnp.float32), precision=HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)


def attention_in_sequence(q, keys, values, chosen, scale):
    """`attention` of many rows, all sums rounded after each term, as those of a GPU's float32 dots are."""
    grouped = np.asarray(q, np.float32).reshape(len(q), keys.shape[2], -1, q.shape[-1])
    logits = np.float32(scale) * tolerance.products_in_sequence(grouped, keys)
    logits = np.where(np.asarray(chosen)[:, :, None], logits, np.float32(-np.inf))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    by_column = np.swapaxes(np.asarray(values), 1, 3)  # [B, D, Hkv, L]: a sum over tokens
    out = tolerance.products_in_sequence(weights / weights.sum(axis=-1, keepdims=True), by_column)
    return out.reshape(q.shape).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("policy", "w_avg", "w_peak"))
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None, None, None))
def page_scores(q, mean, largest, smallest, policy, w_avg, w_peak):
    """Page-level scores: `q` [Hq, D], summaries [M, Hkv, D] -> [Hkv, M] float32."""
    q = _queries(q, mean.shape[1], policy)
    mean, largest, smallest = (x.astype(jnp.float32) for x in (mean, largest, smallest))
    by_mean = jnp.einsum("hgd,mhd->hgm", q, mean, precision=HIGHEST).max(axis=1)
    high, low = (q[:, :, None] * x.swapaxes(0, 1)[:, None] for x in (largest, smallest))
    by_peak = jnp.maximum(high, low).sum(axis=-1).max(axis=1)
    if policy == "block_sparse_attention":
        return by_mean
    if policy == "gqa_quest_sparse_attention":
        return by_peak
    return w_avg * by_mean + w_peak * by_peak


@functools.partial(jax.jit, static_argnames=("policy", "decay", "scale"))
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None, None, None))
def token_scores(q, keys, old, scored, policy, decay, scale):
    """Decayed accumulation: `q` [Hq, D], `keys` [L, Hkv, D], `scored` [L] bool; `old` and result [Hkv, L]."""
    q = _queries(q, keys.shape[1], policy)
    logits = scale * jnp.einsum("hgd,lhd->hgl", q, keys.astype(jnp.float32), precision=HIGHEST)
    weights = jax.nn.softmax(jnp.where(scored, logits, -jnp.inf), axis=-1).max(axis=1)
    new = weights + decay * old.astype(jnp.float32)
    return jnp.where(scored, new, old.astype(jnp.float32)).astype(old.dtype)
