"""The best-scoring pages of a window. Letters: B rows, M logical pages."""

from collections.abc import Callable
from functools import partial
from numbers import Integral

import jax

from pallas_kernels._checks import check_dtype, check_row_ints, check_shape
from pallas_kernels._dispatch import dispatch
from pallas_kernels.top_k_pages import triton, xla

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "pallas": partial(triton.top_k_pages, interpret=False),
    "pallas_interpret": partial(triton.top_k_pages, interpret=True),
    "xla": xla.top_k_pages,
}


def top_k_pages(
    scores: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    k: int,
    in_use: jax.Array | None = None,
    reserved: int = 0,
    filler: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Chooses the k best-scoring pages of each row's window, exactly.

    Equal scores go to the lower page (-0.0 equals 0.0); NaN ranks below every number. With `in_use`, the pages
    in use outside the window are listed too: all of a row's where its window is empty.

    Args:
        scores: [B, Hkv, M] float32; entries outside the window are never read as scores.
        start, stop: [B] int32 window in logical pages, `[start, stop)`; empty where start >= stop.
        k: pages to choose, at least 1; may exceed M.
        in_use: [B] int32, each row's pages in use, at least `stop` where the window is not empty; None lists
            the chosen pages alone.
        reserved: most pages in use outside the window, which need room; a row that has more loses its last.
        filler: what stands past the last page; None is M.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        [B, Hkv, k + reserved] int32 logical pages, ascending, then `filler`. `min(k, stop - start)` are chosen.

    Raises:
        ValueError: a wrong shape, dtype, k or `reserved`; the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_shape("scores", scores, (None, None, None), "[B, Hkv, M]")
    check_dtype("scores", scores, ("float32",))
    check_row_ints(scores.shape[0], start=start, stop=stop)
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise ValueError(f"k: expected a positive integer, got {k!r}")
    if in_use is not None:
        check_row_ints(scores.shape[0], in_use=in_use)
    if isinstance(reserved, bool) or not isinstance(reserved, Integral) or reserved < 0:
        raise ValueError(f"reserved: expected an integer >= 0, got {reserved!r}")
    if reserved and in_use is None:
        raise ValueError(f"reserved: expected 0 without in_use, got {reserved}")
    return dispatch(
        "top_k_pages",
        implementation,
        _IMPLEMENTATIONS,
        scores,
        start,
        stop,
        in_use,
        k=int(k),
        reserved=int(reserved),
        filler=scores.shape[2] if filler is None else int(filler),
    )
