"""Which implementation of an op runs."""

import contextlib
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
        return ("pallas", "xla") if jax.default_backend() == "gpu" else ("xla",)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    return (implementation,)


def require_runnable(implementation: str | None) -> None:
    """Raises unless the implementation can run on the default backend.

    Raises:
        ValueError: as `candidates`.
        NotImplementedError: the kernels are named, compiled, where there is no GPU.
    """
    candidates(implementation)
    if implementation == "pallas" and implementation not in candidates(None):
        raise NotImplementedError(
            f"implementation: 'pallas' needs a CUDA GPU, and the backend is {jax.default_backend()}; "
            "'pallas_interpret' runs the same kernels here, slowly"
        )


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
    """

    def call(name: str) -> _Result:
        if name not in functions:
            raise NotImplementedError(f"{op}: no {name!r} implementation")
        return functions[name](*args, **kwargs)

    *first, last = candidates(implementation)
    for name in first:
        with contextlib.suppress(NotImplementedError):
            return call(name)
    return call(last)
