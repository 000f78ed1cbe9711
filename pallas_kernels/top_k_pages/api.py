"""The best-scoring pages of a window. Letters: B rows, M logical pages."""

from functools import partial

import jax

from pallas_kernels._checks import check_dtype, check_row_ints, check_shape
from pallas_kernels._dispatch import dispatch
from pallas_kernels.top_k_pages import triton, xla

_IMPLEMENTATIONS = {
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
    implementation: str | None = None,
) -> jax.Array:
    """Chooses the k best-scoring pages of each row's window, exactly.

    Equal scores go to the lower page (-0.0 equals 0.0); NaN ranks below every number.

    Args:
        scores: [B, Hkv, M] float32; entries outside the window are never read as scores.
        start, stop: [B] int32 window in logical pages, `[start, stop)`; empty where start >= stop.
        k: pages to choose, at least 1; may exceed M.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        [B, Hkv, k] int32 logical pages, ascending; M past the `min(k, stop - start)` chosen.

    Raises:
        ValueError: a wrong shape, dtype or k; the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_shape("scores", scores, (None, None, None), "[B, Hkv, M]")
    check_dtype("scores", scores, ("float32",))
    check_row_ints(scores.shape[0], start=start, stop=stop)
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k: expected a positive integer, got {k!r}")
    return dispatch("top_k_pages", implementation, _IMPLEMENTATIONS, scores, start, stop, k=k)
