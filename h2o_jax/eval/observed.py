"""A policy that keeps count of what another one chooses.

Letters: B rows, M pages a row, P page size.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.eval.exact import page_mass
from h2o_jax.policy import Policy
from h2o_jax.state import LayerCache, PagedState
from pallas_kernels import top_k_pages
from pallas_kernels._paging import window_mask

_KEPT = ("mass", "recall", "steps")


@dataclasses.dataclass(frozen=True)
class ObservedPolicy(Policy):
    """Chooses as `inner` does, and sums over the steps how good the choice was.

    The sums stand in `aux["observed"]` [num_pages, Hkv, 3] float32, those of a row at its first page: the
    mass of exact attention on the pages read, the share of the best window pages among the chosen ones, and
    the number of steps that chose. Steps whose context the budget covers choose nothing and do not count.

    Attributes:
        inner: a policy that scores pages (`top_k` of at least 1).
    """

    inner: Policy = dataclasses.field(kw_only=True)

    # Those of `inner`: read from instances, not from the class.
    summary_kinds: ClassVar[Any] = property(lambda self: self.inner.summary_kinds)
    page_size: ClassVar[Any] = property(lambda self: self.inner.page_size)

    def init_aux(self, config):
        observed = jnp.zeros((config.num_pages, config.num_kv_heads, len(_KEPT)), jnp.float32)
        return self.inner.init_aux(config) | {"observed": observed}

    def on_write(self, cache, table, k, v, num_tokens):
        return self.inner.on_write(cache, table, k, v, num_tokens)

    def score(self, cache, table, q, window, *, implementation=None):
        cache, scores = self.inner.score(cache, table, q, window, implementation=implementation)
        mass = page_mass(cache, table, q)

        def best(scores):  # [B, Hkv, M] bool: the pages that these scores choose
            pages = top_k_pages(
                scores, window.start, window.stop, k=self.top_k, implementation=implementation
            )
            row, head = jnp.ogrid[: pages.shape[0], : pages.shape[1]]
            none = jnp.zeros(scores.shape, bool)
            return none.at[row[..., None], head[..., None], pages].set(True, mode="drop")

        chosen = best(scores.astype(jnp.float32))
        always = ~window_mask(window.start, window.stop, mass.shape[-1])[:, None]
        seen = jnp.stack(
            [
                jnp.where(chosen | always, mass, 0).sum(axis=-1),
                (chosen & best(mass)).sum(axis=-1) / self.top_k,
                jnp.ones(mass.shape[:2]),
            ],
            axis=-1,
        )
        choosing = (window.start < window.stop)[:, None, None]
        first_page = table.pages[:, 0]
        observed = cache.aux["observed"].at[first_page].add(jnp.where(choosing, seen, 0), mode="drop")
        return dataclasses.replace(cache, aux=cache.aux | {"observed": observed}), scores


def observe(inner: Policy) -> ObservedPolicy:
    """The same budget as `inner`, which is observed."""
    return ObservedPolicy(
        inner.top_k, inner.reserved_bos, inner.reserved_eos, inner.dense_layers, inner=inner
    )


def observations(state: PagedState) -> dict[str, np.ndarray]:
    """What was observed: "mass" and "recall", each [layers, Hkv], means over rows and steps that chose."""
    first_page = np.asarray(state.table.pages[:, 0])
    sums = np.stack([_rows(cache, first_page).sum(axis=0) for cache in state.layers])  # [layers, Hkv, 3]
    return {name: sums[..., i] / sums[..., -1] for i, name in enumerate(_KEPT[:-1])}


def _rows(cache: LayerCache, first_page: np.ndarray) -> jax.Array:
    return jax.device_get(cache.aux["observed"][first_page])
