"""Page-level policies: pages are scored by their summaries, with no state of their own.

For KV head h and page p: mean mu, max M and min m of its keys, `peak(q, p) = sum_d max(q_d M_d, q_d m_d)`.
"""

import dataclasses

import jax

from h2o_jax.policy import Policy, Window, is_number, register_policy
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels import envelope_scores


@dataclasses.dataclass(frozen=True)
class SummaryPolicy(Policy):
    """Scores pages by `envelope_scores` over the kinds in `summary_kinds`, joined over a group by `group`."""

    group = "max"
    w_avg = 1.0
    w_peak = 1.0

    def score(
        self,
        cache: LayerCache,
        table: PageTable,
        q: jax.Array,
        window: Window,
        *,
        implementation: str | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        return cache, envelope_scores(
            q,
            cache.aux["summaries"],
            table.pages,
            window.start,
            window.stop,
            kinds=cache.summary_kinds,
            group=self.group,
            w_avg=self.w_avg,
            w_peak=self.w_peak,
            implementation=implementation,
        )


@register_policy("h2o_sparse_attention")
@dataclasses.dataclass(frozen=True)
class H2OPolicy(SummaryPolicy):
    """`w_avg * (qbar.mu) + w_peak * peak(qbar)`, qbar the mean of the group's queries.

    Attributes:
        w_avg, w_peak: weights of the mean term and of the envelope term.
    """

    w_avg: float = 1.0
    w_peak: float = 1.0

    summary_kinds = ("mean", "max", "min")
    group = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("w_avg", "w_peak"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)!r}")


@register_policy("gqa_h2o_sparse_attention")
@dataclasses.dataclass(frozen=True)
class GQAH2OPolicy(H2OPolicy):
    """`w_avg * max_g(q_g.mu) + w_peak * max_g peak(q_g)`: two separate maxima over the group.

    Attributes:
        w_avg, w_peak: weights of the mean term and of the envelope term.
    """

    group = "max"


@register_policy("block_sparse_attention")
@dataclasses.dataclass(frozen=True)
class BlockSparsePolicy(SummaryPolicy):
    """`qbar.mu`: the mean key against the mean query."""

    summary_kinds = ("mean",)
    group = "mean"


@register_policy("gqa_quest_sparse_attention")
@dataclasses.dataclass(frozen=True)
class GQAQuestPolicy(SummaryPolicy):
    """`max_g peak(q_g)`: the upper bound of Quest (arXiv:2406.10774, section 3.2), maximum over the group."""

    summary_kinds = ("max", "min")
