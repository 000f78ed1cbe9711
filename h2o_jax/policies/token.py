"""Token-level policies: pages of one token, scored by decayed accumulated attention (arXiv:2306.14048)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from h2o_jax.config import CacheConfig
from h2o_jax.policy import Policy, Window, is_number, register_policy
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels import decayed_softmax_scores

SCORE_DTYPES = ("bfloat16", "float16", "float32")


@register_policy("h2o_token_sparse_attention")
@dataclasses.dataclass(frozen=True)
class H2OTokenPolicy(Policy):
    """Over the window A, `a_i = softmax_A(scale * qbar.k_i)`; `hh_i <- a_i + decay * hh_i` is the score.

    Scores accumulate only in decode steps whose context exceeds the budget, are set to 0 when a token is
    written, and are kept per layer and KV head in `aux["hh_score"]` [num_pages, Hkv, 1].

    Attributes:
        decay: factor on the old score, in [0, 1]. 1 is the plain sum of H2O; below 1 a score is bounded
            by `1 / (1 - decay)`, so that a narrow dtype keeps registering new mass; with 0 it is the
            attention of the step alone.
        scale: factor on the logits; None is `head_dim ** -0.5`.
        score_dtype: of `hh_score`. bfloat16 halves its size and rounds each step once.
    """

    decay: float = 0.984375
    scale: float | None = None
    score_dtype: Any = jnp.float32

    page_size = 1
    group = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.decay) and 0 <= self.decay <= 1):
            raise ValueError(f"decay: expected a number in [0, 1], got {self.decay!r}")
        if self.scale is not None and not (is_number(self.scale) and 0 < self.scale):
            raise ValueError(f"scale: expected None or a positive number, got {self.scale!r}")
        try:
            dtype = jnp.dtype(self.score_dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in SCORE_DTYPES:
            raise ValueError(f"score_dtype: expected one of {SCORE_DTYPES}, got {self.score_dtype!r}")
        object.__setattr__(self, "score_dtype", dtype)

    def init_aux(self, config: CacheConfig) -> dict[str, jax.Array]:
        return super().init_aux(config) | {"hh_score": jnp.zeros(config.pool_shape[:3], self.score_dtype)}

    def resolve_scale(self, head_dim: int) -> float:
        """The factor on the logits: `scale`, or `head_dim ** -0.5` where that is None."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def score(
        self,
        cache: LayerCache,
        table: PageTable,
        q: jax.Array,
        window: Window,
        *,
        implementation: str | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        hh_score, scores = decayed_softmax_scores(
            q,
            cache.k,
            cache.aux["hh_score"],
            table.pages,
            window.start,
            window.stop,
            decay=self.decay,
            scale=self.resolve_scale(q.shape[-1]),
            group=self.group,
            implementation=implementation,
        )
        return dataclasses.replace(cache, aux=cache.aux | {"hh_score": hh_score}), scores


@register_policy("gqa_h2o_token_sparse_attention")
@dataclasses.dataclass(frozen=True)
class GQAH2OTokenPolicy(H2OTokenPolicy):
    """The same with `a_i = max_g softmax_A(scale * q_g.k_i)`: a softmax per query head, then the maximum.

    Attributes:
        decay, scale, score_dtype: as in `H2OTokenPolicy`.
    """

    group = "max"
