"""CASES.md, Paging: page tables and batches on which paged caches have failed.

Letters: B rows, M pages_per_request, P page_size, Hkv KV heads, D head_dim, N pages in use.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from pallas_kernels import decayed_softmax_scores, envelope_scores, paged_attention, write_pages
from tests.kernel_runs import jit
from tests.test_cases_numbers import decode, empty, prefill
from tests.test_cases_shapes import SCORING, check_attention

STATEFUL = ["h2o_sparse_attention", "gqa_h2o_token_sparse_attention"]  # one keeps summaries, one scores
BAD_PAGES = [16, 10**6, -1, -5, -(2**31), 2**31 - 1]  # of a pool of 16


def policy_and_size(name):
    page_size = 1 if "token" in name else 4
    options = {"top_k": 1, "reserved_bos": 1, "reserved_eos": 1} if name in SCORING else {}
    return h2o_jax.get_policy(name, **options), page_size


def jitted(op, **static):
    """The op, compiled once for all the calls of a test that differ in values only."""
    return _jitted(op, tuple(sorted(static.items())))


@functools.cache
def _jitted(op, static):
    return jit(functools.partial(op, **dict(static)))


def ints(*values):
    return jnp.array(values, jnp.int32)


def owned(table, row):
    pages = np.asarray(table.pages[row])
    return set(pages[pages < table.num_pages].tolist())


def test_double_release():
    config = h2o_jax.CacheConfig(1, 1, 4, 1, 4, 3, 4, jnp.float32)
    state = h2o_jax.init_state(config, h2o_jax.get_policy("dense_attention"))
    table, ok = h2o_jax.extend(state.table, ints(2, 0, 0))
    row_a = jnp.array([True, False, False])
    for _ in range(2):
        table = h2o_jax.release(table, row_a)
        assert int(table.num_free) == 4
        h2o_jax.check_state(dataclasses.replace(state, table=table), config)
    table, ok = h2o_jax.extend(table, ints(0, 2, 2))
    assert ok.all() and int(table.num_free) == 0
    assert owned(table, 1).isdisjoint(owned(table, 2)) and len(owned(table, 1) | owned(table, 2)) == 4
    h2o_jax.check_state(dataclasses.replace(state, table=table), config)


def test_release_of_rows_that_never_held_a_page():
    config = h2o_jax.CacheConfig(1, 1, 4, 1, 4, 3, 4, jnp.float32)
    state = h2o_jax.init_state(config, h2o_jax.get_policy("dense_attention"))
    table, _ = h2o_jax.extend(state.table, ints(0, 3, 0))
    table = h2o_jax.release(table, jnp.array([True, False, True]))
    assert int(table.num_free) == 1 and len(owned(table, 1)) == 3
    h2o_jax.check_state(dataclasses.replace(state, table=table), config)


@pytest.mark.parametrize("nothing", [4, 10**6, -1, -5])
def test_none_is_not_last(nothing, implementation):
    """Padding rows write to "no page" while row 0 lives in the last physical page, and the first."""
    rng = np.random.default_rng(0)
    k_pool, v_pool, summaries = (rng.standard_normal(s).astype(np.float32) for s in [(4, 1, 2, 4)] * 2 + [(4, 1, 3, 4)])
    scores = rng.standard_normal((4, 1, 2)).astype(np.float32)
    pages = ints([3, 0], [nothing, nothing], [nothing, nothing])
    new = jnp.full((3, 2, 1, 4), jnp.nan)
    for lengths, num_tokens in ([(4, 1, 2), (0, 1, 2)], [(4, 3, 4), (0, 2, 2)], [(4, 0, 0), (0, 2, 1)]):
        write = jitted(write_pages, summary_kinds=("mean", "max", "min"), implementation=implementation)
        rows = (pages, ints(*lengths), ints(*num_tokens))
        got = write(k_pool, v_pool, new, new, *rows, summaries=summaries, scores=scores)
        for before, after in zip((k_pool, v_pool, summaries, scores), got, strict=True):
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_padding_rows(name, implementation):
    policy, page_size = policy_and_size(name)
    rng = np.random.default_rng(0)
    lengths, steps = [5 * page_size, 3], 3
    prompt = [rng.standard_normal((2, 5 * page_size, heads, 16)) for heads in (4, 2, 2)]
    new = [rng.standard_normal((steps, 2, heads, 16)) for heads in (4, 2, 2)]
    options = {"policy": policy, "implementation": implementation}

    def run(batch):
        def padded(x, axis):
            shape = list(x.shape)
            shape[axis] = batch - 2
            return jnp.asarray(np.concatenate([x, np.full(shape, np.nan)], axis=axis), jnp.float32)

        config = h2o_jax.CacheConfig(1, 2, 16, page_size, 16, batch, 8, jnp.float32)
        state = h2o_jax.init_state(config, policy)
        none = [0] * (batch - 2)
        state, out = prefill(state, *(padded(x, 0) for x in prompt), ints(*lengths, *none), **options)
        outs = [out]
        for step in range(steps):
            state, out, _ = decode(state, *(padded(x[step], 0) for x in new), ints(1, 1, *none), **options)
            outs.append(out)
        h2o_jax.check_state(state, config)
        taken = sum(-(-(n + steps) // page_size) for n in lengths)
        assert int(state.table.num_free) == 16 - taken
        assert (state.table.pages[2:] == 16).all()
        for out in outs:
            assert (out[2:] == 0).all()
        return [np.asarray(x[:2]) for x in outs] + jax.tree.leaves(jax.tree.map(np.asarray, state.layers))

    for alone, beside in zip(run(2), run(8), strict=True):
        np.testing.assert_array_equal(beside, alone)


@pytest.mark.parametrize("page", BAD_PAGES)
def test_bad_page_id_is_named(page):
    policy, _ = policy_and_size("dense_attention")
    config = h2o_jax.CacheConfig(1, 1, 16, 4, 16, 2, 8, jnp.float32)
    state = h2o_jax.init_state(config, policy)
    table, _ = h2o_jax.extend(state.table, ints(2, 9))
    table = dataclasses.replace(table, pages=table.pages.at[1, 2].set(page))
    with pytest.raises(ValueError, match=rf"row 1, entry 2: expected a page in \[0, 16\), got {page}"):
        h2o_jax.check_state(h2o_jax.PagedState(table, state.layers), config)


@pytest.mark.parametrize("page", BAD_PAGES)
def test_bad_page_id_is_not_read(page, implementation):
    """Entry 1 of 3 is bad: it is no page. All pages that are not of the row hold NaN, the last one included."""
    rng = np.random.default_rng(0)
    pools = np.full((2, 16, 1, 4, 16), np.nan, np.float32)
    summaries = np.full((16, 1, 3, 16), np.nan, np.float32)
    mine = [2, 5]
    pools[:, mine] = rng.standard_normal((2, 2, 1, 4, 16))
    summaries[mine] = rng.standard_normal((2, 1, 3, 16))
    q = rng.standard_normal((1, 2, 16)).astype(np.float32)
    pages = ints([2, page, 5])
    attend = jitted(paged_attention, scale=0.25, implementation=implementation)
    out, lse = attend(q, *pools, pages, ints(12), ints([[0, 1, 2]]), ints([3]))
    keys, values = (x[mine].swapaxes(1, 2).reshape(8, 1, 16).astype(np.float64) for x in pools)
    check_attention(out[0], q[0].astype(np.float64), keys, values, scale=0.25)
    assert np.isfinite(lse).all()

    kinds = ("mean", "max", "min")
    score = jitted(envelope_scores, kinds=kinds, group="max", implementation=implementation)
    scores = score(q, summaries, pages, ints(0), ints(3))
    assert np.isfinite(scores[0, 0, [0, 2]]).all() and np.isneginf(scores[0, 0, 1])

    hh_score = np.full((16, 1, 1), np.nan, np.float32)
    hh_score[mine] = 0
    options = {"decay": 0.5, "scale": 0.25, "group": "mean", "implementation": implementation}
    accumulate = jitted(decayed_softmax_scores, **options)
    after, scores = accumulate(q, pools[0, :, :, :1], hh_score, pages, ints(0), ints(3))
    assert float(scores[0, 0, 0] + scores[0, 0, 2]) == pytest.approx(1) and np.isneginf(scores[0, 0, 1])
    others = np.delete(np.arange(16), mine)
    assert np.isnan(after[others]).all() and np.isfinite(after[jnp.array(mine)]).all()

    before = np.arange(16 * 4 * 16, dtype=np.float32).reshape(16, 1, 4, 16)
    new = jnp.full((1, 4, 1, 16), -1.0)
    write = jitted(write_pages, summary_kinds=kinds, implementation=implementation)
    k_pool, v_pool, after, _ = write(before, before, new, new, pages, ints(8), ints(4), summaries=summaries)
    np.testing.assert_array_equal(k_pool, before)
    np.testing.assert_array_equal(v_pool, before)
    np.testing.assert_array_equal(after, summaries)


def test_stale_rows(implementation):
    policy, page_size = policy_and_size("h2o_sparse_attention")
    rng = np.random.default_rng(0)
    options = {"policy": policy, "implementation": implementation}
    # Row 2 of the second step is admitted anew, so old lengths and pages of every row are stale.
    state = empty(policy, batch=4, pages=-(-302 // page_size), page_size=page_size, num_kv_heads=2)
    for lengths in ([1, 1, 300, 200], [100, 3, 0, 0]):
        prompt = [rng.standard_normal((4, 300, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
        table = h2o_jax.release(state.table, jnp.ones(4, bool))
        state = h2o_jax.PagedState(table, state.layers)
        state, _ = prefill(state, *map(jnp.asarray, prompt), ints(*lengths), **options)
        q, k, v = (rng.standard_normal((4, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
        live = ints(*(int(n > 0) for n in lengths))
        state, out, chosen = decode(state, *map(jnp.asarray, (q, k, v)), live, **options)
        table = state.table
        for row, length in enumerate(lengths):
            if length == 0:
                assert int(table.seq_lens[row]) == 0 and (out[row] == 0).all()
                assert (chosen.counts[row] == 0).all() and (chosen.pages[row] == table.num_pages).all()
                continue
            keys, values = (
                np.concatenate([x[row, :length], y[row][None]]).astype(np.float64)
                for x, y in zip(prompt[1:], (k, v))
            )
            pages = [p[:n] for p, n in zip(np.asarray(chosen.pages[row]), np.asarray(chosen.counts[row]))]
            check_attention(
                out[row], q[row].astype(np.float64), keys, values, page_size=page_size, pages=pages, name=f"row {row}"
            )


@pytest.mark.parametrize("name", STATEFUL)
def test_row_reuse(name, implementation):
    """A row finishes and its successor, in a fuller pool, runs as if it were alone."""
    policy, page_size = policy_and_size(name)
    options = {"policy": policy, "implementation": implementation}
    rng = np.random.default_rng(0)
    prompt = [jnp.asarray(rng.standard_normal((4, 6 * page_size, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
    steps = [[jnp.asarray(rng.standard_normal((4, heads, 16)), jnp.float32) for heads in (4, 2, 2)] for _ in range(9)]

    def rows(*lengths):
        return ints(*(n * page_size for n in lengths))

    state = empty(policy, batch=4, pages=16, page_size=page_size, num_kv_heads=2)
    state, _ = prefill(state, *prompt, rows(5, 6, 5, 3), **options)
    for new in steps[:5]:
        state, _, _ = decode(state, *(10 * x for x in new), **options)
    if "hh_score" in state.layers[0].aux:
        assert np.asarray(state.layers[0].aux["hh_score"][state.table.pages[1, :6]]).any()
    table = h2o_jax.release(state.table, jnp.arange(4) == 1)
    assert int(table.seq_lens[1]) == 0 and (table.pages[1] == table.num_pages).all()
    state, first = prefill(h2o_jax.PagedState(table, state.layers), *prompt, rows(0, 6, 0, 0), **options)
    alone = empty(policy, batch=4, pages=16, page_size=page_size, num_kv_heads=2)
    alone, expected = prefill(alone, *prompt, rows(0, 6, 0, 0), **options)
    np.testing.assert_array_equal(first[1], expected[1])
    for new in steps[5:]:
        state, out, chosen = decode(state, *new, **options)
        alone, expected, chosen_alone = decode(alone, *new, **options)
        np.testing.assert_array_equal(out[1], expected[1])
        for got, want in zip(jax.tree.leaves(chosen), jax.tree.leaves(chosen_alone), strict=True):
            np.testing.assert_array_equal(got[1], want[1])
    config = h2o_jax.CacheConfig(1, 2, 16, page_size, 64, 4, 16, jnp.float32)
    h2o_jax.check_state(state, config)


@pytest.mark.parametrize(
    "name", ["h2o_sparse_attention", "gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"]
)
def test_group_choice(name, implementation):
    _, page_size = policy_and_size(name)
    policy = h2o_jax.get_policy(name, top_k=1, reserved_bos=1, reserved_eos=1)
    keys = np.zeros((5 * page_size, 2, 16), np.float32)
    keys[1 * page_size : 2 * page_size, :, 0] = 4
    keys[3 * page_size : 4 * page_size, :, 1] = 4
    q = np.zeros((1, 8, 16), np.float32)
    q[0, :4, 0] = q[0, 4:, 1] = 1  # heads 0 - 3 point at page 1, heads 4 - 7 at page 3
    q[0, :, 2:] = np.random.default_rng(0).standard_normal((8, 14))
    state = empty(policy, pages=8, page_size=page_size, num_kv_heads=2)
    prompt = jnp.asarray(keys[None, :-1])
    wide = jnp.zeros((1, prompt.shape[1], 8, 16))
    options = {"policy": policy, "implementation": implementation}
    state, _ = prefill(state, wide, prompt, prompt, ints(5 * page_size - 1), **options)
    last = jnp.asarray(keys[-1:])
    _, out, chosen = decode(state, jnp.asarray(q), last, last, **options)
    assert chosen.pages[0].tolist() == [[0, 1, 4], [0, 3, 4]]
    check_attention(
        out[0],
        q[0].astype(np.float64),
        keys.astype(np.float64),
        keys.astype(np.float64),
        page_size=page_size,
        pages=[[0, 1, 4], [0, 3, 4]],
    )
