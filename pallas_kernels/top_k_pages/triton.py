"""`top_k_pages` through Pallas' Triton lowering.

Scores become int32 keys in the same order, and the k-th largest key is found by halving an interval of keys:
one counting pass over registers per step, until exactly k keys reach the lower end or the interval is one key
wide. Ranks from prefix sums then place the chosen pages, which are met in ascending order, so nothing is
sorted. A row that fits one program takes one launch. A longer one takes four:

1. each chunk of the row reduces its keys to the maxima of strided groups;
2. about the k-th largest maximum is found. It bounds the k-th largest key from below, since k groups hold a
   key at least as large;
3. each chunk writes down its keys that reach the bound: of independent scores little more than k, and without
   ties never more than 9/8 k times the group size;
4. one program chooses among them, in registers if they fit, else in passes over memory.

Letters: B rows, M logical pages, C chunks, N size of a tile in registers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton import load_rows, next_power_of_two, pallas_call, store_rows
from pallas_kernels.top_k_pages.keys import ABSENT, LOWEST, order_preserving_key

_MAX_CHUNKS = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work of a program. All sizes are powers of two.

    Attributes:
        row: entries of a row that one program holds, at most 32768 since two counts share an int32.
        chunk: entries of a chunk of a longer row, at most `row`.
        warp: entries of a warp; a program has 4 to 16 warps.
    """

    row: int = 16384
    chunk: int = 8192
    warp: int = 512

    def __post_init__(self):
        for name, most in (("row", 32768), ("chunk", self.row), ("warp", 32768)):
            value = getattr(self, name)
            if value < 16 or value & (value - 1) or value > most:
                raise ValueError(f"{name}: expected a power of two from 16 to {most}, got {value}")

    def warps(self, entries: int) -> int:
        """Warps of a program that holds `entries` entries."""
        return min(16, max(4, entries // self.warp))


def top_k_pages(scores, start, stop, *, k, interpret: bool, tiles: Tiles | None = None):
    tiles = Tiles() if tiles is None else tiles
    batch, num_kv_heads, num_logical = scores.shape
    if 0 in scores.shape:
        return jnp.full((batch, num_kv_heads, k), num_logical, jnp.int32)
    if num_logical > tiles.row:
        return _long_rows(scores, start, stop, k=k, interpret=interpret, tiles=tiles)
    entries = max(16, next_power_of_two(num_logical))
    return pallas_call(
        functools.partial(_row_kernel, k=k, entries=entries, interpret=interpret),
        grid=(num_kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, num_kv_heads, k), jnp.int32),
        num_warps=tiles.warps(entries),
        interpret=interpret,
        name="top_k_row",
    )(scores, start, stop)


def _long_rows(scores, start, stop, *, k, interpret, tiles):
    batch, num_kv_heads, num_logical = scores.shape
    chunk, num_chunks = tiles.chunk, pl.cdiv(num_logical, tiles.chunk)
    if num_chunks > _MAX_CHUNKS:
        raise NotImplementedError(f"scores: at most {_MAX_CHUNKS * chunk} pages a row, got {num_logical}")
    # With four times as many groups as wanted keys, few of the keys above the bound are unwanted.
    chunks_padded = next_power_of_two(num_chunks)
    groups = min(tiles.row, max(4096, 4 * next_power_of_two(k)))
    groups = max(1, min(chunk, groups // chunks_padded))  # of a chunk
    call = functools.partial(pallas_call, interpret=interpret)
    by_chunk = functools.partial(
        call, grid=(num_chunks, num_kv_heads, batch), num_warps=tiles.warps(chunk)
    )
    by_row = functools.partial(call, grid=(num_kv_heads, batch))

    def int32(*shape):
        return jax.ShapeDtypeStruct((batch, num_kv_heads, *shape), jnp.int32)

    maxima = by_chunk(
        functools.partial(_maxima_kernel, chunk=chunk, groups=groups, interpret=interpret),
        out_shape=int32(num_chunks * groups),
        name="top_k_maxima",
    )(scores, start, stop)
    bound = by_row(
        functools.partial(_bound_kernel, k=k, entries=chunks_padded * groups, interpret=interpret),
        out_shape=int32(),
        num_warps=tiles.warps(chunks_padded * groups),
        name="top_k_bound",
    )(maxima)
    keys, ids, counts = by_chunk(
        functools.partial(_candidates_kernel, chunk=chunk, interpret=interpret),
        out_shape=(int32(num_chunks * chunk), int32(num_chunks * chunk), int32(num_chunks)),
        name="top_k_candidates",
    )(scores, start, stop, bound)
    entries = min(tiles.row, max(1024, 2 * next_power_of_two(k)))
    return by_row(
        functools.partial(
            _choose_kernel, k=k, entries=entries, chunk=chunk, num_logical=num_logical, interpret=interpret
        ),
        out_shape=int32(k),
        num_warps=tiles.warps(entries),
        name="top_k_choose",
    )(keys, ids, counts, bound, start, stop)


def _window(start_ref, stop_ref, row, num_logical):
    start = jnp.clip(start_ref[row], 0, num_logical)
    return start, jnp.clip(stop_ref[row], start, num_logical)


def _load_keys(scores_ref, row, head, at, entries, start, stop, interpret):
    """Logical pages `at + [0, entries)` and their keys, `ABSENT` outside the window."""
    logical = at + jnp.arange(entries, dtype=jnp.int32)
    inside = (logical >= start) & (logical < stop)
    # Loaded up to M, not up to the window's ragged ends, so that a thread loads several scores at once.
    scores = load_rows(scores_ref, (row, head, logical), logical < scores_ref.shape[2], interpret=interpret)
    return logical, jnp.where(inside, order_preserving_key(scores), ABSENT)


def _group_maxima(key, groups):
    """[N] -> [groups]: maxima over entries `groups` apart, which parts neighbours that score alike."""
    return jnp.max(key.reshape(key.shape[0] // groups, groups), axis=0)


def _middle(low, high):
    """The mean of two int32 rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def _search(count, low, high, at_low, *, k, slack=0):
    """Narrows `[low, high)` around the k-th largest key.

    Args:
        count: key -> how many keys are at or above it.
        low: a key that at least k keys reach, or `LOWEST`.
        high: a key that none reaches.
        at_low: how many keys reach `low`; a larger number will do if it is above k.
        slack: stop once between k and k + slack keys reach `low`.

    Returns:
        `low`, how many keys reach it, how many reach `high`. Either `low` is the k-th largest key and
        `high` the one after it, or at most k + slack keys reach `low`.
    """

    def undecided(carry):
        low, high, at_low, _ = carry
        return (at_low > k + slack) & (_middle(low, high) > low)

    def halve(carry):
        low, high, at_low, at_high = carry
        middle = _middle(low, high)
        reach = count(middle)
        enough = reach >= k
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, reach, at_low),
            jnp.where(enough, at_high, reach),
        )

    low, _, at_low, at_high = jax.lax.while_loop(undecided, halve, (low, high, at_low, jnp.int32(0)))
    return low, at_low, at_high


def _count(key, least):
    return jnp.sum((key >= least).astype(jnp.int32))


def _place(key, low, ties, above_before, equal_before):
    """Where chosen keys go: those above `low`, and the first `ties` of those equal to it.

    Args:
        key: [N] keys.
        low: the k-th largest key.
        ties: keys equal to `low` to choose in all.
        above_before, equal_before: how many keys above and equal to `low` stand before these.

    Returns:
        [N] bool, chosen, and [N] int32, its place in the output.
    """
    above, equal = key > low, key == low
    packed = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    before = jnp.cumsum(packed) - packed
    above_before += before & 0xFFFF
    equal_before += jax.lax.shift_right_logical(before, jnp.full_like(before, 16))
    return above | (equal & (equal_before < ties)), above_before + jnp.minimum(equal_before, ties)


def _fill(out_ref, row, head, chosen, num_logical, interpret):
    """Writes M past the pages chosen."""
    k = out_ref.shape[2]
    place = jnp.arange(next_power_of_two(k), dtype=jnp.int32)
    filler = jnp.full(place.shape, num_logical, jnp.int32)
    store_rows(out_ref, (row, head, place), filler, (place >= chosen) & (place < k), interpret=interpret)


def _ties(k, at_low, at_high):
    """How many keys equal to the lower end of the interval to choose."""
    return jnp.where(at_low <= k, k, k - at_high)


def _row_kernel(
    scores_ref,  # [B, Hkv, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    out_ref,  # [B, Hkv, k]
    *,
    k,
    entries,
    interpret,
):
    head, row = pl.program_id(0), pl.program_id(1)
    num_logical = scores_ref.shape[2]
    start, stop = _window(start_ref, stop_ref, row, num_logical)
    window = stop - start
    _fill(out_ref, row, head, jnp.minimum(window, k), num_logical, interpret)

    def choose(at, entries):
        logical, key = _load_keys(scores_ref, row, head, at, entries, start, stop, interpret)
        low, high = jnp.int32(LOWEST), jnp.max(key) + 1
        groups = max(128, next_power_of_two(k))
        if groups <= entries:
            low = jnp.maximum(low, jnp.min(_group_maxima(key, groups)))
        # That k keys reach the least of k or more maxima is all we know of it.
        at_low = jnp.where(window <= k, window, k + 1)
        low = jnp.where(window <= k, LOWEST, low)
        low, at_low, at_high = _search(functools.partial(_count, key), low, high, at_low, k=k)
        chosen, place = _place(key, low, _ties(k, at_low, at_high), jnp.int32(0), jnp.int32(0))
        store_rows(out_ref, (row, head, place), logical, chosen, interpret=interpret)

    # A window much shorter than the row needs fewer registers to pass over.
    few = entries // 8
    if few < 256:
        choose(0, entries)
    else:
        pl.when(window <= few)(lambda: choose(start, few))
        pl.when(window > few)(lambda: choose(0, entries))


def _maxima_kernel(
    scores_ref,  # [B, Hkv, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    maxima_ref,  # [B, Hkv, C * groups]
    *,
    chunk,
    groups,
    interpret,
):
    index, head, row = (pl.program_id(i) for i in range(3))
    start, stop = _window(start_ref, stop_ref, row, scores_ref.shape[2])
    touched = (start < stop) & (index * chunk < stop) & (index * chunk + chunk > start)
    out_ref = maxima_ref.at[row, head, pl.ds(index * groups, groups)]

    @pl.when(~touched)
    def _():
        plt.store(out_ref, jnp.full((groups,), ABSENT, jnp.int32))

    @pl.when(touched)
    def _():
        _, key = _load_keys(scores_ref, row, head, index * chunk, chunk, start, stop, interpret)
        plt.store(out_ref, _group_maxima(key, groups))


def _bound_kernel(
    maxima_ref,  # [B, Hkv, C * groups]
    bound_ref,  # [B, Hkv]
    *,
    k,
    entries,
    interpret,
):
    head, row = pl.program_id(0), pl.program_id(1)
    group = jnp.arange(entries, dtype=jnp.int32)
    inside = group < maxima_ref.shape[2]
    key = jnp.where(inside, load_rows(maxima_ref, (row, head, group), inside, interpret=interpret), ABSENT)
    present = _count(key, LOWEST)
    least = jnp.min(jnp.where(key == ABSENT, 2**31 - 1, key))
    low = jnp.where(present > k, least, LOWEST)
    low, _, _ = _search(
        functools.partial(_count, key), low, jnp.max(key) + 1, present, k=k, slack=k // 8
    )
    bound_ref[row, head] = low


def _candidates_kernel(
    scores_ref,  # [B, Hkv, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    bound_ref,  # [B, Hkv]
    keys_ref,  # [B, Hkv, C * chunk], a chunk's first counts entries are written
    ids_ref,  # [B, Hkv, C * chunk], likewise
    counts_ref,  # [B, Hkv, C]
    *,
    chunk,
    interpret,
):
    index, head, row = (pl.program_id(i) for i in range(3))
    start, stop = _window(start_ref, stop_ref, row, scores_ref.shape[2])
    touched = (start < stop) & (index * chunk < stop) & (index * chunk + chunk > start)

    @pl.when(~touched)
    def _():
        counts_ref[row, head, index] = jnp.int32(0)

    @pl.when(touched)
    def _():
        logical, key = _load_keys(scores_ref, row, head, index * chunk, chunk, start, stop, interpret)
        keep = key >= bound_ref[row, head]
        rank = jnp.cumsum(keep.astype(jnp.int32))
        counts_ref[row, head, index] = jnp.max(rank)
        place = index * chunk + rank - 1
        for ref, values in ((keys_ref, key), (ids_ref, logical)):
            store_rows(ref, (row, head, place), values, keep, interpret=interpret)


def _choose_kernel(
    keys_ref,  # [B, Hkv, C * chunk]
    ids_ref,  # [B, Hkv, C * chunk]
    counts_ref,  # [B, Hkv, C]
    bound_ref,  # [B, Hkv]
    start_ref,  # [B]
    stop_ref,  # [B]
    out_ref,  # [B, Hkv, k]
    *,
    k,
    entries,
    chunk,
    num_logical,
    interpret,
):
    head, row = pl.program_id(0), pl.program_id(1)
    start, stop = _window(start_ref, stop_ref, row, num_logical)
    _fill(out_ref, row, head, jnp.minimum(stop - start, k), num_logical, interpret)
    counts = [counts_ref[row, head, c] for c in range(counts_ref.shape[2])]
    total = sum(counts)
    bound = bound_ref[row, head]

    def load(ref, tile, absent):
        """Candidates `tile * entries + [0, entries)` of the row, `absent` past the last."""
        candidate = tile * entries + jnp.arange(entries, dtype=jnp.int32)
        at, first = candidate, 0
        for c, count in enumerate(counts):
            at = jnp.where(candidate >= first, c * chunk + candidate - first, at)
            first += count
        keep = candidate < total
        return jnp.where(keep, load_rows(ref, (row, head, at), keep, interpret=interpret), absent)

    @pl.when(total <= entries)
    def _():
        key, logical = load(keys_ref, 0, ABSENT), load(ids_ref, 0, 0)
        low, at_low, at_high = _search(
            functools.partial(_count, key), bound, jnp.max(key) + 1, total, k=k
        )
        chosen, place = _place(key, low, _ties(k, at_low, at_high), jnp.int32(0), jnp.int32(0))
        store_rows(out_ref, (row, head, place), logical, chosen, interpret=interpret)

    @pl.when(total > entries)
    def _():
        num_tiles = (total + entries - 1) // entries

        def over_tiles(step, initial):
            return jax.lax.fori_loop(0, num_tiles, step, initial)

        def count(least):
            return over_tiles(
                lambda tile, reach: reach + _count(load(keys_ref, tile, ABSENT), least), jnp.int32(0)
            )

        largest = over_tiles(
            lambda tile, most: jnp.maximum(most, jnp.max(load(keys_ref, tile, ABSENT))), jnp.int32(ABSENT)
        )
        low, at_low, at_high = _search(count, bound, largest + 1, total, k=k)
        ties = _ties(k, at_low, at_high)

        def write(tile, carry):
            above, equal = carry
            key = load(keys_ref, tile, ABSENT)
            chosen, place = _place(key, low, ties, above, equal)
            logical = load(ids_ref, tile, 0)
            store_rows(out_ref, (row, head, place), logical, chosen, interpret=interpret)
            reach, beyond = _count(key, low), _count(key, low + 1)
            return above + beyond, equal + reach - beyond

        over_tiles(write, (jnp.int32(0), jnp.int32(0)))
