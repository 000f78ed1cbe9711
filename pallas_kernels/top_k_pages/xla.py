"""The definition of `top_k_pages` in plain `jax.numpy`."""

import jax
import jax.numpy as jnp

from pallas_kernels._paging import window_mask

_INT32_MIN = -(2**31)


def order_preserving_key(scores: jax.Array) -> jax.Array:
    """float32 -> int32 such that a < b has key(a) < key(b), -0.0 and 0.0 are equal, NaN is lowest.

    No key is the least int32, which is left for entries that are not there.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(jnp.isnan(scores), _INT32_MIN + 1, key)


def top_k_pages(scores, start, stop, *, k):
    num_logical = scores.shape[-1]
    present = window_mask(start, stop, num_logical)[:, None]
    key = jnp.where(present, order_preserving_key(scores), _INT32_MIN)
    best, chosen = jax.lax.top_k(key, min(k, num_logical))  # equal keys: the lower index first
    chosen = jnp.sort(jnp.where(best == _INT32_MIN, num_logical, chosen), axis=-1)
    missing = k - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, missing)), constant_values=num_logical)
