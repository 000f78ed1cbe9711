"""`top_k_pages` kernels, compared exactly; on a GPU compiled, elsewhere interpreted."""

import functools
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_pages
from pallas_kernels.top_k_pages import triton
from pallas_kernels.top_k_pages.cases import CASES, LARGE_CASES, Case, make
from tests.kernel_runs import GPU_MARKS, jit
from tests.lowering import KERNEL_TARGET, lower_for_cuda

GPU = "pallas"
RUNS = [pytest.param("pallas_interpret", case, id=f"interpret-{case.id}") for case in CASES] + [
    pytest.param(GPU, case, id=f"gpu-{case.id}", marks=GPU_MARKS) for case in CASES + LARGE_CASES
]
BOTH = [True, pytest.param(False, marks=GPU_MARKS)]
SMALL = triton.Tiles(row=64, fan=2, chunk=32)  # rows of over 64 entries take the path of long rows


def choose(arrays, case, implementation):
    call = functools.partial(top_k_pages, **case.options, implementation=implementation)
    return np.asarray(jit(call)(**arrays))


def expected(scores, start, stop, k):
    """The k best of each window by a stable sort: [B, Hkv, k]."""
    num_logical = scores.shape[-1]
    chosen = np.full((*scores.shape[:2], k), num_logical)
    for row, head in np.ndindex(scores.shape[:2]):
        window = scores[row, head, start[row] : max(start[row], stop[row])].astype(np.float64)
        best = np.lexsort((np.where(np.isnan(window), 0, -window), np.isnan(window)))[:k]
        chosen[row, head, : len(best)] = np.sort(best) + start[row]
    return chosen


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_parity(implementation, case):
    arrays = make(case)
    got = choose(arrays, case, implementation)
    np.testing.assert_array_equal(got, expected(*(np.asarray(x) for x in arrays.values()), case.k))
    np.testing.assert_array_equal(got, choose(arrays, case, "xla"))


@functools.cache
def compiled(k, interpret, listed=False):
    def call(scores, start, stop, in_use=None):
        options = dict(reserved=5, filler=-1) if listed else dict(reserved=0, filler=scores.shape[2])
        return triton.top_k_pages(
            scores, start, stop, in_use, k=k, **options, interpret=interpret, tiles=SMALL
        )

    return jit(call)


ABOVE_ONE = float(np.nextafter(np.float32(1), np.float32(2)))
SMALLEST = 1e-45  # a subnormal number, which arithmetic may take for zero
VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, ABOVE_ONE, -1.0, SMALLEST, -SMALLEST, 3.4e38, -3.4e38, np.nan, np.inf, -np.inf]
)


@pytest.mark.parametrize("interpret", BOTH)
@pytest.mark.parametrize(("num_logical", "k"), [(50, 9), (150, 9), (150, 70)])
def test_any_scores(num_logical, k, interpret):
    @hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @hypothesis.given(st.data())
    def check(data):
        values = data.draw(st.lists(VALUES, min_size=2 * num_logical, max_size=2 * num_logical))
        scores = np.asarray(values, np.float32).reshape(2, 1, num_logical)
        start, stop = (
            np.asarray(data.draw(st.lists(st.integers(0, num_logical), min_size=2, max_size=2)), np.int32)
            for _ in range(2)
        )
        got = compiled(k, interpret)(jnp.asarray(scores), jnp.asarray(start), jnp.asarray(stop))
        np.testing.assert_array_equal(got, expected(scores, start, stop, k))

    check()


@pytest.mark.parametrize("interpret", BOTH)
@pytest.mark.parametrize("kind", ["normal", "ties", "same", "rising", "falling"])
def test_long_rows(kind, interpret):
    """Rows of several chunks and levels, also where more pages are wanted than a level has groups."""
    for k in (3, 40, 100):
        case = Case("long", k, 300, ((0, 300), (31, 65), (250, 251), (64, 290)), num_kv_heads=1, kind=kind)
        arrays = make(case)
        got = np.asarray(compiled(k, interpret)(**arrays))
        np.testing.assert_array_equal(got, expected(*(np.asarray(x) for x in arrays.values()), k))


