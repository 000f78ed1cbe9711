"""The definition of `top_k_pages` in plain `jax.numpy`."""

import jax
import jax.numpy as jnp

from pallas_kernels._paging import window_mask
from pallas_kernels.top_k_pages.keys import ABSENT, order_preserving_key


def top_k_pages(scores, start, stop, *, k):
    num_logical = scores.shape[-1]
    present = window_mask(start, stop, num_logical)[:, None]
    key = jnp.where(present, order_preserving_key(scores), ABSENT)
    best, chosen = jax.lax.top_k(key, min(k, num_logical))  # equal keys: the lower index first
    chosen = jnp.sort(jnp.where(best == ABSENT, num_logical, chosen), axis=-1)
    missing = k - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, missing)), constant_values=num_logical)
