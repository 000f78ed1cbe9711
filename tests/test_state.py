"""Fresh states, the summaries they hold, and `check_state` on every kind of corruption."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import memory
from h2o_jax import state as state_module

CONFIG = h2o_jax.CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    page_size=4,
    num_pages=10,
    max_requests=3,
    pages_per_request=5,
    dtype=jnp.float32,
)
TOKEN_CONFIG = dataclasses.replace(CONFIG, page_size=1)


def policy(name="h2o_sparse_attention", **options):
    return h2o_jax.get_policy(name, **({"top_k": 1} | options))


@pytest.fixture
def state():
    """Rows of 9, 0 and 5 tokens: pages 3, 0 and 2, so that 5 of 10 are free."""
    fresh = h2o_jax.init_state(CONFIG, policy())
    table, ok = h2o_jax.extend(fresh.table, jnp.array([9, 0, 5], jnp.int32))
    assert ok.all()
    state = dataclasses.replace(fresh, table=table)
    h2o_jax.check_state(state, CONFIG)
    return state


def test_init_state():
    state = h2o_jax.init_state(CONFIG, policy(dense_layers=(1,)))
    h2o_jax.check_state(state, CONFIG)
    table = state.table
    assert table.pages.shape == (3, 5) and (table.pages == 10).all()
    assert table.seq_lens.tolist() == [0, 0, 0] and table.pages_in_use.tolist() == [0, 0, 0]
    assert sorted(table.free_pages.tolist()) == list(range(10)) and int(table.num_free) == 10
    assert (table.num_pages, table.page_size) == (10, 4)
    sparse, dense = state.layers
    assert sparse.k.shape == sparse.v.shape == (10, 2, 4, 8) and sparse.k.dtype == jnp.float32
    assert sparse.summary_kinds == ("mean", "max", "min") and dense.summary_kinds == ()
    assert {name: x.shape for name, x in sparse.aux.items()} == {"summaries": (10, 2, 3, 8)}
    assert dense.aux == {}


@pytest.mark.parametrize(
    ("name", "aux"),
    [
        ("h2o_sparse_attention", {"summaries": (10, 2, 3, 8)}),
        ("gqa_h2o_sparse_attention", {"summaries": (10, 2, 3, 8)}),
        ("block_sparse_attention", {"summaries": (10, 2, 1, 8)}),
        ("gqa_quest_sparse_attention", {"summaries": (10, 2, 2, 8)}),
        ("h2o_token_sparse_attention", {"hh_score": (10, 2, 1)}),
        ("gqa_h2o_token_sparse_attention", {"hh_score": (10, 2, 1)}),
    ],
)
def test_init_state_declares_what_the_policy_needs(name, aux):
    config = TOKEN_CONFIG if "token" in name else CONFIG
    for layer in h2o_jax.init_state(config, policy(name)).layers:
        assert {key: x.shape for key, x in layer.aux.items()} == aux
        assert all((x == 0).all() for x in layer.aux.values())


def test_dtypes_of_a_fresh_state():
    config = dataclasses.replace(TOKEN_CONFIG, dtype="bfloat16")
    assert config.dtype == jnp.bfloat16
    layer = h2o_jax.init_state(config, policy("h2o_token_sparse_attention")).layers[0]
    assert (layer.k.dtype, layer.v.dtype, layer.aux["hh_score"].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    narrow = policy("h2o_token_sparse_attention", score_dtype="bfloat16")
    assert h2o_jax.init_state(config, narrow).layers[0].aux["hh_score"].dtype == jnp.bfloat16
    assert h2o_jax.CacheConfig(1, 1, 8, 4, 10, 3, 5).dtype == jnp.bfloat16


def test_init_state_refuses_a_dense_layer_that_does_not_exist():
    with pytest.raises(ValueError, match=r"dense_layers: expected layers below num_layers = 2, got \[2\]"):
        h2o_jax.init_state(CONFIG, policy(dense_layers=(0, 2)))


def test_a_fresh_state_can_be_made_under_jit():
    state = jax.jit(lambda: h2o_jax.init_state(CONFIG, policy()))()
    h2o_jax.check_state(state, CONFIG)


def test_a_state_is_a_pytree():
    state = h2o_jax.init_state(CONFIG, policy())
    leaves, tree = jax.tree.flatten(state)
    assert len(leaves) == 4 + 2 * 3
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, h2o_jax.PagedState) and again.table.page_size == 4
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".table.pages" in names and ".layers[1].aux['summaries']" in names
    jax.tree.map(lambda x: None, state)  # trees are rebuilt with what is no array
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.table.num_free = 3


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("h2o_sparse_attention", ("mean", "max", "min")),
        ("block_sparse_attention", ("mean",)),
        ("gqa_quest_sparse_attention", ("max", "min")),
        ("dense_attention", ()),
    ],
)
def test_page_summaries(name, kinds):
    k = jnp.asarray(np.random.default_rng(0).standard_normal((3, 9, 2, 8)), jnp.float32)
    chosen = policy(name)

    @jax.jit
    def write(k):
        lengths = jnp.array([9, 0, 5], jnp.int32)
        state = h2o_jax.init_state(CONFIG, chosen)
        table, _ = h2o_jax.extend(state.table, lengths)
        return h2o_jax.write_tokens(state.layers[0], table, k, k, lengths, policy=chosen), table.pages

    cache, pages = write(k)
    found = h2o_jax.page_summaries(cache)
    assert tuple(found) == kinds
    for kind, array in found.items():
        assert array.shape == (10, 2, 8) and array.dtype == jnp.float32
        array = np.asarray(array)[np.asarray(pages)[[0, 0, 2, 0, 2], [0, 1, 0, 2, 1]]]
        tokens = np.asarray(k, np.float64)[[0, 0, 2]].reshape(3, 9, 2, 8)
        tokens = np.stack([tokens[0, :4], tokens[1, 4:8], tokens[2, :4]])
        exact = {"mean": np.mean, "max": np.max, "min": np.min}[kind](tokens, axis=1)
        np.testing.assert_allclose(array[:3], exact, rtol=0, atol=1e-6)
        assert (array[3:] == 0).all(), "a page that is not complete keeps what it had"


def put(name, *index):
    """A corruption: sets one entry of an array of the table."""

    def corrupt(state, value):
        array = getattr(state.table, name)
        array = array.at[index].set(value) if index else jnp.asarray(value, array.dtype)
        return dataclasses.replace(state, table=dataclasses.replace(state.table, **{name: array}))

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "value", "message"),
    [
        (put("pages", 2, 1), 10, r"pages, row 2, entry 1: expected a page in \[0, 10\), got 10"),
        (put("pages", 0, 0), -1, r"pages, row 0, entry 0: expected a page in \[0, 10\), got -1"),
        (put("pages", 0, 2), -(2**31), "pages, row 0, entry 2: .* got -2147483648"),
        (put("pages", 0, 3), 7, "pages, row 0, entry 3: expected NO_PAGE = 10 past 3 pages, got 7"),
        (put("pages", 1, 0), -1, "pages, row 1, entry 0: expected NO_PAGE = 10 past 0 pages, got -1"),
        (put("pages", 2, 4), 11, "pages, row 2, entry 4: expected NO_PAGE = 10 past 2 pages, got 11"),
        (put("pages", 2, 1), 0, "pages, row 2, entry 1: page 0 is already owned by row 0"),
        (put("pages", 0, 1), 0, "pages, row 0, entry 1: page 0 is already owned by row 0"),
        (put("seq_lens", 1), -1, "seq_lens, row 1: expected 0 to 20, got -1"),
        (put("seq_lens", 2), 21, "seq_lens, row 2: expected 0 to 20, got 21"),
        (put("seq_lens", 0), 13, r"pages, row 0, entry 3: expected a page in \[0, 10\), got 10"),
        (put("seq_lens", 0), 8, "pages, row 0, entry 2: expected NO_PAGE = 10 past 2 pages, got 2"),
        (put("num_free"), -1, "num_free: expected 0 to 10, got -1"),
        (put("num_free"), 11, "num_free: expected 0 to 10, got 11"),
        (put("num_free"), 4, "free_pages: page 5 is leaked: neither free nor owned"),
        (put("num_free"), 6, "free_pages: page 4 is free and owned by row 2, entry 1"),
        (put("free_pages", 2), 10, r"free_pages, entry 2: expected a page in \[0, 10\), got 10"),
        (put("free_pages", 0), -1, r"free_pages, entry 0: expected a page in \[0, 10\), got -1"),
        (put("free_pages", 0), 8, "free_pages: page 8 is in the free stack more than once"),
        (put("free_pages", 0), 2, "free_pages: page 2 is free and owned by row 0, entry 2"),
    ],
)
def test_check_state_names_what_is_broken(state, corrupt, value, message):
    with pytest.raises(ValueError, match=message):
        h2o_jax.check_state(corrupt(state, value), CONFIG)


def test_check_state_reads_only_the_stack_below_its_top(state):
    """Past `num_free` the stack holds leftovers, which mean nothing."""
    h2o_jax.check_state(put("free_pages", 9)(state, -7), CONFIG)


def test_check_state_names_the_row_that_owns_a_free_page(state):
    with pytest.raises(ValueError, match="page 2 .* row 0, entry 2"):
        h2o_jax.check_state(put("free_pages", 0)(state, 2), CONFIG)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("pages", jnp.zeros((3, 4), jnp.int32), "table.pages: expected int32[3, 5], got int32[3, 4]"),
        ("pages", jnp.zeros((3, 5)), "table.pages: expected int32[3, 5], got float32[3, 5]"),
        ("seq_lens", jnp.zeros(4, jnp.int32), "table.seq_lens: expected int32[3], got int32[4]"),
        ("free_pages", jnp.zeros(9, jnp.int32), "table.free_pages: expected int32[10], got int32[9]"),
        ("num_free", jnp.zeros(1, jnp.int32), "table.num_free: expected int32[], got int32[1]"),
        ("num_free", jnp.zeros((), jnp.uint32), "table.num_free: expected int32[], got uint32[]"),
        ("page_size", 8, "table.page_size: expected 4, got 8"),
    ],
)
def test_check_state_names_a_wrong_array_of_the_table(state, name, array, message):
    table = dataclasses.replace(state.table, **{name: array})
    with pytest.raises(ValueError, match=re.escape(message)):
        h2o_jax.check_state(dataclasses.replace(state, table=table), CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": jnp.zeros((10, 2, 4, 9))}, "layers[1].k: expected float32[10, 2, 4, 8], got float32[10, 2, 4, 9]"),
        ({"v": jnp.zeros((10, 2, 4, 8), jnp.bfloat16)}, "layers[1].v: expected float32[10, 2, 4, 8], got bfloat16"),
        ({"aux": {"summaries": jnp.zeros((9, 2, 3, 8))}}, "layers[1].aux['summaries']: expected float32[10, 2, 3, 8]"),
        ({"summary_kinds": (), "aux": {"mine": jnp.zeros(())}}, "layers[1].aux['mine']: expected float32[10]"),
        ({"aux": {}}, "layers[1].aux: expected 'summaries' for ('mean', 'max', 'min'), got []"),
        ({"aux": {"summaries": jnp.zeros((10, 2, 3, 8), int)}}, "layers[1].aux['summaries']: expected float32[10"),
        (
            {"summary_kinds": (), "aux": {"hh_score": jnp.zeros((10, 2, 4), int)}},
            "layers[1].aux['hh_score']: expected dtype bfloat16 or float16 or float32, got int32",
        ),
    ],
)
def test_check_state_names_a_wrong_array_of_a_layer(state, changes, message):
    layers = (state.layers[0], dataclasses.replace(state.layers[1], **changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        h2o_jax.check_state(dataclasses.replace(state, layers=layers), CONFIG)


@pytest.mark.parametrize("shape", [(10, 1, 3, 8), (10, 2, 2, 8), (10, 2, 3, 4)])
def test_check_state_names_summaries_of_a_wrong_shape(state, shape):
    layers = (dataclasses.replace(state.layers[0], aux={"summaries": jnp.zeros(shape)}), state.layers[1])
    with pytest.raises(ValueError, match=re.escape("layers[0].aux['summaries']: expected")):
        h2o_jax.check_state(dataclasses.replace(state, layers=layers), CONFIG)


def test_check_state_counts_the_layers(state):
    with pytest.raises(ValueError, match="layers: expected 2, got 1"):
        h2o_jax.check_state(dataclasses.replace(state, layers=state.layers[:1]), CONFIG)


def test_a_state_that_does_not_fit_says_what_would(monkeypatch):
    config = h2o_jax.CacheConfig(2, 8, 2**14, 2**10, 2**20, 4, 16, dtype=jnp.float32)  # but a small page table
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=8)
    message = "^init_state: no room for .*keys and values 2048.00 TiB, summaries 3.00 TiB$"
    with pytest.raises(MemoryError, match=message):
        h2o_jax.init_state(config, policy)
    monkeypatch.setattr(memory, "free", lambda device: 3 * 2**30)
    with pytest.raises(MemoryError, match="3.00 GiB are free, enough for about num_pages=1 instead of 1048576"):
        h2o_jax.init_state(config, policy)


def test_the_pages_that_would_fit_fit():
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=8)

    def shapes(num_pages):
        config = h2o_jax.CacheConfig(2, 8, 128, 16, num_pages, 4, 256)
        return jax.eval_shape(lambda: h2o_jax.init_state(config, policy))

    left = sum(memory.parts(shapes(1000)).values()) + 10_000
    fits = int(re.search("num_pages=([0-9]+) ", str(memory.out_of_memory(shapes(9000), 9000, left)))[1])
    assert sum(memory.parts(shapes(fits)).values()) <= left and 990 < fits <= 1000


def test_another_error_is_not_taken_for_one_of_memory(monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(state_module, "_empty", fail)
    config = h2o_jax.CacheConfig(1, 1, 8, 2, 4, 1, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        h2o_jax.init_state(config, h2o_jax.get_policy("dense_attention"))
