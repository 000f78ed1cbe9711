"""The kernels of `paged_attention` against float64, and what a row's result may not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from h2o_jax import reference
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.cases import CASES, Case, make
from tests import plain, tolerance
from tests.kernel_runs import jit, on_gpu, over_cases, over_implementations
from tests.lowering import KERNEL_TARGET, lower_for_cuda

BY_ID = {case.id: case for case in CASES}
SMALL = [case for case in CASES if not case.benchmark]
INTERPRETED = (
    "g3",
    "g32-wide",
    "d8",
    "d80",
    "d192",
    "p1-bf16",
    "p1-f32",
    "p16-f16",
    "p64-bf16",
    "p24-odd",
    "q-f32",
    "short-counts",
    "many-splits-p1",
)
FOUR_SPLITS = triton.Tiles(tokens=16, split_tiles=1, max_splits=4, num_warps=4, num_stages=2)


def run(arrays, implementation, *, scale=None, tiles=None):
    """`out` and `lse` as float64, and as they came."""
    scale = arrays["q"].shape[-1] ** -0.5 if scale is None else scale
    out, lse = _jitted(implementation, scale, tiles)(**arrays)
    assert out.dtype == arrays["q"].dtype and lse.dtype == jnp.float32
    return np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse, np.float64)


@functools.cache
def _jitted(implementation, scale, tiles):
    if tiles is None:
        return jit(functools.partial(paged_attention, implementation=implementation, scale=scale))
    interpret = implementation == "pallas_interpret"
    return jit(functools.partial(triton.paged_attention, interpret=interpret, tiles=tiles, scale=scale))


def gathered(arrays):
    """Keys and values by position, [B, L, Hkv, D] float64, and which are to be read, [B, Hkv, L] bool."""
    pools = [np.asarray(arrays[name].astype(jnp.float32), np.float64) for name in ("k_pool", "v_pool")]
    pages, seq_lens, selected, counts = (
        np.asarray(arrays[name]) for name in ("pages", "seq_lens", "selected", "counts")
    )
    num_pages, heads, size, dim = pools[0].shape
    batch, row_pages = pages.shape
    keys, values = np.zeros((2, batch, row_pages * size, heads, dim))
    chosen = np.zeros((batch, heads, row_pages * size), bool)
    for row in range(batch):
        for logical in range(row_pages):
            page, span = pages[row, logical], slice(logical * size, (logical + 1) * size)
            if not 0 <= page < num_pages:
                continue
            used = min(max(seq_lens[row] - span.start, 0), size)
            for whole, pool in zip((keys, values), pools, strict=True):
                whole[row, span.start : span.start + used] = pool[page, :, :used].swapaxes(0, 1)
            for head in range(heads):
                if logical in selected[row, head, : counts[row, head]]:
                    chosen[row, head, span.start : span.start + used] = True
    return keys, values, chosen


def exact_attention(arrays, scale):
    """`out` [B, Hq, D] and `lse` [B, Hq] by the oracle."""
    keys, values, chosen = gathered(arrays)
    queries = np.asarray(arrays["q"].astype(jnp.float32), np.float64)
    out, lse = np.zeros(queries.shape), np.zeros(queries.shape[:2])
    group = queries.shape[1] // keys.shape[2]
    for row, head in np.ndindex(*lse.shape):
        mine = chosen[row, head // group]
        tokens = [list(x[row, mine, head // group]) for x in (keys, values)]
        out[row, head], lse[row, head] = reference.attend(queries[row, head], *tokens, scale)
    return out, lse


def lse_in_float32(queries, keys, chosen, scale):
    batch, _, heads, _ = keys.shape
    grouped = queries.reshape(batch, heads, -1, queries.shape[-1])
    logits = np.float32(scale) * np.einsum("bhgd,blhd->bhgl", grouped, keys.astype(np.float32))
    logits = np.where(chosen[:, :, None], logits, np.float32(-np.inf))
    largest = np.maximum(logits.max(axis=-1, keepdims=True), np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):
        lse = largest[..., 0] + np.log(np.exp(logits - largest).sum(axis=-1))
    return lse.reshape(queries.shape[:2])


def check(arrays, out, lse):
    """Asserts that a result is as good as the plain version, and 0 and -inf where nothing is read."""
    scale = arrays["q"].shape[-1] ** -0.5
    exact_out, exact_lse = exact_attention(arrays, scale)
    empty = np.isneginf(exact_lse)
    assert (out[empty] == 0).all(), "output where nothing is read"
    assert np.isneginf(lse[empty]).all(), "lse where nothing is read"
    keys, values, chosen = gathered(arrays)
    inputs = (jnp.asarray(x, arrays["k_pool"].dtype) for x in (keys, values))
    plain_out = np.asarray(plain.attention(arrays["q"], *inputs, chosen, scale).astype(jnp.float32))
    plain_lse = lse_in_float32(np.asarray(arrays["q"].astype(jnp.float32)), keys, chosen, scale)
    live = ~empty
    dtype = arrays["q"].dtype
    tolerance.assert_as_good_as_plain(out[live], exact_out[live], plain_out[live], dtype, name="out")
    tolerance.assert_as_good_as_plain(lse[live], exact_lse[live], plain_lse[live], jnp.float32, name="lse")


@over_cases(SMALL, INTERPRETED)
def test_parity(case, implementation):
    arrays = make(case)
    check(arrays, *run(arrays, implementation))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_lowers_for_cuda(case):
    f = functools.partial(paged_attention, scale=case.head_dim**-0.5, implementation="pallas")
    text = lower_for_cuda(f, *case.shapes.values())
    assert text.count(KERNEL_TARGET) == 2


@on_gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.benchmark], ids=lambda case: case.id)
def test_parity_at_size(case):
    # The whole batch would keep the oracle busy for minutes.
    case = dataclasses.replace(case, num_kv_heads=2, lengths=case.lengths[:1])
    arrays = make(case)
    out, lse = run(arrays, "pallas")
    check(arrays, out, lse)
    for _ in range(20):
        again = run(arrays, "pallas")
        np.testing.assert_array_equal(again[0], out)
        np.testing.assert_array_equal(again[1], lse)


RAGGED = Case("ragged", budget=5, lengths=(0, 1, 15, 16, 17, 80, 130), counts=(0, 1, 1, 1, 2, 5, 4))


@over_implementations
def test_empty_splits(implementation):
    case = Case("empty-splits", num_kv_heads=1, budget=4, lengths=(0, 1, 16, 49))
    arrays = make(case)
    out, lse = run(arrays, implementation, tiles=FOUR_SPLITS)
    check(arrays, out, lse)
    # Splits that are in use but hold nothing to read: a table without pages.
    arrays["pages"] = jnp.full_like(arrays["pages"], arrays["k_pool"].shape[0])
    out, lse = run(arrays, implementation, tiles=FOUR_SPLITS)
    assert (out == 0).all() and np.isneginf(lse).all()


@over_implementations
def test_poison_is_not_read(implementation):
    results = [run(make(RAGGED, poison=value), implementation) for value in (np.nan, np.inf, 0.0)]
    for result in results[1:]:
        np.testing.assert_array_equal(result[0], results[0][0])
        np.testing.assert_array_equal(result[1], results[0][1])


def permuted(arrays):
    order = np.random.default_rng(1).permutation(arrays["seq_lens"].shape[0])
    rows = ("q", "pages", "seq_lens", "selected", "counts")
    return {name: x[order] if name in rows else x for name, x in arrays.items()}, np.argsort(order)


def padded(arrays):
    """One row more, NaN and empty, in front."""
    fills = {"q": np.nan, "pages": arrays["k_pool"].shape[0], "seq_lens": 0, "selected": 0, "counts": 0}
    wider = {}
    for name, x in arrays.items():
        front = [(1, 0)] + [(0, 0)] * (x.ndim - 1)
        wider[name] = jnp.pad(x, front, constant_values=fills[name]) if name in fills else x
    return wider, np.arange(1, arrays["seq_lens"].shape[0] + 1)


def longer_rows(arrays):
    pad = ((0, 0), (0, 700))
    return arrays | {"pages": jnp.pad(arrays["pages"], pad, constant_values=arrays["k_pool"].shape[0])}, ...


def larger_budget(arrays):
    """Entries that do not count: none of the row's splits may move for them."""
    return arrays | {"selected": jnp.pad(arrays["selected"], ((0, 0), (0, 0), (0, 70)))}, ...


