"""The kernel of `write_pages` against the equations, and that it writes in place and nowhere else."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from h2o_jax import reference
from pallas_kernels import write_pages
from pallas_kernels.write_pages.cases import CASES, Case, make
from tests import tolerance
from tests.kernel_runs import jit, on_gpu, over_cases, over_implementations
from tests.lowering import KERNEL_TARGET, lower_for_cuda

SMALL = [case for case in CASES if not case.benchmark]
INTERPRETED = (
    "p1-f32",
    "p16-bf16",
    "p64-f16",
    "d8",
    "d80",
    "p24-odd",
    "max-min",
    "scores-p1",
    "scores-bf16",
    "prefill-p1",
    "prefill-p16",
)
NAMES = ("k_pool", "v_pool", "summaries", "scores")
EXACT = {"mean": reference.page_mean, "max": reference.page_max, "min": reference.page_min}


@functools.cache
def _jitted(implementation, summary_kinds):
    return jit(functools.partial(write_pages, implementation=implementation, summary_kinds=summary_kinds))


def run(arrays, implementation, summary_kinds):
    """The arrays after the write, by name."""
    results = _jitted(implementation, summary_kinds)(**arrays)
    for name, x in zip(NAMES, results, strict=True):
        assert (x is None) == (name not in arrays), name
        assert x is None or (x.dtype == arrays[name].dtype and x.shape == arrays[name].shape), name
    return {name: x for name, x in zip(NAMES, results, strict=True) if x is not None}


def as_float64(arrays):
    return {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in arrays.items()}


def check(case, arrays, results):
    """Asserts that tokens, summaries and resets stand where they must, and that nothing else moved."""
    before, after = as_float64({name: x for name, x in arrays.items() if name in NAMES}), as_float64(results)
    new = as_float64({name: arrays[name] for name in ("k", "v")})
    pages, size = np.asarray(arrays["pages"]), case.page_size
    completed = []
    for row, (length, count) in enumerate(zip(case.lengths, case.num_tokens, strict=True)):
        for token in range(count):
            logical, slot = divmod(length - count + token, size)
            page = pages[row, logical]
            if not 0 <= page < len(before["k_pool"]):
                continue
            before["k_pool"][page, :, slot] = new["k"][row, token]
            before["v_pool"][page, :, slot] = new["v"][row, token]
            if "scores" in before:
                before["scores"][page, :, slot] = 0
            if slot == size - 1:
                completed.append(page)
    heads, kinds = range(case.num_kv_heads), enumerate(case.summary_kinds)
    for page, head, (i, kind) in itertools.product(completed, heads, kinds):
        keys, got = before["k_pool"][page, head], after["summaries"][page, head, i]
        exact = EXACT[kind](keys)
        if kind == "mean":
            tolerance.assert_rounding_of(got, exact, tolerance.mean_error(keys), case.dtype, name=kind)
        else:
            np.testing.assert_array_equal(got, exact, kind)
        before["summaries"][page, head, i] = got
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected, name)


@over_cases(SMALL, INTERPRETED)
def test_parity(case, implementation):
    arrays = make(case)
    check(case, arrays, run(arrays, implementation, case.summary_kinds))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_lowers_for_cuda_in_place(case):
    f = functools.partial(write_pages, summary_kinds=case.summary_kinds, implementation="pallas")
    text = lower_for_cuda(lambda arrays: f(**arrays), case.shapes)
    assert text.count(KERNEL_TARGET) == 1
    assert text.count("output_operand_alias<") == sum(name in case.shapes for name in NAMES)


@over_implementations
def test_bad_page_ids_are_not_written(implementation):
    case = Case("bad-ids", lengths=(16, 16, 16, 32), num_tokens=(1, 1, 16, 17), score_dtype="float32")
    arrays = make(case)
    bad = [arrays["k_pool"].shape[0], 10**6, -5, -1]
    arrays["pages"] = arrays["pages"].at[:, 0].set(jnp.asarray(bad, jnp.int32))
    check(case, arrays, run(arrays, implementation, case.summary_kinds))


@over_implementations
def test_none_is_not_last(implementation):
    """Rows without tokens leave the last physical page alone, whatever their table says."""
    case = Case("padding", lengths=(0, 0, 0), num_tokens=(0, 0, 0), max_tokens=1, score_dtype="float32")
    arrays = make(case, poison=0.0)
    last = arrays["k_pool"].shape[0] - 1
    arrays |= {"k": jnp.full_like(arrays["k"], jnp.nan), "v": jnp.full_like(arrays["v"], jnp.nan)}
    arrays["pages"] = jnp.full_like(arrays["pages"], last)
    check(case, arrays, run(arrays, implementation, case.summary_kinds))


@over_implementations
def test_decode_steps_equal_one_prefill(implementation):
    """Token by token or at once: the same pools and summaries, to the last bit."""
    kinds = ("mean", "max", "min")
    case = Case("at-once", page_size=4, lengths=(11, 4), num_tokens=(11, 4), score_dtype="float32")
    arrays = make(case)
    at_once = run(arrays, implementation, kinds)
    state = arrays
    for step in range(11):
        active = jnp.asarray([True, step < 4])
        token = {"k": arrays["k"][:, step : step + 1], "v": arrays["v"][:, step : step + 1]}
        seq_lens = jnp.minimum(step + 1, arrays["seq_lens"])
        sizes = {"seq_lens": seq_lens, "num_tokens": active.astype(jnp.int32)}
        state = state | run(state | token | sizes, implementation, kinds)
    step_by_step = as_float64({name: state[name] for name in NAMES})
    for name, expected in as_float64(at_once).items():
        np.testing.assert_array_equal(step_by_step[name], expected, name)


def _stale(results, arrays, name):
    return results | {name: arrays[name]}


def _means_of_15(results):
    return results | {"summaries": results["summaries"].at[..., 0, :].multiply(15 / 16)}


MUTANTS = {
    "nothing written": lambda a, r: {name: a[name] for name in r},
    "values not written": lambda a, r: _stale(r, a, "v_pool"),
    "summaries not written": lambda a, r: _stale(r, a, "summaries"),
    "scores not reset": lambda a, r: _stale(r, a, "scores"),
    "mean of 15 keys": lambda a, r: _means_of_15(r),
    "max for min": lambda a, r: r | {"summaries": r["summaries"][:, :, jnp.asarray([0, 1, 1])]},
    "heads swapped": lambda a, r: r | {"k_pool": r["k_pool"][:, ::-1]},
    "an unowned page written": lambda a, r: r | {"k_pool": jnp.nan_to_num(r["k_pool"], nan=1.0)},
    "all scores reset": lambda a, r: r | {"scores": jnp.zeros_like(r["scores"])},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda name: name.replace(" ", "-"))
def test_mutants_are_rejected(mutant):
    case = Case("mutant", lengths=(1, 16, 40), num_tokens=(1, 1, 40), score_dtype="float32")
    arrays = make(case)
    results = run(arrays, "xla", case.summary_kinds)
    check(case, arrays, results)
    with pytest.raises(AssertionError):
        check(case, arrays, MUTANTS[mutant](arrays, results))


def test_nothing_to_write():
    arrays = make(Case("empty", lengths=(3,), num_tokens=(0,), max_tokens=1))
    arrays |= {name: arrays[name][:, :0] for name in ("k", "v")}
    results = write_pages(**arrays, summary_kinds=("mean", "max", "min"), implementation="pallas_interpret")
    for name, result in zip(("k_pool", "v_pool", "summaries"), results):
        np.testing.assert_array_equal(result.astype(jnp.float32), arrays[name].astype(jnp.float32))
    assert results[3] is None


def test_page_too_large_for_a_program():
    case = Case("large", page_size=512, head_dim=128, lengths=(3,), num_tokens=(1,))
    f = functools.partial(write_pages, summary_kinds=case.summary_kinds, implementation="pallas_interpret")
    with pytest.raises(NotImplementedError, match="512 tokens of head_dim 128"):
        jax.eval_shape(lambda arrays: f(**arrays), case.shapes)


@on_gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.benchmark], ids=lambda case: case.id)
def test_parity_at_size(case):
    arrays = make(case)
    check(case, arrays, run(arrays, "pallas", case.summary_kinds))


@on_gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.benchmark], ids=lambda case: case.id)
def test_pools_are_not_copied(case):
    def step(pools, rest):
        return write_pages(**pools, **rest, summary_kinds=case.summary_kinds, implementation="pallas")

    pools = {name: x for name, x in case.shapes.items() if name in NAMES}
    rest = {name: x for name, x in case.shapes.items() if name not in NAMES}
    memory = jax.jit(step, donate_argnums=0).lower(pools, rest).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in pools.values())
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 1 << 16


@on_gpu
def test_pool_beyond_32_bits():
    case = Case("far", num_kv_heads=8, head_dim=128, lengths=(16, 33, 1), num_tokens=(1, 33, 1))
    arrays = make(case)
    expected = run(arrays, "pallas", case.summary_kinds)
    num_pages = arrays["k_pool"].shape[0]
    total = 2**31 // (8 * 16 * 128) + 5000
    # The live pages stand at the far end, where 32-bit offsets would wrap.
    far = {}
    for name in ("k_pool", "v_pool", "summaries"):
        nothing = jnp.full((total, *arrays[name].shape[1:]), jnp.nan, jnp.bfloat16)
        far[name] = nothing.at[total - num_pages :].set(arrays[name])
    far["pages"] = jnp.where(arrays["pages"] < num_pages, arrays["pages"] + total - num_pages, total)
    got = run(arrays | far, "pallas", case.summary_kinds)
    live = as_float64({name: x[total - num_pages :] for name, x in got.items()})
    for name, x in as_float64(expected).items():
        np.testing.assert_array_equal(live[name], x, name)
        assert bool(jnp.isnan(got[name][: total - num_pages]).all())
