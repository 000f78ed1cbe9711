"""Queries of one KV head, held in registers, and their products with tiles of gathered vectors.

Letters: G query heads of a KV head, R = G padded to the rows of a tensor-core tile, D head_dim, T vectors.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.lax import Precision

from pallas_kernels._triton import MIN_DOT, load_rows, next_power_of_two, power_of_two_pieces

# Terms whose sum is a float32, each exact in the dtype: 24 bits in steps of 8 or 11.
_TERMS = {"bfloat16": (3, 16), "float16": (3, 13)}  # dtype: (terms, low bits of a float32 that a term drops)


def query_rows(group_size: int) -> int:
    """R."""
    return max(MIN_DOT, next_power_of_two(group_size))


def load_queries(q_ref, row, head, *, group_size: int, group: str, interpret: bool) -> list[jax.Array]:
    """The float32 queries of a KV head as pieces along D.

    Args:
        q_ref: [B, Hq, D].
        row, head: request row and KV head.
        group_size: G.
        group: "max": row g holds query g; "mean": row 0 holds the mean over G in float32.
        interpret: as of the kernel.

    Returns:
        One [R, piece] per power-of-two piece of D. Rows without a query are 0.
    """
    g = jnp.arange(query_rows(group_size), dtype=jnp.int32)
    pieces = []
    for at, length in power_of_two_pieces(q_ref.shape[2]):
        index = (row, head * group_size + g, pl.ds(at, length))
        q = load_rows(q_ref, index, g < group_size, interpret=interpret).astype(jnp.float32)
        if group == "mean":
            mean = jnp.sum(q, axis=0) / group_size
            q = jnp.where((g == 0)[:, None], mean[None], 0.0)
        pieces.append(q)
    return pieces


def join_rows(products: jax.Array, *, group_size: int, group: str) -> jax.Array:
    """[R, T] -> [T]: the maximum over the G queries, or the row of their mean."""
    g = jnp.arange(products.shape[0], dtype=jnp.int32)[:, None]
    if group == "mean":
        return jnp.sum(jnp.where(g == 0, products, 0.0), axis=0)
    return jnp.max(jnp.where(g < group_size, products, -jnp.inf), axis=0)


class QueryTerms:
    """Queries as factors of products with vectors of one dtype, without rounding them to it.

    A 16-bit dtype takes a query that has more digits as a sum of terms that the dtype holds exactly, so that
    tensor cores form exact products and only their float32 sum rounds. float16 lacks the range for the last
    terms; there the queries are first scaled by a power of two.

    Args:
        pieces: [R, piece] float32, along D.
        dtype: of the vectors.
        exact: the queries are known to be values of `dtype`.
    """

    def __init__(self, pieces: list[jax.Array], dtype, *, exact: bool):
        dtype = jnp.dtype(dtype)
        self._unscale = None
        if exact or dtype == jnp.float32:
            self._pieces = _negate_all_but_first([[piece.astype(dtype)] for piece in pieces])
            return
        if dtype == jnp.float16:
            scale, self._unscale = _power_of_two_scale(pieces)
            pieces = [piece * scale for piece in pieces]
        terms = [[p] if p.shape[1] < MIN_DOT else _split(p, dtype) for p in pieces]
        self._pieces = _negate_all_but_first(terms)

    def dot(self, tiles: list[jax.Array]) -> jax.Array:
        """Products with vectors given as [T, piece] along D: [R, T] float32."""
        total = None
        for terms, tile in zip(self._pieces, tiles, strict=True):
            for term in terms:
                product = _dot(term, tile)
                # A difference, for Triton makes of a sum with a product one product that starts at the other
                # summand: tensor cores cut what they add, and would cut small terms to the size of large ones.
                total = product if total is None else total - product
        return total if self._unscale is None else total * self._unscale


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


def _power_of_two_scale(pieces):
    """A power of two that brings the largest magnitude to [2^14, 2^15), and its inverse."""
    largest = jnp.float32(0)
    for piece in pieces:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(piece)))
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    wanted = jnp.clip(127 + 127 + 14 - exponent, 1, 253)
    to_float = [jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (wanted, 254 - wanted)]
    return to_float[0], to_float[1]
