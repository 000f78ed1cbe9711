"""CASES.md, Numbers: inputs on which scores, ranges and positions have gone wrong.

Letters: B rows, T prompt tokens, P page_size, Hq/Hkv heads, D head_dim, N pages in use.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from pallas_kernels import paged_attention
from tests import plain, tolerance
from tests.test_cases_shapes import FEW, POLICIES, SCORING, check_attention

TOKEN_POLICIES = [name for name in SCORING if "token" in name]


def empty(policy, *, batch=1, pages=16, page_size=4, num_kv_heads=1, head_dim=16, dtype="float32"):
    """An empty state in which each row can hold `pages` pages."""
    config = h2o_jax.CacheConfig(1, num_kv_heads, head_dim, page_size, batch * pages, batch, pages, dtype)
    return h2o_jax.init_state(config, policy)


@functools.partial(jax.jit, static_argnames=("policy", "implementation"))
def prefill(state, q, k, v, lengths, *, policy, implementation):
    table, ok = h2o_jax.extend(state.table, lengths)
    cache, out = h2o_jax.prefill_attention(
        state.layers[0], table, q, k, v, lengths, policy=policy, implementation=implementation
    )
    return h2o_jax.PagedState(table, (cache,)), out


@functools.partial(jax.jit, static_argnames=("policy", "implementation"))
def decode(state, q, k, v, num_tokens=1, *, policy, implementation):
    """One step of all rows, or of those whose `num_tokens` is 1: the state, the output and the selection."""
    options = {"policy": policy, "implementation": implementation}
    num_tokens = jnp.broadcast_to(jnp.asarray(num_tokens, jnp.int32), q.shape[:1])
    table, _ = h2o_jax.extend(state.table, num_tokens)
    cache = h2o_jax.write_tokens(state.layers[0], table, k[:, None], v[:, None], num_tokens, **options)
    cache, chosen = h2o_jax.select_pages(cache, table, q, **options)
    out = h2o_jax.attend(cache, table, q, chosen, implementation=implementation)
    return h2o_jax.PagedState(table, (cache,)), out, chosen


def filled_row(k, v, policy, implementation, **sizes):
    """A state of one row that holds the given tokens, [T, Hkv, D]."""
    k, v = jnp.asarray(k)[None], jnp.asarray(v)[None]
    state = empty(policy, num_kv_heads=k.shape[2], head_dim=k.shape[3], dtype=k.dtype, **sizes)
    return _fill(state, k, v, policy=policy, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("policy", "implementation"))
def _fill(state, k, v, *, policy, implementation):
    lengths = jnp.array([k.shape[1]], jnp.int32)
    table, _ = h2o_jax.extend(state.table, lengths)
    cache = h2o_jax.write_tokens(
        state.layers[0], table, k, v, lengths, policy=policy, implementation=implementation
    )
    return h2o_jax.PagedState(table, (cache,))


@pytest.mark.parametrize(
    ("name", "score_dtype", "decay", "expected"),
    [
        ("h2o_token_sparse_attention", "float32", 1.0, 5000),
        ("h2o_token_sparse_attention", "float32", 0.99, 100),
        ("h2o_token_sparse_attention", "float32", 0.0, 1),
        ("gqa_h2o_token_sparse_attention", "float32", 0.999, 993.2782),
        ("h2o_token_sparse_attention", "bfloat16", 1.0, 256),
        ("h2o_token_sparse_attention", "bfloat16", 0.99, None),
        ("gqa_h2o_token_sparse_attention", "bfloat16", 0.999, 256),
    ],
)
def test_freeze(name, score_dtype, decay, expected, implementation):
    options = {"top_k": 1, "reserved_bos": 1, "reserved_eos": 1}
    policy = h2o_jax.get_policy(name, decay=decay, score_dtype=score_dtype, **options)
    keys = np.full((8, 1, 4), -100, np.float32)
    keys[1] = 100  # the first token of the window gets all of its attention
    state = filled_row(keys, keys, policy, implementation, page_size=1, pages=8)
    table, q = state.table, jnp.ones((1, 2, 4))

    @jax.jit
    def run(cache):
        def step(_, cache):
            return h2o_jax.select_pages(cache, table, q, policy=policy, implementation=implementation)[0]

        return h2o_jax.select_pages(
            jax.lax.fori_loop(0, 4999, step, cache), table, q, policy=policy, implementation=implementation
        )

    cache, chosen = run(state.layers[0])
    got = float(chosen.scores[0, 0, 1])
    assert got == float(cache.aux["hh_score"][table.pages[0, 1], 0, 0])
    assert chosen.pages[0, 0].tolist() == [0, 1, 7]
    if score_dtype == "float32":
        assert got == pytest.approx(expected, rel=1e-4)
        return
    frozen = 0.0
    for _ in range(5000):
        frozen = reference.decayed_update(frozen, 1.0, decay, score_dtype)
    assert got == frozen
    # A decay rounded to bfloat16 as well would stop at 64 for 0.99; the undecayed sum stops at 256.
    assert got == expected if expected else got > 70


@pytest.mark.parametrize("name", ["h2o_sparse_attention", "gqa_quest_sparse_attention", *TOKEN_POLICIES])
def test_newcomer(name, implementation):
    page_size = 1 if "token" in name else 4
    options = {"decay": 0.98} if page_size == 1 else {}
    policy = h2o_jax.get_policy(name, top_k=1, reserved_bos=1, reserved_eos=1, **options)
    rng = np.random.default_rng(0)
    keys = 0.3 * rng.standard_normal((48, 1, 16))
    needle = np.zeros(16)
    needle[3] = 8.0
    keys[16] = needle  # the key of step 9, after a prompt of 8
    queries = 0.3 * rng.standard_normal((48, 1, 2, 16))
    queries[17:] += needle / 2  # matched by every query from step 10 on
    state = filled_row(
        keys[:8].astype(np.float32),
        keys[:8].astype(np.float32),
        policy,
        implementation,
        page_size=page_size,
        pages=48 // page_size,
    )
    for position in range(8, 48):
        q, k = jnp.asarray(queries[position], jnp.float32), jnp.asarray(keys[None, position], jnp.float32)
        state, _, chosen = decode(state, q, k, k, policy=policy, implementation=implementation)
        pages = chosen.pages[0, 0, : chosen.counts[0, 0]].tolist()
        assert position // page_size in pages, "the page of the newest token is always read"
        if position >= 16 + page_size + 3:
            assert 16 // page_size in pages, f"the newcomer is not read at position {position}"
            scores = chosen.scores[0, 0]
            assert (scores[1 : 8 // page_size] < scores[16 // page_size]).all()


def test_unchosen_is_not_moved(implementation):
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=1)
    rng = np.random.default_rng(0)
    raw, values = rng.standard_normal((2, 41, 2, 16))
    raw_q = rng.standard_normal((4, 16))

    def turned(x, position):
        return np.stack([reference.rope(head, position) for head in x])

    keys = np.stack([turned(x, i) for i, x in enumerate(raw)])
    q = turned(raw_q, 40)
    # Page 3 is what the queries of both KV heads look for; pages 1 and 2 are never chosen.
    keys[24:32] = np.repeat(8 * q.reshape(2, 2, 16).mean(axis=1)[None], 8, axis=0)
    keys, values, q = (reference.round_to(x, "float32") for x in (keys, values, q))
    prompt = [x[:40].astype(np.float32) for x in (keys, values)]
    state = filled_row(*prompt, policy, implementation, page_size=8, pages=8)
    new = [jnp.asarray(x, jnp.float32)[None] for x in (q, keys[40], values[40])]
    state, out, chosen = decode(state, *new, policy=policy, implementation=implementation)
    read = [0, 3, 4, 5]
    assert chosen.pages[0, :, :4].tolist() == [read, read]
    check_attention(out[0], q, keys, values, page_size=8, pages=[read, read])

    cache, pages = state.layers[0], np.asarray(state.table.pages[0])
    stored = np.asarray(cache.k)[pages[:6]].swapaxes(1, 2).reshape(48, 2, 16)[:41]
    np.testing.assert_array_equal(stored, keys.astype(np.float32))
    # Later the pages are read after all, at the positions they have always had.
    everything = h2o_jax.get_policy("dense_attention")
    _, chosen = h2o_jax.select_pages(
        dataclasses.replace(cache, aux={}, summary_kinds=()), state.table, new[0], policy=everything
    )
    out = h2o_jax.attend(cache, state.table, new[0], chosen, implementation=implementation)
    check_attention(out[0], q, keys, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty_splits(dtype, implementation):
    page_size, head_dim, num_logical = 4, 16, 16  # a row of 16 pages is cut into splits; most are empty
    lengths = [0, 1, page_size, 3 * page_size + 1, num_logical * page_size]
    rng = np.random.default_rng(0)
    num_pages = len(lengths) * num_logical
    pages = rng.permutation(num_pages).reshape(len(lengths), num_logical)
    pools = reference.round_to(rng.standard_normal((2, num_pages, 2, page_size, head_dim)), dtype)
    q = reference.round_to(rng.standard_normal((len(lengths), 4, head_dim)), dtype)
    counts = -(-np.array(lengths) // page_size)
    for row, length in enumerate(lengths):  # poison all that is not a token
        pools[:, pages[row, counts[row] :]] = np.nan
        if length % page_size:
            pools[:, pages[row, counts[row] - 1], :, length % page_size :] = np.nan
        pages[row, counts[row] :] = num_pages
    out, lse = paged_attention(
        *(jnp.asarray(x, dtype) for x in (q, *pools)),
        jnp.asarray(pages, jnp.int32),
        jnp.array(lengths, jnp.int32),
        jnp.broadcast_to(jnp.arange(num_logical, dtype=jnp.int32), (len(lengths), 2, num_logical)),
        jnp.broadcast_to(jnp.asarray(counts, jnp.int32)[:, None], (len(lengths), 2)),
        scale=0.25,
        implementation=implementation,
    )
    out, lse = np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse)
    assert (out[0] == 0).all() and np.isneginf(lse[0]).all()
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    for row, length in enumerate(lengths[1:], 1):
        keys, values = (x[pages[row, : counts[row]]].swapaxes(1, 2).reshape(-1, 2, head_dim)[:length] for x in pools)
        check_attention(out[row], q[row], keys, values, dtype=dtype, scale=0.25, name=f"length {length}")
        exact = [reference.attend(q[row, h], keys[:, h // 2], values[:, h // 2], 0.25)[1] for h in range(4)]
        np.testing.assert_allclose(lse[row], exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", FEW)
def test_poison(name, implementation):
    page_size = 1 if "token" in name else 4
    options = {"top_k": 1, "reserved_bos": 0, "reserved_eos": 1} if name in SCORING else POLICIES[name]
    policy = h2o_jax.get_policy(name, **options)
    lengths = [1, page_size + 1, 2 * page_size + 1]
    rng = np.random.default_rng(0)
    new = [jnp.asarray(rng.standard_normal((3, 3, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
    prompt = [jnp.asarray(rng.standard_normal((3, 9, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
    options = {"policy": policy, "implementation": implementation}

    def run(poison):
        state = empty(policy, batch=3, pages=8, page_size=page_size, num_kv_heads=2)
        state = h2o_jax.PagedState(state.table, jax.tree.map(lambda x: jnp.full_like(x, poison), state.layers))
        padding = jnp.arange(9) >= jnp.array(lengths)[:, None]
        poisoned = [jnp.where(padding[..., None, None], poison, x) for x in prompt]
        state, out = prefill(state, *poisoned, jnp.array(lengths, jnp.int32), **options)
        results = [out]
        for i in range(3):
            state, out, chosen = decode(state, *(x[:, i] for x in new), **options)
            results += [out, chosen.pages, chosen.counts, chosen.scores]
        cache, mine = state.layers[0], state.table.pages
        for row, length in enumerate(lengths):
            full = mine[row, : (length + 3) // page_size]
            results += [x[full] for x in h2o_jax.page_summaries(cache).values()]
            if "hh_score" in cache.aux:
                results.append(cache.aux["hh_score"][full])
        return [np.asarray(x) for x in results]

    clean = run(0.0)
    assert not any(np.isnan(x).any() for x in clean)
    for poison in (math.nan, math.inf, -math.inf):
        for expected, got in zip(clean, run(poison), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["h2o_sparse_attention", "gqa_h2o_sparse_attention", *TOKEN_POLICIES])
def test_fp16_range(name, implementation):
    page_size = 1 if "token" in name else 4
    policy = h2o_jax.get_policy(name, top_k=1, reserved_bos=1, reserved_eos=1)
    keys = np.full((31, 1, 128), 256, np.float16)
    values = np.random.default_rng(0).standard_normal((31, 1, 128)).astype(np.float16)
    sizes = {"page_size": page_size, "pages": 32 // page_size}
    state = filled_row(keys[:30], values[:30], policy, implementation, **sizes)
    q = jnp.full((1, 2, 128), 256, jnp.float16)  # scaled logit 741,455; fp16 ends at 65,504
    new = [q, jnp.asarray(keys[30:]), jnp.asarray(values[30:])]
    state, out, chosen = decode(state, *new, policy=policy, implementation=implementation)
    read = chosen.pages[0, 0, : chosen.counts[0, 0]]
    tokens = np.isin(np.arange(31) // page_size, read)
    mean = values[tokens, 0].astype(np.float64).mean(axis=0)
    for head in range(2):
        np.testing.assert_allclose(np.asarray(out[0, head], np.float64), mean, rtol=0, atol=1e-3)
    used = 31 if page_size == 1 else 8
    both = 2 if "h2o_sparse" in name else 1  # mean and envelope
    expected = 1 / (used - 2) if page_size == 1 else both * 256.0 * 256.0 * 128
    np.testing.assert_allclose(chosen.scores[0, 0, 1 : used - 1], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp16_range_of_prefill(dtype, implementation):
    """float16 queries: neither their logits nor, where the pool is wider, its keys and values overflow."""
    policy = h2o_jax.get_policy("dense_attention")
    state = empty(policy, head_dim=128, dtype=dtype)
    values = np.random.default_rng(0).standard_normal((1, 6, 1, 128))
    size = 256 if dtype == "float16" else 2.0**17
    q = jnp.full((1, 6, 2, 128), 256 if dtype == "float16" else 1.0, jnp.float16)
    arrays = [jnp.full((1, 6, 1, 128), size, dtype), jnp.asarray(values, dtype)]
    _, out = prefill(
        state, q, *arrays, jnp.array([6], jnp.int32), policy=policy, implementation=implementation
    )
    assert out.dtype == jnp.float16
    mean = np.asarray(arrays[1].astype(jnp.float32), np.float64).mean(axis=1)
    np.testing.assert_allclose(np.asarray(out[:, -1, 1], np.float64), mean[:, 0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("best", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in SCORING if name != "gqa_h2o_sparse_attention"])
def test_tf32(name, best, implementation):
    page_size = 1 if "token" in name else 2
    policy = h2o_jax.get_policy(name, top_k=1, reserved_bos=1, reserved_eos=1)
    keys = np.ones((5 * page_size, 1, 128), np.float32)
    keys[best * page_size : (best + 1) * page_size] = 1 + 2.0**-12  # rounded away by TF32 and bfloat16
    state = filled_row(keys[:-1], keys[:-1], policy, implementation, page_size=page_size, pages=8)
    last = jnp.asarray(keys[-1:])
    _, _, chosen = decode(
        state, jnp.ones((1, 2, 128)), last, last, policy=policy, implementation=implementation
    )
    assert chosen.pages[0, 0].tolist() == [0, best, 4]
    if name == "block_sparse_attention":
        assert chosen.scores[0, 0, 1:4].tolist() == [128.03125 if page == best else 128.0 for page in (1, 2, 3)]


@pytest.mark.parametrize("prompt", [True, False], ids=["prefill", "decode"])
def test_tf32_of_attention(prompt, implementation):
    # 1 + 2^-12 against 1, times 4096: logits 128 apart, or equal once the keys are rounded.
    policy = h2o_jax.get_policy("dense_attention")
    keys = np.ones((4, 1, 128), np.float32)
    keys[1] = 1 + 2.0**-12
    values = np.zeros((4, 1, 128), np.float32)
    values[1] = 1
    options = {"policy": policy, "scale": 4096.0, "implementation": implementation}
    if prompt:
        state, arrays, num_tokens = empty(policy, head_dim=128), [np.ones_like(keys), keys, values], 4
    else:
        state = filled_row(keys[:3], values[:3], policy, implementation)
        arrays, num_tokens = [np.ones((1, 128), np.float32), keys[3], values[3]], 1

    @jax.jit
    def run(state, q, k, v):
        lengths = jnp.array([num_tokens], jnp.int32)
        table, _ = h2o_jax.extend(state.table, lengths)
        if prompt:
            return h2o_jax.prefill_attention(state.layers[0], table, q, k, v, lengths, **options)[1][:, -1]
        return h2o_jax.decode_attention(state.layers[0], table, q, k, v, **options)[1]

    np.testing.assert_array_equal(run(state, *(jnp.asarray(x)[None] for x in arrays)), 1)


@pytest.mark.parametrize("name", ["gqa_h2o_token_sparse_attention", "dense_attention"])
def test_padded_scale(name, implementation):
    options = {"top_k": 2, "reserved_bos": 1, "reserved_eos": 1} if name in TOKEN_POLICIES else {}
    policy = h2o_jax.get_policy(name, **options)
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 9, 1, 80)).astype(np.float32)
    q = rng.standard_normal((1, 80)).astype(np.float32)
    state = filled_row(keys[:8], values[:8], policy, implementation, page_size=1)
    new = [jnp.asarray(x)[None] for x in (q, keys[8], values[8])]
    state, out, chosen = decode(state, *new, policy=policy, implementation=implementation)
    pages = [chosen.pages[0, 0, : chosen.counts[0, 0]]]
    keys, values, q = (x.astype(np.float64) for x in (keys, values, q))
    read = [x[np.asarray(pages[0])] for x in (keys, values)]
    exact, _ = reference.attend(q[0], *(list(x[:, 0]) for x in read), 80**-0.5)
    arrays = [jnp.asarray(x, jnp.float32)[None] for x in (q, *read)]
    arrays += [np.ones((1, 1, len(read[0])), bool), 80**-0.5]
    plains = [attention(*arrays)[0, 0] for attention in (plain.attention, plain.attention_in_sequence)]
    tolerance.assert_as_good_as_plains(out[0, 0], exact, plains, "float32", name="out")
    if name in TOKEN_POLICIES:
        exact = reference.softmax([80**-0.5 * float(q[0] @ key[0]) for key in keys[1:8]])
        np.testing.assert_allclose(chosen.scores[0, 0, 1:8], exact, rtol=1e-5)
        padded = reference.softmax([128**-0.5 * float(q[0] @ key[0]) for key in keys[1:8]])
        assert not np.allclose(exact, padded, rtol=1e-2)


def test_padded_scale_of_prefill(implementation):
    policy = h2o_jax.get_policy("dense_attention")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 1, 80)).astype(np.float32)
    _, out = prefill(
        empty(policy, head_dim=80),
        *(jnp.asarray(x) for x in (q, k, v)),
        jnp.array([6], jnp.int32),
        policy=policy,
        implementation=implementation,
    )
    q, k, v = (x[0].astype(np.float64) for x in (q, k, v))
    for token in range(6):
        check_attention(out[0, token], q[token], k[: token + 1], v[: token + 1], scale=80**-0.5)
