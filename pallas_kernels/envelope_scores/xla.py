"""The definition of `envelope_scores` in plain `jax.numpy`."""

import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels._dispatch import compiled_once
from pallas_kernels._paging import group_queries, physical_pages, window_mask


@compiled_once
def envelope_scores(q, summaries, pages, start, stop, *, kinds, group, w_avg, w_peak):
    num_pages, num_kv_heads, _, _ = summaries.shape
    logical = jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    page = physical_pages(pages, logical, window_mask(start, stop, pages.shape[1]), num_pages)
    gathered = summaries.at[page].get(mode="fill", fill_value=0).astype(jnp.float32)  # [B, M, Hkv, S, D]
    summary = {kind: gathered[..., i, :] for i, kind in enumerate(kinds)}
    q = group_queries(q, num_kv_heads, group)

    def dot(a, b):
        return jnp.einsum("bhgd,bmhd->bhgm", a, b, precision=Precision.HIGHEST)

    score = jnp.zeros((), jnp.float32)
    if "mean" in kinds:
        score = score + w_avg * dot(q, summary["mean"]).max(axis=2)
    if "max" in kinds:
        # max(q M, q m) is q M where q > 0 and q m elsewhere, since M >= m.
        peak = dot(jnp.maximum(q, 0), summary["max"]) + dot(jnp.minimum(q, 0), summary["min"])
        score = score + w_peak * peak.max(axis=2)
    return jnp.where((page < num_pages)[:, None], score, -jnp.inf)
