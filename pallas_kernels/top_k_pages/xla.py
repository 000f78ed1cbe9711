"""The definition of `top_k_pages` in plain `jax.numpy`."""

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import compiled_once
from pallas_kernels._paging import list_pages, window_mask
from pallas_kernels.top_k_pages.keys import ABSENT, order_preserving_key


@compiled_once
def top_k_pages(scores, start, stop, in_use, *, k, reserved, filler):
    num_logical = scores.shape[-1]
    present = window_mask(start, stop, num_logical)[:, None]
    key = jnp.where(present, order_preserving_key(scores), ABSENT)
    best, chosen = jax.lax.top_k(key, min(k, num_logical))  # equal keys: the lower index first
    chosen = jnp.sort(jnp.where(best == ABSENT, num_logical, chosen), axis=-1)
    if in_use is not None:
        start, stop = (jnp.clip(x, 0, num_logical) for x in (start, stop))
        return list_pages(chosen, start, stop, in_use, width=k + reserved, filler=filler)
    chosen = jnp.where(chosen == num_logical, filler, chosen)
    missing = k - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, missing)), constant_values=filler)
