"""The benchmark: `h2o-jax bench`.

Each row is checked before it is timed, and held against the read bandwidth of the same run and against what
would be used instead. A group is a function from a `Run` to rows, each yielded as soon as it is there.
Results of record are kept in `results`, a file of JSON lines for each device and date.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator

from h2o_jax.bench import models, ops, steps
from h2o_jax.bench.row import HEADER, Row
from h2o_jax.bench.run import LEAST_TOKENS, TOKENS, Run, failed

__all__ = ["GROUPS", "HEADER", "LEAST_TOKENS", "TOKENS", "Row", "Run", "run_groups"]

GROUPS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "bandwidth": ops.bandwidth,
    "envelope": ops.envelope,
    "top-k": ops.top_k,
    "softmax": ops.softmax,
    "attention": ops.attention,
    "write": ops.write,
    "extend": ops.extend,
    "step": steps.steps,
    "dense": steps.dense,
    "ragged": steps.ragged,
    "pool-size": steps.pool_size,
    "policies": steps.policies,
    "model": models.model,
    "small-model": models.small_model,
}


def run_groups(run: Run, names: Iterable[str]) -> Iterator[Row]:
    """Rows of these groups, and first of "bandwidth", which the percentages of all others need."""
    for name in dict.fromkeys(["bandwidth", *names]):
        try:
            for row in GROUPS[name](run):
                yield dataclasses.replace(row, group=name)
        except Exception as error:  # one group's inputs must not cost the others
            yield failed(Row(name, run.implementation, shape="", group=name), error)
        gc.collect()  # what a cycle of references holds would crowd the next group's pools
