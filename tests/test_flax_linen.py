"""The Linen module: built from Flax's own attention, init and apply, axis names, stacked layers, its errors.

Letters: S steps, B rows, L layers, H heads, D head_dim.
"""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

import h2o_jax
from h2o_jax.linen import H2OAttention
from h2o_jax.rope import RotaryEmbedding
from tests.flax_attention import assert_close, dense_loop, fresh_state

DENSE = h2o_jax.get_policy("dense_attention")
NORMAL, KERNEL = nn.initializers.normal(0.5), nn.initializers.lecun_normal()
STEPS, ROWS, FEATURES = 40, 3, 12
FLAX = {
    "plain": dict(),
    "sizes": dict(qkv_features=32, out_features=20, use_bias=False),
    "normalized": dict(qkv_features=32, normalize_qk=True),
}


def flax_attention(name="plain", **changes):
    """Flax's attention of 4 heads and its parameters; no bias is 0 and no norm weight 1."""
    options = dict(num_heads=4, bias_init=NORMAL) | FLAX[name] | changes
    attention = nn.MultiHeadDotProductAttention(**options)
    params = attention.init(jax.random.key(0), jnp.ones((1, 1, FEATURES)))["params"]
    for norm in ("query_ln", "key_ln"):
        if norm in params:
            params[norm]["scale"] += jax.random.normal(jax.random.key(7), params[norm]["scale"].shape)
    return attention, params


def flax_decode(attention, params, xs, starts):
    """Outputs [S, B, F] of Flax's decode mode, in which row b joins at step `starts[b]`."""
    decoder = attention.clone(decode=True)
    cache = decoder.init(jax.random.key(0), jnp.ones((ROWS, len(xs), FEATURES)))["cache"]
    seen = (np.arange(len(xs)) >= starts[:, None])[:, None, None]  # [B, 1, 1, S]

    def step(cache, x):
        variables = {"params": params, "cache": cache}
        y, changed = decoder.apply(variables, x[:, None], mask=seen, mutable="cache")
        return changed["cache"], y[:, 0]

    return np.asarray(jax.jit(lambda cache, xs: jax.lax.scan(step, cache, xs))(cache, xs)[1])


def call(module):
    return lambda params, *arguments: module.apply({"params": params}, *arguments)


@pytest.mark.parametrize("name", ["sizes", "normalized"])
def test_from_attention_equals_its_decode_mode(name, rng):
    """Step by step, with rows that join later."""
    attention, params = flax_attention(name)
    module, converted = H2OAttention.from_attention(attention, params, policy=DENSE)
    starts = np.array([0, 5, 17])
    active = np.arange(STEPS)[:, None] >= starts
    xs = rng.standard_normal((STEPS, ROWS, FEATURES)).astype(np.float32)
    expected = flax_decode(attention, params, xs, starts)
    got = dense_loop(call(module), converted, xs, active, 4, params["query"]["kernel"].shape[-1])
    assert got.shape == expected.shape
    assert_close(got[active], expected[active])


def test_from_attention_keeps_the_arrays():
    attention, params = flax_attention("normalized")
    for given in (params, flax.core.freeze(params)):
        module, converted = H2OAttention.from_attention(attention, given, policy=DENSE)
        for theirs, ours in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj")):
            for name in ("kernel", "bias"):
                np.testing.assert_array_equal(converted[ours][name].ravel(), params[theirs][name].ravel())
        assert converted["o_proj"]["bias"] is params["out"]["bias"]
        assert converted["q_norm"]["scale"] is params["query_ln"]["scale"]
        assert converted["k_norm"]["scale"] is params["key_ln"]["scale"]
        fresh = jax.eval_shape(module.init, jax.random.key(0), *arguments())["params"]
        assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, converted)


def test_from_attention_of_grouped_keys(rng):
    """The number of KV heads is that of the parameters: G = 2 equals keys and values repeated."""
    attention, params = flax_attention("sizes")
    few = {part: dict(leaves) for part, leaves in params.items()}
    for part in ("key", "value"):
        few[part]["kernel"] = params[part]["kernel"][:, ::2]
        params[part]["kernel"] = jnp.repeat(few[part]["kernel"], 2, axis=1)
    module, converted = H2OAttention.from_attention(attention, few, policy=DENSE)
    assert module.num_kv_heads == 2
    xs = rng.standard_normal((STEPS, ROWS, FEATURES)).astype(np.float32)
    expected = flax_decode(attention, params, xs, np.zeros(ROWS, int))
    assert_close(dense_loop(call(module), converted, xs, np.ones((STEPS, ROWS), bool), 2, 8), expected)


