"""The NNX module: built from Flax's own attention, with axis names, stacked over layers, and its errors.

Letters: S steps, B rows, L layers, H heads, D head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import h2o_jax
from h2o_jax.nnx import H2OAttention
from tests.flax_attention import assert_close, dense_loop, fresh_state

DENSE = h2o_jax.get_policy("dense_attention")
NORMAL, KERNEL = nnx.initializers.normal(0.5), nnx.initializers.lecun_normal()
STEPS, ROWS = 40, 3
FLAX = {
    "plain": dict(in_features=16),
    "grouped": dict(in_features=12, qkv_features=32, out_features=20, num_kv_heads=2, use_bias=False),
    "multi-query-normalized": dict(in_features=16, qkv_features=32, num_kv_heads=1, normalize_qk=True),
}


def flax_attention(name="plain", **changes):
    """Flax's attention of 4 heads; no bias is 0 and no norm weight 1."""
    arguments = dict(num_heads=4, bias_init=NORMAL, rngs=nnx.Rngs(0)) | FLAX[name] | changes
    attention = nnx.MultiHeadAttention(**arguments)
    for norm in (attention.query_ln, attention.key_ln):
        if norm is not None:
            norm.scale[...] = 1 + jax.random.normal(jax.random.key(7), norm.scale.shape, norm.scale.dtype)
    return attention


def flax_decode(attention, xs, starts):
    """Outputs [S, B, F] of Flax's decode mode, in which row b joins at step `starts[b]`."""
    attention.init_cache((ROWS, len(xs), attention.in_features))
    graph, state = nnx.split(attention)
    seen = (np.arange(len(xs)) >= starts[:, None])[:, None, None]  # [B, 1, 1, S]

    def step(state, x):
        module = nnx.merge(graph, state)
        y = module(x[:, None], decode=True, mask=seen)
        return nnx.state(module), y[:, 0]

    return np.asarray(jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))(state, xs)[1])


def call(module):
    """The module as a function of its state, and that state."""
    graph, state = nnx.split(module)
    return lambda state, *arguments: nnx.merge(graph, state)(*arguments), state


def replaced_parts():
    """Norms of another kind with epsilons of their own, one without weights, and keys without bias."""
    attention = flax_attention("multi-query-normalized")
    attention.query_ln = nnx.RMSNorm(8, epsilon=0.5, use_scale=False, rngs=nnx.Rngs(0))
    attention.key_ln = nnx.RMSNorm(8, epsilon=0.3, rngs=nnx.Rngs(0))
    attention.key_ln.scale[...] = jnp.arange(8.0)
    attention.key = nnx.LinearGeneral(16, (1, 8), use_bias=False, rngs=nnx.Rngs(3))
    return attention


@pytest.mark.parametrize("name", [*FLAX, "replaced parts"])
def test_from_attention_equals_its_decode_mode(name, rng):
    """Step by step, with rows that join later."""
    attention = flax_attention(name) if name in FLAX else replaced_parts()
    module = H2OAttention.from_attention(attention, policy=DENSE)
    starts = np.array([0, 5, 17])
    active = np.arange(STEPS)[:, None] >= starts
    xs = rng.standard_normal((STEPS, ROWS, attention.in_features)).astype(np.float32)
    expected = flax_decode(attention, xs, starts)
    got = dense_loop(*call(module), xs, active, attention.num_kv_heads, attention.head_dim)
    assert got.shape == expected.shape
    assert_close(got[active], expected[active])


@pytest.mark.parametrize("name", FLAX)
def test_from_attention_keeps_the_arrays(name):
    attention = flax_attention(name)
    module = H2OAttention.from_attention(attention)
    for theirs, ours in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj")):
        theirs, ours = getattr(attention, theirs), getattr(module, ours)
        np.testing.assert_array_equal(ours.kernel[...].ravel(), theirs.kernel[...].ravel())
        if attention.use_bias:
            np.testing.assert_array_equal(ours.bias[...], theirs.bias[...].ravel())
    if attention.use_bias:
        assert module.o_proj.bias.get_raw_value() is attention.out.bias.get_raw_value()
    if attention.normalize_qk:
        assert module.q_norm.scale.get_raw_value() is attention.query_ln.scale.get_raw_value()
        assert module.k_norm.scale.get_raw_value() is attention.key_ln.scale.get_raw_value()
    kinds = {type(variable) for _, variable in nnx.to_flat_state(nnx.state(module))}
    assert kinds == {nnx.Param}, "a cache or a stream of random numbers was carried over"
    # An update of one does not reach the other.
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))
    nnx.update(attention, jax.tree.map(lambda x: x + 1, nnx.state(attention)))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module)), before)


