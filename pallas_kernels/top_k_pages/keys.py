"""Scores as integers in the same order."""

import jax
import jax.numpy as jnp

ABSENT = -(2**31)  # below the key of every score: for entries that are not there
LOWEST = ABSENT + 1  # the key of NaN

_INFINITY = 0x7F800000


def order_preserving_key(scores: jax.Array) -> jax.Array:
    """float32 -> int32 such that a < b has key(a) < key(b), -0.0 and 0.0 are equal, NaN is lowest.

    Only bits are compared, so that it holds for subnormal numbers where arithmetic takes them for zero.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    key = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > _INFINITY, LOWEST, key)
