"""What a policy costs in quality: `h2o-jax eval`.

Every policy is given the same number of tokens to read in a step, and compared with dense attention after
the same dense prefill: `perplexity` (of a text, with KL and top-1 agreement), `coverage` (how much of exact
attention the pages read hold) and `passkey` (whether a hidden number is found). Results of record are kept in
`results`, a file of JSON lines for each device and date; they name their model but hold no fingerprint of it, so
no run takes them for its own.
"""

from h2o_jax.eval.baselines import OraclePolicy, RandomPolicy
from h2o_jax.eval.budget import budget_tokens, policy_at, policy_names
from h2o_jax.eval.cells import TASKS, Cell, PolicySpec, grid
from h2o_jax.eval.run import Setup, evaluate
from h2o_jax.eval.store import Store

__all__ = [
    "TASKS",
    "Cell",
    "OraclePolicy",
    "PolicySpec",
    "RandomPolicy",
    "Setup",
    "Store",
    "budget_tokens",
    "evaluate",
    "grid",
    "policy_at",
    "policy_names",
]