def test_from_attention_keeps_norms_as_they_are(rng):
    attention = flax_attention("multi-query-normalized")
    norms = [
        nnx.LayerNorm(8, epsilon=0.5, bias_init=NORMAL, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(8, use_bias=False, use_scale=False, use_fast_variance=False, rngs=nnx.Rngs(0)),
    ]
    attention.query_ln, attention.key_ln = norms
    module = H2OAttention.from_attention(attention)
    x = jnp.asarray(rng.standard_normal((3, 8)), jnp.float32)
    for ours, theirs in zip((module.q_norm, module.k_norm), norms):
        np.testing.assert_array_equal(ours(x), theirs(x))
    assert module.q_norm.bias is not norms[0].bias and module.k_norm.scale is None


def test_from_attention_equals_a_module_of_its_own():
    """The same graph as a module that was constructed: states move between the two."""
    dtypes = dict(dtype=jnp.bfloat16, param_dtype=jnp.float16)

    def build():
        bias = dict(use_qkv_bias=True, use_out_bias=True)
        return H2OAttention(16, 4, 1, 8, policy=DENSE, qk_norm="layer", rngs=nnx.Rngs(0), **bias, **dtypes)

    def convert():
        attention = nnx.MultiHeadAttention(4, rngs=nnx.Rngs(0), **FLAX["multi-query-normalized"], **dtypes)
        return H2OAttention.from_attention(attention, policy=DENSE)

    converted, built = nnx.eval_shape(convert), nnx.eval_shape(build)
    assert nnx.graphdef(converted) == nnx.graphdef(built)
    assert nnx.to_pure_dict(nnx.state(converted)) == nnx.to_pure_dict(nnx.state(built))


def test_from_attention_under_transformations():
    def build():
        return H2OAttention.from_attention(flax_attention("grouped"), policy=DENSE)

    abstract, jitted = nnx.eval_shape(build), nnx.jit(build)()
    flat = (nnx.to_flat_state(nnx.state(module)) for module in (abstract, jitted))
    for (path, x), (_, y) in zip(*flat):
        assert isinstance(x.get_raw_value(), jax.ShapeDtypeStruct), path
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    np.testing.assert_array_equal(jitted.q_proj.kernel[...], build().q_proj.kernel[...])


@pytest.mark.parametrize("deterministic", [True, None])
def test_from_attention_ignores_dropout_that_is_not_active(deterministic):
    attention = flax_attention(dropout_rate=0.5, deterministic=deterministic)
    module = H2OAttention.from_attention(attention)
    np.testing.assert_array_equal(module.q_proj.kernel[...].ravel(), attention.query.kernel[...].ravel())


def replaced(part, new, name="multi-query-normalized"):
    attention = flax_attention(name)
    setattr(attention, part, new)
    return attention


def projection(heads=1, **options):
    return nnx.LinearGeneral(16, (heads, 8), rngs=nnx.Rngs(0), **options)


class Doubled(nnx.MultiHeadAttention):
    """Other arithmetic in the same parameters."""

    def __call__(self, inputs_q, **options):
        return 2 * super().__call__(inputs_q, **options)


def dot_general(*arguments, **keywords):
    return jax.lax.dot_general(*arguments, **keywords)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "attention: expected a MultiHeadAttention; got Linear"),
        (
            lambda: flax_attention(attention_fn=dot_general),
            "attention: attention_fn can't be carried over: expected the default; got <function dot_general",
        ),
        (lambda: flax_attention(qkv_dot_general=dot_general), "qkv_dot_general can't be carried over"),
        (lambda: flax_attention(out_dot_general_cls=dot_general), "out_dot_general_cls can't be carried"),
        (lambda: flax_attention(ln_promote_dtype=dot_general), "ln_promote_dtype can't be carried over"),
        (lambda: flax_attention(in_kv_features=8), "expected in_kv_features = in_features = 16.*; got 8"),
        (
            lambda: flax_attention(dropout_rate=0.1, deterministic=False),
            "dropout can't be carried over: .*got dropout_rate = 0.1, deterministic = False",
        ),
        (
            lambda: Doubled(4, 16, rngs=nnx.Rngs(0)),
            "attention: __call__ can't be carried over: .* MultiHeadAttention; got that of Doubled",
        ),
        (
            lambda: replaced("value", nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(0))),
            "attention.value: expected a LinearGeneral; got LoRALinear",
        ),
        (lambda: replaced("key", projection(2)), r"attention.key.kernel: .*= \[16, 1, 8\], got \[16, 2, 8\]"),
        (
            lambda: replaced("key", projection(dtype="bfloat16")),
            "attention.key: dtype can't be carried over: expected None as in attention; got bfloat16",
        ),
        (
            lambda: replaced("value", projection(precision="BF16_BF16_F32")),
            "attention.value: precision can't be carried over: .*; got 'BF16_BF16_F32'",
        ),
        (
            lambda: replaced("value", projection(dot_general=dot_general)),
            "attention.value: dot_general can't be carried over: expected the default",
        ),
        (
            lambda: replaced("query", projection(4, preferred_element_type=jnp.float32)),
            "attention.query: preferred_element_type can't be carried over",
        ),
        (
            lambda: replaced("key", projection(axis=-2)),
            r"attention.key: axis can't be carried over: expected \(-1,\); got \(-2,\)",
        ),
        (lambda: replaced("key_ln", None), "attention.key_ln: expected a LayerNorm or RMSNorm; got NoneType"),
        (
            lambda: replaced("key_ln", nnx.RMSNorm(8, rngs=nnx.Rngs(0))),
            "attention.key_ln: expected a LayerNorm as in query_ln; got RMSNorm",
        ),
        (
            lambda: replaced("query_ln", nnx.LayerNorm(4, rngs=nnx.Rngs(0))),
            r"attention.query_ln.scale: expected shape \[D\] = \[8\], got \[4\]",
        ),
        (
            lambda: replaced("query_ln", nnx.LayerNorm(8, promote_dtype=dot_general, rngs=nnx.Rngs(0))),
            "attention.query_ln: promote_dtype can't be carried over",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_attention_errors(attention, message):
    with pytest.raises(ValueError, match=message):
        H2OAttention.from_attention(attention())


def named(init, *names):
    """An initializer that names the axes, where there is no mesh yet."""
    return nnx.with_partitioning(init, names, eager_sharding=False)


NAMED = dict(
    kernel_init=named(KERNEL, "embed", "heads"),
    bias_init=named(NORMAL, "heads"),
    out_kernel_init=named(KERNEL, "heads", "embed"),
    out_bias_init=named(NORMAL, "embed"),
)
SPECS = {f"{part}/kernel": PartitionSpec("embed", "heads") for part in ("q_proj", "k_proj", "v_proj")}
SPECS |= {f"{part}/bias": PartitionSpec("heads") for part in ("q_proj", "k_proj", "v_proj")}
SPECS |= {"o_proj/kernel": PartitionSpec("heads", "embed"), "o_proj/bias": PartitionSpec("embed")}


def attention(**changes):
    """4 query and 2 KV heads of 8, 16 features."""
    arguments = dict(head_dim=8, policy=DENSE, use_qkv_bias=True, use_out_bias=True, rngs=nnx.Rngs(0))
    return H2OAttention(16, 4, 2, **(arguments | changes))


def specs(module):
    """{"part/parameter": axis names}."""
    flat = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module)))
    return {"/".join(path): variable.get_value() for path, variable in flat}


