"""Page-table look-ups shared by the plain `jax.numpy` implementations."""

import jax
import jax.numpy as jnp


def physical_pages(pages: jax.Array, logical: jax.Array, valid: jax.Array, num_pages: int) -> jax.Array:
    """Physical page of each logical page, `num_pages` where there is none.

    `num_pages` is out of range for a pool, so that a gather with `mode="fill"` reads nothing there and
    a scatter with `mode="drop"` writes nothing. A negative id would wrap, hence the explicit range check.

    Args:
        pages: [B, M] int32 page table.
        logical: [B, ...] int32 logical pages.
        valid: [B, ...] bool; False entries have no page.
        num_pages: pages of the pool.

    Returns:
        [B, ...] int32 in [0, num_pages].
    """
    if not pages.shape[1]:
        return jnp.full(jnp.broadcast_shapes(logical.shape, valid.shape), num_pages, jnp.int32)
    row = jnp.arange(pages.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (logical.ndim - 1))
    in_row = (logical >= 0) & (logical < pages.shape[1])
    page = pages[row, jnp.where(in_row, logical, 0)]
    return jnp.where(valid & in_row & (page >= 0) & (page < num_pages), page, num_pages)


def window_mask(start: jax.Array, stop: jax.Array, num_logical: int) -> jax.Array:
    """[B, M] bool: True for logical pages in `[start, stop)` of their row."""
    logical = jnp.arange(num_logical, dtype=jnp.int32)
    return (logical >= start[:, None]) & (logical < stop[:, None])


def group_queries(q: jax.Array, num_kv_heads: int, group: str = "max") -> jax.Array:
    """Queries by KV head, float32: `[B, Hq, D]` -> `[B, Hkv, G, D]`; for "mean" their mean over g, G = 1."""
    b, hq, d = q.shape
    q = q.astype(jnp.float32).reshape(b, num_kv_heads, hq // num_kv_heads, d)
    return q.mean(axis=2, keepdims=True) if group == "mean" else q
