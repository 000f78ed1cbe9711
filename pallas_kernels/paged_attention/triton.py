"""`paged_attention` as two Triton-lowered kernels: softmax over splits of the chosen tokens, and their merge.

The chosen tokens of a row and KV head are numbered `f` in [0, count * P): entry `f // P` of `selected`, slot
`f % P` of its page. A split is a range of them, walked in tiles; a tile gathers from as many pages as it
touches. How a row is cut depends on nothing but its own count, so its result is the same to the last bit in
any batch, table and pool.

Letters: B rows, M logical pages, W chosen pages, P page size, G query heads of a KV head (padded to GP),
D head_dim, S splits, T tokens of a tile.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton
from pallas_kernels._triton import MIN_DOT

MERGED = 32  # splits that the merge reads at once; fixed, for the order of additions depends on it
MERGE_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a row's chosen tokens are cut.

    Attributes:
        tokens: T, tokens of a tile.
        split_tiles: tiles of a split, for rows that need at most `max_splits` splits so.
        max_splits: most splits of a row and KV head; longer rows have longer splits.
        num_warps: warps of a program.
        num_stages: stages of the pipelined loop over tiles.
    """

    tokens: int
    split_tiles: int
    max_splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("tokens", "num_warps"):
            value = getattr(self, name)
            if value != _triton.next_power_of_two(value):
                raise ValueError(f"{name}: expected a power of two, got {value}")
        if self.tokens < MIN_DOT:
            raise ValueError(f"tokens: expected at least {MIN_DOT}, got {self.tokens}")
        for name in ("split_tiles", "max_splits", "num_warps", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def num_splits(self, num_tokens: int) -> int:
        """Splits that rows of up to `num_tokens` chosen tokens need."""
        return max(1, min(self.max_splits, pl.cdiv(num_tokens, self.tokens * self.split_tiles)))

    def cut(self, num_tokens, most_tokens: int) -> tuple:
        """`(tokens per split, splits in use)` of a row.

        Args:
            num_tokens: int32 scalar, chosen tokens of the row.
            most_tokens: no row has more. Decides nothing but whether the first result is an `int`, on which
                loads need not wait.
        """
        tiles = lax.div(num_tokens + (self.tokens - 1), self.tokens)
        per_split: int | jax.Array = self.split_tiles
        if most_tokens > self.max_splits * self.split_tiles * self.tokens:
            longer = lax.div(tiles + (self.max_splits - 1), self.max_splits)
            per_split = jnp.maximum(per_split, longer)
        return per_split * self.tokens, lax.div(tiles + (per_split - 1), per_split)


# Most bytes of a head's row (D by the dtype computed with) -> tokens, split_tiles, num_warps, num_stages. A tile has
# 16 KiB of keys, so that two stages of keys and values fit the shared memory of every GPU since Ampere. Splits of
# 128 tokens were the best at batch 1 on an H200, and 5% behind ones of 256 at batch 8.
_TILES = {
    128: (128, 1, 4, 2),
    256: (64, 2, 4, 2),
    512: (32, 4, 4, 3),
    1024: (16, 8, 4, 3),
}
_ROW_PROGRAMS = 256  # of a row, all its KV heads together: enough to fill a GPU, few enough for a quick merge
_LONG_SPLIT_STAGES = 3  # for splits of many tiles


def default_tiles(dtype, head_dim: int, num_kv_heads: int, num_tokens: int) -> Tiles:
    """Tiles for keys computed with in `dtype`, of rows of up to `num_tokens` chosen tokens."""
    row = head_dim * jnp.dtype(dtype).itemsize
    for limit, (tokens, split_tiles, num_warps, num_stages) in _TILES.items():
        if row <= limit:
            max_splits = max(1, _ROW_PROGRAMS // num_kv_heads)
            if num_tokens > 4 * tokens * split_tiles * max_splits:
                num_stages = _LONG_SPLIT_STAGES
            return Tiles(tokens, split_tiles, max_splits, num_warps, num_stages)
    raise NotImplementedError(f"paged_attention: head_dim {head_dim} of {jnp.dtype(dtype).name} has no tiles")


@_triton.kernel_op
def paged_attention(
    q,
    k_pool,
    v_pool,
    pages,
    seq_lens,
    selected,
    counts,
    *,
    scale: float,
    interpret: bool,
    tiles: Tiles | None = None,
):
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pool.shape[1:3]
    budget = selected.shape[2]
    group = num_q_heads // num_kv_heads
    if 0 in (batch, num_kv_heads, num_q_heads, budget, pages.shape[1], k_pool.shape[0], page_size, head_dim):
        raise NotImplementedError("paged_attention: an argument has a dimension of size 0")
    # A query of another dtype than the pool's must not be rounded to it.
    dtype = k_pool.dtype if q.dtype == k_pool.dtype else jnp.float32
    tiles = tiles or default_tiles(dtype, head_dim, num_kv_heads, budget * page_size)
    splits = tiles.num_splits(budget * page_size)
    shape = (batch, num_kv_heads, splits, group)
    partials = _triton.pallas_call(
        functools.partial(
            _split_kernel, scale=scale, group=group, dtype=dtype, tiles=tiles, interpret=interpret
        ),
        # Heads vary fastest, for they share pages; splits slowest, so that empty ones come last.
        grid=(num_kv_heads, batch, splits),
        out_shape=[
            jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        name="paged_attention_split",
    )(q, k_pool, v_pool, pages, seq_lens, selected, counts)
    return _triton.pallas_call(
        functools.partial(
            _merge_kernel, group=group, budget=budget, page_size=page_size, tiles=tiles, interpret=interpret
        ),
        grid=(num_q_heads, batch),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ],
        interpret=interpret,
        num_warps=MERGE_WARPS,
        num_stages=1,
        name="paged_attention_merge",
    )(*partials, counts)


def _split_kernel(
    q_ref,  # [B, Hq, D]
    k_ref,  # [num_pages, Hkv, P, D]
    v_ref,  # [num_pages, Hkv, P, D]
    pages_ref,  # [B, M]
    seq_lens_ref,  # [B]
    selected_ref,  # [B, Hkv, W]
    counts_ref,  # [B, Hkv]
    acc_ref,  # [B, Hkv, S, G, D] sum of weighted values
    peak_ref,  # [B, Hkv, S, G] largest logit
    total_ref,  # [B, Hkv, S, G] sum of weights exp(logit - peak)
    *,
    scale: float,
    group: int,
    dtype,  # of the dots' operands
    tiles: Tiles,
    interpret: bool,
):
    head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num_pages, page_size, head_dim = (k_ref.shape[axis] for axis in (0, 2, 3))
    num_logical, budget = pages_ref.shape[1], selected_ref.shape[2]
    load = functools.partial(_triton.load_rows, interpret=interpret)
    store = functools.partial(_triton.store_rows, interpret=interpret)

    seq_len = seq_lens_ref[row]
    num_tokens = jnp.clip(counts_ref[row, head], 0, budget) * page_size
    split_tokens = tiles.cut(num_tokens, budget * page_size)[0]
    first = split * split_tokens
    stop = jnp.minimum(first + split_tokens, num_tokens)

    # Runs of this many tokens share a page: it divides both a tile, at whose multiples splits start, and a page.
    run = math.gcd(tiles.tokens, page_size)
    in_run = lax.rem(jnp.arange(tiles.tokens, dtype=jnp.int32), run)

    def number(i):
        """First chosen token of each run of tile i."""
        return first + i * tiles.tokens + run * jnp.arange(tiles.tokens // run, dtype=jnp.int32)

    def choose(i):
        """Logical page of each run of tile i."""
        f = number(i)
        # Not masked by `stop`: this load need not wait for the one of the count.
        return load(selected_ref, (row, head, lax.div(f, page_size)), f < budget * page_size)

    def locate(i, logical):
        """Physical page of each run of tile i, and how many of its tokens are there to be read."""
        f = number(i)
        exists = (f < stop) & (logical >= 0) & (logical < num_logical)
        page = load(pages_ref, (row, logical), exists)
        exists &= (page >= 0) & (page < num_pages)
        length = jnp.minimum(stop - f, seq_len - logical * page_size - lax.rem(f, page_size))
        return jnp.where(exists, page, 0), jnp.where(exists, length, 0)

    def by_token(runs):
        """Gives each token of a tile what its run has."""
        if run == 1:
            return runs
        return jnp.broadcast_to(runs[:, None], (runs.shape[0], run)).reshape(tiles.tokens)

    page, length = locate(0, choose(0))
    following = choose(1)

    @pl.when(first < num_tokens)
    def _():
        g = jnp.arange(max(MIN_DOT, _triton.next_power_of_two(group)), dtype=jnp.int32)
        in_group = g < group
        columns = _split_columns(head_dim)
        q = [load(q_ref, *c.of((row, head * group + g), in_group)).astype(dtype) for c in columns]

        def tile(i, carry):
            runs, length, following, peak, total, acc = carry
            page, valid = by_token(runs), in_run < by_token(length)
            slot = by_token(lax.rem(number(i), page_size)) + in_run
            # The pages of a tile are found one tile ahead, and their numbers two: no load here waits for
            # another, and no stage of the pipeline is spent on addresses.
            next_runs, next_length = locate(i + 1, following)
            following = choose(i + 2)
            # Both are asked for before either is waited for. Slots that are not valid load as 0, for the
            # product of a weight of 0 and a NaN would be NaN.
            keys, values = (
                [load(ref, *c.of((page, head, slot), valid)).astype(dtype) for c in columns]
                for ref in (k_ref, v_ref)
            )
            logits = jnp.zeros((len(g), tiles.tokens), jnp.float32)
            for q_part, key in zip(q, keys):
                logits += _dot(q_part, key, transpose=True)
            logits = jnp.where(valid, logits * scale, -jnp.inf)
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            # -inf - -inf is NaN where nothing is valid yet.
            finite = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp(logits - finite[:, None])
            rescale = jnp.exp(peak - finite)
            total = total * rescale + weights.sum(axis=1)
            acc = tuple(
                part * rescale[:, None] + _dot(weights.astype(dtype), value) for part, value in zip(acc, values)
            )
            return next_runs, next_length, following, new_peak, total, acc

        *_, peak, total, acc = lax.fori_loop(
            0,
            lax.div(stop - first + (tiles.tokens - 1), tiles.tokens),
            tile,
            (
                page,
                length,
                following,
                jnp.full(len(g), -jnp.inf, jnp.float32),
                jnp.zeros(len(g), jnp.float32),
                tuple(jnp.zeros((len(g), c.size), jnp.float32) for c in columns),
            ),
        )
        store(peak_ref, (row, head, split, g), peak, in_group)
        store(total_ref, (row, head, split, g), total, in_group)
        for part, c in zip(acc, columns):
            index, keep = c.of((row, head, split, g), in_group)
            store(acc_ref, index, part, keep)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Columns `[start, start + size)` of the head dimension, of which those past `head_dim` are padding."""

    start: int
    size: int
    head_dim: int

    def of(self, index: tuple, keep: jax.Array) -> tuple[tuple, jax.Array]:
        """Index and mask of these columns, from those of the rows: `index` of all dimensions but the last."""
        if self.start + self.size <= self.head_dim:
            return (*index, pl.ds(self.start, self.size)), keep
        column = self.start + jnp.arange(self.size, dtype=jnp.int32)
        rows = tuple(i[:, None] if jnp.ndim(i) else i for i in index)
        return (*rows, column[None, :]), keep[:, None] & (column < self.head_dim)[None, :]


def _split_columns(head_dim: int) -> list[_Columns]:
    """Covers the head dimension by powers of two from MIN_DOT up: 80 -> 64 + 16, and so 72."""
    whole = _triton.power_of_two_pieces(head_dim - head_dim % MIN_DOT)
    pieces = [*whole, (head_dim - head_dim % MIN_DOT, MIN_DOT)] if head_dim % MIN_DOT else whole
    return [_Columns(start, size, head_dim) for start, size in pieces]


def _dot(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """`a @ b` or `a @ b.T` in float32, of float32 operands without TF32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _merge_kernel(
    acc_ref,  # [B, Hkv, S, G, D]
    peak_ref,  # [B, Hkv, S, G]
    total_ref,  # [B, Hkv, S, G]
    counts_ref,  # [B, Hkv]
    out_ref,  # [B, Hq, D]
    lse_ref,  # [B, Hq]
    *,
    group: int,
    budget: int,
    page_size: int,
    tiles: Tiles,
    interpret: bool,
):
    q_head, row = pl.program_id(0), pl.program_id(1)
    head, g = lax.div(q_head, group), lax.rem(q_head, group)
    pieces = _triton.power_of_two_pieces(out_ref.shape[2])
    load = functools.partial(_triton.load_rows, interpret=interpret)
    num_tokens = jnp.clip(counts_ref[row, head], 0, budget) * page_size
    _, in_use = tiles.cut(num_tokens, budget * page_size)
    num_splits = acc_ref.shape[2]

    def chunk(i, carry):
        peak, total, acc = carry
        split = i * MERGED + jnp.arange(MERGED, dtype=jnp.int32)
        # Splits not in use were never written. Masking after the loads spares them the wait for the count.
        exists, used = split < num_splits, split < in_use
        peaks = jnp.where(used, load(peak_ref, (row, head, split, g), exists), -jnp.inf)
        totals = jnp.where(used, load(total_ref, (row, head, split, g), exists), 0.0)
        parts = [load(acc_ref, (row, head, split, g, pl.ds(*piece)), exists) for piece in pieces]
        new_peak = jnp.maximum(peak, peaks.max())
        finite = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights, rescale = jnp.exp(peaks - finite), jnp.exp(peak - finite)
        total = total * rescale + (weights * totals).sum()
        acc = tuple(
            old * rescale + jnp.where(used[:, None], weights[:, None] * part, 0.0).sum(axis=0)
            for old, part in zip(acc, parts)
        )
        return new_peak, total, acc

    nothing = (
        jnp.float32(-jnp.inf),
        jnp.float32(0),
        tuple(jnp.zeros(size, jnp.float32) for _, size in pieces),
    )
    chunks = lax.div(in_use + (MERGED - 1), MERGED)
    peak, total, acc = lax.fori_loop(1, chunks, chunk, chunk(0, nothing))
    divisor = jnp.where(total == 0, 1.0, total)
    for part, (start, size) in zip(acc, pieces):
        out_ref[row, q_head, pl.ds(start, size)] = (part / divisor).astype(out_ref.dtype)
    lse_ref[row, q_head] = peak + jnp.log(total)