def test_axis_names():
    module = attention(**NAMED, qk_norm=True)
    norms = {"q_norm/scale": PartitionSpec(), "k_norm/scale": PartitionSpec()}
    assert specs(module) == specs(nnx.eval_shape(lambda: attention(**NAMED, qk_norm=True))) == SPECS | norms
    assert set(specs(attention()).values()) == {PartitionSpec()}


def test_output_projection_is_initialized_as_the_others_by_default():
    module = attention(kernel_init=nnx.initializers.constant(2.0), bias_init=nnx.initializers.constant(3.0))
    assert float(module.o_proj.kernel[0, 0]) == 2.0 and float(module.o_proj.bias[0]) == 3.0


def test_axis_names_are_carried_over():
    """Heads and head_dim become one axis, which keeps the name of the heads."""
    names = dict(
        kernel_init=named(KERNEL, "embed", "heads", "head_dim"),
        bias_init=named(NORMAL, "heads", "head_dim"),
        out_kernel_init=named(KERNEL, "heads", "head_dim", "embed"),
        out_bias_init=named(NORMAL, "embed"),
    )
    module = H2OAttention.from_attention(flax_attention("plain", **names))
    assert specs(module) == SPECS
    assert set(specs(H2OAttention.from_attention(flax_attention("plain"))).values()) == {PartitionSpec()}


