"""One decode step of one layer: write, select, attend.

Letters: B request rows, M logical pages a row, P page size, W budget in pages, T new tokens a row, Hq query
heads, Hkv KV heads, D head_dim, N pages in use by a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from h2o_jax import debug
from h2o_jax._checks import check_budget, check_new, check_policy, check_pool, check_scored, resolve_scale
from h2o_jax.policy import Policy, Window
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels import paged_attention, top_k_pages
from pallas_kernels import write_pages as write_pages_op
from pallas_kernels._checks import check_dtype, check_kind, check_queries, check_row_ints, check_shape
from pallas_kernels._paging import list_pages, window_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """The pages that each row's new token attends to.

    Attributes:
        pages: [B, Hkv, W] int32 logical pages in ascending order; NO_PAGE (`table.num_pages`) past count.
        counts: [B, Hkv] int32, valid entries of `pages`; 0 for an empty or inactive row.
        scores: [B, Hkv, M] float32, -inf outside the window (everywhere, where nothing was scored).
    """

    pages: jax.Array
    counts: jax.Array
    scores: jax.Array


def decode_attention(
    cache: LayerCache,
    table: PageTable,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    policy: Policy,
    scale: float | None = None,
    active: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[LayerCache, jax.Array]:
    """One decode step of one layer: writes the new token, selects pages, attends to them.

    Rows with length 0 and rows that are not active get output 0 and keep their state.

    Args:
        cache: the layer's cache.
        table: page table, already extended by the token being decoded.
        q: [B, Hq, D] queries, bfloat16, float16 or float32.
        k, v: [B, Hkv, D] key and value of the new token, in the pool's dtype.
        policy: the layer's policy (`policy.for_layer(i)`).
        scale: factor on the logits; None is `D ** -0.5`.
        active: [B] bool, rows that take part; None is all rows.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        The cache after the step, and the output, [B, Hq, D] in q's dtype.

    Raises:
        ValueError: a wrong shape, dtype or head count (at trace time); the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    _check_q(cache, table, q, implementation)
    check_new(cache, table, "[B, Hkv, D]", k=k, v=v)
    scale = resolve_scale(scale, q.shape[-1])
    active = _active_rows(table, active)
    cache = write_tokens(
        cache,
        table,
        k[:, None],
        v[:, None],
        active.astype(jnp.int32),
        policy=policy,
        implementation=implementation,
    )
    cache, selection = select_pages(
        cache, table, q, policy=policy, active=active, implementation=implementation
    )
    out = attend(cache, table, q, selection, scale=scale, active=active, implementation=implementation)
    return cache, out


