"""The definition of `write_pages` in plain `jax.numpy`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import compiled_once
from pallas_kernels._paging import physical_pages

_REDUCE: dict[str, Callable[..., jax.Array]] = {"mean": jnp.mean, "max": jnp.max, "min": jnp.min}


@compiled_once
def write_pages(k_pool, v_pool, k, v, pages, seq_lens, num_tokens, summaries, scores, *, summary_kinds):
    num_pages, _, page_size, _ = k_pool.shape
    first = seq_lens - num_tokens
    token = jnp.arange(k.shape[1], dtype=jnp.int32)
    position = first[:, None] + token
    new = (token < num_tokens[:, None]) & (position >= 0)
    page = physical_pages(pages, position // page_size, new, num_pages)
    slot = position % page_size

    k_pool = k_pool.at[page, :, slot].set(k, mode="drop")
    v_pool = v_pool.at[page, :, slot].set(v, mode="drop")
    if scores is not None:
        scores = scores.at[page, :, slot].set(0, mode="drop")
    if summaries is not None:
        page = _completed_pages(pages, first, seq_lens, k.shape[1], page_size, num_pages)
        keys = k_pool.at[page].get(mode="fill", fill_value=0).astype(jnp.float32)
        rows = jnp.stack([_REDUCE[kind](keys, axis=-2) for kind in summary_kinds], axis=-2)
        summaries = summaries.at[page].set(rows.astype(summaries.dtype), mode="drop")
    return k_pool, v_pool, summaries, scores


def _completed_pages(pages, first, seq_lens, max_tokens, page_size, num_pages) -> jax.Array:
    """[B, ceil(T / P)] physical pages that the new tokens complete, `num_pages` elsewhere."""
    candidate = jnp.arange(-(-max_tokens // page_size), dtype=jnp.int32)
    logical = (first // page_size)[:, None] + candidate
    end = (logical + 1) * page_size
    complete = (end > first[:, None]) & (end <= seq_lens[:, None])
    return physical_pages(pages, logical, complete, num_pages)