def test_from_attention_under_transformations():
    attention, params = flax_attention()

    def convert(params):
        return H2OAttention.from_attention(attention, params)[1]

    expected = convert(params)
    shapes = jax.eval_shape(convert, params)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, expected)
    # As of a model whose layers are stacked.
    stacked = jax.vmap(convert)(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params))
    jax.tree.map(lambda got, x: np.testing.assert_array_equal(got, [x, 2 * x]), stacked, expected)


def test_from_attention_keeps_settings_and_ignores_inactive_dropout():
    attention, params = flax_attention()
    attention = attention.clone(dropout_rate=0.5, dtype=jnp.bfloat16, param_dtype=jnp.float16)
    module, _ = H2OAttention.from_attention(attention, params, policy=DENSE)
    assert (module.dtype, module.param_dtype, module.policy) == (jnp.bfloat16, jnp.float16, DENSE)
    assert (module.out_features, module.head_dim) == (FEATURES, 3)


def dot_general(*arguments, **keywords):
    return jax.lax.dot_general(*arguments, **keywords)


def changed(part, shape, name="kernel"):
    def change(params):
        return params | {part: params[part] | {name: jnp.ones(shape)}}

    return change


@pytest.mark.parametrize(
    ("changes", "change", "message"),
    [
        (dict(precision="BF16_BF16_F32"), None, "precision can't be carried over: .* got 'BF16_BF16_F32'"),
        (dict(attention_fn=dot_general), None, "attention_fn can't be carried over: .* got <function dot"),
        (dict(qkv_dot_general=dot_general), None, "attention: qkv_dot_general can't be carried over"),
        (dict(out_dot_general_cls=dot_general), None, "attention: out_dot_general_cls can't be carried over"),
        (dict(qk_attn_weights_einsum_cls=dot_general), None, "qk_attn_weights_einsum_cls can't"),
        (dict(attn_weights_value_einsum_cls=dot_general), None, "attn_weights_value_einsum_cls can't"),
        (dict(dropout_rate=0.1, deterministic=False), None, "dropout can't be carried over"),
        (dict(qkv_features=30), None, "expected qkv_features = 12, the 4 heads of 3 in params; got 30"),
        (dict(out_features=7), None, r"params\['out'\]\['kernel'\]: .*= \[4, 3, 7\], got \[4, 3, 12\]"),
        (dict(num_heads=3), None, r"params\['query'\]\['kernel'\]: .*= \[\?, 3, \?\], got \[12, 4, 3\]"),
        (dict(use_bias=False), None, r"params: expected those of attention, \['key/k.*; got \['key/bias'"),
        (dict(normalize_qk=True), None, "params: expected those of attention, .*'query_ln/scale'"),
        ({}, lambda params: {"params": params}, r"params: expected .*; got \['params/key/bias'"),
        ({}, changed("key", (12, 4, 5)), r"params\['key'\]\['kernel'\]: .*= \[12, \?, 3\], got \[12, 4, 5\]"),
        ({}, changed("key", (4, 4), "bias"), r"params\['key'\]\['bias'\]: .*D\] = \[4, 3\], got \[4, 4\]"),
        ({}, changed("out", (3,), "bias"), r"params\['out'\]\['bias'\]: expected .* = \[12\], got"),
        ({}, lambda params: None, r"params: expected those of attention, \['key/bias', .*\]; got None"),
        ({}, changed("value", (12, 2, 3)), r"params\['value'\]\['kernel'\]: .*4, 3\], got \[12, 2, 3\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "",
)
def test_from_attention_errors(changes, change, message):
    attention, params = flax_attention()
    attention = attention.clone(**changes)
    with pytest.raises(ValueError, match=message):
        H2OAttention.from_attention(attention, change(params) if change else params)


def test_from_attention_refuses_other_modules():
    with pytest.raises(ValueError, match="attention: expected a MultiHeadDotProductAttention; got Dense"):
        H2OAttention.from_attention(nn.Dense(3), {})


class Doubled(nn.MultiHeadDotProductAttention):
    """Other arithmetic in the same parameters."""

    @nn.compact
    def __call__(self, inputs_q, **options):
        return 2 * super().__call__(inputs_q, **options)


class Renamed(nn.MultiHeadDotProductAttention):
    """The same arithmetic."""


def test_from_attention_refuses_another_call():
    params = flax_attention()[1]
    with pytest.raises(ValueError, match="attention: __call__ can't be carried over.*got that of Doubled"):
        H2OAttention.from_attention(Doubled(4), params)
    for same in (Renamed, nn.MultiHeadAttention, nn.SelfAttention):
        assert H2OAttention.from_attention(same(4), params)[0].head_dim == 3


NAMED = {
    "kernel_init": (KERNEL, ("embed", "heads")),
    "bias_init": (NORMAL, ("heads",)),
    "out_kernel_init": (KERNEL, ("heads", "embed")),
    "out_bias_init": (NORMAL, ("embed",)),
}
QKV = {"kernel": PartitionSpec("embed", "heads"), "bias": PartitionSpec("heads")}
SPECS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), QKV)
SPECS["o_proj"] = {"kernel": PartitionSpec("heads", "embed"), "bias": PartitionSpec("embed")}


