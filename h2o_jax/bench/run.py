"""One run of the benchmark: what all groups of rows share."""

import dataclasses
import logging
from collections.abc import Callable, Iterator

from h2o_jax.bench.inputs import Sizes
from h2o_jax.bench.row import Parity, Row, Target
from h2o_jax.bench.timing import Calls, time_calls
from h2o_jax.policy import Policy, get_policy

TOKENS = 131072  # of a row, in results of record
LEAST_TOKENS = 512
_TOKENS_A_CHOSEN_ONE = 64  # a step may read 2,048 of 131,072
_LEAST_BUDGET = 4  # pages

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Run:
    """Settings, and what earlier groups found.

    Attributes:
        implementation: the one measured.
        memory: bytes that arrays may take on the device.
        tokens: of a row; all other lengths follow from it.
        heads: KV heads, query heads of each, and head_dim, of all rows but those of models.
        judged: whether rows are held against their targets.
        bandwidth: R, bytes/s; None before it is measured.
        dense: by (batch, tokens), the seconds of contiguous dense attention; None where it failed.
        functions: by policy and implementation, jitted steps, so that none is compiled twice.
    """

    implementation: str
    memory: int
    tokens: int = TOKENS
    heads: tuple[int, int, int] = (8, 4, 128)
    judged: bool = False
    bandwidth: float | None = None
    dense: dict[tuple[int, int], float | None] = dataclasses.field(default_factory=dict)
    functions: dict[tuple[Policy, str], Callable] = dataclasses.field(default_factory=dict)

    def sizes(self, batch: int, page_size: int, tokens: int | None = None, **options) -> Sizes:
        """`batch` rows of equal length, by default the run's."""
        return self.ragged_sizes((tokens or self.tokens,) * batch, page_size, **options)

    def ragged_sizes(self, lengths: tuple[int, ...], page_size: int, **options) -> Sizes:
        """Rows of these lengths, with the run's heads; options are further fields of `Sizes`."""
        return Sizes(lengths, page_size, *self.heads, **options)

    def budget(self, page_size: int) -> int:
        """Pages that a step may read of a row, the reserved ones included."""
        return max(self.tokens // _TOKENS_A_CHOSEN_ONE // page_size, _LEAST_BUDGET)

    def policy(self, name: str, page_size: int) -> Policy:
        """The policy with the run's budget, of which one leading and two trailing pages are reserved."""
        if name == "dense_attention":
            return get_policy(name)
        budget = self.budget(page_size)
        if name == "sink_recent_attention":  # its budget is all reserved
            return get_policy(name, reserved_bos=1, reserved_eos=budget - 1)
        return get_policy(name, top_k=budget - 3, reserved_bos=1, reserved_eos=2)

    def measure(
        self,
        name: str,
        shape: Sizes | str,
        prepare: Callable[[], tuple[Calls, Parity | None]],
        *,
        floor_bytes: int | None = None,
        steps: int = 1,
        host_clock: bool = False,
        implementation: str | None = None,
        baseline: tuple[str, float | None] | None = None,
        targets: tuple[Target, ...] = (),
    ) -> Row:
        """One row: checked, and only then timed.

        Args:
            name, baseline, targets: see `Row`. A baseline without a time is none.
            shape: the sizes.
            prepare: makes the calls to time, and checks one; None for a definition, which has no check.
            floor_bytes: of one step.
            steps: steps of a call.
            host_clock: whether the host's clock counts, and not the device's.
            implementation: what runs; default the run's.
        """
        row = Row(
            name=name,
            implementation=implementation or self.implementation,
            shape=str(shape),
            floor_bytes=floor_bytes,
            bandwidth=self.bandwidth,
            baseline=(baseline[0], baseline[1]) if baseline and baseline[1] else None,
            targets=targets if self.judged else (),
        )
        try:
            calls, parity = prepare()
            row = dataclasses.replace(row, parity=parity)
            if parity is None or parity.passed:
                return dataclasses.replace(row, timing=time_calls(calls, steps, host_clock))
            return dataclasses.replace(row, failure=str(parity))
        except Exception as error:  # what can't run here is a row like any other
            return failed(row, error)

    def against_xla(
        self,
        name: str,
        shape: Sizes | str,
        make: Callable[[str], Calls],
        check: Callable[[Calls], Parity],
        *,
        floor_bytes: int,
        targets: tuple[Target, ...] = (),
    ) -> Iterator[Row]:
        """The row of the definition, unless that is what the run measures, and the row held against it.

        Args:
            name, shape, floor_bytes, targets: see `measure`.
            make: from the name of an implementation, its calls.
            check: the parity of a call that has just run.
        """
        baseline = None
        if self.implementation != "xla":
            copies = 8 * floor_bytes  # of the input, in float32, in two layouts
            if self.fits(copies):
                row = self.measure(
                    name, shape, lambda: (make("xla"), None), floor_bytes=floor_bytes, implementation="xla"
                )
                baseline = ("xla", row.seconds)
            else:
                row = self.left_out(name, shape, copies, implementation="xla")
            yield row

        def prepare():
            calls = make(self.implementation)
            calls()
            return calls, check(calls)

        yield self.measure(
            name, shape, prepare, floor_bytes=floor_bytes, baseline=baseline, targets=targets
        )

    def fits(self, num_bytes: int) -> bool:
        """Whether the device has room for this much."""
        return num_bytes <= self.memory

    def left_out(
        self, name: str, shape: Sizes | str, num_bytes: int, implementation: str | None = None
    ) -> Row:
        """The row of what does not fit."""
        note = f"left out: needs {num_bytes / 2**30:.1f} of {self.memory / 2**30:.1f} GiB"
        return Row(name, implementation or self.implementation, str(shape), note=note)


def failed(row: Row, error: Exception) -> Row:
    """The row of what raised an error, which is logged in full."""
    _log.error("%s, %s", row.name, row.implementation, exc_info=error)
    return dataclasses.replace(row, failure=f"{type(error).__name__}: {error}")
