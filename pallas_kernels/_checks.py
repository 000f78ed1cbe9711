"""Static checks of arguments: each error names the argument, what was expected and what came."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def check_kind(name: str, value: Any, expected: type) -> None:
    """Raises unless `value` is an instance of `expected`."""
    if not isinstance(value, expected):
        raise ValueError(f"{name}: expected a {expected.__name__}, got a {type(value).__name__}")


def check_shape(name: str, array: Any, expected: Sequence[int | None], letters: str) -> None:
    """Raises unless `array` is an array of shape `expected`, where None admits any size."""
    if not hasattr(array, "shape"):
        raise ValueError(f"{name}: expected an array {letters}, got a {type(array).__name__}")
    shape = array.shape
    if len(shape) != len(expected) or any(e is not None and e != s for e, s in zip(expected, shape)):
        sizes = ", ".join("?" if e is None else str(e) for e in expected)
        raise ValueError(f"{name}: expected shape {letters} = [{sizes}], got {list(shape)}")


def check_dtype(name: str, array: Any, expected: Sequence[str]) -> None:
    """Raises unless the dtype of `array` is one of the names in `expected`.

    Without 64-bit types JAX takes NumPy's int64 for int32, as long as its values fit.
    """
    dtype = jnp.result_type(array)
    if dtype.name not in expected:
        raise ValueError(f"{name}: expected dtype {' or '.join(expected)}, got {dtype.name}")
    if isinstance(array, np.ndarray) and dtype == jnp.int32 and (array != array.astype(np.int32)).any():
        raise ValueError(f"{name}: expected values that int32 holds, got {array.min()} to {array.max()}")


def check_pool_array(name: str, pool: Any, expected: Sequence[int | None], letters: str) -> None:
    """Raises unless `pool` is floating point, of shape `expected` (None: any size), and no axis is empty."""
    check_shape(name, pool, expected, letters)
    check_dtype(name, pool, FLOAT_DTYPES)
    if 0 in pool.shape:
        raise ValueError(f"{name}: expected {letters} of at least 1 each, got {list(pool.shape)}")


def check_table(pages: Any) -> None:
    """Raises unless `pages` is a page table, `[B, M]` int32."""
    check_shape("pages", pages, (None, None), "[B, M]")
    check_dtype("pages", pages, ("int32",))


def check_queries(q: Any, batch: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises unless `q` is `[B, Hq, D]` floating point, Hq a multiple of `num_kv_heads`."""
    check_shape("q", q, (batch, None, head_dim), "[B, Hq, D]")
    check_dtype("q", q, FLOAT_DTYPES)
    check_heads(q.shape[1], num_kv_heads)


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raises unless the query heads divide evenly over the KV heads."""
    if min(num_q_heads, num_kv_heads) < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of num_kv_heads = {num_kv_heads} query heads, got {num_q_heads}"
        )


def check_choice(name: str, value: Any, choices: Sequence) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {tuple(choices)}, got {value!r}")


def check_row_ints(batch: int, **arrays: Any) -> None:
    """Raises unless every array is `[B]` int32."""
    for name, array in arrays.items():
        check_shape(name, array, (batch,), "[B]")
        check_dtype(name, array, ("int32",))
