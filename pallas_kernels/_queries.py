"""Queries of one KV head, held in registers, and their products with tiles of gathered vectors.

Letters: G query heads of a KV head, R = G padded to rows of tensor-core tiles, D head_dim, T vectors.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.lax import Precision

from pallas_kernels._triton import MIN_DOT, load_rows, next_power_of_two, power_of_two_pieces

# Terms whose sum is a float32, each exact in the dtype: 24 bits in steps of 8 or 11.
_TERMS = {"bfloat16": (3, 16), "float16": (3, 13)}  # dtype: (terms, low bits of a float32 that a term drops)


def load_queries(q_ref, row, head, *, group_size: int, group: str, interpret: bool) -> list[jax.Array]:
    """The float32 queries of a KV head as pieces along D.

    Args:
        q_ref: [B, Hq, D].
        row, head: request row and KV head.
        group_size: G.
        group: "max": each query; "mean": their mean in float32.
        interpret: as of the kernel.

    Returns:
        For each power-of-two piece of D an [R, piece], of which rows past G are 0; for "mean" a [piece].
    """
    g = jnp.arange(max(MIN_DOT, next_power_of_two(group_size)), dtype=jnp.int32)
    pieces = []
    for at, length in power_of_two_pieces(q_ref.shape[2]):
        index = (row, head * group_size + g, pl.ds(at, length))
        q = load_rows(q_ref, index, g < group_size, interpret=interpret).astype(jnp.float32)
        pieces.append(jnp.sum(q, axis=0) / group_size if group == "mean" else q)
    return pieces


def join_rows(products: jax.Array, *, group_size: int) -> jax.Array:
    """[R, T] -> [T]: the maximum over the rows of the group's queries (the one row of their mean)."""
    g = jnp.arange(products.shape[0], dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(g < group_size, products, -jnp.inf), axis=0)


class QueryTerms:
    """Queries as factors of products with vectors of one dtype, without rounding them to it.

    A 16-bit dtype takes a query that has more digits as a sum of terms that the dtype holds exactly, so that
    tensor cores form exact products and only their float32 sum rounds. float16 lacks the range for the last
    terms; there each query is first scaled by a power of two. The terms of a lone query are rows of one
    factor, for a tensor-core tile has rows to spare.

    Args:
        pieces: float32, along D: [R, piece] of R queries or [piece] of a lone one.
        dtype: of the vectors.
        exact: the queries are known to be values of `dtype`.
    """

    def __init__(self, pieces: list[jax.Array], dtype, *, exact: bool):
        dtype = jnp.dtype(dtype)
        self._lone = pieces[0].ndim == 1
        self._unscale = None
        if exact or dtype == jnp.float32:
            terms = [[piece.astype(dtype)] for piece in pieces]
        else:
            if dtype == jnp.float16:
                scale, self._unscale = _power_of_two_scales(pieces)
                pieces = [piece * scale for piece in pieces]
            terms = [[p] if p.shape[-1] < MIN_DOT else _split(p, dtype) for p in pieces]
        if self._lone:
            terms = [[_rows(piece)] for piece in terms]
        self._pieces = _negate_all_but_first(terms)

    def dot(self, tiles: list[jax.Array]) -> jax.Array:
        """Products with vectors given as [T, piece] along D: [R, T] float32, [1, T] of a lone query."""
        total: Any = None
        for terms, tile in zip(self._pieces, tiles, strict=True):
            for term in terms:
                product = _dot(term, tile)
                # A difference, for Triton makes of a sum with a product one product that starts at the other
                # summand: tensor cores cut what they add, and would cut small terms to the size of large ones.
                total = product if total is None else total - product
        if self._lone:
            total = jnp.sum(total, axis=0, keepdims=True)
        return total if self._unscale is None else total * self._unscale


def _rows(terms):
    """Vectors of one piece as the first rows of a factor whose other rows are 0."""
    row = jnp.arange(MIN_DOT, dtype=jnp.int32)[:, None]
    factor = jnp.zeros((MIN_DOT, terms[0].shape[0]), terms[0].dtype)
    for i, term in enumerate(terms):
        factor = jnp.where(row == i, term[None], factor)
    return factor


def _dot(queries, vectors):
    """[R, piece] and [T, piece] -> [R, T] float32."""
    if queries.shape[1] < MIN_DOT:
        queries, vectors = (x.astype(jnp.float32) for x in (queries, vectors))
        return jnp.sum(queries[:, None] * vectors[None], axis=2)
    return jax.lax.dot_general(
        queries,
        vectors,
        (((1,), (1,)), ((), ())),
        precision=Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _negate_all_but_first(terms):
    return [[x if i == j == 0 else -x for j, x in enumerate(piece)] for i, piece in enumerate(terms)]


def _split(x, dtype):
    count, dropped = _TERMS[dtype.name]
    terms = []
    for _ in range(count):
        # Cut by bits, not by conversion: a compiler may drop a round trip through a narrower dtype.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << dropped))
        term = jax.lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(term.astype(dtype))
        x = x - term
    return terms[::-1]  # the least first, which rounds the sum less


def _power_of_two_scales(pieces):
    """The power of two that brings each query's largest magnitude to [2^14, 2^15), and its inverse: [R, 1] or [1]."""
    largest: Any = jnp.float32(0)
    for piece in pieces:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(piece), axis=-1, keepdims=True))
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    wanted = jnp.clip(127 + 127 + 14 - exponent, 1, 253)
    to_float = [jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (wanted, 254 - wanted)]
    return to_float[0], to_float[1]