def write_tokens(
    cache: LayerCache,
    table: PageTable,
    k: jax.Array,
    v: jax.Array,
    num_tokens: jax.Array,
    *,
    policy: Policy,
    implementation: str | None = None,
) -> LayerCache:
    """Writes each row's newest tokens, the summaries of pages they complete, and resets their scores.

    Args:
        cache: the layer's cache.
        table: page table, already extended: the tokens stand at positions `seq_len - num_tokens` to
            `seq_len - 1` of their row.
        k, v: [B, T, Hkv, D] keys and values, right-padded, in the pool's dtype.
        num_tokens: [B] int32 tokens of each row, 0 to T.
        policy: the layer's policy.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        The cache after the write.

    Raises:
        ValueError: a wrong shape or dtype (at trace time); the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_pool(cache, table, implementation)
    check_new(cache, table, "[B, T, Hkv, D]", k=k, v=v)
    check_shape("v", v, k.shape, "[B, T, Hkv, D]")
    check_row_ints(table.pages.shape[0], num_tokens=num_tokens)
    check_policy(cache, policy)
    debug.check_written(table, k, v, num_tokens)
    new_k, new_v, summaries, scores = write_pages_op(
        cache.k,
        cache.v,
        k,
        v,
        table.pages,
        table.seq_lens,
        num_tokens,
        summaries=cache.aux.get("summaries"),
        summary_kinds=cache.summary_kinds,
        scores=cache.aux.get("hh_score"),
        implementation=implementation,
    )
    written = {"summaries": summaries, "hh_score": scores}
    aux = cache.aux | {name: x for name, x in written.items() if x is not None}
    cache = dataclasses.replace(cache, k=new_k, v=new_v, aux=aux)
    cache = policy.on_write(cache, table, k, v, num_tokens)
    check_kind(f"on_write() of {type(policy).__name__}", cache, LayerCache)
    return cache


def select_pages(
    cache: LayerCache,
    table: PageTable,
    q: jax.Array,
    *,
    policy: Policy,
    active: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[LayerCache, Selection]:
    """Chooses, for each row and KV head, the pages that the token being decoded attends to.

    A row with N <= W pages gets all of them, and nothing is scored. Else it gets the `reserved_bos` first
    pages, the `top_k` best-scoring pages of the window between the reserved ones (equal scores: the lower
    page; NaN ranks below everything) and the `reserved_eos` last pages.

    Args:
        cache: the layer's cache, the new token written.
        table: page table.
        q: [B, Hq, D] queries.
        policy: the layer's policy.
        active: [B] bool, rows that take part; None is all rows. Others get count 0 and keep their state.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        The cache (its scores updated, for a policy that accumulates) and the `Selection`.

    Raises:
        ValueError: a wrong shape, dtype or head count (at trace time); the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    _check_q(cache, table, q, implementation)
    check_policy(cache, policy)
    batch, num_logical = table.pages.shape
    num_kv_heads = cache.k.shape[1]
    budget = check_budget(policy, num_logical)
    in_use = jnp.where(_active_rows(table, active), table.pages_in_use, 0)
    sparse = in_use > budget
    window = Window(
        start=jnp.where(sparse, jnp.int32(policy.reserved_bos), 0),
        stop=jnp.where(sparse, in_use - policy.reserved_eos, 0),
    )

    if policy.top_k > 0 and budget < num_logical:
        cache, scores = check_scored(policy, policy.score(cache, table, q, window, implementation=implementation))
        check_shape(f"score() of {type(policy).__name__}", scores, (batch, num_kv_heads, num_logical), "[B, Hkv, M]")
        scores = scores.astype(jnp.float32)
        debug.check_scores(scores, window)
        pages = top_k_pages(
            scores,
            window.start,
            window.stop,
            k=policy.top_k,
            in_use=in_use,
            reserved=policy.reserved_bos + policy.reserved_eos,
            filler=table.num_pages,
            implementation=implementation,
        )
        # For the caller alone, and so not computed where it goes unused: `top_k_pages` knows the window.
        inside = window_mask(window.start, window.stop, num_logical)
        scores = jnp.where(inside[:, None], scores, -jnp.inf)
    else:  # nothing to choose, or no row can outgrow the budget
        scores = jnp.full((batch, num_kv_heads, num_logical), -jnp.inf, jnp.float32)
        none = jnp.zeros((batch, num_kv_heads, 0), jnp.int32)
        pages = list_pages(none, window.start, window.stop, in_use, width=budget, filler=table.num_pages)

    counts = jnp.broadcast_to(jnp.minimum(in_use, budget)[:, None], (batch, num_kv_heads))
    return cache, Selection(pages=pages, counts=counts, scores=scores)


def attend(
    cache: LayerCache,
    table: PageTable,
    q: jax.Array,
    selection: Selection,
    *,
    scale: float | None = None,
    active: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact softmax attention over the valid tokens of the selected pages only.

    Args:
        cache: the layer's cache.
        table: page table.
        q: [B, Hq, D] queries; the G heads of a KV head share its selection.
        selection: from `select_pages`.
        scale: factor on the logits; None is `D ** -0.5`.
        active: [B] bool, rows that take part; None is all rows.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        [B, Hq, D] in q's dtype; exactly 0 where a row is empty or not active.

    Raises:
        ValueError: a wrong shape, dtype or head count (at trace time); the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    _check_q(cache, table, q, implementation)
    check_kind("selection", selection, Selection)
    rows = (table.pages.shape[0], cache.k.shape[1])
    check_shape("selection.pages", selection.pages, (*rows, None), "[B, Hkv, W]")
    check_shape("selection.counts", selection.counts, rows, "[B, Hkv]")
    counts = jnp.where(_active_rows(table, active)[:, None], selection.counts, 0)
    pages = selection.pages[..., : table.pages.shape[1]]  # a budget past the row's M pages is all filler
    out, _ = paged_attention(
        q,
        cache.k,
        cache.v,
        table.pages,
        table.seq_lens,
        pages,
        counts,
        scale=resolve_scale(scale, q.shape[-1]),
        implementation=implementation,
    )
    debug.check_output(out)
    return out


def _check_q(cache: LayerCache, table: PageTable, q: jax.Array, implementation: str | None) -> None:
    check_pool(cache, table, implementation)
    check_queries(q, table.pages.shape[0], cache.k.shape[1], cache.k.shape[3])


def _active_rows(table: PageTable, active: jax.Array | None) -> jax.Array:
    live = table.seq_lens > 0
    if active is None:
        return live
    check_shape("active", active, live.shape, "[B]")
    check_dtype("active", active, ("bool",))
    return live & active
