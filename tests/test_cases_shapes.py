"""CASES.md, Shapes: head sizes, groups and budgets on which sparse decoding has failed.

Letters: B rows, T prompt tokens, M pages_per_request, P page_size, Hq/Hkv heads, G group, D head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from tests import plain, tolerance
from tests.kernel_runs import jit

POLICIES = {
    "h2o_sparse_attention": {"top_k": 1},
    "gqa_h2o_sparse_attention": {"top_k": 1},
    "h2o_token_sparse_attention": {"top_k": 5},
    "gqa_h2o_token_sparse_attention": {"top_k": 5},
    "block_sparse_attention": {"top_k": 1},
    "gqa_quest_sparse_attention": {"top_k": 1},
    "sink_recent_attention": {},
    "dense_attention": {},
}
FEW = ["h2o_sparse_attention", "gqa_h2o_token_sparse_attention", "dense_attention"]  # one of each kind
SCORING = [name for name in POLICIES if name not in ("sink_recent_attention", "dense_attention")]

@dataclasses.dataclass
class Batch:
    """Rows with a prompt each and one more token, and what decoding that token gave.

    Attributes:
        q: [B, Hq, D]; k, v: one [n + 1, Hkv, D] per row, the decoded token last; all float64.
        state: after the step. out: [B, Hq, D] float64. pages, counts: of the selection.
    """

    q: np.ndarray
    k: list
    v: list
    state: h2o_jax.PagedState
    out: np.ndarray
    pages: np.ndarray
    counts: np.ndarray


def decode_after(
    prompts,
    policy,
    implementation,
    *,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=4,
    pages_per_request=8,
    num_pages=None,
    dtype="float32",
    seed=0,
):
    """Caches prompts of the given lengths (-1: a row that stays empty) and decodes one token after each."""
    rng, batch = np.random.default_rng(seed), len(prompts)
    config = h2o_jax.CacheConfig(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages or batch * pages_per_request,
        max_requests=batch,
        pages_per_request=pages_per_request,
        dtype=dtype,
    )
    lengths, live, rows = np.maximum(prompts, 0), np.asarray(prompts) >= 0, np.arange(batch)

    def draw(heads):
        return reference.round_to(rng.standard_normal((batch, max(lengths) + 1, heads, head_dim)), dtype)

    q, k, v = draw(num_q_heads), draw(num_kv_heads), draw(num_kv_heads)
    state, out, chosen = _decode_after(
        *(jnp.asarray(x[:, :-1], dtype) for x in (k, v)),
        jnp.asarray(lengths, jnp.int32),
        *(jnp.asarray(x[rows, lengths], dtype) for x in (q, k, v)),
        jnp.asarray(live),
        config=config,
        policy=policy,
        implementation=implementation,
    )
    h2o_jax.check_state(state, config)
    return Batch(
        q=q[rows, lengths],
        k=[k[row, : lengths[row] + live[row]] for row in rows],
        v=[v[row, : lengths[row] + live[row]] for row in rows],
        state=state,
        out=np.asarray(out, np.float64),
        pages=np.asarray(chosen.pages),
        counts=np.asarray(chosen.counts),
    )


@functools.partial(jit, static_argnames=("config", "policy", "implementation"))
def _decode_after(k, v, lengths, new_q, new_k, new_v, live, *, config, policy, implementation):
    options = {"policy": policy, "implementation": implementation}
    state = h2o_jax.init_state(config, policy)
    table, _ = h2o_jax.extend(state.table, lengths)
    cache = h2o_jax.write_tokens(state.layers[0], table, k, v, lengths, **options)
    grow = live.astype(jnp.int32)
    table, _ = h2o_jax.extend(table, grow)
    cache = h2o_jax.write_tokens(cache, table, new_k[:, None], new_v[:, None], grow, **options)
    cache, chosen = h2o_jax.select_pages(cache, table, new_q, **options)
    out = h2o_jax.attend(cache, table, new_q, chosen, implementation=implementation)
    return h2o_jax.PagedState(table, (cache,)), out.astype(jnp.float32), chosen


def check_attention(got, q, keys, values, *, dtype="float32", page_size=1, pages=None, scale=None, name="out"):
    """Asserts that one row's output is float64 attention over the valid tokens of its pages (None: all).

    Args:
        got: [Hq, D]. q: [Hq, D]. keys, values: [n, Hkv, D], float64. pages: a list per KV head.
    """
    length, num_kv_heads = keys.shape[:2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = np.ones((num_kv_heads, length), bool)
    if pages is not None:
        for head, mine in enumerate(pages):
            chosen[head] = np.isin(np.arange(length) // page_size, mine)
    exact, group = np.zeros(q.shape), q.shape[0] // num_kv_heads
    for index, query in enumerate(q):
        head = index // group
        mine = chosen[head]
        exact[index], _ = reference.attend(query, keys[mine, head], values[mine, head], scale)
    spare = -length % 64  # so that few shapes are compiled
    keys, values = (np.pad(x, ((0, spare), (0, 0), (0, 0))) for x in (keys, values))
    arrays = [jnp.asarray(x, dtype)[None] for x in (q, keys, values)]
    arrays += [np.pad(chosen, ((0, 0), (0, spare)))[None], scale]
    plains = [attention(*arrays)[0] for attention in (plain.attention, plain.attention_in_sequence)]
    tolerance.assert_as_good_as_plains(got, exact, plains, dtype, name=name)


def check_dense(batch, *, dtype="float32"):
    """Asserts that every row's output is dense attention, and 0 where the row is empty."""
    for row, (q, k, v) in enumerate(zip(batch.q, batch.k, batch.v)):
        if len(k) == 0:
            assert (batch.out[row] == 0).all()
        else:
            check_attention(batch.out[row], q, k, v, dtype=dtype, name=f"row {row}")


