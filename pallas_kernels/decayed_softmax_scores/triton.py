"""`decayed_softmax_scores` through Pallas' Triton lowering.

Three launches. The first gathers each key once: logits go to memory in float32, with the maximum and the sum
of exponentials of each chunk of tokens. The second joins the chunks. The third takes the maximum probability
over the group and updates the scores, all KV heads of a token together since their scores are neighbours in
memory.

Chunks have a fixed size, counted from logical page 0: a row's sums do not depend on M or on the batch.
Letters: B rows, M logical pages of one token, C chunks, H padded KV heads, G' padded group (1 for "mean"),
R rows of a tensor-core tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._queries import QueryTerms, load_queries
from pallas_kernels._triton import (
    kernel_op,
    load_rows,
    load_window,
    next_power_of_two,
    pallas_call,
    power_of_two_pieces,
    store_rows,
)

# Chunks that are joined at once, one a thread: the order of additions depends on both, and would on the strides of
# the statistics, and so on M, if a thread had several, for then it takes as many neighbours as their alignment allows.
JOINED = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work of a program.

    Attributes:
        tokens: tokens of a tile in the first launch, a power of two, at least 16.
        tiles: tiles of a program there; `tokens * tiles` is a chunk.
        num_warps, num_stages: warps and pipeline stages there.
        update_elements: elements H * tokens of a program in the third launch.
        update_warps: warps there.
    """

    tokens: int
    tiles: int = 8
    num_warps: int = 4
    num_stages: int = 3
    update_elements: int = 4096
    update_warps: int = 4

    def __post_init__(self):
        for name, least in (("tokens", 16), ("update_elements", 16)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two of at least {least}, got {value}")
        for name in ("tiles", "num_warps", "num_stages", "update_warps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


def default_tiles(key_bytes: int) -> Tiles:
    """Tiles for keys of `key_bytes` bytes a KV head; a chunk is 512 tokens whatever the tile."""
    tokens = next((t for t in (64, 32) if t * key_bytes <= 32 * 1024), 16)
    return Tiles(tokens=tokens, tiles=512 // tokens)


@kernel_op
def decayed_softmax_scores(
    q,
    k_pool,
    scores,
    pages,
    start,
    stop,
    *,
    decay,
    scale,
    group,
    interpret: bool,
    tiles: Tiles | None = None,
):
    _, num_kv_heads, _, head_dim = k_pool.shape
    batch, num_logical = pages.shape
    if tiles is None:
        tiles = default_tiles(head_dim * k_pool.dtype.itemsize)
    if 0 in (batch, num_logical):
        return scores, jnp.full((batch, num_kv_heads, num_logical), -jnp.inf, jnp.float32)
    group_size = q.shape[1] // num_kv_heads
    kept = 1 if group == "mean" else group_size
    chunk = tiles.tokens * tiles.tiles
    num_chunks = pl.cdiv(num_logical, chunk)
    statistics = jax.ShapeDtypeStruct((batch, num_kv_heads, kept, num_chunks), jnp.float32)
    logits, peak, total = pallas_call(
        functools.partial(
            _logits_kernel,
            group_size=group_size,
            group=group,
            scale=scale,
            tiles=tiles,
            interpret=interpret,
        ),
        # Heads vary fastest, for a page's heads are neighbours in memory.
        grid=(num_kv_heads, num_chunks, batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_kv_heads, kept, num_chunks * chunk), jnp.float32),
            statistics,
            statistics,
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        name="decayed_softmax_logits",
    )(q, k_pool, pages, start, stop)

    joined = jax.ShapeDtypeStruct((batch, num_kv_heads, kept), jnp.float32)
    peak, total = pallas_call(
        functools.partial(_join_kernel, chunk=chunk, num_logical=num_logical, interpret=interpret),
        grid=(kept, num_kv_heads, batch),
        out_shape=(joined, joined),
        num_warps=JOINED // 32,
        interpret=interpret,
        name="decayed_softmax_join",
    )(peak, total, start, stop)

    tokens = min(chunk, max(16, tiles.update_elements // next_power_of_two(num_kv_heads)))
    return pallas_call(
        functools.partial(_update_kernel, decay=decay, tokens=tokens, interpret=interpret),
        grid=(pl.cdiv(num_logical, tokens), batch),
        out_shape=(
            jax.ShapeDtypeStruct(scores.shape, scores.dtype),
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_logical), jnp.float32),
        ),
        num_warps=tiles.update_warps,
        interpret=interpret,
        input_output_aliases={0: 0},
        name="decayed_softmax_update",
    )(scores, logits, peak, total, pages, start, stop)


def _logits_kernel(
    q_ref,  # [B, Hq, D]
    k_ref,  # [num_pages, Hkv, 1, D]
    pages_ref,  # [B, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    logits_ref,  # [B, Hkv, G', C * chunk]
    peak_ref,  # [B, Hkv, G', C]
    total_ref,  # [B, Hkv, G', C]
    *,
    group_size,
    group,
    scale,
    tiles,
    interpret,
):
    head, chunk, row = (pl.program_id(i) for i in range(3))
    num_pages, head_dim = k_ref.shape[0], k_ref.shape[3]
    start, stop = load_window(start_ref, stop_ref, row, pages_ref.shape[1])
    first = chunk * tiles.tiles
    last = first + tiles.tiles
    begin = jnp.clip(start // tiles.tokens, first, last)
    end = jnp.where(start < stop, jnp.clip((stop + tiles.tokens - 1) // tiles.tokens, begin, last), begin)

    # What lies outside the window is not written here, and not read by the second launch.
    @pl.when(begin < end)
    def _():
        q = load_queries(q_ref, row, head, group_size=group_size, group=group, interpret=interpret)
        queries = QueryTerms(q, k_ref.dtype, exact=group == "max" and q_ref.dtype == k_ref.dtype)
        rows = 1 if group == "mean" else q[0].shape[0]
        g = jnp.arange(rows, dtype=jnp.int32)
        kept = g < logits_ref.shape[2]

        def add_tile(tile, carry):
            peak, total = carry
            position = tile * tiles.tokens + jnp.arange(tiles.tokens, dtype=jnp.int32)
            inside = (position >= start) & (position < stop)
            page = plt.load(
                pages_ref.at[row, pl.ds(tile * tiles.tokens, tiles.tokens)], mask=inside, other=jnp.int32(-1)
            )
            valid = inside & (page >= 0) & (page < num_pages)
            keys = [
                load_rows(k_ref, (page, head, 0, pl.ds(at, length)), valid, interpret=interpret)
                for at, length in power_of_two_pieces(head_dim)
            ]
            logits = jnp.where(valid[None], scale * queries.dot(keys), -jnp.inf)
            store_rows(
                logits_ref,
                (row, head, g[:, None], position[None]),
                logits,
                jnp.broadcast_to(kept[:, None], logits.shape),
                interpret=interpret,
            )
            return _add_exponentials(peak, total, logits)

        nothing = jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32)
        peak, total = jax.lax.fori_loop(begin, end, add_tile, nothing)
        for ref, value in ((peak_ref, peak), (total_ref, total)):
            store_rows(ref, (row, head, g, chunk), value, kept, interpret=interpret)


def _add_exponentials(peak, total, logits, weights=None):
    """Joins exponentials along the last axis of `logits` to a running maximum and a sum relative to it."""
    joined = jnp.maximum(peak, jnp.max(logits, axis=-1))
    base = jnp.where(joined == -jnp.inf, 0.0, joined)  # -inf - -inf is NaN
    terms = jnp.exp(logits - base[..., None])
    terms = terms if weights is None else terms * weights
    return joined, total * jnp.exp(peak - base) + jnp.sum(terms, axis=-1)


def _join_kernel(
    peak_ref,  # [B, Hkv, G', C]
    total_ref,  # [B, Hkv, G', C]
    start_ref,  # [B]
    stop_ref,  # [B]
    joined_peak_ref,  # [B, Hkv, G']
    joined_total_ref,  # [B, Hkv, G']
    *,
    chunk,
    num_logical,
    interpret,
):
    g, head, row = (pl.program_id(i) for i in range(3))
    start, stop = load_window(start_ref, stop_ref, row, num_logical)

    def join(i, carry):
        at = i * JOINED + jnp.arange(JOINED, dtype=jnp.int32)
        # Chunks that do not meet the window were never written.
        keep = (at >= start // chunk) & (at * chunk < stop)
        peaks, totals = (
            load_rows(ref, (row, head, g, at), keep, interpret=interpret) for ref in (peak_ref, total_ref)
        )
        peak, total = carry
        return _add_exponentials(peak, total, jnp.where(keep, peaks, -jnp.inf), totals)

    first, last = start // chunk // JOINED, (stop + chunk * JOINED - 1) // (chunk * JOINED)
    peak, total = jax.lax.fori_loop(first, last, join, (jnp.float32(-jnp.inf), jnp.float32(0)))
    joined_peak_ref[row, head, g] = peak
    joined_total_ref[row, head, g] = total


def _update_kernel(
    old_scores_ref,  # [num_pages, Hkv, 1], the same memory as scores_ref
    logits_ref,  # [B, Hkv, G', C * chunk]
    peak_ref,  # [B, Hkv, G']
    total_ref,  # [B, Hkv, G']
    pages_ref,  # [B, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    scores_ref,  # [num_pages, Hkv, 1]
    page_scores_ref,  # [B, Hkv, M]
    *,
    decay,
    tokens,
    interpret,
):
    tile, row = pl.program_id(0), pl.program_id(1)
    num_pages = scores_ref.shape[0]
    num_logical = pages_ref.shape[1]
    num_kv_heads = logits_ref.shape[1]
    start, stop = load_window(start_ref, stop_ref, row, num_logical)
    position = tile * tokens + jnp.arange(tokens, dtype=jnp.int32)
    inside = (position >= start) & (position < stop)
    head = jnp.arange(next_power_of_two(num_kv_heads), dtype=jnp.int32)
    load = functools.partial(load_rows, interpret=interpret)

    def store_page_scores(value):
        store_rows(
            page_scores_ref,
            (row, head[:, None], position[None]),
            value,
            (head < num_kv_heads)[:, None] & (position < num_logical)[None],
            interpret=interpret,
        )

    touched = (start < stop) & (tile * tokens < stop) & (tile * tokens + tokens > start)

    @pl.when(~touched)
    def _():
        store_page_scores(jnp.full((head.shape[0], tokens), -jnp.inf, jnp.float32))

    @pl.when(touched)
    def _():
        page = plt.load(pages_ref.at[row, pl.ds(tile * tokens, tokens)], mask=inside, other=jnp.int32(-1))
        valid = inside & (page >= 0) & (page < num_pages)
        stored = (head < num_kv_heads)[:, None] & valid[None]
        index = (page[None], head[:, None], 0)
        # For decay = 0, whatever is stored: 0 * inf is NaN, and a float16 sum may have overflowed.
        old: jax.Array | float = 0.0
        if decay:
            old = load(scores_ref, index, stored).astype(jnp.float32)

        # What the first launch left unwritten is loaded too, so that a thread loads several logits at once.
        exists = (head < num_kv_heads)[:, None] & (position >= 0)[None]
        probability = jnp.zeros((head.shape[0], tokens), jnp.float32)
        for g in range(logits_ref.shape[2]):
            peak, total = (load(ref, (row, head, g), head < num_kv_heads) for ref in (peak_ref, total_ref))
            logits = load(logits_ref, (row, head[:, None], g, position[None]), exists)
            logits = jnp.where(stored, logits, -jnp.inf)
            weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak)[:, None])
            probability = jnp.maximum(probability, weights / jnp.where(total == 0, 1.0, total)[:, None])

        new = (probability + decay * old).astype(scores_ref.dtype)
        store_rows(scores_ref, index, new, stored, interpret=interpret)
        if interpret:
            # Else XLA may form it twice, once with a fused multiply-add, and return what it did not store.
            new = load(scores_ref, index, stored)
        store_page_scores(jnp.where(valid[None], new.astype(jnp.float32), -jnp.inf))
