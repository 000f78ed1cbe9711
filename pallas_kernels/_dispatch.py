"""Which implementation of an op runs."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

_Result = TypeVar("_Result")

IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret")


def candidates(implementation: str | None) -> tuple[str, ...]:
    """The implementations to try, best first.

    Raises:
        ValueError: `implementation` is neither None nor one of `IMPLEMENTATIONS`.
    """
    if implementation is None:
        return ("pallas", "xla") if _platform() in ("cuda", "gpu") else ("xla",)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    return (implementation,)


def require_runnable(implementation: str | None) -> None:
    """Raises unless the implementation can run where programs traced now will.

    Raises:
        ValueError: as `candidates`.
        NotImplementedError: the kernels are named, compiled, where there is no GPU.
    """
    candidates(implementation)
    if implementation == "pallas" and implementation not in candidates(None):
        raise NotImplementedError(
            f"implementation: 'pallas' needs a CUDA GPU, and the backend is {_platform()}; "
            "'pallas_interpret' runs the same kernels here, slowly"
        )


def _platform() -> str:
    """What programs traced now are for: the device of an abstract mesh, where one is set, or the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compiled_once(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """An implementation whose keyword-only arguments are static: part of a jitted function that calls it.

    Called eagerly, it is compiled for what it has not seen, and not at each call.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return jax.jit(function, static_argnames=static, inline=True)


def dispatch(
    op: str,
    implementation: str | None,
    functions: Mapping[str, Callable[..., _Result]],
    *args: Any,
    **kwargs: Any,
) -> _Result:
    """Calls the first candidate that does not raise `NotImplementedError`.

    An implementation that is named explicitly is the only candidate, so its `NotImplementedError`
    reaches the caller.

    Args:
        op: name for messages.
        implementation: as of the op.
        functions: the implementations by name.
        args, kwargs: arrays, and options.
    """
    require_runnable(implementation)

    def call(name: str) -> _Result:
        if name not in functions:
            raise NotImplementedError(f"{op}: no {name!r} implementation")
        with jax.numpy_rank_promotion("allow"):
            return functions[name](*args, **kwargs)

    *first, last = candidates(implementation)
    for name in first:
        with contextlib.suppress(NotImplementedError):
            return call(name)
    return call(last)
