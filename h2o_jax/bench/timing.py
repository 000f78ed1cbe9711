"""How long a call takes: on the device, and by the host's clock."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

ROTATED_BYTES = 256 * 2**20  # twice the L2 cache of the GPU with the largest (126 MB, B200)
SECONDS_A_LOOP = 0.05
MIN_CALLS, MAX_CALLS = 3, 20


def rotated(num_bytes: int, most: int) -> int:
    """How many inputs of `num_bytes` to take in turn so that none is still in the cache, but `most`."""
    return min(-(-ROTATED_BYTES // num_bytes), most)


class Calls(jax.stages.Wrapped):
    """A jitted function with its inputs at hand, to be called over and over.

    Each call takes the next of `arguments`, so that inputs which together exceed the L2 cache come from
    memory, and hands the state that it returns on to the next, so that a step which donates its state runs as
    it does in a decode loop. The profiler repeats a call with one set of arguments, which donated ones do not
    survive; it accepts this class as a jitted function of none.

    Args:
        function: jitted. `function(*arguments) -> out`, or `function(state, *arguments) -> (state, out)`
            where there is a state.
        arguments: tuples of arguments, taken in turn.
        state: the first state; None for none.

    Attributes:
        state, out: of the latest call.
    """

    # Of a jitted function too, and asked for by no one here.
    trace: Any
    lower: Any

    def __init__(self, function: Callable, arguments: Sequence[tuple], state: Any = None):
        self._function, self._arguments = function, arguments
        self._done = 0
        self.state: Any = state
        self.out: Any = None

    def __call__(self) -> "Calls":
        """Runs the next call, and returns itself: something to wait for that keeps no output alive."""
        arguments = self._arguments[self._done % len(self._arguments)]
        self._done += 1
        if self.state is None:
            self.out = self._function(*arguments)
        else:
            self.state, self.out = self._function(self.state, *arguments)
        return self

    def block_until_ready(self) -> "Calls":
        """Waits for the latest call, as `jax.block_until_ready` asks of whatever it is given."""
        jax.block_until_ready((self.state, self.out))
        return self


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long one step took.

    Attributes:
        seconds: of device time where `clock` is "cupti": the durations of a step's kernels, added up, which
            leaves out gaps between kernels and copies of whole buffers. Else `host_seconds`.
        host_seconds: host's clock around calls that are queued back to back, launches included.
        clock: "cupti" or "host".
        kernels: name and seconds of each kernel of a call; empty for "host".
        note: what kept the device time from being taken; empty where nothing did.
    """

    seconds: float
    host_seconds: float
    clock: str
    kernels: tuple[tuple[str, float], ...] = ()
    note: str = ""


def time_calls(calls: Calls, steps: int = 1, host_clock: bool = False) -> Timing:
    """Times calls of `steps` steps each.

    Device time is that of the median call, and counts unless `host_clock` does or there is no device to ask;
    host time is the least of three loops.
    """
    jax.block_until_ready(calls())  # compiled by now, and warm
    number = int(min(max(SECONDS_A_LOOP / _loop(calls, 1), MIN_CALLS), MAX_CALLS))
    host_seconds = min(_loop(calls, number) for _ in range(3)) / number / steps
    if host_clock or jax.default_backend() != "gpu":
        return Timing(host_seconds, host_seconds, "host")
    try:
        kernels = kernel_times(calls, number)
    except (ImportError, RuntimeError) as error:
        return Timing(host_seconds, host_seconds, "host", note=f"no CUPTI: {error}")
    return Timing(sum(seconds for _, seconds in kernels) / steps, host_seconds, "cupti", kernels)


def kernel_times(calls: Calls, number: int) -> tuple[tuple[str, float], ...]:
    """Name and seconds of each kernel of the call that is the median of `number` (at least 2).

    Raises:
        ImportError, RuntimeError: CUPTI is not there, does not answer, or saw no kernel.
    """
    from jax.experimental.mosaic.gpu import profiler  # loads a compiler's libraries

    _, runs = profiler.measure(calls, aggregate=False, iterations=number)()
    if runs is None:
        raise RuntimeError("no kernel was seen")
    totals = [sum(milliseconds for _, milliseconds in run) for run in runs]
    median = runs[totals.index(statistics.median_low(totals))]
    return tuple((name, milliseconds / 1e3) for name, milliseconds in median)


def _loop(calls: Calls, number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        calls()
    jax.block_until_ready(calls)
    return time.perf_counter() - begin
