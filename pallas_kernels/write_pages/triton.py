"""`write_pages` as one Triton-lowered kernel that updates the pools in place.

A program owns one page of a row and KV head: it writes the new tokens that stand there and, where they
complete the page, its summaries. The new keys reach the summaries in registers, the older ones from the pool,
so no program reads what it or another wrote.

Letters: B rows, T new tokens, M logical pages, P page size (padded to PP), D head_dim, C pages that T tokens
can touch.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton

MAX_TILE = 1 << 15  # elements of a page and KV head that a program can hold


@_triton.kernel_op
def write_pages(
    k_pool,
    v_pool,
    k,
    v,
    pages,
    seq_lens,
    num_tokens,
    summaries,
    scores,
    *,
    summary_kinds,
    interpret: bool,
):
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    batch, tokens = k.shape[:2]
    if 0 in (*k_pool.shape, *k.shape, *pages.shape):
        return k_pool, v_pool, summaries, scores
    tile = _triton.next_power_of_two(page_size) * _triton.next_power_of_two(head_dim)
    if tile > MAX_TILE:
        raise NotImplementedError(
            f"write_pages: a page of {page_size} tokens of head_dim {head_dim} is too large for one program"
        )
    pools = [k_pool, v_pool, *(x for x in (summaries, scores) if x is not None and x.size)]
    inputs = [k, v, pages, seq_lens, num_tokens]
    written = _triton.pallas_call(
        functools.partial(
            _kernel,
            summary_kinds=summary_kinds if summaries is not None else (),
            reset=scores is not None,
            interpret=interpret,
        ),
        grid=(num_kv_heads, batch, (tokens + page_size - 2) // page_size + 1),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={len(inputs) + i: i for i in range(len(pools))},
        interpret=interpret,
        num_warps=1 if tile <= 1024 else 4,
        name="write_pages",
    )(*inputs, *pools)
    k_pool, v_pool, *rest = written
    if summaries is not None and summaries.size:
        summaries = rest.pop(0)
    if scores is not None:
        scores = rest.pop(0)
    return k_pool, v_pool, summaries, scores


def _kernel(
    k_new_ref,  # [B, T, Hkv, D]
    v_new_ref,  # [B, T, Hkv, D]
    pages_ref,  # [B, M]
    seq_lens_ref,  # [B]
    num_tokens_ref,  # [B]
    *pool_refs,  # k, v, summaries and scores (if any) as inputs, then the same buffers as outputs
    summary_kinds: tuple[str, ...],
    reset: bool,
    interpret: bool,
):
    outputs = list(pool_refs[len(pool_refs) // 2 :])
    k_ref, v_ref = outputs[:2]  # [num_pages, Hkv, P, D]
    summaries_ref = outputs[2] if summary_kinds else None  # [num_pages, Hkv, S, D]
    scores_ref = outputs[-1] if reset else None  # [num_pages, Hkv, P]
    head, row, nth = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num_pages, page_size, head_dim = (k_ref.shape[axis] for axis in (0, 2, 3))
    load = functools.partial(_triton.load_rows, interpret=interpret)
    store = functools.partial(_triton.store_rows, interpret=interpret)

    seq_len, count = seq_lens_ref[row], num_tokens_ref[row]
    first = seq_len - count
    stop = first + jnp.minimum(count, k_new_ref.shape[1])
    logical = lax.div(jnp.maximum(first, 0), page_size) + nth
    start = logical * page_size
    touched = (start < stop) & (logical < pages_ref.shape[1])
    page = load(pages_ref, (row, logical), touched)

    @pl.when(touched & (page >= 0) & (page < num_pages))
    def _():
        slot = jnp.arange(_triton.next_power_of_two(page_size), dtype=jnp.int32)
        in_page = slot < page_size
        token = start + slot - first
        new = in_page & (token >= 0) & (token < stop - first)
        complete = start + page_size <= stop
        if reset:
            store(scores_ref, (page, head, slot), jnp.zeros(slot.shape, jnp.float32), new)
        for begin, size in _triton.power_of_two_pieces(head_dim):
            columns = pl.ds(begin, size)
            keys = load(k_new_ref, (row, token, head, columns), new)
            values = load(v_new_ref, (row, token, head, columns), new)
            store(k_ref, (page, head, slot, columns), keys, new)
            store(v_ref, (page, head, slot, columns), values, new)
            if summary_kinds:
                older = load(k_ref, (page, head, slot, columns), in_page & ~new & complete)
                page_keys = jnp.where(new[:, None], keys, older).astype(jnp.float32)
                for i, kind in enumerate(summary_kinds):
                    summary = _summarise(kind, page_keys, in_page[:, None], page_size)
                    index = (page, head, jnp.full(1, i, jnp.int32), columns)
                    store(summaries_ref, index, summary[None, :], complete[None])


def _summarise(kind: str, keys: jax.Array, in_page: jax.Array, page_size: int) -> jax.Array:
    """Summary of a page's keys [PP, D] float32, of which rows that are not `in_page` are padding."""
    if kind == "mean":
        return jnp.where(in_page, keys, 0.0).sum(axis=0) / page_size
    if kind == "max":
        return jnp.where(in_page, keys, -jnp.inf).max(axis=0)
    return jnp.where(in_page, keys, jnp.inf).min(axis=0)