def larger_pool(arrays):
    pad = ((0, 40), (0, 0), (0, 0), (0, 0))
    pools = {name: jnp.pad(arrays[name], pad, constant_values=np.nan) for name in ("k_pool", "v_pool")}
    none = arrays["k_pool"].shape[0]
    return arrays | pools | {"pages": jnp.where(arrays["pages"] == none, none + 40, arrays["pages"])}, ...


def moved_pages(arrays):
    num_pages = arrays["k_pool"].shape[0]
    order = np.random.default_rng(1).permutation(num_pages)
    pools = {name: arrays[name][np.argsort(order)] for name in ("k_pool", "v_pool")}
    table = jnp.asarray([*order, num_pages], jnp.int32)[arrays["pages"]]
    return arrays | pools | {"pages": table}, ...


CHANGES = (permuted, padded, longer_rows, larger_budget, larger_pool, moved_pages)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@over_implementations
def test_row_does_not_depend_on(change, implementation):
    arrays = make(RAGGED)
    changed, rows = change(arrays)
    for got, expected in zip(run(changed, implementation), run(arrays, implementation), strict=True):
        np.testing.assert_array_equal(got[rows], expected)


@over_implementations
def test_one_kernel_many_grids(implementation):
    for batch, budget in ((2, 4), (5, 1), (3, 3), (4, 2)):
        arrays = make(Case("grid", num_kv_heads=1, budget=budget, lengths=(64, 5, 49, 17, 33)[:batch]))
        check(arrays, *run(arrays, implementation, tiles=FOUR_SPLITS))


