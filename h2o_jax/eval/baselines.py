"""What a policy is compared with: the best and the worst that a choice of pages can do, and the latest pages.

Policies like any other, written through the public hook, but not registered: none is of use for decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp

from h2o_jax.eval.exact import page_mass
from h2o_jax.generate import check_seed
from h2o_jax.policy import Policy


@dataclasses.dataclass(frozen=True)
class OraclePolicy(Policy):
    """The pages with most exact attention mass of the group. It reads all keys, so it saves nothing."""

    def score(self, cache, table, q, window, *, implementation=None):
        return cache, page_mass(cache, table, q)


@dataclasses.dataclass(frozen=True)
class RandomPolicy(Policy):
    """Pages at random, others in each step, layer, row and KV head.

    Attributes:
        seed: of the choice, in [0, 2**32).
    """

    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed)

    def score(self, cache, table, q, window, *, implementation=None):
        heads = (cache.k.shape[1], table.pages.shape[1])
        salt = jax.lax.bitcast_convert_type(q[:, 0, 0].astype(jnp.float32), jnp.uint32)  # differs by layer

        def draw(length, salt):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), length), salt)
            return jax.random.uniform(key, heads)

        return cache, jax.vmap(draw)(table.seq_lens, salt)


@dataclasses.dataclass(frozen=True)
class RecentPolicy(Policy):
    """The latest pages of the window: what `sink_recent_attention` reads of the same budget, but scored, so
    that its choice can be observed."""

    def score(self, cache, table, q, window, *, implementation=None):
        shape = (q.shape[0], cache.k.shape[1], table.pages.shape[1])
        return cache, jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.float32), shape)