def attention(wrap=None, **changes):
    """4 query and 2 KV heads of 8; `wrap` names the axes of its parameters."""
    names = {"bias_init": NORMAL}
    if wrap:
        names = {name: wrap(init, axes) for name, (init, axes) in NAMED.items()}
    arguments = dict(head_dim=8, policy=DENSE, use_qkv_bias=True, use_out_bias=True) | names
    return H2OAttention(4, 2, **(arguments | changes))


def arguments(length=1, num_kv_heads=4, head_dim=8, features=FEATURES):
    """Cache, table, x and num_tokens of a call; the table extended by them."""
    state = fresh_state(DENSE, num_kv_heads, head_dim, 4, rows=2)
    num_tokens = jnp.array([length, 0], jnp.int32)
    table, _ = h2o_jax.extend(state.table, num_tokens)
    x = jax.random.normal(jax.random.key(1), (2, length, features))
    return state.layers[0], table, x, num_tokens


@functools.cache
def plain_variables():
    return jax.jit(attention().init)(jax.random.key(0), *arguments(num_kv_heads=2))


plain_apply = jax.jit(attention().apply, static_argnames="policy")


@pytest.mark.parametrize("wrap", [nn.with_partitioning, nn.with_logical_partitioning])
def test_axis_names(wrap):
    """They are there, they reach the mesh through the rules, and boxed parameters run as plain ones do."""
    module, given = attention(wrap), arguments(num_kv_heads=2)
    abstract = jax.eval_shape(module.init, jax.random.key(0), *given)
    variables = nn.meta.replace_boxed(abstract, plain_variables())
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(abstract) == {"params": SPECS}
    apply = jax.jit(module.apply)
    _, y = apply(variables, *given)
    np.testing.assert_array_equal(y, plain_apply(plain_variables(), *given)[1])

    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = (("embed", None), ("heads", "model"))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)
    assert shardings["params"]["o_proj"]["kernel"].spec == PartitionSpec("model", None)
    if wrap is nn.with_logical_partitioning:
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            placed = jax.device_put(variables, shardings)
            assert_close(apply(placed, *given)[1], y)


@pytest.mark.parametrize("wrap", [nn.with_partitioning, nn.with_logical_partitioning])
def test_axis_names_are_carried_over(wrap):
    """Heads and head_dim become one axis, which keeps the name of the heads."""
    names = dict(
        kernel_init=wrap(KERNEL, ("embed", "heads", "head_dim")),
        bias_init=wrap(NORMAL, ("heads", "head_dim")),
        out_kernel_init=wrap(KERNEL, ("heads", "head_dim", "embed")),
        out_bias_init=wrap(NORMAL, ("embed",)),
    )
    flax_module, params = flax_attention("plain", **names)
    _, converted = H2OAttention.from_attention(flax_module, params)
    assert nn.get_partition_spec(converted) == SPECS
    assert type(converted["q_proj"]["kernel"]) is type(params["query"]["kernel"])
    unboxed = H2OAttention.from_attention(flax_module, nn.unbox(params))[1]
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(converted), unboxed)


class Layer(nn.Module):
    """One residual layer, as the body of nn.scan: the stream is carried, the cache is scanned."""

    policy: h2o_jax.Policy

    @nn.compact
    def __call__(self, x, cache, table, num_tokens):
        cache, y = attention(nn.with_logical_partitioning, policy=self.policy)(cache, table, x, num_tokens)
        return x + y, cache


