"""`decayed_softmax_scores` kernels against float64; on a GPU compiled, elsewhere interpreted."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decayed_softmax_scores
from pallas_kernels._paging import group_queries, physical_pages, window_mask
from pallas_kernels.decayed_softmax_scores import triton
from pallas_kernels.decayed_softmax_scores.cases import CASES, LARGE_CASES, Case, make
from tests.kernel_runs import GPU_MARKS, jit
from tests.lowering import KERNEL_TARGET, lower_for_cuda
from tests.tolerance import assert_as_good_as_plains, products_in_dtype, products_in_sequence

GPU = "pallas"
MAX_BYTES = 1 << 29  # of keys in the parity tests: float64 is slow
RUNS = [pytest.param("pallas_interpret", case, id=f"interpret-{case.id}") for case in CASES] + [
    pytest.param(GPU, case, id=f"gpu-{case.id}", marks=GPU_MARKS)
    for case in CASES + LARGE_CASES
    if case.bytes_read <= MAX_BYTES
]
BOTH = ["pallas_interpret", pytest.param(GPU, marks=GPU_MARKS)]


def accumulate(arrays, case, implementation):
    """Scores after the step [num_pages, Hkv] and page scores [B, Hkv, M]."""
    call = functools.partial(decayed_softmax_scores, **case.options, implementation=implementation)
    scores, page_scores = jit(call)(**arrays)
    assert scores.dtype == arrays["scores"].dtype
    return np.asarray(scores.astype(jnp.float32))[..., 0], np.asarray(page_scores)


def exact_scores(arrays, case, *, group=None, decays=1, scale=None, whole_row=False):
    """The definition in float64: [B, Hkv, M], NaN outside the windows. The keywords make it wrong."""
    q, keys, old = (np.asarray(arrays[n].astype(jnp.float32), np.float64) for n in ("q", "k_pool", "scores"))
    group = group or case.group
    scale = case.options["scale"] if scale is None else scale
    scores = np.full((len(case.windows), case.num_kv_heads, case.row_pages), np.nan)
    for row, (start, stop) in enumerate(case.windows):
        logical = np.arange(start, max(start, stop))
        page = np.asarray(arrays["pages"])[row, logical]
        logical, page = (x[(page >= 0) & (page < len(keys))] for x in (logical, page))
        if not len(page):
            continue
        for head in range(case.num_kv_heads):
            queries = q[row].reshape(case.num_kv_heads, case.group_size, -1)[head]
            if group == "mean":
                queries = queries.mean(axis=0, keepdims=True)
            logits = scale * queries @ keys[page, head, 0].T
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            # One key more of logit 0, as if a token outside the window took part.
            extra = np.exp(-logits.max(axis=1, keepdims=True)) if whole_row else 0
            chance = (weights / (weights.sum(axis=1, keepdims=True) + extra)).max(axis=0)
            scores[row, head, logical] = chance
            if case.decay:
                scores[row, head, logical] += case.decay**decays * old[page, head, 0]
    return scores


def plain_scores(arrays, case, products):
    """The definition in float32, its products formed by `products`: [B, Hkv, M], 0 where there is no page."""
    pool, old = np.asarray(arrays["k_pool"]), np.asarray(arrays["scores"])
    inside = window_mask(arrays["start"], arrays["stop"], case.row_pages)
    logical = jnp.arange(case.row_pages)[None]
    page = np.asarray(physical_pages(arrays["pages"], logical, inside, len(pool)))
    pool, old = (np.concatenate([x, np.zeros_like(x[:1])])[page][:, :, :, 0] for x in (pool, old))
    q = np.asarray(group_queries(arrays["q"], case.num_kv_heads, case.group))
    valid = (page < len(arrays["k_pool"]))[:, None, None]
    logits = np.where(valid, np.float32(case.options["scale"]) * products(q, pool), np.float32(-np.inf))
    peak = np.maximum(logits.max(axis=-1, keepdims=True), np.finfo(np.float32).min)
    weights = np.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    chance = (weights / np.where(total == 0, np.float32(1), total)).max(axis=2)
    old = np.float32(case.decay) * old.swapaxes(1, 2).astype(np.float32) if case.decay else 0
    new = chance + old
    return new.astype(arrays["scores"].dtype).astype(np.float32)


def check(got, arrays, case):
    """Page scores against float64."""
    exact = exact_scores(arrays, case)
    absent = np.isnan(exact)
    assert (np.isneginf(got) == absent).all()
    keep = ~absent
    plains = [accumulate(arrays, case, "xla")[1]]
    plains += [plain_scores(arrays, case, products) for products in (products_in_dtype, products_in_sequence)]
    plains = [x[keep] for x in plains]
    assert_as_good_as_plains(got[keep], exact[keep], plains, case.score_dtype, name=case.id, relative=True)


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_parity(implementation, case):
    arrays = make(case)
    scores, page_scores = accumulate(arrays, case, implementation)
    check(page_scores, arrays, case)
    # What a window's pages store is what is returned, and no other score changes by a bit.
    expected = np.asarray(arrays["scores"].astype(jnp.float32))[..., 0].copy()
    rows, heads, logical = np.nonzero(~np.isneginf(page_scores))
    expected[np.asarray(arrays["pages"])[rows, logical], heads] = page_scores[rows, heads, logical]
    np.testing.assert_array_equal(scores, expected)


MUTANT_CASE = Case("mutants", head_dim=80, windows=((1, 40), (0, 7)))
MUTANTS = {
    "decay applied twice": (MUTANT_CASE, {"decays": 2}),
    "no decay": (MUTANT_CASE, {"decays": 0}),
    "padded scale": (MUTANT_CASE, {"scale": 128**-0.5}),
    "one token too many": (MUTANT_CASE, {"whole_row": True}),
    "mean for max": (MUTANT_CASE, {"group": "mean"}),
    "max for mean": (dataclasses.replace(MUTANT_CASE, group="mean"), {"group": "max"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_check_rejects(name):
    case, wrong = MUTANTS[name]
    arrays = make(case)
    mutant = np.asarray(exact_scores(arrays, case, **wrong), np.float32)
    with pytest.raises(AssertionError, match="off by"):
        check(np.where(np.isnan(mutant), -np.inf, mutant), arrays, case)


@pytest.mark.parametrize("implementation", BOTH)
def test_rows_are_alone(implementation):
    """Batch, M, pool size, page ids and what nobody owns change no bit of a row."""
    case = Case("alone", windows=((1, 700), (2, 3), (5, 5)))
    wide = dataclasses.replace(case, pages_per_request=1700, windows=((7, 1590), (5, 5), (2, 3), (1, 700)))
    arrays, other = make(case), make(wide, poison=0.0)
    num_pages, wide_pages = arrays["k_pool"].shape[0], other["k_pool"].shape[0]
    moved = np.random.default_rng(1).permutation(wide_pages)[:num_pages]
    free = np.setdiff1d(np.arange(wide_pages), moved)[: 1590 - 7]
    for here, there in ((0, 3), (1, 2)):
        stop = case.windows[here][1]
        ids = arrays["pages"][here, :stop]
        other["pages"] = other["pages"].at[there, :stop].set(jnp.asarray(moved)[ids])
        other["q"] = other["q"].at[there].set(arrays["q"][here])
    other["pages"] = other["pages"].at[0, 7 : 7 + len(free)].set(jnp.asarray(free, jnp.int32))
    for name in ("k_pool", "scores"):
        other[name] = other[name].at[jnp.asarray(moved)].set(arrays[name])
    got, wider = (accumulate(a, c, implementation)[1] for a, c in ((arrays, case), (other, wide)))
    for here, there in ((0, 3), (1, 2)):
        np.testing.assert_array_equal(got[here], wider[there, :, : case.row_pages])
        assert np.isneginf(wider[there, :, case.row_pages :]).all()


@pytest.mark.parametrize("group", ["max", "mean"])
@pytest.mark.parametrize("implementation", BOTH)
def test_logits_beyond_float16(implementation, group):
    """Every component 256 in float16: the scaled logit, 741455, would overflow it."""
    case = Case("fp16-range", group, head_dim=128, dtype="float16", windows=((0, 40),))
    arrays = make(case)
    for name in ("q", "k_pool"):
        arrays[name] = jnp.full_like(arrays[name], 256)
    check(accumulate(arrays, case, implementation)[1], arrays, case)


@pytest.mark.parametrize("implementation", BOTH)
def test_queries_of_a_group_may_differ_in_size(implementation):
    """float16 lacks the range for both, so each query has a scale of its own."""
    case = Case("sizes", group_size=2, dtype="float16", q_dtype="float32", windows=((0, 40),), decay=0.0)
    arrays = make(case)
    arrays["q"] = arrays["q"] * jnp.asarray([1e8, 1e-4, 1e-4, 1e8])[None, :, None]
    arrays["k_pool"] = arrays["k_pool"] * 1e4
    check(accumulate(arrays, case, implementation)[1], arrays, case)


@pytest.mark.parametrize("implementation", [pytest.param(GPU, marks=GPU_MARKS)])
def test_repeats_are_equal(implementation):
    case = next(case for case in LARGE_CASES if case.id == "bench-b1-m131072-bf16-max")
    arrays = make(case)
    first = accumulate(arrays, case, implementation)
    for _ in range(19):
        for got, expected in zip(accumulate(arrays, case, implementation), first, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", CASES + LARGE_CASES, ids=lambda case: case.id)
def test_lowers_for_cuda(case):
    call = functools.partial(decayed_softmax_scores, **case.options, implementation=GPU)
    assert KERNEL_TARGET in lower_for_cuda(lambda kwargs: call(**kwargs), case.shapes)


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 24}, {"tokens": 8}, {"tokens": 32, "tiles": 0}, {"tokens": 32, "update_elements": 100}],
)
def test_tiles_are_checked(wrong):
    with pytest.raises(ValueError, match="expected"):
        triton.Tiles(**wrong)
