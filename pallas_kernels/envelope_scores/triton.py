"""`envelope_scores` through Pallas' Triton lowering.

Since M >= m, `sum_d max(q_d M_d, q_d m_d) = max(q, 0).M - max(-q, 0).m`: two products per page, formed on
tensor cores from pages gathered by id. Letters: B rows, M logical pages, S summary rows, R padded group.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._queries import QueryTerms, join_rows, load_queries
from pallas_kernels._triton import kernel_op, load_rows, load_window, pallas_call, power_of_two_pieces


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work of a program.

    Attributes:
        pages: pages of a tile, a power of two, at least 16.
        tiles: tiles of a program, which the software pipeline overlaps.
        num_warps: warps of a program.
        num_stages: stages of the pipeline.
    """

    pages: int
    tiles: int = 3
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        if self.pages < 16 or self.pages & (self.pages - 1):
            raise ValueError(f"pages: expected a power of two of at least 16, got {self.pages}")
        for name in ("tiles", "num_warps", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


def default_tiles(page_bytes: int) -> Tiles:
    """Tiles for pages of `page_bytes` bytes of summaries a KV head: about 72 KiB in flight a program."""
    pages = next((p for p in (64, 32) if 3 * p * page_bytes <= 72 * 1024), 16)
    return Tiles(pages=pages, num_warps=4 if pages > 32 else 2)


@kernel_op
def envelope_scores(
    q,
    summaries,
    pages,
    start,
    stop,
    *,
    kinds,
    group,
    w_avg,
    w_peak,
    interpret: bool,
    tiles: Tiles | None = None,
):
    num_pages, num_kv_heads, num_kinds, head_dim = summaries.shape
    batch, num_logical = pages.shape
    if tiles is None:
        tiles = default_tiles(num_kinds * head_dim * summaries.dtype.itemsize)
    if 0 in (batch, num_logical):
        return jnp.full((batch, num_kv_heads, num_logical), -jnp.inf, jnp.float32)
    kernel = functools.partial(
        _kernel,
        kinds=kinds,
        group=group,
        group_size=q.shape[1] // num_kv_heads,
        w_avg=w_avg,
        w_peak=w_peak,
        tiles=tiles,
        interpret=interpret,
    )
    return pallas_call(
        kernel,
        # Heads vary fastest, for a page's heads are neighbours in memory.
        grid=(num_kv_heads, pl.cdiv(num_logical, tiles.pages * tiles.tiles), batch),
        out_shape=jax.ShapeDtypeStruct((batch, num_kv_heads, num_logical), jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        name="envelope_scores",
    )(q, summaries, pages, start, stop)


def _kernel(
    q_ref,  # [B, Hq, D]
    summaries_ref,  # [num_pages, Hkv, S, D]
    pages_ref,  # [B, M]
    start_ref,  # [B]
    stop_ref,  # [B]
    out_ref,  # [B, Hkv, M]
    *,
    kinds,
    group,
    group_size,
    w_avg,
    w_peak,
    tiles,
    interpret,
):
    head, chunk, row = (pl.program_id(i) for i in range(3))
    num_pages, head_dim = summaries_ref.shape[0], summaries_ref.shape[3]
    num_logical = pages_ref.shape[1]
    start, stop = load_window(start_ref, stop_ref, row, num_logical)
    # Tiles [first, last) are this program's, [begin, end) of them meet the window.
    first = chunk * tiles.tiles
    last = first + tiles.tiles
    begin = jnp.clip(start // tiles.pages, first, last)
    end = jnp.where(start < stop, jnp.clip((stop + tiles.pages - 1) // tiles.pages, begin, last), begin)

    def store(tile, score):
        logical = tile * tiles.pages + jnp.arange(tiles.pages, dtype=jnp.int32)
        index = out_ref.at[row, head, pl.ds(tile * tiles.pages, tiles.pages)]
        plt.store(index, score, mask=logical < num_logical)

    def fill(tile, carry):
        store(tile, jnp.full((tiles.pages,), -jnp.inf, jnp.float32))
        return carry

    jax.lax.fori_loop(first, begin, fill, 0)
    jax.lax.fori_loop(end, last, fill, 0)

    @pl.when(begin < end)
    def _():
        q = load_queries(q_ref, row, head, group_size=group_size, group=group, interpret=interpret)
        factor = functools.partial(
            QueryTerms,
            dtype=summaries_ref.dtype,
            exact=group == "max" and q_ref.dtype == summaries_ref.dtype,
        )
        factors: dict[str, Any] = {
            "mean": factor(q) if "mean" in kinds else None,
            "max": factor([jnp.maximum(x, 0.0) for x in q]) if "max" in kinds else None,
            "min": factor([jnp.maximum(-x, 0.0) for x in q]) if "min" in kinds else None,
        }

        def score_tile(tile, carry):
            logical = tile * tiles.pages + jnp.arange(tiles.pages, dtype=jnp.int32)
            inside = (logical >= start) & (logical < stop)
            page = plt.load(
                pages_ref.at[row, pl.ds(tile * tiles.pages, tiles.pages)], mask=inside, other=jnp.int32(-1)
            )
            valid = inside & (page >= 0) & (page < num_pages)

            def product(kind):
                summary = [
                    load_rows(
                        summaries_ref,
                        (page, head, kinds.index(kind), pl.ds(at, length)),
                        valid,
                        interpret=interpret,
                    )
                    for at, length in power_of_two_pieces(head_dim)
                ]
                return factors[kind].dot(summary)

            join = functools.partial(join_rows, group_size=1 if group == "mean" else group_size)
            score = jnp.zeros((tiles.pages,), jnp.float32)
            if "mean" in kinds:
                score = score + w_avg * join(product("mean"))
            if "max" in kinds:
                # A difference: Triton makes of a sum of two products one that starts at the other, and since
                # tensor cores cut what they add, its error would be more than twice as large.
                score = score + w_peak * join(product("max") - product("min"))
            store(tile, jnp.where(valid, score, -jnp.inf))
            return carry

        jax.lax.fori_loop(begin, end, score_tile, 0)
