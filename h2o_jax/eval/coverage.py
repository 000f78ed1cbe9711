"""How much of exact attention a policy's choice of pages covers."""

from typing import Any

import numpy as np

from h2o_jax.eval.baselines import RecentPolicy
from h2o_jax.eval.observed import ObservedPolicy, observations
from h2o_jax.eval.windows import Windows
from h2o_jax.policy import Policy, reserved_pages


def measure(windows: Windows, policy: ObservedPolicy, page_size: int) -> dict[str, Any]:
    """Means over steps and windows, along the policy's own decode.

    Returns:
        "mass", the share of exact dense attention on the pages read; "recall", the share of the best pages of
        the window among as many chosen ones; and both by layer and KV head, "mass_by_head" and
        "recall_by_head". Where attention is not finite, neither are these.
    """
    state, _ = windows.run(policy, page_size)
    found = {name: values.astype(float) for name, values in observations(state).items()}
    found["recall"][np.isnan(found["mass"])] = np.nan  # pages were ranked by what is not finite
    means = {name: float(values.mean()) for name, values in found.items()}
    return means | {f"{name}_by_head": values.tolist() for name, values in found.items()}


def scored(policy: Policy, page_size: int) -> Policy:
    """The same choice by scores: of a policy without any, the latest pages but the usual ones are chosen."""
    if policy.top_k > 0:
        return policy
    _, eos = reserved_pages(page_size)
    return RecentPolicy(policy.reserved_eos - eos, policy.reserved_bos, eos)