def test_scan_over_layers_equals_a_loop(rng):
    """Parameters and caches stacked over layers, the names with an axis of layers."""
    layers = 2
    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=1, reserved_bos=1, reserved_eos=1)
    scan = nn.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast),
        metadata_params={nn.meta.PARTITION_NAME: "layers"},
    )
    stack, layer = scan(policy), Layer(policy)
    state = fresh_state(policy, 2, 8, 2, rows=2, tokens=16, layers=layers)
    table, caches = state.table, state.layers
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    one, extend = jnp.ones(2, jnp.int32), jax.jit(h2o_jax.extend)
    variables = jax.jit(stack.init)(jax.random.key(0), jnp.ones((2, 1, FEATURES)), stacked, table, one)
    spec = nn.get_partition_spec(variables)["params"]["H2OAttention_0"]
    assert spec["q_proj"]["kernel"] == PartitionSpec("layers", "embed", "heads")
    variables = nn.unbox(variables)

    scanned, alone = jax.jit(stack.apply), jax.jit(layer.apply)
    each = [jax.tree.map(lambda leaf: leaf[i], variables) for i in range(layers)]
    caches = list(caches)
    for _ in range(12):  # 6 pages of 2, over the budget of 3
        table, _ = extend(table, one)
        x = jnp.asarray(rng.standard_normal((2, 1, FEATURES)), jnp.float32)
        got, stacked = scanned(variables, x, stacked, table, one)
        for i in range(layers):
            x, caches[i] = alone(each[i], x, caches[i], table, one)
        assert_close(got, x)


def test_sizes_default_to_those_of_the_input():
    given = arguments(num_kv_heads=4, head_dim=3)
    variables = jax.eval_shape(H2OAttention(4, policy=DENSE).init, jax.random.key(0), *given)
    shapes = {part: leaves["kernel"].shape for part, leaves in variables["params"].items()}
    assert shapes == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (FEATURES, FEATURES))
    (_, y), _ = jax.eval_shape(
        functools.partial(H2OAttention(4, policy=DENSE).init_with_output, jax.random.key(0)), *given
    )
    assert y.shape == (2, 1, FEATURES)


def test_call_policy_overrides_the_attribute():
    """Neither policy keeps anything of its own in the cache, so that one cache serves both."""
    sinks = h2o_jax.get_policy("sink_recent_attention", reserved_bos=1, reserved_eos=1)
    cache, table, x, num_tokens = arguments(12, num_kv_heads=2)
    variables = plain_variables()
    cache, _ = plain_apply(variables, cache, table, x, num_tokens)
    one = jnp.array([1, 0], jnp.int32)
    table, _ = h2o_jax.extend(table, one)
    given = (variables, cache, table, x[:, :1], one)
    dense, overridden = plain_apply(*given)[1], plain_apply(*given, policy=sinks)[1]
    np.testing.assert_array_equal(overridden, jax.jit(attention(policy=sinks).apply)(*given)[1])
    assert np.abs(overridden[0] - dense[0]).max() > 1e-2
    np.testing.assert_array_equal(dense[1, 0], variables["params"]["o_proj"]["bias"])  # inactive


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=3), "num_kv_heads: expected a divisor of num_heads; got num_heads = 3, num_kv_h"),
        (dict(head_dim=None, num_heads=8), "head_dim: expected in_features to be a multiple of num_heads"),
        (dict(head_dim=0), "head_dim: expected a positive integer; got 0"),
        (dict(rope=RotaryEmbedding(16)), "rope: expected head_dim = 8; got head_dim = 16"),
        (dict(qk_norm="batch"), 'qk_norm: expected "rms", "layer" or a bool; got \'batch\''),
        (dict(policy=None), "policy: expected one from the constructor or the call; got None in both"),
        (dict(num_kv_heads=4), "cache: expected 4 KV heads of head_dim 8; got a pool of shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_module_errors(changes, message):
    module = attention().clone(**changes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), *arguments(num_kv_heads=2))


def test_argument_errors():
    cache, table, x, num_tokens = arguments(num_kv_heads=2)
    init = functools.partial(attention().init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"x: expected \[B, T, 12\]; got shape \(2, 12\)"):
        init(cache, table, x[:, 0], num_tokens)
    with pytest.raises(ValueError, match=r"table.seq_lens: expected shape \[B\] of x = \[3\], got \[2\]"):
        init(cache, table, jnp.ones((3, 1, FEATURES)), num_tokens)