def test_named_parameters_run_on_a_mesh(rng):
    """In a mesh, eagerly sharded as Flax does it; the names are those of mesh axes."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    state, num_tokens = fresh_state(DENSE, 2, 8, 4, rows=2), jnp.array([5, 2], jnp.int32)
    table, _ = h2o_jax.extend(state.table, num_tokens)
    given = state.layers[0], table, jnp.asarray(rng.standard_normal((2, 5, 16)), jnp.float32), num_tokens
    _, plain = nnx.jit(lambda module: module(*given))(attention())
    with jax.set_mesh(mesh):
        module = attention(
            kernel_init=nnx.with_partitioning(KERNEL, (None, "model")),
            out_kernel_init=nnx.with_partitioning(KERNEL, ("model", None)),
        )
        assert module.q_proj.kernel[...].sharding.spec == PartitionSpec(None, "model")
        _, sharded = nnx.jit(lambda module: module(*given))(module)
    assert_close(sharded, plain)


def test_scan_over_layers_equals_a_loop(rng):
    """Stacked modules under nnx.jit and nnx.scan, each with its cache; the names have an axis of layers."""
    layers, transform = 2, {nnx.PARTITION_NAME: "layers"}

    @nnx.jit
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(transform_metadata=transform)
    def build(rngs):
        return attention(**NAMED, rngs=rngs)

    stacked = build(nnx.Rngs(3))
    assert specs(stacked) == {name: PartitionSpec("layers", *spec) for name, spec in SPECS.items()}
    graph, parameters = nnx.split(stacked)

    policy = h2o_jax.get_policy("h2o_sparse_attention", top_k=1, reserved_bos=1, reserved_eos=1)

    @nnx.jit
    def scanned(module, table, caches, x, num_tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0), transform_metadata=transform)
        def layer(x, module, cache):
            cache, y = module(cache, table, x, num_tokens, policy=policy)
            return x + y, cache

        return layer(x, module, caches)

    @jax.jit
    def alone(parameters, table, cache, x, num_tokens):
        cache, y = nnx.merge(graph, parameters)(cache, table, x, num_tokens, policy=policy)
        return x + y, cache

    state = fresh_state(policy, 2, 8, 2, rows=2, tokens=16, layers=layers)
    table, caches = state.table, list(state.layers)
    each = [jax.tree.map(lambda leaf: leaf[i], parameters) for i in range(layers)]
    stacked_caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    one, extend = jnp.ones(2, jnp.int32), jax.jit(h2o_jax.extend)
    for _ in range(12):  # 6 pages of 2, over the budget of 3
        table, _ = extend(table, one)
        x = jnp.asarray(rng.standard_normal((2, 1, 16)), jnp.float32)
        got, stacked_caches = scanned(stacked, table, stacked_caches, x, one)
        for i in range(layers):
            x, caches[i] = alone(each[i], table, caches[i], x, one)
        assert_close(got, x)


def test_call_under_eval_shape():
    function, state = call(attention())
    paged = fresh_state(DENSE, 2, 8, 4, rows=2)
    x, num_tokens = jnp.ones((2, 5, 16)), jnp.ones(2, jnp.int32)
    cache, y = jax.eval_shape(function, state, paged.layers[0], paged.table, x, num_tokens)
    assert y == jax.ShapeDtypeStruct((2, 5, 16), jnp.float32)
    assert cache == jax.eval_shape(lambda: paged.layers[0])


@pytest.mark.parametrize("norm", ["batch", 1.0])
def test_unknown_norm(norm):
    with pytest.raises(ValueError, match=f'qk_norm: expected "rms", "layer" or a bool; got {norm!r}'):
        attention(qk_norm=norm)


def test_rms_is_the_default_norm():
    assert nnx.graphdef(attention(qk_norm=True)) == nnx.graphdef(attention(qk_norm="rms"))
    assert nnx.graphdef(attention(qk_norm=None)) == nnx.graphdef(attention(qk_norm=False))


@pytest.mark.parametrize("size", ["in_features", "num_heads", "num_kv_heads", "head_dim", "out_features"])
def test_sizes_are_positive_integers(size):
    sizes = dict(in_features=16, num_heads=4, num_kv_heads=2, head_dim=8, out_features=16)
    for bad in (0, 2.0):
        with pytest.raises(ValueError, match=f"^{size}: expected a positive integer; got {bad}"):
            H2OAttention(**(sizes | {size: bad}), rngs=nnx.Rngs(0))
