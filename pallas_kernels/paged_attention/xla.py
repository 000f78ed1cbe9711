"""The definition of `paged_attention` in plain `jax.numpy`."""

import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels._dispatch import compiled_once
from pallas_kernels._paging import group_queries, physical_pages


@compiled_once
def paged_attention(q, k_pool, v_pool, pages, seq_lens, selected, counts, *, scale):
    num_pages, num_kv_heads, page_size, _ = k_pool.shape
    chosen = jnp.arange(selected.shape[2], dtype=jnp.int32) < counts[..., None]
    page = physical_pages(pages, selected, chosen, num_pages)  # [B, Hkv, W]
    position = selected[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    valid = (page < num_pages)[..., None] & (position < seq_lens[:, None, None, None])

    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    keys = k_pool.at[page, head].get(mode="fill", fill_value=0).astype(jnp.float32)  # [B, Hkv, W, P, D]
    values = v_pool.at[page, head].get(mode="fill", fill_value=0).astype(jnp.float32)
    # An unused slot may hold NaN, and 0 * NaN is NaN: a weight of 0 is not enough, nor for keys when differentiating.
    keys, values = (jnp.where(valid[..., None], x, 0) for x in (keys, values))

    groups = group_queries(q, num_kv_heads)  # [B, Hkv, G, D]
    logits = scale * jnp.einsum("bhgd,bhwpd->bhgwp", groups, keys, precision=Precision.HIGHEST)
    logits = jnp.where(valid[:, :, None], logits, -jnp.inf)
    peak = logits.max(axis=(-2, -1), keepdims=True, initial=-jnp.inf)  # W may be 0
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    weight = jnp.exp(logits - peak)
    total = weight.sum(axis=(-2, -1))  # [B, Hkv, G]
    out = jnp.einsum("bhgwp,bhwpd->bhgd", weight, values, precision=Precision.HIGHEST)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    lse = peak[..., 0, 0] + jnp.log(total)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])
