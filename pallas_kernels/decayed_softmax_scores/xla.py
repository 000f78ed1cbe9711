"""The definition of `decayed_softmax_scores` in plain `jax.numpy`."""

import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels._dispatch import compiled_once
from pallas_kernels._paging import group_queries, physical_pages, window_mask


@compiled_once
def decayed_softmax_scores(q, k_pool, scores, pages, start, stop, *, decay, scale, group):
    num_pages, num_kv_heads, _, _ = k_pool.shape
    logical = jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    page = physical_pages(pages, logical, window_mask(start, stop, pages.shape[1]), num_pages)
    valid = (page < num_pages)[:, None]  # [B, 1, M]

    keys = k_pool.at[page].get(mode="fill", fill_value=0)[:, :, :, 0].astype(jnp.float32)  # [B, M, Hkv, D]
    q = group_queries(q, num_kv_heads, group)
    logits = scale * jnp.einsum("bhgd,bmhd->bhgm", q, keys, precision=Precision.HIGHEST)
    logits = jnp.where(valid[:, :, None], logits, -jnp.inf)
    peak = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)  # M may be 0
    weight = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0, peak))
    total = weight.sum(axis=-1, keepdims=True)
    probability = (weight / jnp.where(total == 0, 1, total)).max(axis=2)  # [B, Hkv, M]

    old = 0.0  # for decay = 0, whatever is stored: 0 * inf is NaN, and a float16 sum may have overflowed
    if decay:
        old = scores.at[page].get(mode="fill", fill_value=0)[..., 0].swapaxes(1, 2).astype(jnp.float32)
    new = (probability + decay * old).astype(scores.dtype)
    scores = scores.at[page].set(new.swapaxes(1, 2)[..., None], mode="drop")
    return scores, jnp.where(valid, new.astype(jnp.float32), -jnp.inf)
