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
    logical = jnp.arange(num_logical, dtype=jnp.int32)[None]
    return (logical >= start[:, None]) & (logical < stop[:, None])


def list_pages(
    chosen: jax.Array, start: jax.Array, stop: jax.Array, in_use: jax.Array, *, width: int, filler: int
) -> jax.Array:
    """Each row's pages before the window, the chosen ones in it, and those after it.

    Args:
        chosen: [B, Hkv, k] int32, the first `min(k, stop - start)` of them pages of the window, ascending.
        start, stop: [B] int32 window; where it is empty, all pages in use are listed.
        in_use: [B] int32 pages in use.
        width: length of the list.
        filler: what stands past the last page.

    Returns:
        [B, Hkv, width] int32.
    """
    k = chosen.shape[2]
    start, stop, in_use = (
        x[:, None, None] for x in (jnp.where(start < stop, start, 0), jnp.where(start < stop, stop, 0), in_use)
    )
    entry = jnp.arange(width, dtype=jnp.int32)[None, None]
    after = entry - start - jnp.minimum(k, stop - start)  # place among the pages after the window
    room = jnp.pad(chosen, ((0, 0), (0, 0), (0, max(width - k, 0))))
    inside = jnp.take_along_axis(room, jnp.maximum(entry - start, 0), axis=2)
    page = jnp.where(entry < start, entry, jnp.where(after < 0, inside, stop + after))
    return jnp.where((after < 0) | (stop + after < in_use), page, filler)


def group_queries(q: jax.Array, num_kv_heads: int, group: str = "max") -> jax.Array:
    """Queries by KV head, float32: `[B, Hq, D]` -> `[B, Hkv, G, D]`; for "mean" their mean over g, G = 1."""
    b, hq, d = q.shape
    q = q.astype(jnp.float32).reshape(b, num_kv_heads, hq // num_kv_heads, d)
    return q.mean(axis=2, keepdims=True) if group == "mean" else q
