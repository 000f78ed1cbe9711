"""`H2O_JAX_DEBUG`: what it finds inside a jitted step, and that it costs nothing when off."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax
from h2o_jax import debug
from h2o_jax.models import Llama, LlamaConfig

ROWS, KV_HEADS, HEADS, SIZE = 2, 2, 4, 4
CONFIG = h2o_jax.CacheConfig(1, KV_HEADS, SIZE, 2, 20, ROWS, 8, dtype=jnp.float32)
POLICY = h2o_jax.get_policy("h2o_sparse_attention", top_k=1, reserved_bos=1, reserved_eos=1)


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setenv("H2O_JAX_DEBUG", "1")


def step(cache, table, q, k, v):
    with debug.layer(3):
        return h2o_jax.decode_attention(cache, table, q, k, v, policy=POLICY)


@pytest.fixture(scope="module")
def checked():
    """The step, traced with the checks on, and arguments that pass them: each row has 10 tokens."""
    state = h2o_jax.init_state(CONFIG, POLICY)
    table, _ = h2o_jax.extend(state.table, jnp.full(ROWS, 10, jnp.int32))
    q = jnp.ones((ROWS, HEADS, SIZE))
    arguments = state.layers[0], table, q, *jnp.ones((2, ROWS, KV_HEADS, SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_JAX_DEBUG", "1")
        compiled = jax.jit(step).lower(*arguments).compile()
    return compiled, arguments


def fails(checked, message, **changes):
    compiled, arguments = checked
    names = ("cache", "table", "q", "k", "v")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(compiled(*(changes.get(name, x) for name, x in zip(names, arguments))))


def test_a_sound_step_passes(checked):
    compiled, arguments = checked
    _, out = compiled(*arguments)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("page", [20, 10**6, -5])
def test_a_bad_page_id(checked, page):
    table = checked[1][1]
    table = dataclasses.replace(table, pages=table.pages.at[1, 2].set(page))
    message = rf"layer 3, table.pages, row 1, entry 2: expected a page in \[0, 20\), got {page}"
    fails(checked, message, table=table)


def test_a_page_of_two_rows(checked):
    table = checked[1][1]
    table = dataclasses.replace(table, pages=table.pages.at[1, 2].set(table.pages[0, 4]))
    fails(checked, "layer 3, table.pages, row 1, entry 2: page 4 is already owned by row 0, entry 4", table=table)


def test_a_length_past_the_row(checked):
    table = checked[1][1]
    table = dataclasses.replace(table, seq_lens=table.seq_lens.at[1].set(17))
    fails(checked, "layer 3, table.seq_lens, row 1: expected 0 to 16, got 17", table=table)


@pytest.mark.parametrize("num_tokens", [-1, 3, 11])
def test_tokens_that_are_not_there(num_tokens):
    """More than were given, or than the row's length."""
    state = h2o_jax.init_state(CONFIG, POLICY)
    table, _ = h2o_jax.extend(state.table, jnp.array([10, 2], jnp.int32))
    new = jnp.ones((ROWS, 10 if num_tokens == 3 else 2, KV_HEADS, SIZE))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"row 1: num_tokens: expected 0 to 2, .*, got {num_tokens}"):
        write = jax.jit(lambda n: h2o_jax.write_tokens(state.layers[0], table, new, new, n, policy=POLICY))
        jax.block_until_ready(write(jnp.array([1, num_tokens], jnp.int32)))


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_what_turns_it_off(value, monkeypatch):
    monkeypatch.setenv("H2O_JAX_DEBUG", value)
    assert not debug.enabled()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_that_is_not_finite(checked, value):
    cache, table = checked[1][:2]
    summaries = cache.aux["summaries"].at[table.pages[1, 3], 1, 0].set(value)
    cache = dataclasses.replace(cache, aux={"summaries": summaries})
    fails(checked, f"layer 3, row 1, KV head 1: the score of page 3 is {value}", cache=cache)


def test_a_new_key_or_value_that_is_not_finite(checked):
    _, _, _, k, v = checked[1]
    fails(checked, "layer 3, row 0, KV head 1: k of new token 0 is not finite", k=k.at[0, 1, 2].set(jnp.inf))
    fails(checked, "layer 3, row 1, KV head 0: v of new token 0 is not finite", v=v.at[1, 0, 0].set(jnp.nan))


def test_an_output_that_is_not_finite(checked):
    cache, table = checked[1][:2]
    cache = dataclasses.replace(cache, v=cache.v.at[table.pages[0, 0], 1, 1].set(jnp.nan))
    fails(checked, "layer 3, row 0, query head 2: the attention output is not finite", cache=cache)


def test_a_model_names_the_layer():
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4)
    model = Llama(LlamaConfig("llama", num_layers=2, **sizes), rngs=nnx.Rngs(0))
    norm = model.blocks[1].attention_norm
    norm.scale[...] = norm.scale[...] * jnp.nan
    state = h2o_jax.init_state(model.cache_config(1, 8, 2), POLICY)
    table, _ = h2o_jax.extend(state.table, jnp.array([3], jnp.int32))
    state = dataclasses.replace(state, table=table)

    @jax.jit
    def prefill(model, state):
        return model(state, jnp.zeros((1, 3), jnp.int32), jnp.array([3], jnp.int32), policy=POLICY)

    with pytest.raises(jax.errors.JaxRuntimeError, match="layer 1, row 0, KV head 0: k of new token 0 is not finite"):
        jax.block_until_ready(prefill(model, state))


def test_off_it_costs_nothing(checked, monkeypatch):
    arguments = checked[1]

    def jaxpr():
        return str(jax.make_jaxpr(lambda *args: step(*args))(*arguments))

    assert jaxpr().count("debug_callback[") == 3
    monkeypatch.setenv("H2O_JAX_DEBUG", "0")
    off = jaxpr()
    monkeypatch.setattr(debug, "enabled", lambda: False)
    for name in ("check_written", "check_scores", "check_output"):
        monkeypatch.setattr(debug, name, lambda *args: None)
    assert jaxpr() == off and "callback" not in off
