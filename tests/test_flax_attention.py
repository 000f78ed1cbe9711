"""The NNX and the Linen module: the same arithmetic, that of NumPy float64, in a jitted decode loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax.linen
import h2o_jax.nnx
from tests.flax_attention import LONGEST, PROMPTS, Case, Loop, Oracle, assert_close, fresh_state, inputs

CASES = {
    "G1-bias-dense": Case(group=1, bias=True),
    "G2-rope-h2o-pages": Case(group=2, rope=True, policy="h2o_sparse_attention", top_k=2, page_size=4),
    "G3-layernorm-h2o-tokens": Case(
        group=3, qk_norm="layer", policy="h2o_token_sparse_attention", top_k=5, page_size=1
    ),
    "G4-all-gqa-h2o-tokens": Case(
        group=4,
        bias=True,
        qk_norm="rms",
        rope=True,
        policy="gqa_h2o_token_sparse_attention",
        top_k=5,
        page_size=1,
    ),
}


def nnx_module(case):
    return h2o_jax.nnx.H2OAttention(case.in_features, **case.options, rngs=nnx.Rngs(0))


def nnx_loop(case):
    """The loop of an NNX module, and its parameters in its own form."""
    graph, state = nnx.split(nnx_module(case))
    nnx.replace_by_pure_dict(state, case.parameters())
    return Loop(lambda parameters, *arguments: nnx.merge(graph, parameters)(*arguments)), state


def linen_loop(case):
    module = h2o_jax.linen.H2OAttention(**case.options)
    loop = Loop(lambda parameters, *arguments: module.apply({"params": parameters}, *arguments))
    return loop, case.parameters()


@functools.cache
def outcome(name):
    """Outputs and number of traces of the NNX module."""
    loop, parameters = nnx_loop(CASES[name])
    return loop.run(parameters, CASES[name]), loop.traces


def valid(first, outs):
    """What an active row put out: the prompts' and the steps'."""
    *_, active = inputs(CASES["G1-bias-dense"].in_features)
    return first[np.arange(LONGEST) < PROMPTS[:, None]], outs[active]


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    got, traces = outcome(name)
    expected = Oracle(CASES[name], CASES[name].parameters()).run()
    for x, y, part in zip(valid(*got), valid(*expected), ("prefill", "decode")):
        assert x.dtype == np.float32
        assert_close(x, y, part)
    assert traces == 2, "prefill and decode are traced once each"


@pytest.mark.parametrize("mutant", ["bias", "qk_norm", "norm kind", "position", "group", "policy"])
def test_rejects_mutants(mutant):
    """The same comparison with a module known to be wrong."""
    name = "G3-layernorm-h2o-tokens" if mutant == "norm kind" else "G4-all-gqa-h2o-tokens"
    case, parameters = CASES[name], CASES[name].parameters()
    if mutant == "bias":
        parameters["k_proj"]["bias"] *= 0
    elif mutant == "qk_norm":
        parameters["q_norm"], parameters["k_norm"] = parameters["k_norm"], parameters["q_norm"]
        parameters["q_norm"]["scale"] = parameters["q_norm"]["scale"][::-1]
    elif mutant == "norm kind":
        case = dataclasses.replace(case, qk_norm="rms")
    elif mutant == "group":
        kernel = parameters["q_proj"]["kernel"].reshape(-1, case.num_kv_heads, case.group, case.head_dim)
        parameters["q_proj"]["kernel"] = kernel.swapaxes(1, 2).reshape(case.in_features, -1)
    elif mutant == "policy":
        case = dataclasses.replace(case, policy="h2o_token_sparse_attention")
    wrong = Oracle(case, parameters, shift=int(mutant == "position")).run()
    with pytest.raises(AssertionError, match="decode"):
        assert_close(valid(*outcome(name)[0])[1], valid(*wrong)[1], "decode")


@pytest.mark.parametrize("name", CASES)
def test_linen_equals_nnx_to_the_bit(name):
    loop, parameters = linen_loop(CASES[name])
    for x, y in zip(valid(*loop.run(parameters, CASES[name])), valid(*outcome(name)[0])):
        np.testing.assert_array_equal(x, y)
    assert loop.traces == 2


def test_bfloat16_computation_of_float32_parameters():
    """The same bits in both modules, norms included, a few roundings of 2^-9 from float64."""
    case = Case(bias=True, qk_norm="rms", rope=True, dtype="bfloat16")
    exact = Oracle(case, case.parameters()).run()
    runs = [loop.run(parameters, case) for loop, parameters in (nnx_loop(case), linen_loop(case))]
    for x, y, expected in zip(valid(*runs[0]), valid(*runs[1]), valid(*exact)):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)
        error = np.abs(np.asarray(x, np.float64) - expected).max() / np.abs(expected).max()
        assert 1e-3 < error < 0.05
    assert {x.dtype for x in jax.tree.leaves(case.parameters())} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_the_same_names_shapes_and_dtypes(name):
    case = CASES[name]
    module = nnx.eval_shape(lambda: nnx_module(case))
    abstract = nnx.to_pure_dict(nnx.state(module))
    expected = jax.eval_shape(case.parameters)
    assert abstract == expected
    linen = h2o_jax.linen.H2OAttention(**case.options)
    variables = jax.eval_shape(linen.init, jax.random.key(0), *arguments(case))
    assert variables == {"params": expected}
    assert all(isinstance(x, nnx.Param) for _, x in nnx.to_flat_state(nnx.state(module)))


def arguments(case, length=1):
    state = fresh_state(case.get_policy(), case.num_kv_heads, case.head_dim, case.page_size)
    x = jnp.ones((len(PROMPTS), length, case.in_features))
    return state.layers[0], state.table, x, jnp.zeros(len(PROMPTS), jnp.int32)


@pytest.mark.parametrize("build", [nnx_loop, linen_loop], ids=["nnx", "linen"])
@pytest.mark.parametrize("length", [1, 5])
def test_row_counts_are_int32_arrays(build, length):
    loop, parameters = build(CASES["G1-bias-dense"])
    *given, num_tokens = arguments(CASES["G1-bias-dense"], length)
    for dtype in ("float32", "bool", "uint32"):
        with pytest.raises(ValueError, match=f"num_tokens: expected dtype int32, got {dtype}"):
            loop.call(parameters, *given, num_tokens.astype(dtype))
    with pytest.raises(ValueError, match=r"num_tokens: expected an array \[B\], got a list"):
        loop.call(parameters, *given, [0, 1, 0, 1])


@pytest.mark.parametrize("build", [nnx_loop, linen_loop], ids=["nnx", "linen"])
def test_no_new_tokens_and_no_rows_give_empty_outputs(build):
    case = CASES["G1-bias-dense"]
    loop, parameters = build(case)
    cache, table, x, num_tokens = arguments(case, 0)
    assert jax.eval_shape(loop.call, parameters, cache, table, x, num_tokens)[1].shape == (4, 0, 12)
    nobody = dataclasses.replace(table, pages=table.pages[:0], seq_lens=table.seq_lens[:0])
    for length in (1, 5):
        given = cache, nobody, jnp.zeros((0, length, case.in_features)), num_tokens[:0]
        assert jax.eval_shape(loop.call, parameters, *given)[1].shape == (0, length, 12)


@pytest.mark.parametrize("build", [nnx_loop, linen_loop], ids=["nnx", "linen"])
@pytest.mark.parametrize("length", [1, 5])
def test_float32_products_are_never_tf32(build, length):
    """Those of the projections and of attention; a 16-bit computation asks for nothing."""
    for dtype in (None, "bfloat16"):
        case = dataclasses.replace(CASES["G1-bias-dense"], dtype=dtype)
        loop, parameters = build(case)
        text = str(jax.make_jaxpr(loop.call)(parameters, *arguments(case, length)))
        products = text.count("dot_general[")
        highest = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert products >= 6
        assert highest == products if dtype is None else highest <= products - 4
