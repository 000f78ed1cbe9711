"""`top_k_pages` through Pallas' Triton lowering.

Scores become int32 keys in the same order, and the k-th largest key is found by narrowing an interval of keys
to a third: one counting pass over registers per step, until exactly k keys reach the lower end or the interval
is one key wide. Ranks from prefix sums then place the chosen entries, which are met in ascending order, so
nothing is sorted.

A row too long for one program is first reduced to the maxima of groups of `fan` neighbours, of groups of those,
and so on, until the maxima of a row fit a program. The k best entries lie in the k best groups, ties to the
lower on both levels: of the entries above the k-th key each lies in a group whose maximum is above it, and the
first entries that equal it lie in those groups or in the first whose maximum equals it. So the same choice among
the maxima, then among the members of the groups chosen, and so on down, is exact whatever the scores.

Letters: B rows, M logical pages, N entries of a level (M at level 0).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import (
    kernel_op,
    load_rows,
    load_window,
    next_power_of_two,
    pallas_call,
    store_rows,
)
from pallas_kernels.top_k_pages.keys import ABSENT, LOWEST, order_preserving_key

MOST_ENTRIES = 32768  # of a program, since two counts share an int32


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work of a program. All sizes are powers of two.

    Attributes:
        row: entries of a row that one program takes.
        fan: entries of a group, and groups of a group, in longer rows.
        chunk: entries that a program reduces to maxima.
        warp: entries of a warp; a program has 4 to 16 warps.
    """

    row: int = 8192
    fan: int = 4
    chunk: int = 8192
    warp: int = 1024

    def __post_init__(self):
        for name, least, most in (
            ("row", 16, MOST_ENTRIES),
            ("fan", 2, self.chunk),
            ("chunk", 16, MOST_ENTRIES),
            ("warp", 16, MOST_ENTRIES),
        ):
            value = getattr(self, name)
            if value < least or value & (value - 1) or value > most:
                raise ValueError(f"{name}: expected a power of two from {least} to {most}, got {value}")

    def warps(self, entries: int) -> int:
        """Warps of a program that holds `entries` entries."""
        return min(16, max(4, entries // self.warp))


@kernel_op
def top_k_pages(
    scores, start, stop, in_use, *, k, reserved, filler, interpret: bool, tiles: Tiles | None = None
):
    tiles = Tiles() if tiles is None else tiles
    if 0 in scores.shape:
        return jnp.full((*scores.shape[:2], k + reserved), filler, jnp.int32)
    levels = _levels(scores.shape[2], k, tiles)
    values = [scores, *_maxima(scores, start, stop, levels, tiles, interpret)]
    chosen = None
    for level in range(len(levels) - 1, -1, -1):
        chosen = _choose(
            values[level],
            start,
            stop,
            chosen,
            None if level else in_use,
            k=min(k, levels[level]) if level else k,
            reserved=0 if level else reserved,
            filler=levels[level] if level else filler,
            num_logical=levels[0],
            num_entries=levels[level],
            span=tiles.fan**level,
            tiles=tiles,
            interpret=interpret,
        )
    return chosen


def _levels(num_logical: int, k: int, tiles: Tiles) -> list[int]:
    """N of each level: the row's pages, their groups, groups of those, until one program can take them."""
    if num_logical <= min(tiles.fan * k, MOST_ENTRIES):
        return [num_logical]  # the members of k groups are the whole row
    levels = [num_logical]
    while levels[-1] > tiles.row:
        levels.append(pl.cdiv(levels[-1], tiles.fan))
    if len(levels) > 1 and tiles.fan * k > MOST_ENTRIES:
        raise NotImplementedError(
            f"k: at most {MOST_ENTRIES // tiles.fan} of rows longer than {MOST_ENTRIES} pages, got {k} of {num_logical}"
        )
    if tiles.fan ** (len(levels) - 1) > tiles.chunk:
        raise NotImplementedError(f"scores: rows of {num_logical} pages are too long")
    return levels


def _maxima(scores, start, stop, levels, tiles, interpret):
    """Keys of the best entry of each group, by level from 1 up: [B, Hkv, N or a little more]."""
    if len(levels) == 1:
        return ()
    batch, num_kv_heads, num_logical = scores.shape
    num_chunks = pl.cdiv(num_logical, tiles.chunk)
    return pallas_call(
        functools.partial(_maxima_kernel, tiles=tiles, interpret=interpret),
        grid=(num_chunks, num_kv_heads, batch),
        out_shape=tuple(
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_chunks * (tiles.chunk // tiles.fan**level)), jnp.int32)
            for level in range(1, len(levels))
        ),
        num_warps=tiles.warps(tiles.chunk),
        interpret=interpret,
        name="top_k_maxima",
    )(scores, start, stop)


def _choose(
    values, start, stop, groups, in_use, *, k, reserved, filler, num_logical, num_entries, span, tiles, interpret
):
    """The k best entries of a level, among all or among the members of chosen groups: [B, Hkv, k + reserved]."""
    batch, num_kv_heads, _ = values.shape
    shape: tuple[int, ...]
    if groups is None:
        shape = (max(16, next_power_of_two(num_entries)),)
    else:
        shape = (max(16, next_power_of_two(groups.shape[2])), tiles.fan)
    return pallas_call(
        functools.partial(
            _choose_kernel,
            k=k,
            grouped=groups is not None,
            filler=filler,
            num_logical=num_logical,
            num_entries=num_entries,
            span=span,
            shape=shape,
            interpret=interpret,
        ),
        grid=(num_kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, num_kv_heads, k + reserved), jnp.int32),
        num_warps=tiles.warps(math.prod(shape)),
        interpret=interpret,
        name="top_k_choose" if span == 1 else "top_k_groups",
    )(values, start, stop, *(x for x in (groups, in_use) if x is not None))


def _maxima_kernel(
    scores_ref,  # [B, Hkv, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    *maxima_refs,  # [B, Hkv, N or more], by level from 1 up; written where a chunk meets the window
    tiles,
    interpret,
):
    index, head, row = (pl.program_id(i) for i in range(3))
    num_logical = scores_ref.shape[2]
    start, stop = load_window(start_ref, stop_ref, row, num_logical)
    first = index * tiles.chunk

    @pl.when((start < stop) & (first < stop) & (first + tiles.chunk > start))
    def _():
        logical = first + jnp.arange(tiles.chunk, dtype=jnp.int32)
        # Loaded up to M, not up to the window's ragged ends, so that a thread loads several scores at once.
        scores = load_rows(scores_ref, (row, head, logical), logical < num_logical, interpret=interpret)
        key = jnp.where((logical >= start) & (logical < stop), order_preserving_key(scores), ABSENT)
        for ref in maxima_refs:
            groups = key.shape[0] // tiles.fan
            key = jnp.max(key.reshape(groups, tiles.fan), axis=1)
            group = index * groups + jnp.arange(groups, dtype=jnp.int32)
            store_rows(ref, (row, head, group), key, group >= 0, interpret=interpret)


def _choose_kernel(
    values_ref,  # [B, Hkv, N or more] float32 scores at level 0, int32 keys of groups' maxima above
    start_ref,  # [B]
    stop_ref,  # [B]
    *refs,  # chosen groups [B, Hkv, K] int32, each of `fan` entries of this level, if grouped; pages in use [B],
    # if these are to be listed; out [B, Hkv, k + reserved]
    k,
    grouped,
    filler,
    num_logical,
    num_entries,
    span,
    shape,
    interpret,
):
    *inputs, out_ref = refs
    groups_ref: Any = inputs.pop(0) if grouped else None
    head, row = pl.program_id(0), pl.program_id(1)
    if grouped:
        nth = jnp.arange(shape[0], dtype=jnp.int32)
        wanted = groups_ref.shape[2]
        group = load_rows(groups_ref, (row, head, nth), nth < wanted, interpret=interpret)
        group = jnp.where(nth < wanted, group, num_entries)
        entry = group[:, None] * shape[1] + jnp.arange(shape[1], dtype=jnp.int32)[None]
    else:
        entry = jnp.arange(shape[0], dtype=jnp.int32)
    whole = not grouped and shape[0] == num_entries
    key = load_rows(
        values_ref, (row, head, entry), None if whole else entry < num_entries, interpret=interpret
    )
    if span == 1:
        key = order_preserving_key(key)

    start, stop = load_window(start_ref, stop_ref, row, num_logical)
    first = start // span
    present = jnp.where(start < stop, (stop + span - 1) // span - first, 0)  # entries that meet the window
    # Unsigned, so that one comparison does for both ends.
    key = jnp.where((entry - first).astype(jnp.uint32) < present.astype(jnp.uint32), key, ABSENT)

    width = out_ref.shape[2]
    place = jnp.arange(next_power_of_two(width), dtype=jnp.int32)
    before, after, in_use = jnp.int32(0), stop, jnp.int32(0)  # pages before the window, the first one after it
    if inputs:
        before, after = (jnp.where(start < stop, x, 0) for x in (start, stop))
        in_use = inputs[0][row]
    ahead = place - before - jnp.minimum(present, k)
    page = jnp.where(place < before, place, jnp.where(after + ahead < in_use, after + ahead, filler))
    outside = (place < before) | (ahead >= 0)
    store_rows(out_ref, (row, head, place), page, outside & (place < width), interpret=interpret)

    low = jnp.int32(LOWEST)
    parts = groups_ref.shape[2] if grouped else max(next_power_of_two(k), 128)
    if k <= parts <= key.size:
        # At least k parts of the row, or all that hold a key, reach the least of the parts' maxima.
        padded = shape[0] if grouped else parts
        best = jnp.max(key.reshape(padded, key.size // padded), axis=1)
        low = jnp.maximum(low, jnp.min(jnp.where(jnp.arange(padded, dtype=jnp.int32) < parts, best, 2**31 - 1)))
    key, entry = key.reshape(-1), entry.reshape(-1)
    # How many keys reach `low` need not be known where it is more than k.
    at_low = jnp.where(present <= k, present, k + 1)
    low = jnp.where(present <= k, LOWEST, low)
    low, at_low, at_high = _search(key, low, jnp.max(key) + 1, at_low, k=k)
    ties = jnp.where(at_low <= k, k, k - at_high)
    chosen, place = _place(key, low, ties)
    place += before
    store_rows(out_ref, (row, head, place), entry, chosen & (place < width), interpret=interpret)


def _search(key, low, high, at_low, *, k):
    """Narrows `[low, high)` around the k-th largest key.

    Args:
        key: [N] keys.
        low: a key that at least k keys reach, or `LOWEST`.
        high: a key that none reaches.
        at_low: how many keys reach `low`; a larger number will do if it is above k.

    Returns:
        `low`, how many keys reach it, how many reach `high`. Either exactly k keys, or all if there are fewer,
        reach `low`, or `low` is the k-th largest key and `high` the one after it.
    """

    def undecided(carry):
        low, high, at_low, _ = carry
        return (at_low > k) & (low < high - 1)

    def narrow(carry):
        low, high, at_low, at_high = carry
        # About a third of the width, without overflow; at least 1 and less than the width.
        third = jnp.maximum(((high >> 1) - (low >> 1)) // 3 * 2, 1)
        one = low + third
        two = jnp.minimum(one + third, high - 1)
        counts = jnp.sum((key >= one).astype(jnp.int32) + ((key >= two).astype(jnp.int32) << 16))
        at_one, at_two = counts & 0xFFFF, jax.lax.shift_right_logical(counts, 16)
        above_one, above_two = at_one >= k, at_two >= k
        return (
            jnp.where(above_two, two, jnp.where(above_one, one, low)),
            jnp.where(above_two, high, jnp.where(above_one, two, one)),
            jnp.where(above_two, at_two, jnp.where(above_one, at_one, at_low)),
            jnp.where(above_two, at_high, jnp.where(above_one, at_two, at_one)),
        )

    low, _, at_low, at_high = jax.lax.while_loop(undecided, narrow, (low, high, at_low, jnp.int32(0)))
    return low, at_low, at_high


def _place(key, low, ties):
    """Which keys are chosen, and where they go: those above `low`, and the first `ties` of those equal to it.

    Returns:
        [N] bool, chosen, and [N] int32, its place in the output.
    """
    above, equal = key > low, key == low
    packed = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    before = jnp.cumsum(packed) - packed
    above_before = before & 0xFFFF
    equal_before = jax.lax.shift_right_logical(before, jnp.full_like(before, 16))
    return above | (equal & (equal_before < ties)), above_before + jnp.minimum(equal_before, ties)
