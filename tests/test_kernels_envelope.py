"""`envelope_scores` kernels against float64 and the definition; on a GPU compiled, elsewhere interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import envelope_scores
from pallas_kernels._paging import group_queries, physical_pages, window_mask
from pallas_kernels.envelope_scores import triton
from pallas_kernels.envelope_scores.cases import CASES, LARGE_CASES, Case, make
from tests.kernel_runs import GPU_MARKS, jit
from tests.lowering import KERNEL_TARGET, lower_for_cuda
from tests.tolerance import assert_as_good_as_plains, products_in_dtype, products_in_sequence

GPU = "pallas"
MAX_BYTES = 1 << 26  # of summaries in the parity tests: float64 is slow
RUNS = [pytest.param("pallas_interpret", case, id=f"interpret-{case.id}") for case in CASES] + [
    pytest.param(GPU, case, id=f"gpu-{case.id}", marks=GPU_MARKS)
    for case in CASES + LARGE_CASES
    if case.bytes_read <= MAX_BYTES
]
BOTH = ["pallas_interpret", pytest.param(GPU, marks=GPU_MARKS)]


def score(arrays, case, implementation):
    call = functools.partial(envelope_scores, **case.options, implementation=implementation)
    return np.asarray(jit(call)(**arrays))


def exact_scores(
    arrays, case, *, envelopes=("max", "min"), separate=True, shift=0, group=None, round_mean=False
):
    """The definition in float64: [B, Hkv, M], NaN where a score is -inf. The keywords make it wrong."""
    q, summaries = (np.asarray(arrays[name].astype(jnp.float32), np.float64) for name in ("q", "summaries"))
    group = group or case.group
    scores = np.full((len(case.windows), case.num_kv_heads, case.row_pages), np.nan)
    for row, (start, stop) in enumerate(case.windows):
        logical = np.arange(start, max(start, stop))
        page = np.asarray(arrays["pages"])[row, logical]
        logical, page = (x[(page >= 0) & (page < len(summaries))] for x in (logical, page))
        page = np.roll(page, shift)
        for head in range(case.num_kv_heads):
            queries = q[row].reshape(case.num_kv_heads, case.group_size, -1)[head]
            if group == "mean":
                queries = queries.mean(axis=0, keepdims=True)
                if round_mean:
                    queries = np.asarray(jnp.asarray(queries, case.dtype).astype(jnp.float32), np.float64)
            found = dict(zip(case.kinds, np.moveaxis(summaries[page, head], 1, 0)))
            by_mean = by_peak = np.zeros((len(queries), len(page)))
            if "mean" in found:
                by_mean = queries @ found["mean"].T
            if "max" in found:
                terms = [queries[:, None] * found[name] for name in envelopes]
                by_peak = np.max(terms, axis=0).sum(axis=-1)
            by_mean, by_peak = case.w_avg * by_mean, case.w_peak * by_peak
            best = by_mean.max(axis=0) + by_peak.max(axis=0) if separate else (by_mean + by_peak).max(axis=0)
            scores[row, head, logical] = best
    return scores


def plain_scores(arrays, case, products):
    """The definition in float32, its products formed by `products`: [B, Hkv, M], 0 where there is no page."""
    summaries = np.asarray(arrays["summaries"])
    inside = window_mask(arrays["start"], arrays["stop"], case.row_pages)
    logical = jnp.arange(case.row_pages)[None]
    page = np.asarray(physical_pages(arrays["pages"], logical, inside, len(summaries)))
    found = np.concatenate([summaries, np.zeros_like(summaries[:1])])[page]  # [B, M, Hkv, S, D]
    found = {kind: found[..., i, :] for i, kind in enumerate(case.kinds)}
    q = np.asarray(group_queries(arrays["q"], case.num_kv_heads, case.group))
    scores = np.float32(0)
    if "mean" in found:
        scores = scores + np.float32(case.w_avg) * products(q, found["mean"]).max(axis=2)
    if "max" in found:
        peak = products(np.maximum(q, 0), found["max"]) + products(np.minimum(q, 0), found["min"])
        scores = scores + np.float32(case.w_peak) * peak.max(axis=2)
    return scores


def check(got, arrays, case):
    exact = exact_scores(arrays, case)
    absent = np.isnan(exact)
    assert (np.isneginf(got) == absent).all()
    keep = ~absent
    plains = [score(arrays, case, "xla")]
    plains += [plain_scores(arrays, case, products) for products in (products_in_dtype, products_in_sequence)]
    assert_as_good_as_plains(got[keep], exact[keep], [x[keep] for x in plains], jnp.float32, name=case.id)


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_parity(implementation, case):
    arrays = make(case)
    check(score(arrays, case, implementation), arrays, case)


MUTANT_CASE = Case("mutants", windows=((1, 40), (0, 7)))
MEAN_CASE = dataclasses.replace(MUTANT_CASE, group="mean")
MUTANTS = {
    "maximum only": (MUTANT_CASE, {"envelopes": ("max",)}),
    "minimum only": (MUTANT_CASE, {"envelopes": ("min",)}),
    "maximum of sums": (MUTANT_CASE, {"separate": False}),
    "mean for max": (MUTANT_CASE, {"group": "mean"}),
    "max for mean": (MEAN_CASE, {"group": "max"}),
    "mean rounded": (MEAN_CASE, {"round_mean": True}),
    "neighbour": (MUTANT_CASE, {"shift": 1}),
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
    case = Case("alone", windows=((1, 70), (2, 3), (5, 5)))
    wide = dataclasses.replace(case, pages_per_request=300, windows=((7, 290), (5, 5), (2, 3), (1, 70)))
    arrays, other = make(case), make(wide, poison=0.0)
    num_pages = arrays["summaries"].shape[0]
    moved = np.random.default_rng(1).permutation(other["summaries"].shape[0])[:num_pages]
    free = np.setdiff1d(np.arange(other["summaries"].shape[0]), moved)
    for here, there in ((0, 3), (1, 2)):
        stop = case.windows[here][1]
        ids = arrays["pages"][here, :stop]
        other["pages"] = other["pages"].at[there, :stop].set(jnp.asarray(moved)[ids])
        other["q"] = other["q"].at[there].set(arrays["q"][here])
    taken = jnp.asarray(free[: 290 - 7], jnp.int32)
    other["pages"] = other["pages"].at[0, 7 : 7 + len(taken)].set(taken)
    other["summaries"] = other["summaries"].at[jnp.asarray(moved)].set(arrays["summaries"])
    got, wider = (score(a, c, implementation) for a, c in ((arrays, case), (other, wide)))
    for here, there in ((0, 3), (1, 2)):
        np.testing.assert_array_equal(got[here], wider[there, :, : case.row_pages])
        assert np.isneginf(wider[there, :, case.row_pages :]).all()


@pytest.mark.parametrize("implementation", [pytest.param(GPU, marks=GPU_MARKS)])
def test_repeats_are_equal(implementation):
    case = next(case for case in LARGE_CASES if case.id == "bench-b1-m8192-bf16-max-3")
    arrays = make(case)
    first = score(arrays, case, implementation)
    for _ in range(19):
        np.testing.assert_array_equal(score(arrays, case, implementation), first)


@pytest.mark.parametrize("case", CASES + LARGE_CASES, ids=lambda case: case.id)
def test_lowers_for_cuda(case):
    call = functools.partial(envelope_scores, **case.options, implementation=GPU)
    assert KERNEL_TARGET in lower_for_cuda(lambda kwargs: call(**kwargs), case.shapes)


def test_pools_above_4_gib_lower():
    shapes = dict(Case("huge", num_kv_heads=8, head_dim=128).shapes)
    shapes["summaries"] = jax.ShapeDtypeStruct((1 << 20, 8, 3, 128), jnp.bfloat16)
    call = functools.partial(envelope_scores, kinds=("mean", "max", "min"), group="max", implementation=GPU)
    assert KERNEL_TARGET in lower_for_cuda(lambda kwargs: call(**kwargs), shapes)


@pytest.mark.parametrize("wrong", [{"pages": 24}, {"pages": 8}, {"pages": 32, "tiles": 0}])
def test_tiles_are_checked(wrong):
    with pytest.raises(ValueError, match="expected"):
        triton.Tiles(**wrong)
