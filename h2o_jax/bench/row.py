"""A result: one row of the table, one line of JSON."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping

from h2o_jax.bench.timing import Timing


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far a result is from the one it is checked against.

    Attributes:
        what: the quantity compared.
        error: the largest difference, or where tolerances differ, that which is largest for its tolerance.
            Of integers, the number of entries that differ.
        tolerance: the largest allowed.
    """

    what: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        if self.tolerance:
            return f"{self.what} off by {self.error:.2g}, allowed {self.tolerance:.2g}"
        return f"{self.what} exact" if self.passed else f"{self.what} wrong by {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a row must reach.

    Attributes:
        text: what, in words.
        met: tells from a row that was timed whether it does.
    """

    text: str
    met: Callable[["Row"], bool]


def ratio(least: float) -> Target:
    """At least this many times as fast as the baseline."""
    return Target(f"{least}x", lambda row: row.ratio is not None and row.ratio >= least)


def at_most(seconds: float) -> Target:
    """A step in no more than this."""
    return Target(f"{seconds * 1e6:.0f} us", lambda row: row.seconds is not None and row.seconds <= seconds)


def percent(least: float) -> Target:
    """At least this percentage of the read bandwidth, on the floor's bytes."""
    return Target(f"{least}% of R", lambda row: (row.percent_of_bandwidth or 0) >= least)


def share_of_bandwidth(least: float, num_bytes: int, of: str) -> Target:
    """At least this percentage of the read bandwidth on some of the floor's bytes, named by `of`."""

    def met(row):
        return 100 * num_bytes / row.seconds >= least * (row.bandwidth or math.inf)

    return Target(f"{least}% {of}", met)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement, or why there is none.

    Attributes:
        name: what was measured.
        implementation: which code ran.
        shape: the sizes, readable.
        dtype: of keys and values.
        floor_bytes: the fewest bytes that a step must move (`h2o_jax.bench.floors`).
        bandwidth: R, bytes/s that a plain read reaches here; None before that is known.
        parity: the check that came before the timing; None for a definition, which others are held against.
        timing: of one step; None where the check failed or nothing ran.
        baseline: name and seconds of what this is compared with.
        targets: what the row must reach.
        failure: what went wrong; empty where nothing did.
        note: anything else worth knowing, such as why the row was left out.
        group: the group of rows it belongs to.
    """

    name: str
    implementation: str
    shape: str
    dtype: str = "bfloat16"
    floor_bytes: int | None = None
    bandwidth: float | None = None
    parity: Parity | None = None
    timing: Timing | None = None
    baseline: tuple[str, float] | None = None
    targets: tuple[Target, ...] = ()
    failure: str = ""
    note: str = ""
    group: str = ""

    @property
    def seconds(self) -> float | None:
        """Of one step."""
        return None if self.timing is None else self.timing.seconds

    @property
    def gb_per_s(self) -> float | None:
        """The floor's bytes over the time."""
        if self.seconds is None or self.floor_bytes is None:
            return None
        return self.floor_bytes / self.seconds / 1e9

    @property
    def percent_of_bandwidth(self) -> float | None:
        """`gb_per_s` as a share of R."""
        if self.gb_per_s is None or self.bandwidth is None:
            return None
        return 100 * self.gb_per_s * 1e9 / self.bandwidth

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the baseline."""
        return None if self.seconds is None or self.baseline is None else self.baseline[1] / self.seconds

    @property
    def met(self) -> bool | None:
        """Whether all targets are reached; None where there are none."""
        if not self.targets:
            return None
        return self.timing is not None and all(target.met(self) for target in self.targets)

    def to_json(self, environment: Mapping[str, str]) -> str:
        """One line of JSON: the fields, what follows from them, and the environment."""
        timing, parity = self.timing, self.parity
        values = {
            "group": self.group,
            "name": self.name,
            "implementation": self.implementation,
            "shape": self.shape,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "host_seconds": timing and timing.host_seconds,
            "clock": timing and timing.clock,
            "floor_bytes": self.floor_bytes,
            "gb_per_s": self.gb_per_s,
            "bandwidth_gb_per_s": self.bandwidth and self.bandwidth / 1e9,
            "percent_of_bandwidth": self.percent_of_bandwidth,
            "baseline": self.baseline and self.baseline[0],
            "ratio": self.ratio,
            "targets": [target.text for target in self.targets],
            "met": self.met,
            # JSON has no infinity and no NaN.
            "parity": parity and {
                "what": parity.what,
                "error": parity.error if math.isfinite(parity.error) else str(parity.error),
                "tolerance": parity.tolerance,
            },
            "failure": self.failure,
            "note": "; ".join(filter(None, (self.note, timing.note if timing else ""))),
            "kernels": [[name, seconds] for name, seconds in timing.kernels] if timing else [],
        }
        return json.dumps(values | dict(environment), allow_nan=False)

    def to_line(self) -> str:
        """A line of the table under `HEADER`."""
        start = _COLUMNS.format(self.name, self.implementation, self.shape, "", "", "", "", "").rstrip()
        if self.failure:
            first, *_ = self.failure.splitlines() or [""]
            return f"{start}  FAILED: {first:.300}"
        if self.timing is None:
            return f"{start}  {self.note}"
        versus = "" if self.ratio is None or self.baseline is None else f"{self.ratio:.2f}x {self.baseline[0]}"
        goal = ", ".join(target.text for target in self.targets)
        if goal:
            goal += " met" if self.met else " MISSED"
        line = _COLUMNS.format(
            self.name,
            self.implementation,
            self.shape,
            f"{self.timing.seconds * 1e6:.1f}",
            _number(self.gb_per_s, ".0f"),
            _number(self.percent_of_bandwidth, ".1f"),
            versus,
            goal,
        )
        notes = "; ".join(filter(None, (self.note, self.timing.note)))
        return f"{line} {self.parity or 'definition'}" + (f"; {notes}" if notes else "")


_COLUMNS = "{:<36} {:<6} {:<36} {:>10} {:>6} {:>6}  {:<18} {:<24}"
HEADER = _COLUMNS.format("name", "by", "shape", "us a step", "GB/s", "% of R", "ratio", "target") + " check"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
