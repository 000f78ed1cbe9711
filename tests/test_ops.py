"""Each op's definition against scalar float64 loops written here, on tiny inputs with every kind of oddity.

Letters: B rows, M logical pages, P page size, Hq/Hkv heads, G group, D head_dim, W chosen pages, T new tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from h2o_jax import reference
from pallas_kernels import decayed_softmax_scores, envelope_scores, paged_attention, top_k_pages, write_pages

KINDS = [("mean", "max", "min"), ("max", "min"), ("mean",)]
STATIC = ("kinds", "group", "w_avg", "w_peak", "decay", "scale", "k", "implementation", "summary_kinds")
STATIC += ("reserved", "filler")

PAGES, HEADS, GROUP, SIZE = 9, 2, 3, 8  # physical pages, KV heads, G, D
# Rows: whole; empty window; with entries that are no page; longer than its window; window past the row.
TABLE = np.array([[3, 0, 7, 5], [1, 2, 9, 9], [6, -1, 8, 10**6], [4, 9, -9, 2**31 - 1], [9, 9, 9, 9]], np.int32)
START = np.array([1, 2, 0, 0, 0], np.int32)
STOP = np.array([4, 2, 4, 2, 9], np.int32)


def jitted(op, *args, **kwargs):
    arrays = {name: x for name, x in kwargs.items() if name not in STATIC}
    static = {name: x for name, x in kwargs.items() if name in STATIC}
    return jax.jit(functools.partial(op, **static))(*map(jnp.asarray, args), **arrays)


def page_of(row, logical):
    """The physical page, or None."""
    page = int(TABLE[row, logical])
    return page if 0 <= page < PAGES else None


def in_window(row, logical):
    return START[row] <= logical < STOP[row]


def normal(*shape, dtype="float32", seed=0):
    """Values that `dtype` holds exactly, as a jax array and as float64."""
    x = reference.round_to(np.random.default_rng(seed).standard_normal(shape), dtype)
    return jnp.asarray(x, dtype), x


def unowned_are_nan(array):
    """The array with NaN in pages that no row of TABLE names."""
    spare = np.setdiff1d(np.arange(PAGES), TABLE)
    return array.at[spare].set(jnp.nan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_envelope_scores(kinds, group, dtype, implementation):
    q, q64 = normal(5, HEADS * GROUP, SIZE, dtype=dtype)
    summaries, s64 = normal(PAGES, HEADS, len(kinds), SIZE, dtype=dtype, seed=1)
    if "max" in kinds:  # the maximum is not below the minimum
        at = kinds.index("max")
        s64[:, :, at : at + 2] = -np.sort(-s64[:, :, at : at + 2], axis=2)
        summaries = jnp.asarray(s64, dtype)
    w_avg, w_peak = 0.5, -1.5
    got = jitted(
        envelope_scores,
        q,
        unowned_are_nan(summaries),
        TABLE,
        START,
        STOP,
        kinds=kinds,
        group=group,
        w_avg=w_avg,
        w_peak=w_peak,
        implementation=implementation,
    )
    assert got.shape == (5, HEADS, 4) and got.dtype == jnp.float32
    for row, head, logical in np.ndindex(5, HEADS, 4):
        page = page_of(row, logical)
        if page is None or not in_window(row, logical):
            assert np.isneginf(got[row, head, logical]), (row, head, logical)
            continue
        queries = [q64[row, head * GROUP + g] for g in range(GROUP)]
        if group == "mean":
            queries = [sum(queries) / GROUP]
        summary = dict(zip(kinds, s64[page, head]))
        expected = 0.0
        if "mean" in kinds:
            expected += w_avg * max(sum(x * y for x, y in zip(query, summary["mean"])) for query in queries)
        if "max" in kinds:
            expected += w_peak * max(
                sum(max(x * high, x * low) for x, high, low in zip(query, summary["max"], summary["min"]))
                for query in queries
            )
        assert float(got[row, head, logical]) == pytest.approx(expected, abs=1e-5), (row, head, logical)


@pytest.mark.parametrize("score_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_decayed_softmax_scores(group, score_dtype, decay, implementation):
    q, q64 = normal(5, HEADS * GROUP, SIZE)
    k_pool, k64 = normal(PAGES, HEADS, 1, SIZE, seed=1)
    old, old64 = normal(PAGES, HEADS, 1, dtype=score_dtype, seed=2)
    old, old64 = abs(old), abs(old64)
    after, got = jitted(
        decayed_softmax_scores,
        q,
        unowned_are_nan(k_pool),
        old,
        TABLE,
        START,
        STOP,
        decay=decay,
        scale=0.7,
        group=group,
        implementation=implementation,
    )
    assert after.dtype == old.dtype and after.shape == old.shape and got.dtype == jnp.float32
    expected = old64.copy()
    for row, head in np.ndindex(5, HEADS):
        window = [x for x in range(4) if in_window(row, x) and page_of(row, x) is not None]
        queries = [q64[row, head * GROUP + g] for g in range(GROUP)]
        if group == "mean":
            queries = [sum(queries) / GROUP]
        weights = [[math.exp(0.7 * float(query @ k64[page_of(row, x), head, 0])) for x in window] for query in queries]
        for i, logical in enumerate(window):
            probability = max(mine[i] / sum(mine) for mine in weights)
            page = page_of(row, logical)
            expected[page, head, 0] = probability + decay * old64[page, head, 0]
            # What is returned is what is stored, to the bit, also where a compiler could skip the rounding.
            assert float(got[row, head, logical]) == float(after[page, head, 0])
        assert np.isneginf(np.delete(np.asarray(got[row, head]), window)).all()
    touched = {page_of(row, x) for row in range(5) for x in range(4) if in_window(row, x)} - {None}
    others = np.delete(np.arange(PAGES), sorted(touched))
    np.testing.assert_array_equal(after[others], old[others])
    tolerance = 1e-6 if score_dtype == "float32" else 2.0**-8 * 4
    np.testing.assert_allclose(np.asarray(after, np.float64), expected, rtol=0, atol=tolerance)


def test_decayed_softmax_scores_of_far_logits(implementation):
    """Logits of +-1e4 apart neither overflow nor divide 0 by 0; a window of one token has probability 1."""
    k_pool = jnp.array([1e4, -1e4, 1e4, 0.0])[:, None, None, None]
    after, got = jitted(
        decayed_softmax_scores,
        jnp.ones((3, 1, 1)),
        k_pool,
        jnp.zeros((4, 1, 1)),
        np.array([[0, 1, 2, 3]] * 3, np.int32)[:, :4],
        np.array([0, 1, 2], np.int32),
        np.array([3, 2, 2], np.int32),
        decay=1.0,
        scale=1.0,
        group="mean",
        implementation=implementation,
    )
    assert got[0, 0, :3].tolist() == [0.5, 0.0, 0.5]
    assert np.isneginf(got[2]).all() and float(got[1, 0, 1]) == 1.0


TOP_K = [
    ([3.0, 1.0, 2.0, 5.0], 2, [0, 3]),
    ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
    ([0.0, 1.0, 1.0, 1.0], 2, [1, 2]),
    ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
    ([-0.0, 0.0, -1.0, -2.0], 1, [0]),
    ([0.0, -0.0, 1.0, -0.0], 3, [0, 1, 2]),
    ([np.nan, -np.inf, np.nan, -1e38], 2, [1, 3]),
    ([np.nan, np.nan, -np.inf, np.nan], 2, [0, 2]),
    ([np.nan] * 4, 3, [0, 1, 2]),
    ([-np.inf, -np.nan, np.nan, -np.inf], 3, [0, 1, 3]),
    ([0.0, 1e-45, 1e-39, -1e-40], 1, [2]),  # subnormal numbers are in order too
    ([-1e-39, -1e-45, 0.0, 1e-45], 2, [2, 3]),
    ([-np.inf] * 4, 3, [0, 1, 2]),
    ([np.inf, 3e38, np.inf, np.inf], 2, [0, 2]),
    ([-1.0, -2.0, -3.0, -4.0], 1, [0]),
    ([1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0, 1.0], 1, [1]),
    ([1.0, 2.0, 3.0, 4.0], 4, [0, 1, 2, 3]),
    ([1.0, 2.0, 3.0, 4.0], 7, [0, 1, 2, 3, 4, 4, 4]),
]


@pytest.mark.parametrize("k", sorted({k for _, k, _ in TOP_K}))
def test_top_k_pages(k, implementation):
    cases = [(scores, expected) for scores, n, expected in TOP_K if n == k]
    batch = len(cases)
    scores = np.array([[scores] for scores, _ in cases], np.float32)
    whole = np.zeros(batch, np.int32), np.full(batch, 4, np.int32)
    got = jitted(top_k_pages, scores, *whole, k=k, implementation=implementation)
    assert got.dtype == jnp.int32 and got[:, 0].tolist() == [expected for _, expected in cases]


@pytest.mark.parametrize("k", [1, 3, 9])
def test_top_k_pages_in_windows(k, implementation):
    """Every window of a row of 6, also empty, inverted and past the row, against a sort."""
    bounds = [(a, b) for a in (-3, 0, 2, 5, 6, 9) for b in (-1, 0, 3, 6, 8)]
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (len(bounds), 2, 6)).astype(np.float32)  # ties abound
    scores[rng.random(scores.shape) < 0.2] = np.nan
    start, stop = np.array(bounds, np.int32).T
    in_use = np.tile(np.array([0, 4, 6], np.int32), len(bounds))[: len(bounds)]
    got = jitted(top_k_pages, scores, start, stop, k=k, implementation=implementation)
    listed = jitted(
        top_k_pages, scores, start, stop, k=k, in_use=in_use, reserved=2, filler=99, implementation=implementation
    )
    for row, (a, b) in enumerate(bounds):
        window = range(max(a, 0), min(b, 6))
        before, after = (window.start, window.stop) if window else (0, 0)
        for head in range(2):
            expected = reference.top_pages(scores[row, head], window, k)
            assert got[row, head].tolist() == expected + [6] * (k - len(expected)), (a, b, scores[row, head])
            expected = [*range(before), *expected, *range(after, in_use[row])] + [99] * (k + 2)
            assert listed[row, head].tolist() == expected[: k + 2], (a, b, in_use[row], scores[row, head])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_paged_attention(dtype, implementation):
    page_size, length = 2, np.array([7, 3, 8, 1, 8])
    q, q64 = normal(5, HEADS * GROUP, SIZE, dtype=dtype)
    k_pool, k64 = normal(PAGES, HEADS, page_size, SIZE, dtype=dtype, seed=1)
    v_pool, v64 = normal(PAGES, HEADS, page_size, SIZE, dtype=dtype, seed=2)
    for page, slot in ((5, 1), (2, 1), (4, 1)):  # slots past the length of rows 0, 1 and 3
        k_pool, v_pool = (x.at[page, :, slot].set(jnp.nan) for x in (k_pool, v_pool))
    chosen = np.array([[[3, 0, 1], [1, 2, 3]], [[1, 0, 4], [0, 1, 2]]] * 2 + [[[0, 1, 2]] * 2], np.int32)
    counts = np.array([[2, 3], [2, 1], [3, 2], [0, 1], [3, 3]], np.int32)
    chosen[1, 0, 2], chosen[0, 0, 2] = -1, 77  # past the count: anything
    out, lse = jitted(
        paged_attention,
        q,
        unowned_are_nan(k_pool),
        unowned_are_nan(v_pool),
        TABLE,
        length.astype(np.int32),
        chosen,
        counts,
        scale=0.6,
        implementation=implementation,
    )
    assert out.dtype == q.dtype and lse.dtype == jnp.float32 and lse.shape == (5, HEADS * GROUP)
    for row, index in np.ndindex(5, HEADS * GROUP):
        head, tokens = index // GROUP, []
        for logical in chosen[row, head, : counts[row, head]]:
            page = page_of(row, logical) if 0 <= logical < 4 else None
            slots = range(page_size) if page is not None else ()
            tokens += [(page, slot) for slot in slots if logical * page_size + slot < length[row]]
        if not tokens:
            assert (out[row, index] == 0).all() and np.isneginf(lse[row, index])
            continue
        logits = [0.6 * float(q64[row, index] @ k64[page, head, slot]) for page, slot in tokens]
        total = sum(math.exp(x) for x in logits)
        expected = sum(math.exp(x) / total * v64[page, head, slot] for x, (page, slot) in zip(logits, tokens))
        error = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype] * 4
        np.testing.assert_allclose(np.asarray(out[row, index], np.float64), expected, rtol=0, atol=error)
        assert float(lse[row, index]) == pytest.approx(math.log(total), abs=1e-5)


def test_paged_attention_of_far_logits(implementation):
    """Logits of -1e4 only: the sum of exponentials would be 0 without the maximum taken off."""
    pool = jnp.arange(4, dtype=jnp.float32)[:, None, None, None]
    q = jnp.array([[[-1e4]], [[1e4]]])
    out, lse = jitted(
        paged_attention,
        q,
        pool + 1,
        pool,
        np.array([[0, 1, 2, 3]] * 2, np.int32),
        np.array([4, 4], np.int32),
        np.array([[[0, 1, 2, 3]]] * 2, np.int32),
        np.array([[4], [4]], np.int32),
        scale=1.0,
        implementation=implementation,
    )
    assert out[:, 0, 0].tolist() == [0, 3] and lse[:, 0].tolist() == [-1e4, 4e4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kinds", [*KINDS, ()], ids=lambda x: "-".join(x) or "none")
def test_write_pages(kinds, dtype, implementation):
    page_size, num_tokens = 2, 5
    # Lengths after the write and tokens written: a page's middle to a page's end; one token that completes a
    # page; none; a row that lacks pages; tokens past the row.
    length, count = np.array([7, 2, 3, 6, 9], np.int32), np.array([4, 1, 0, 5, 3], np.int32)
    k, k64 = normal(5, num_tokens, HEADS, SIZE, dtype=dtype)
    v, v64 = normal(5, num_tokens, HEADS, SIZE, dtype=dtype, seed=1)
    padding = jnp.arange(num_tokens) >= count[:, None]
    k, v = (jnp.where(padding[..., None, None], jnp.asarray(jnp.nan, dtype), x) for x in (k, v))
    k_pool, expected_k = normal(PAGES, HEADS, page_size, SIZE, dtype=dtype, seed=2)
    v_pool, expected_v = normal(PAGES, HEADS, page_size, SIZE, dtype=dtype, seed=3)
    scores, expected_scores = normal(PAGES, HEADS, page_size, seed=4)
    summaries, expected_summaries = normal(PAGES, HEADS, len(kinds), SIZE, dtype=dtype, seed=5)
    completed = []
    for row in range(5):
        for token in range(count[row]):
            position = length[row] - count[row] + token
            page = page_of(row, position // page_size) if position // page_size < 4 else None
            if page is None:
                continue
            slot = position % page_size
            expected_k[page, :, slot], expected_v[page, :, slot] = k64[row, token], v64[row, token]
            expected_scores[page, :, slot] = 0
            if slot == page_size - 1:
                completed.append(page)
    options = {"summaries": summaries, "summary_kinds": kinds} if kinds else {}
    got = jitted(
        write_pages, k_pool, v_pool, k, v, TABLE, length, count, scores=scores, implementation=implementation, **options
    )
    assert completed == [0, 7, 1, 4]
    for array, before, expected in zip(
        (got[0], got[1], got[3]), (k_pool, v_pool, scores), (expected_k, expected_v, expected_scores)
    ):
        assert array.dtype == before.dtype
        np.testing.assert_array_equal(np.asarray(array, np.float64), expected)
    if not kinds:
        assert got[2] is None
        return
    for page in completed:
        for i, kind in enumerate(kinds):
            keys = expected_k[page]  # [Hkv, P, D]
            exact = {"mean": keys.sum(axis=1) / page_size, "max": keys.max(axis=1), "min": keys.min(axis=1)}[kind]
            expected_summaries[page, :, i] = reference.round_to(exact, dtype)
    np.testing.assert_array_equal(np.asarray(got[2], np.float64), expected_summaries)


def test_write_pages_without_summaries_or_scores(implementation):
    pool = jnp.zeros((2, 1, 2, 4))
    one = np.ones(1, np.int32)
    got = jitted(
        write_pages,
        pool,
        pool,
        jnp.ones((1, 1, 1, 4)),
        jnp.ones((1, 1, 1, 4)),
        np.array([[1]], np.int32),
        one,
        one,
        implementation=implementation,
    )
    assert got[2] is None and got[3] is None
    assert got[0][1, 0, 0].tolist() == [1] * 4 and float(got[0].sum()) == 4


def test_mean_is_float32_arithmetic(implementation):
    """The mean of 64 values that bfloat16 or float16 sums would get wrong; a float16 sum would overflow."""
    for dtype, values in (("bfloat16", [256.0] + [1.0] * 63), ("float16", [60000.0] * 63 + [59968.0])):
        k = jnp.asarray(values, dtype)[None, :, None, None]
        pool = jnp.zeros((1, 1, 64, 1), dtype)
        summaries = jitted(
            write_pages,
            pool,
            pool,
            k,
            k,
            np.array([[0]], np.int32),
            np.array([64], np.int32),
            np.array([64], np.int32),
            summaries=jnp.zeros((1, 1, 1, 1), dtype),
            summary_kinds=("mean",),
            implementation=implementation,
        )[2]
        assert float(summaries[0, 0, 0, 0]) == reference.round_to(sum(map(float, k.ravel())) / 64, dtype)
