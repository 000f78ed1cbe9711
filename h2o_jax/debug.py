"""Checks of page table and values inside jitted steps, on where the environment has `H2O_JAX_DEBUG=1`.

The variable is read when a step is traced: set it before the first call. Off, a step's program is the same as
without these checks. On, a broken invariant raises from the call (as `jax.errors.JaxRuntimeError`, whose message
ends with ours), or from `jax.block_until_ready`; the state that the call was given may be gone by then, if it was
donated.

Letters: B rows, M logical pages, T new tokens, Hq query heads, Hkv KV heads, D head_dim.
"""

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator

import jax
import numpy as np
import numpy.typing as npt

from h2o_jax.policy import Window
from h2o_jax.state import PageTable, check_table

_layer: contextvars.ContextVar[int | None] = contextvars.ContextVar("layer", default=None)


def enabled() -> bool:
    """Whether steps traced now are checked."""
    return os.environ.get("H2O_JAX_DEBUG", "").lower() not in ("", "0", "false", "no", "off")


@contextlib.contextmanager
def layer(index: int) -> Iterator[None]:
    """Names the layer that is traced inside, for the messages. The models of `h2o_jax.models` do."""
    token = _layer.set(index)
    try:
        yield
    finally:
        _layer.reset(token)


def check_written(table: PageTable, k: jax.Array, v: jax.Array, num_tokens: jax.Array) -> None:
    """Checks the table that tokens are written by, their number, and that they are finite: k, v [B, T, Hkv, D]."""
    if enabled():
        jax.debug.callback(functools.partial(_written, _where()), table, k, v, num_tokens)


def check_scores(scores: jax.Array, window: Window) -> None:
    """Checks that the scores [B, Hkv, M] of each row's window are finite."""
    if enabled():
        jax.debug.callback(functools.partial(_scores, _where()), scores, window)


def check_output(out: jax.Array) -> None:
    """Checks that an attention output, [B, ..., Hq, D], is finite."""
    if enabled():
        jax.debug.callback(functools.partial(_output, _where()), out)


def _where() -> str:
    index = _layer.get()
    return "" if index is None else f"layer {index}, "


def _written(where: str, table: PageTable, k: jax.Array, v: jax.Array, num_tokens: jax.Array) -> None:
    check_table(table, where)
    for row, (new, length) in enumerate(zip(np.asarray(num_tokens).tolist(), np.asarray(table.seq_lens).tolist())):
        if not 0 <= new <= min(k.shape[1], length):
            raise ValueError(
                f"{where}row {row}: num_tokens: expected 0 to {min(k.shape[1], length)}, of {k.shape[1]} given tokens "
                f"and a length of {length}, got {new}"
            )
    real = np.arange(k.shape[1]) < np.asarray(num_tokens)[:, None]
    for name, new in (("k", k), ("v", v)):
        for row, token, head in _first(~_finite(new).all(-1) & real[..., None]):
            raise ValueError(f"{where}row {row}, KV head {head}: {name} of new token {token} is not finite")


def _scores(where: str, scores: jax.Array, window: Window) -> None:
    logical = np.arange(scores.shape[2])
    inside = (logical >= np.asarray(window.start)[:, None]) & (logical < np.asarray(window.stop)[:, None])
    for row, head, page in _first(~_finite(scores) & inside[:, None]):
        raise ValueError(f"{where}row {row}, KV head {head}: the score of page {page} is {scores[row, head, page]}")


def _output(where: str, out: jax.Array) -> None:
    for row, *_, head in _first(~_finite(out).all(-1)):
        raise ValueError(f"{where}row {row}, query head {head}: the attention output is not finite")


def _finite(x: jax.Array) -> np.ndarray:
    return np.isfinite(np.asarray(x, np.float32))


def _first(bad: npt.ArrayLike) -> list[tuple[int, ...]]:
    """The first place that is True, as a list of none or one."""
    return [tuple(map(int, place)) for place in np.argwhere(bad)[:1]]
