"""Accumulated attention of tokens. Letters: B rows, M logical pages of one token, G query heads a KV head."""

from collections.abc import Callable
from functools import partial

import jax

from pallas_kernels._checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_pool_array,
    check_queries,
    check_row_ints,
    check_shape,
    check_table,
)
from pallas_kernels._dispatch import dispatch
from pallas_kernels.decayed_softmax_scores import triton, xla

GROUPS = ("mean", "max")

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "pallas": partial(triton.decayed_softmax_scores, interpret=False),
    "pallas_interpret": partial(triton.decayed_softmax_scores, interpret=True),
    "xla": xla.decayed_softmax_scores,
}


def decayed_softmax_scores(
    q: jax.Array,
    k_pool: jax.Array,
    scores: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    decay: float,
    scale: float,
    group: str,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds one step's attention probabilities over the window to the decayed scores of its tokens.

    The accumulated score of H2O (arXiv:2306.14048, section 4) with decay: over the window A,
    `a_i = softmax_{i in A}(scale * qbar.k_i)` (group="mean") or
    `a_i = max_g softmax_{i in A}(scale * q_g.k_i)` (group="max"), then `h_i <- a_i + decay * h_i`,
    computed in float32 and rounded once to the dtype of `scores`. Tokens outside the window keep their
    score. Donate `scores` to have it updated in place.

    Args:
        q: [B, Hq, D] queries, bfloat16, float16 or float32.
        k_pool: [num_pages, Hkv, 1, D] keys; a page holds one token.
        scores: [num_pages, Hkv, 1] accumulated scores.
        pages: [B, M] int32 page table; an entry outside `[0, num_pages)` is no page.
        start, stop: [B] int32 window in logical pages, `[start, stop)`; empty where start >= stop.
        decay: factor on the old score, in [0, 1]; with 0 the old score counts for nothing, whatever it is.
        scale: factor on the logits.
        group: "max" or "mean", how the G queries of a KV head are joined.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        `scores` after the step, and [B, Hkv, M] float32: the stored score of each window token, -inf
        outside the window and where there is no page.

    Raises:
        ValueError: a wrong shape, dtype or option, or pages of more than one token.
        NotImplementedError: the named implementation can't.
    """
    check_choice("group", group, GROUPS)
    check_pool_array("k_pool", k_pool, (None, None, 1, None), "[num_pages, Hkv, 1, D]")
    check_shape("scores", scores, k_pool.shape[:3], "[num_pages, Hkv, 1]")
    check_dtype("scores", scores, FLOAT_DTYPES)
    check_table(pages)
    check_queries(q, pages.shape[0], k_pool.shape[1], k_pool.shape[3])
    check_row_ints(pages.shape[0], start=start, stop=stop)
    if not 0 <= decay <= 1:
        raise ValueError(f"decay: expected a number in [0, 1], got {decay!r}")
    return dispatch(
        "decayed_softmax_scores",
        implementation,
        _IMPLEMENTATIONS,
        q,
        k_pool,
        scores,
        pages,
        start,
        stop,
        decay=float(decay),
        scale=float(scale),
        group=group,
    )
