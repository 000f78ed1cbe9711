"""Page scores from page summaries. Letters: B rows, M logical pages, G query heads of a KV head."""

from collections.abc import Callable, Sequence
from functools import partial

import jax

from pallas_kernels._checks import (
    check_choice,
    check_pool_array,
    check_queries,
    check_row_ints,
    check_table,
)
from pallas_kernels._dispatch import dispatch
from pallas_kernels.envelope_scores import triton, xla

GROUPS = ("mean", "max")
KINDS = (("mean", "max", "min"), ("max", "min"), ("mean",))

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "pallas": partial(triton.envelope_scores, interpret=False),
    "pallas_interpret": partial(triton.envelope_scores, interpret=True),
    "xla": xla.envelope_scores,
}


def envelope_scores(
    q: jax.Array,
    summaries: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    kinds: Sequence[str],
    group: str,
    w_avg: float = 1.0,
    w_peak: float = 1.0,
    implementation: str | None = None,
) -> jax.Array:
    """Scores the pages of each row's window against the queries of each KV head.

    For a page with key mean mu, maximum M and minimum m,
    `peak(q) = sum_d max(q_d * M_d, q_d * m_d)`, an upper bound of `q.k` over the page's keys (the
    bound of Quest, arXiv:2406.10774), and with the queries q_g of the group

        group="max":  w_avg * max_g(q_g.mu) + w_peak * max_g peak(q_g)
        group="mean": w_avg * (qbar.mu) + w_peak * peak(qbar),   qbar = mean_g q_g in float32

    where a term whose summaries are not in `kinds` is left out.

    Args:
        q: [B, Hq, D] queries, bfloat16, float16 or float32.
        summaries: [num_pages, Hkv, S, D] page summaries.
        pages: [B, M] int32 page table; an entry outside `[0, num_pages)` is no page.
        start, stop: [B] int32 window in logical pages, `[start, stop)`; empty where start >= stop.
        kinds: what the S rows are: ("mean", "max", "min"), ("max", "min") or ("mean",).
        group: "max" or "mean", how the G queries of a KV head are joined.
        w_avg, w_peak: weights of the two terms.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        [B, Hkv, M] float32 scores, -inf outside the window and where there is no page.

    Raises:
        ValueError: a wrong shape, dtype or option; the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_choice("kinds", tuple(kinds), KINDS)
    check_choice("group", group, GROUPS)
    check_pool_array("summaries", summaries, (None, None, len(kinds), None), "[num_pages, Hkv, S, D]")
    check_table(pages)
    check_queries(q, pages.shape[0], summaries.shape[1], summaries.shape[3])
    check_row_ints(pages.shape[0], start=start, stop=stop)
    return dispatch(
        "envelope_scores",
        implementation,
        _IMPLEMENTATIONS,
        q,
        summaries,
        pages,
        start,
        stop,
        kinds=tuple(kinds),
        group=group,
        w_avg=float(w_avg),
        w_peak=float(w_peak),
    )
