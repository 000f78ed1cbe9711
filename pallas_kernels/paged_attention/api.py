"""Attention over chosen pages. Letters: B rows, M logical pages, W chosen pages, P page size."""

from collections.abc import Callable
from functools import partial

import jax

from pallas_kernels._checks import (
    check_dtype,
    check_pool_array,
    check_queries,
    check_row_ints,
    check_shape,
    check_table,
)
from pallas_kernels._dispatch import dispatch
from pallas_kernels.paged_attention import triton, xla

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "pallas": partial(triton.paged_attention, interpret=False),
    "pallas_interpret": partial(triton.paged_attention, interpret=True),
    "xla": xla.paged_attention,
}


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    pages: jax.Array,
    seq_lens: jax.Array,
    selected: jax.Array,
    counts: jax.Array,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Exact softmax attention of one query per head over the valid tokens of the chosen pages.

    Args:
        q: [B, Hq, D] queries, bfloat16, float16 or float32; head h reads KV head `h // (Hq // Hkv)`.
        k_pool, v_pool: [num_pages, Hkv, P, D] pools.
        pages: [B, M] int32 page table; an entry outside `[0, num_pages)` is no page and is not read.
        seq_lens: [B] int32 tokens of each row.
        selected: [B, Hkv, W] int32 logical pages to read, each at most once.
        counts: [B, Hkv] int32, how many entries of `selected` count; the rest is ignored.
        scale: factor on the logits.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        `out` [B, Hq, D] in q's dtype and `lse` [B, Hq] float32, the natural logarithm of the sum of
        exponentiated logits. Where nothing is read, `out` is 0 and `lse` is -inf.

    Raises:
        ValueError: a wrong shape or dtype; the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_pool_array("k_pool", k_pool, (None,) * 4, "[num_pages, Hkv, P, D]")
    check_shape("v_pool", v_pool, k_pool.shape, "[num_pages, Hkv, P, D]")
    check_dtype("v_pool", v_pool, (k_pool.dtype.name,))
    check_table(pages)
    batch, num_kv_heads = pages.shape[0], k_pool.shape[1]
    check_queries(q, batch, num_kv_heads, k_pool.shape[3])
    check_shape("selected", selected, (batch, num_kv_heads, None), "[B, Hkv, W]")
    check_dtype("selected", selected, ("int32",))
    check_shape("counts", counts, (batch, num_kv_heads), "[B, Hkv]")
    check_dtype("counts", counts, ("int32",))
    check_row_ints(batch, seq_lens=seq_lens)
    return dispatch(
        "paged_attention",
        implementation,
        _IMPLEMENTATIONS,
        q,
        k_pool,
        v_pool,
        pages,
        seq_lens,
        selected,
        counts,
        scale=float(scale),
    )
