"""Writing new tokens into a paged pool. Letters: B rows, T new tokens, M logical pages, P page size."""

from collections.abc import Callable, Sequence
from functools import partial

import jax

from pallas_kernels._checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_pool_array,
    check_row_ints,
    check_shape,
    check_table,
)
from pallas_kernels._dispatch import dispatch
from pallas_kernels.write_pages import triton, xla

SUMMARY_KINDS = ("mean", "max", "min")

_Written = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]
_IMPLEMENTATIONS: dict[str, Callable[..., _Written]] = {
    "pallas": partial(triton.write_pages, interpret=False),
    "pallas_interpret": partial(triton.write_pages, interpret=True),
    "xla": xla.write_pages,
}


def write_pages(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    seq_lens: jax.Array,
    num_tokens: jax.Array,
    *,
    summaries: jax.Array | None = None,
    summary_kinds: Sequence[str] = (),
    scores: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Writes each row's last `num_tokens` tokens, summarises completed pages, resets scores.

    Token i of row b stands at position `seq_lens[b] - num_tokens[b] + i`. A page whose last slot is
    written gets its summaries: mean, maximum and minimum over its P keys, float32 arithmetic, rounded
    once to the dtype of `summaries`. Donate the pools to have them updated in place.

    Args:
        k_pool, v_pool: [num_pages, Hkv, P, D] pools, bfloat16, float16 or float32.
        k, v: [B, T, Hkv, D] new tokens, right-padded, in the pools' dtype.
        pages: [B, M] int32 page table; an entry outside `[0, num_pages)` is no page and is not written.
        seq_lens: [B] int32 tokens of each row, the new ones included.
        num_tokens: [B] int32 new tokens of each row, 0 to T; 0 leaves a row alone.
        summaries: [num_pages, Hkv, S, D] summaries to update, or None.
        summary_kinds: the S kinds in `summaries`, of "mean", "max", "min".
        scores: [num_pages, Hkv, P] accumulated scores, set to 0 for written tokens, or None.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        `k_pool, v_pool, summaries, scores` after the write.

    Raises:
        ValueError: a wrong shape or dtype; the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_pool_array("k_pool", k_pool, (None,) * 4, "[num_pages, Hkv, P, D]")
    num_pages, num_kv_heads, page_size, head_dim = k_pool.shape
    check_shape("v_pool", v_pool, k_pool.shape, "[num_pages, Hkv, P, D]")
    check_dtype("v_pool", v_pool, (k_pool.dtype.name,))
    check_table(pages)
    for name, array in (("k", k), ("v", v)):
        check_shape(name, array, (pages.shape[0], None, num_kv_heads, head_dim), "[B, T, Hkv, D]")
        check_dtype(name, array, (k_pool.dtype.name,))
    check_shape("v", v, k.shape, "[B, T, Hkv, D]")
    check_row_ints(pages.shape[0], seq_lens=seq_lens, num_tokens=num_tokens)
    for kind in summary_kinds:
        check_choice("summary_kinds", kind, SUMMARY_KINDS)
    if summaries is not None:
        shape = (num_pages, num_kv_heads, len(summary_kinds), head_dim)
        check_pool_array("summaries", summaries, shape, "[num_pages, Hkv, S, D]")
    if scores is not None:
        check_shape("scores", scores, k_pool.shape[:3], "[num_pages, Hkv, P]")
        check_dtype("scores", scores, FLOAT_DTYPES)
    return dispatch(
        "write_pages",
        implementation,
        _IMPLEMENTATIONS,
        k_pool,
        v_pool,
        k,
        v,
        pages,
        seq_lens,
        num_tokens,
        summaries,
        scores,
        summary_kinds=tuple(summary_kinds),
    )
