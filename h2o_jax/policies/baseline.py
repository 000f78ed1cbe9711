"""Baselines: policies that score nothing."""

import dataclasses

from h2o_jax.policy import Policy, register_policy


@register_policy("sink_recent_attention")
@dataclasses.dataclass(frozen=True)
class SinkRecentPolicy(Policy):
    """Only the reserved pages: sinks and a recent window, `top_k` 0 (StreamingLLM, arXiv:2309.17453)."""

    top_k: int = 0
    least_top_k = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k != 0:
            raise ValueError(f"top_k: expected 0, since sink_recent_attention scores nothing, got {self.top_k!r}")


@register_policy("dense_attention")
@dataclasses.dataclass(frozen=True)
class DensePolicy(Policy):
    """All pages. `top_k` and the reserved pages mean nothing here: everything is read."""

    top_k: int = 0
    least_top_k = 0

    def budget(self, pages_per_request: int) -> int:
        return pages_per_request