@over_implementations
def test_long_rows_lengthen_their_splits(implementation):
    tiles = dataclasses.replace(FOUR_SPLITS, max_splits=3)
    arrays = make(Case("long", num_kv_heads=1, budget=20, lengths=(16, 320, 111)))
    check(arrays, *run(arrays, implementation, tiles=tiles))


@over_implementations
def test_float16_range(implementation):
    arrays = make(Case("fp16", head_dim=128, dtype="float16", lengths=(33,)))
    arrays["q"] = jnp.full_like(arrays["q"], 256)
    arrays["k_pool"] = jnp.where(jnp.isnan(arrays["k_pool"]), jnp.nan, 256).astype(jnp.float16)
    out, lse = run(arrays, implementation)
    _, values, chosen = gathered(arrays)
    for head in range(8):
        mean = values[0, chosen[0, head // 4], head // 4].mean(axis=0)
        np.testing.assert_allclose(out[0, head], mean, atol=2 * float(tolerance.ulp(1.0, jnp.float16)))
    np.testing.assert_allclose(lse[0], 256 * 256 * 128**0.5 + np.log(33), rtol=1e-6)


@over_implementations
def test_bad_page_ids_are_no_pages(implementation):
    case = Case("bad-ids", budget=5, lengths=(80, 80, 80))
    arrays = make(case)
    bad = [arrays["k_pool"].shape[0], 10**6, -5]
    arrays["pages"] = arrays["pages"].at[np.arange(3), [0, 2, 4]].set(jnp.asarray(bad, jnp.int32))
    check(arrays, *run(arrays, implementation))


@over_implementations
def test_counts_are_bounded(implementation):
    arrays = make(RAGGED)
    over = arrays | {"counts": jnp.where(arrays["counts"] == 5, 1000, arrays["counts"]).at[0].set(-3)}
    for got, expected in zip(run(over, implementation), run(arrays, implementation), strict=True):
        np.testing.assert_array_equal(got, expected)


def without_rescale(arrays, implementation):
    """Halves of the chosen tokens averaged as if their totals were equal."""
    halves = []
    for start in (0, 1):
        part = arrays["selected"][:, :, start::2]
        counts = (arrays["counts"] + 1 - start) // 2
        halves.append(run(arrays | {"selected": part, "counts": counts}, implementation))
    return (halves[0][0] + halves[1][0]) / 2, np.logaddexp(halves[0][1], halves[1][1])


MUTANTS = {
    "zeros": lambda a, i: tuple(np.zeros_like(x) for x in run(a, i)),
    "values are keys": lambda a, i: run(a | {"v_pool": a["k_pool"]}, i),
    "last token dropped": lambda a, i: run(a | {"seq_lens": a["seq_lens"] - 1}, i),
    "one entry dropped": lambda a, i: run(a | {"counts": a["counts"] - 1}, i),
    "another row's page": lambda a, i: run(a | {"pages": a["pages"].at[0, 6].set(a["pages"][1, 4])}, i),
    "another head's choice": lambda a, i: run(a | {"selected": a["selected"][:, ::-1]}, i),
    "scale of the padded head_dim": lambda a, i: run(a, i, scale=128**-0.5),
    "no rescale": without_rescale,
    "lse in base 2": lambda a, i: (run(a, i)[0], run(a, i)[1] / np.log(2)),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda name: name.replace(" ", "-"))
def test_mutants_are_rejected(mutant):
    arrays = make(Case("mutant", head_dim=80, budget=4, lengths=(112, 80), counts=(4, 4)))
    check(arrays, *run(arrays, "xla"))
    with pytest.raises(AssertionError):
        check(arrays, *MUTANTS[mutant](arrays, "xla"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 48}, "tokens: expected a power of two, got 48"),
        ({"tokens": 8}, "tokens: expected at least 16, got 8"),
        ({"num_warps": 3}, "num_warps: expected a power of two, got 3"),
        ({"max_splits": 0}, "max_splits: expected at least 1, got 0"),
    ],
)
def test_tiles_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FOUR_SPLITS, **change)


def test_head_dim_without_tiles():
    shapes = Case("wide", head_dim=1024, dtype="float32", lengths=(16,)).shapes
    f = functools.partial(paged_attention, scale=1.0, implementation="pallas_interpret")
    with pytest.raises(NotImplementedError, match="head_dim 1024"):
        jax.eval_shape(f, *shapes.values())


@on_gpu
def test_pool_beyond_32_bits():
    case = Case("far", num_kv_heads=8, head_dim=128, budget=16, lengths=(1000, 77, 4000))
    arrays = make(case)
    expected = run(arrays, "pallas")
    num_pages = arrays["k_pool"].shape[0]
    total = 2**31 // (8 * 16 * 128) + 5000
    # The live pages stand at the far end, where 32-bit offsets would wrap.
    pools = {
        name: jnp.full((total, 8, 16, 128), jnp.nan, jnp.bfloat16).at[total - num_pages :].set(arrays[name])
        for name in ("k_pool", "v_pool")
    }
    pages = jnp.where(arrays["pages"] < num_pages, arrays["pages"] + total - num_pages, total)
    got = run(arrays | pools | {"pages": pages}, "pallas")
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)
