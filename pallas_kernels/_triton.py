"""What the kernels that go through Pallas' Triton lowering share.

Refs are whole arrays (no block specs): a kernel indexes them with natural dimensions,
`ref[page, head, slot, :]`, for which the lowering takes 64-bit offsets once an array passes 4 GiB. Arrays
inside a kernel must have power-of-two dimensions, hence the helpers for masked rows and split dimensions.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import compiled_once

MIN_DOT = 16  # a tensor-core dot takes no fewer rows, columns or terms


def kernel_op(function: Callable) -> Callable:
    """An implementation by kernels: `compiled_once`, and NotImplementedError where its derivative is asked for."""

    def no_derivative(primals, tangents):
        raise NotImplementedError(f"{function.__name__}: the kernels have no derivative; implementation='xla' has one")

    @compiled_once
    @functools.wraps(function)
    def compiled(*arrays, **options):
        run = jax.custom_jvp(functools.partial(function, **options))
        run.defjvp(no_derivative)
        return run(*arrays)

    @functools.wraps(function)
    def op(*arrays, **options):
        _silence_deprecation()
        return compiled(*arrays, **options)

    return op


def pallas_call(
    kernel: Callable,
    *,
    grid: Sequence[int],
    out_shape,
    interpret: bool,
    num_warps: int = 4,
    num_stages: int = 2,
    input_output_aliases: Mapping[int, int] | None = None,
    name: str | None = None,
) -> Callable:
    """`pl.pallas_call` through the Triton lowering, on refs of whole arrays.

    Sizes must reach the kernel as static arguments: `pl.num_programs` may answer for another grid
    (JAX 0.11 caches the traced kernel).

    Args:
        kernel: takes the refs of inputs, then outputs.
        grid: programs along up to three axes; the first varies fastest in launch order.
        out_shape: pytree of `jax.ShapeDtypeStruct`.
        interpret: run the kernel's body on the CPU, program by program.
        num_warps: warps of a program, 32 threads each.
        num_stages: stages of software-pipelined loops.
        input_output_aliases: input number -> output number updated in place.
        name: shown in profiles.
    """
    call = pl.pallas_call(
        kernel,
        grid=tuple(grid),
        out_shape=out_shape,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )

    def in_32_bits(*args):
        # With 64-bit types on, sums and Python numbers inside a kernel would be 64 bits wide.
        with jax.enable_x64(False):
            return call(*args)

    return in_32_bits


def _silence_deprecation():
    # JAX >= 0.11 warns each time a kernel is lowered, which is after the call here returned. Repeating the
    # filter at each call keeps it in force where others reset the filters (pytest does, for each test).
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least `n` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_pieces(size: int) -> tuple[tuple[int, int], ...]:
    """`(start, length)` pieces of `range(size)`, lengths falling powers of two: 80 -> (0, 64), (64, 16)."""
    pieces, start = [], 0
    while start < size:
        length = 1 << (size - start).bit_length() - 1
        pieces.append((start, length))
        start += length
    return tuple(pieces)


def load_window(start_ref, stop_ref, row, num_logical: int) -> tuple[jax.Array, jax.Array]:
    """A row's window `[start, stop)` of logical pages, within the row's M; empty where start == stop."""
    start = jnp.clip(start_ref[row], 0, num_logical)
    return start, jnp.clip(stop_ref[row], start, num_logical)


def load_rows(ref, index: tuple, keep: jax.Array | None, *, interpret: bool, **options) -> jax.Array:
    """`ref[index]` where `keep`, else 0; nothing is read where `keep` is False.

    Args:
        ref: array reference.
        index: one entry per dimension of `ref`: scalars, arrays that broadcast to the shape of `keep`, and
            trailing slices.
        keep: bool, of the shape to which the arrays in `index` broadcast; None for True everywhere. Where
            False, any index will do.
        interpret: as of the kernel.
        options: of `plt.load`, such as `eviction_policy`.
    """
    if keep is None:
        return ref[index] if interpret else plt.load(ref.at[index], **options)
    mask = _over_slices(keep, index)
    if interpret:
        # The interpreter has no masked loads through index arrays.
        safe = tuple(jnp.where(keep, i, 0) if _is_index(i) else i for i in index)
        values = ref[safe]
        return jnp.where(mask, values, jnp.zeros_like(values))
    return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype), **options)


def store_rows(ref, index: tuple, values: jax.Array, keep: jax.Array, *, interpret: bool) -> None:
    """`ref[index] = values` where `keep`; nothing is written elsewhere. Arguments as `load_rows`."""
    values = values.astype(ref.dtype)
    if interpret:
        # The interpreter has no masked stores through index arrays, but drops what is out of bounds.
        ref[tuple(jnp.where(keep, i, n) if _is_index(i) else i for i, n in zip(index, ref.shape))] = values
    else:
        plt.store(ref.at[index], values, mask=_over_slices(keep, index))


def _is_index(entry) -> bool:
    return not isinstance(entry, (slice, pl.Slice))


def _over_slices(keep: jax.Array, index: tuple) -> jax.Array:
    slices = sum(not _is_index(i) for i in index)
    return keep.reshape(keep.shape + (1,) * slices) if slices else keep