def check_chosen(batch, page_size, *, dtype="float32"):
    """Asserts that every row's output is attention over the pages it chose."""
    for row, (q, k, v) in enumerate(zip(batch.q, batch.k, batch.v)):
        pages = [mine[:count] for mine, count in zip(batch.pages[row], batch.counts[row])]
        check_attention(
            batch.out[row], q, k, v, dtype=dtype, page_size=page_size, pages=pages, name=f"row {row}"
        )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dim(head_dim, implementation):
    dtype = {64: "bfloat16", 80: "float16", 128: "bfloat16"}.get(head_dim, "float32")
    sizes = {"num_q_heads": 8, "head_dim": head_dim, "page_size": 16, "pages_per_request": 4, "dtype": dtype}
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=1, reserved_bos=0, reserved_eos=1)
    batch = decode_after([36, 17, 4], policy, implementation, **sizes)
    assert batch.counts.tolist() == [[2, 2], [2, 2], [1, 1]]
    check_chosen(batch, 16, dtype=dtype)
    for row in (1, 2):  # within the budget
        check_attention(batch.out[row], batch.q[row], batch.k[row], batch.v[row], dtype=dtype)


@pytest.mark.parametrize("heads", [(32, 1), (48, 2), (64, 2)], ids=lambda x: f"{x[0]}q{x[1]}kv")
def test_wide_group(heads, implementation):
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=1, reserved_eos=1)
    batch = decode_after([21, 3, 11], policy, implementation, num_q_heads=heads[0], num_kv_heads=heads[1])
    check_chosen(batch, 4)
    check_attention(batch.out[2], batch.q[2], batch.k[2], batch.v[2])  # 3 pages, all of them read


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("h2o_sparse_attention", 5),
        ("gqa_h2o_sparse_attention", 3),
        ("h2o_token_sparse_attention", 7),
        ("gqa_h2o_token_sparse_attention", 6),
        ("dense_attention", 1),
    ],
)
def test_odd_group(name, group, implementation):
    page_size = 1 if "token" in name else 4
    policy = h2o_jax.get_policy(name, **POLICIES[name])
    sizes = {"num_q_heads": 2 * group, "page_size": page_size, "pages_per_request": 32 // page_size}
    batch = decode_after([5, 21, 30, 3], policy, implementation, **sizes)
    check_chosen(batch, page_size)
    for row in (0, 3):  # within the budget
        check_attention(batch.out[row], batch.q[row], batch.k[row], batch.v[row])


def test_odd_group_that_does_not_divide(implementation):
    policy = h2o_jax.get_policy("dense_attention")
    with pytest.raises(ValueError, match="q: expected a multiple of num_kv_heads = 2 query heads, got 3"):
        decode_after([5], policy, implementation, num_q_heads=3)


@pytest.mark.parametrize("name", FEW)
def test_budget_at_least_the_length(name, implementation):
    page_size = 1 if "token" in name else 16
    budget = 50 if page_size == 1 else 4
    policy = h2o_jax.get_policy(name, **({} if name == "dense_attention" else {"top_k": budget - 3}))
    tokens = [49, 50, 0, page_size * budget - 1]
    batch = decode_after(
        tokens if page_size == 16 else [49, 30, 0],
        policy,
        implementation,
        page_size=page_size,
        pages_per_request=64 // page_size,
    )
    check_dense(batch)
    used = -(-np.array([len(k) for k in batch.k]) // page_size)
    assert batch.counts.tolist() == [[n, n] for n in used.tolist()]
    for row, n in enumerate(used):
        assert (batch.pages[row, :, :n] == np.arange(n)).all()
        # With the dense policy the budget is the row, whatever its length.
        assert (batch.pages[row, :, n:] == batch.state.table.num_pages).all()
    if "hh_score" in batch.state.layers[0].aux:
        assert not np.asarray(batch.state.layers[0].aux["hh_score"]).any()  # nothing was scored


@pytest.mark.parametrize("name", FEW)
def test_fewer_pages_than_k(name, implementation):
    page_size = 1 if "token" in name else 4
    options = {"top_k": 16} if name in SCORING else {}
    policy = h2o_jax.get_policy(name, **options)
    batch = decode_after([0, 40 * page_size - 1], policy, implementation, page_size=page_size, pages_per_request=40)
    row = (slice(0, 1),)
    check_dense(Batch(batch.q[row], batch.k[:1], batch.v[:1], None, batch.out[row], None, None))
    assert (batch.counts[0] == 1).all() and (batch.counts[1] == min(40, batch.pages.shape[2])).all()
    assert (batch.pages[0, :, 0] == 0).all() and (batch.pages[0, :, 1:] == 80).all()
    check_chosen(batch, page_size)


def test_fewer_pages_than_k_in_the_whole_pool(implementation):
    # Rows may name more logical pages than the pool has, so that NO_PAGE = 8 looks like a logical page.
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=16)
    batch = decode_after([0, 20], policy, implementation, pages_per_request=40, num_pages=8)
    assert (batch.pages[0, :, 1:] == 8).all()
    check_dense(batch)


def test_k_beyond_the_row(implementation):
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=100)
    batch = decode_after([30, 2], policy, implementation, pages_per_request=8)
    check_dense(batch)
    assert batch.pages.shape == (2, 2, 103)


def test_one_page_and_one_row(implementation):
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=1)
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "pages_per_request": 1, "num_pages": 1}
    check_dense(decode_after([3], policy, implementation, **sizes))


def test_nothing_runs_eagerly_before_the_checks():
    """A head count that does not divide is refused while tracing, when no value exists yet."""
    config = h2o_jax.CacheConfig(1, 2, 8, 4, 8, 1, 4, jnp.float32)
    policy = h2o_jax.get_policy("dense_attention")
    state = jax.eval_shape(lambda: h2o_jax.init_state(config, policy))
    q, k = jax.ShapeDtypeStruct((1, 3, 8), jnp.float32), jax.ShapeDtypeStruct((1, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match="query heads, got 3"):
        jax.eval_shape(
            lambda s, q, k: h2o_jax.decode_attention(s.layers[0], s.table, q, k, k, policy=policy), state, q, k
        )
