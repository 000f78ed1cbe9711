"""Where exact dense attention looks.

Letters: B rows, M pages a row, P page size, G query heads of a KV head.
"""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from h2o_jax.state import LayerCache, PageTable
from pallas_kernels._paging import group_queries, physical_pages


def page_mass(cache: LayerCache, table: PageTable, q: jax.Array) -> jax.Array:
    """The share of dense attention that falls on each page: softmax over all tokens, mean over the group.

    Args:
        cache: the layer's cache, the newest token written.
        table: page table.
        q: [B, Hq, D] queries of the newest token; logits are scaled by `D ** -0.5`.

    Returns:
        [B, Hkv, M] float32; the sum over a row's pages is 1.
    """
    num_pages, num_kv_heads, page_size, head_dim = cache.k.shape
    logical = jnp.broadcast_to(jnp.arange(table.pages.shape[1], dtype=jnp.int32), table.pages.shape)
    page = physical_pages(table.pages, logical, jnp.ones_like(logical, bool), num_pages)
    keys = cache.k.at[page].get(mode="fill", fill_value=0).astype(jnp.float32)  # [B, M, Hkv, P, D]
    groups = group_queries(q, num_kv_heads)  # [B, Hkv, G, D]
    logits = jnp.einsum("bhgd,bmhpd->bhgmp", groups, keys, precision=Precision.HIGHEST) * head_dim**-0.5
    position = logical[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)  # [B, M, P]
    valid = (position < table.seq_lens[:, None, None])[:, None, None]
    logits = jnp.where(valid, logits, -jnp.inf)
    weight = jnp.where(valid, jnp.exp(logits - logits.max(axis=(-2, -1), keepdims=True)), 0)
    total = weight.sum(axis=(-2, -1), keepdims=True)
    return (weight / jnp.where(total > 0, total, 1)).sum(axis=-1).mean(axis=2)