@pytest.mark.parametrize("interpret", BOTH)
def test_long_rows_list_what_surrounds_the_window(interpret):
    arrays = make(Case("long", 40, 300, ((1, 296), (4, 44), (2, 20), (0, 300), (0, 0), (0, 0)), num_kv_heads=1))
    in_use = np.array([300, 45, 25, 300, 7, 0])
    got = np.asarray(compiled(40, interpret, listed=True)(**arrays, in_use=jnp.asarray(in_use, jnp.int32)))
    scores, start, stop = (np.asarray(x) for x in arrays.values())
    for row, chosen in enumerate(expected(scores, start, stop, 40)[:, 0]):
        outside = np.r_[: start[row], stop[row] : in_use[row]]
        pages = np.sort(np.r_[outside, chosen[chosen < 300]])
        np.testing.assert_array_equal(got[row, 0], np.pad(pages, (0, 45 - len(pages)), constant_values=-1))


def test_more_pages_than_groups():
    """Each group holds one high and one low score, and more pages are wanted than there are groups."""
    scores = np.where(np.arange(300) % 2, 5.0, np.arange(300) / 1000).astype(np.float32)[None, None]
    got = compiled(140, True)(jnp.asarray(scores), jnp.asarray([0], jnp.int32), jnp.asarray([300], jnp.int32))
    np.testing.assert_array_equal(got, expected(scores, [0], [300], 140))


@pytest.mark.parametrize("num_logical", [50, 300])
def test_a_window_past_the_row_ends_with_it(num_logical):
    """The groups of a longer row are no more than its pages; scores are below those of memory read as 0."""
    scores = np.linspace(-2, -1, num_logical, dtype=np.float32)[None, None]
    got = compiled(9, True)(jnp.asarray(scores), jnp.asarray([0], jnp.int32), jnp.asarray([900], jnp.int32))
    np.testing.assert_array_equal(got, expected(scores, [0], [num_logical], 9))


@pytest.mark.parametrize("implementation", [pytest.param(GPU, marks=GPU_MARKS)])
def test_repeats_are_equal(implementation):
    case = next(case for case in LARGE_CASES if case.id == "bench-r64-m131072-k4096")
    arrays = make(case)
    first = choose(arrays, case, implementation)
    for _ in range(19):
        np.testing.assert_array_equal(choose(arrays, case, implementation), first)


SHAPES = {(case.k, case.pages_per_request, len(case.windows)): case for case in CASES + LARGE_CASES}


@pytest.mark.parametrize("case", SHAPES.values(), ids=lambda case: case.id)
def test_lowers_for_cuda(case):
    call = functools.partial(top_k_pages, **case.options, implementation=GPU)
    assert KERNEL_TARGET in lower_for_cuda(lambda kwargs: call(**kwargs), case.shapes)


def test_lowering_again_is_as_silent():
    """JAX warns of the Triton lowering; what it knows from before is not traced again, but is lowered."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((1, 1, 96), "float32"), *[((1,), "int32")] * 2)]
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lower_for_cuda(lambda *args: top_k_pages(*args, k=5, implementation=GPU), *shapes)


@pytest.mark.parametrize(
    ("num_logical", "k", "message"),
    [(40000, 8193, "k: at most 8192 of rows longer than 32768"), (2**27, 4, "134217728 pages are too long")],
)
def test_what_does_not_fit_is_refused(num_logical, k, message):
    scores = jax.ShapeDtypeStruct((1, 1, num_logical), jnp.float32)
    window = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = functools.partial(top_k_pages, k=k, implementation="pallas_interpret")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call, scores, window, window)


@pytest.mark.parametrize(
    "wrong", [{"row": 65536}, {"row": 48}, {"fan": 3}, {"fan": 64, "chunk": 32}, {"chunk": 8}, {"warp": 100}]
)
def test_tiles_are_checked(wrong):
    with pytest.raises(ValueError, match="expected"):
        triton.Tiles(**wrong)
