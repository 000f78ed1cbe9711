"""The Flax attention module and the Llama model, against NumPy float64 and against themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax
from h2o_jax.models import LlamaConfig, load_weights
from h2o_jax.models.weights import Tensor
from h2o_jax.nnx import H2OAttention
from h2o_jax.rope import RopeScaling, RotaryEmbedding
from tests import tiny_llama

DENSE = h2o_jax.get_policy("dense_attention")
TOKENS = np.array([5, 250, 17, 3, 99, 17, 201, 42])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope": {"rope_scaling": LLAMA3},
    "llama-linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}
# Of the largest logit, for two float32 layers. test_forward_rejects_mutants holds it against wrong models.
TOLERANCE = 2e-6


def build(values, weights, dtype=jnp.float32):
    sources = {name: Tensor(weight.shape, lambda weight=weight: weight) for name, weight in weights.items()}
    return load_weights(LlamaConfig.from_hf(values), sources, dtype)


def variant(name):
    values = tiny_llama.config(name.split("-")[0], **VARIANTS[name])
    return values, tiny_llama.tensors(values)


def stepper(model, policy=DENSE):
    """A jitted step that extends the table and runs the model."""
    graph, parameters = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens, num_tokens):
        table, ok = h2o_jax.extend(state.table, num_tokens)
        state = h2o_jax.PagedState(table=table, layers=state.layers)
        state, logits = nnx.merge(graph, parameters)(state, tokens, num_tokens, policy=policy)
        return state, logits, ok

    return step


def fresh_state(model, rows=1, page_size=4, pages=4, policy=DENSE):
    """An empty state whose pools hold NaN."""
    state = h2o_jax.init_state(model.cache_config(rows, pages, page_size), policy)
    poisoned = [
        h2o_jax.LayerCache(
            k=jnp.full_like(c.k, jnp.nan),
            v=jnp.full_like(c.v, jnp.nan),
            aux=c.aux,
            summary_kinds=c.summary_kinds,
        )
        for c in state.layers
    ]
    return h2o_jax.PagedState(table=state.table, layers=tuple(poisoned))


def run(model, chunks, tokens=TOKENS, policy=DENSE, pages=4):
    """Logits [T, V] of one row whose tokens are given in chunks of these sizes."""
    step, state = stepper(model, policy), fresh_state(model, policy=policy, pages=pages)
    logits, start = [], 0
    for size in chunks:
        chunk = jnp.asarray(tokens[start : start + size], jnp.int32)[None]
        state, out, ok = step(state, chunk, jnp.array([size], jnp.int32))
        assert bool(ok.all())
        logits.append(np.asarray(out[0]))
        start += size
    return np.concatenate(logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_equals_float64(name):
    values, weights = variant(name)
    expected = tiny_llama.forward(values, weights, TOKENS)
    got = run(build(values, weights), [8])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("mutant", ["rotation", "head order", "norm", "bias", "qk norm", "rope scaling"])
def test_forward_rejects_mutants(mutant):
    name = {"bias": "qwen2", "qk norm": "qwen3", "rope scaling": "llama-llama3-rope"}.get(mutant, "llama")
    values, weights = variant(name)
    expected = tiny_llama.forward(values, weights, TOKENS)
    wrong = dict(weights)
    q = "model.layers.1.self_attn.q_proj.weight"
    if mutant == "rotation":
        k = q.replace("q_proj", "k_proj")
        wrong[q] = tiny_llama.converter_rows(weights[q], 4)
        wrong[k] = tiny_llama.converter_rows(weights[k], 2)
    elif mutant == "head order":
        wrong[q] = weights[q].reshape(2, 2, 8, 32).swapaxes(0, 1).reshape(32, 32)
    elif mutant == "norm":
        wrong["model.norm.weight"] = np.ones_like(weights["model.norm.weight"])
    elif mutant == "bias":
        wrong[q.replace("weight", "bias")] = 0 * weights[q.replace("weight", "bias")]
    elif mutant == "qk norm":
        wrong[q.replace("q_proj", "q_norm")] = np.ones(8, np.float32)
    else:
        values = values | {"rope_scaling": None}
    error = np.abs(run(build(values, wrong), [8]) - expected).max()
    assert error > 100 * TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("llama", [1] * 8),
        ("qwen2", [1] * 8),
        ("qwen3", [1] * 8),
        ("llama", [4, 4]),
        ("llama", [3, 1, 2, 1, 1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value)),
)
def test_decode_equals_forward(name, chunks):
    model = build(*variant(name))
    forward = run(model, [8])
    np.testing.assert_allclose(run(model, chunks), forward, rtol=0, atol=TOLERANCE * np.abs(forward).max())


@pytest.mark.parametrize("policy", h2o_jax.list_policies())
def test_decode_equals_forward_within_the_budget(policy):
    """Every policy is dense attention while a row's pages are within its budget."""
    top_k = {} if policy in ("dense_attention", "sink_recent_attention") else {"top_k": 8}
    reserved = {"reserved_bos": 8} if policy == "sink_recent_attention" else {}
    page_size = 1 if "token" in policy else 4
    policy = h2o_jax.get_policy(policy, **top_k, **reserved)
    model = build(*variant("llama"))
    forward = run(model, [8])
    step, state = stepper(model, policy), fresh_state(model, page_size=page_size, pages=8, policy=policy)
    for index, token in enumerate(TOKENS):
        state, logits, _ = step(state, jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32))
        np.testing.assert_allclose(
            logits[0, 0], forward[index], rtol=0, atol=TOLERANCE * np.abs(forward).max()
        )


def test_rows_of_unequal_length_do_not_mix():
    model = build(*variant("llama"))
    forward = run(model, [8])
    step, state = stepper(model), fresh_state(model, rows=4)
    prompts = np.zeros((4, 5), np.int32)
    lengths = np.array([0, 1, 4, 5])
    for row, length in enumerate(lengths):
        prompts[row, :length] = TOKENS[:length]
        prompts[row, length:] = 7 + row
    state, logits, _ = step(state, jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32))
    bound = TOLERANCE * np.abs(forward).max()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], forward[:length], rtol=0, atol=bound)

    # Row 2 pauses for a step: it is inactive, and its next step continues where it stood.
    for active in ([0, 1, 0, 1], [0, 1, 1, 1]):
        active = np.array(active)
        nxt = np.where(active, TOKENS[np.minimum(lengths, 7)], 9)[:, None]
        state, logits, _ = step(state, jnp.asarray(nxt, jnp.int32), jnp.asarray(active, jnp.int32))
        for row in np.flatnonzero(active):
            np.testing.assert_allclose(logits[row, 0], forward[lengths[row]], rtol=0, atol=bound)
        lengths = lengths + active
    np.testing.assert_array_equal(state.table.seq_lens, lengths)


def test_each_layer_runs_its_own_policy():
    """Dense layers declare no scores, and sparse ones do."""
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=1, dense_layers=(0,))
    model = build(*variant("llama"))
    step, state = stepper(model, policy), fresh_state(model, page_size=1, pages=8, policy=policy)
    assert "summaries" not in state.layers[0].aux and "summaries" in state.layers[1].aux
    for token in TOKENS:
        state, logits, _ = step(state, jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32))
    assert np.isfinite(np.asarray(logits)).all()
    dense = run(model, [8])[-1]
    assert np.abs(np.asarray(logits[0, 0]) - dense).max() > 1e-3, "8 pages exceed the budget of 4"


def test_step_is_traced_once():
    traces = []
    model = build(*variant("llama"))
    graph, parameters = nnx.split(model)

    @jax.jit
    def step(state, tokens):
        traces.append(1)
        num_tokens = jnp.ones(1, jnp.int32)
        table, _ = h2o_jax.extend(state.table, num_tokens)
        state = h2o_jax.PagedState(table=table, layers=state.layers)
        return nnx.merge(graph, parameters)(state, tokens, num_tokens, policy=DENSE)

    state = fresh_state(model)
    for token in TOKENS:
        state, _ = step(state, jnp.array([[token]], jnp.int32))
    assert len(traces) == 1


def test_bfloat16_model_is_close_and_gives_float32_logits():
    values, weights = variant("llama")
    model = build(values, weights, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    expected = tiny_llama.forward(values, weights, TOKENS)
    got = run(model, [8])
    assert got.dtype == np.float32
    # A few roundings of 2^-9 per layer.
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def dot_precisions(jaxpr):
    """(operand dtype, precision) of every matrix product, in inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.invars[0].aval.dtype, equation.params["precision"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from dot_precisions(inner)


@pytest.mark.parametrize("length", [1, 8])
def test_tf32(length):
    """No product of float32 operands is left to a GPU's default, TF32."""
    model = build(*variant("qwen3"))
    state = h2o_jax.init_state(model.cache_config(1, 4, 4), DENSE)
    tokens, num_tokens = jnp.zeros((1, length), jnp.int32), jnp.array([length], jnp.int32)
    jaxpr = jax.make_jaxpr(lambda s: model(s, tokens, num_tokens, policy=DENSE, implementation="xla"))(state)
    found = list(dot_precisions(jaxpr.jaxpr))
    assert len(found) >= 2 * (7 + 2) + 1
    for dtype, precision in found:
        assert dtype == jnp.float32
        assert precision == (jax.lax.Precision.HIGHEST,) * 2


def test_rotation(rng):
    """Angles are exact to far below 2e-3 at any position, in a bfloat16 model too."""
    positions = np.array([0, 255, 257, 4095, 32767, 131071])
    for theta, head_dim in ((10000.0, 64), (100000.0, 64), (500000.0, 128), (1e6, 256)):
        rope = RotaryEmbedding(head_dim, theta)
        angle = positions[:, None] * theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        cos, sin = jax.jit(rope.tables)(jnp.asarray(positions, jnp.int32))
        assert cos.dtype == sin.dtype == jnp.float32
        np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=2e-4)
        np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=2e-4)

        x = jnp.asarray(rng.standard_normal((1, len(positions), 2, head_dim)), jnp.bfloat16)
        got = rope(x, jnp.asarray(positions, jnp.int32)[None])
        assert got.dtype == jnp.bfloat16
        x = np.asarray(x, np.float64)[0]
        pairs = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angle)[:, None]
        expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
        error = np.abs(np.asarray(got, np.float64)[0] - expected)
        assert (error <= 2.0**-8 * np.abs(expected) + 2e-3).all()


def test_rope_scaling():
    values = tiny_llama.config(rope_scaling=LLAMA3)
    np.testing.assert_allclose(
        LlamaConfig.from_hf(values).rope().frequencies(), tiny_llama.frequencies(values), rtol=1e-12
    )
    # The same rule as a GGUF file carries it.
    plain = RotaryEmbedding(8).frequencies()
    factors = tuple(plain / tiny_llama.frequencies(values))
    scaled = RotaryEmbedding(8, scaling=RopeScaling("factors", factors=factors)).frequencies()
    np.testing.assert_allclose(scaled, tiny_llama.frequencies(values), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(head_dim=7), "head_dim: expected an even number"),
        (dict(head_dim=8, theta=0.0), "theta: expected a positive number in float32's range; got 0.0"),
        (dict(head_dim=8, scaling=RopeScaling("factors", factors=(1.0,))), "expected 4 values"),
    ],
    ids=["head_dim", "theta", "factors"],
)
def test_rope_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(**arguments)


def attention(**changes):
    arguments = dict(in_features=32, num_heads=4, num_kv_heads=2, head_dim=8, rngs=nnx.Rngs(0)) | changes
    return H2OAttention(arguments.pop("in_features"), **arguments)


def attention_inputs(length=1):
    config = h2o_jax.CacheConfig(1, 2, 8, 4, 8, 2, 4, dtype=jnp.float32)
    state = h2o_jax.init_state(config, DENSE)
    num_tokens = jnp.array([length, 0], jnp.int32)
    table, _ = h2o_jax.extend(state.table, num_tokens)
    return state.layers[0], table, jnp.ones((2, length, 32)), num_tokens


def call(module, *arguments, **keywords):
    """The module under jit, as users run it."""
    graph, parameters = nnx.split(module)
    return jax.jit(lambda p, *a: nnx.merge(graph, p)(*a, **keywords))(parameters, *arguments)


def test_attention_call_policy_overrides_constructor(rng):
    """Neither policy keeps anything of its own in the cache, so that one cache serves both."""
    sinks = h2o_jax.get_policy("sink_recent_attention", reserved_bos=1, reserved_eos=1)
    state = h2o_jax.init_state(h2o_jax.CacheConfig(1, 2, 8, 1, 8, 1, 8, dtype=jnp.float32), DENSE)
    module = attention(policy=DENSE)
    table, _ = h2o_jax.extend(state.table, jnp.array([6], jnp.int32))
    prompt = jnp.asarray(rng.standard_normal((1, 6, 32)), jnp.float32)
    cache, _ = call(module, state.layers[0], table, prompt, jnp.array([6], jnp.int32))
    one = jnp.ones(1, jnp.int32)
    table, _ = h2o_jax.extend(table, one)
    x = jnp.asarray(rng.standard_normal((1, 1, 32)), jnp.float32)
    _, dense = call(module, cache, table, x, one)
    _, overridden = call(module, cache, table, x, one, policy=sinks)
    module.policy = sinks
    _, expected = call(module, cache, table, x, one)
    np.testing.assert_array_equal(overridden, expected)
    assert np.abs(overridden - dense).max() > 1e-2


def test_attention_inactive_row_is_zero_and_unwritten():
    cache, table, x, num_tokens = attention_inputs()
    _, y = call(attention(policy=DENSE), cache, table, x, num_tokens)
    assert y.shape == (2, 1, 32) and np.abs(y[0]).max() > 0
    np.testing.assert_array_equal(y[1], 0)


def test_attention_holds_parameters_only():
    graph, state = nnx.split(
        attention(policy=DENSE, use_qkv_bias=True, qk_norm=True, rope=RotaryEmbedding(8))
    )
    assert all(isinstance(variable, nnx.Param) for _, variable in nnx.to_flat_state(state))
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    projections = {f"{name}_proj.kernel" for name in "qkvo"} | {f"{name}_proj.bias" for name in "qkv"}
    assert names == projections | {"q_norm.scale", "k_norm.scale"}
    hash(graph)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(num_heads=3),
            "num_kv_heads: expected a divisor of num_heads; got num_heads = 3, num_kv_heads = 2",
        ),
        (dict(in_features=33, head_dim=None), "head_dim: expected in_features to be a multiple of num_heads"),
        (dict(rope=RotaryEmbedding(16)), "rope: expected head_dim = 8; got head_dim = 16"),
    ],
    ids=["odd group", "head_dim", "rope"],
)
def test_attention_constructor_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(**changes)


def test_attention_call_errors():
    cache, table, x, num_tokens = attention_inputs()
    with pytest.raises(ValueError, match="policy: expected one from the constructor or the call; got None"):
        attention()(cache, table, x, num_tokens)
    module = attention(policy=DENSE)
    with pytest.raises(ValueError, match=r"x: expected \[B, T, 32\]; got shape \(2, 32\)"):
        module(cache, table, x[:, 0], num_tokens)
    with pytest.raises(ValueError, match=r"table.seq_lens: expected .* = \[3\], got \[2\]"):
        module(cache, table, jnp.ones((3, 1, 32)), num_tokens)
    with pytest.raises(ValueError, match="cache: expected 4 KV heads of head_dim 8; got a pool of shape"):
        attention(policy=DENSE, num_kv_heads=4)(cache, table, x, num_tokens)


def test_model_call_errors():
    model = build(*variant("llama"))
    state, one = fresh_state(model), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"tokens: expected \[B, T\] integers; got int32 of shape \(1,\)"):
        model(state, one, one, policy=DENSE)
    with pytest.raises(ValueError, match="tokens: .*; got float32"):
        model(state, jnp.ones((1, 1)), one, policy=DENSE)
    short = h2o_jax.PagedState(table=state.table, layers=state.layers[:1])
    with pytest.raises(ValueError, match="state: expected 2 layers as in the model; got 1"):
        model(short, one[None], one, policy=DENSE)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma2", {}, "'gemma2' is not supported; expected one of llama, mistral, qwen2, qwen3"),
        (None, {}, "architecture: None is not supported"),
        (
            "mistral",
            {"sliding_window": 511},
            "sliding_window: expected none, or at least the context of 512 tokens; got a window of 511. "
            "Such a model must not see older tokens, and the policies here keep every page readable",
        ),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            "got a window of 64",
        ),
        (
            "qwen3",
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
            "got a window of 64",
        ),
        (
            "qwen3",
            {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: expected full_attention in every layer; got sliding_attention",
        ),
        (
            "llama",
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layer_types: expected full_attention in every layer; got chunked_attention",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: expected 'silu'; got 'gelu'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not supported",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope type 'dynamic' is not supported",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor: expected in the model's config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0; got 0.5"),
        (
            "llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: expected 1.0; got 0.5",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters: expected the same for all layers; got them apart for full_attention",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
            "rope_parameters, rope_scaling: expected one of them, or the same in both",
        ),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "got quant_method 'awq'"),
        ("llama", {"hidden_size": None}, "hidden_size: expected in the model's config; it is missing"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of num_heads = 4; got 3"),
        ("llama", {"num_hidden_layers": 0}, r"num_layers: expected a positive integer below 2\*\*31; got 0"),
        ("llama", {"head_dim": 9}, "head_dim: expected an even number"),
    ],
)
def test_config_errors(architecture, changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(tiny_llama.config(architecture, **changes))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 512}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_inactive_sliding_window_loads(architecture, changes):
    assert LlamaConfig.from_hf(tiny_llama.config(architecture, **changes)).architecture == architecture


def test_config_defaults():
    values = tiny_llama.config()
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"):
        del values[key]
    config = LlamaConfig.from_hf(values)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tie_embeddings) == (
        4,
        8,
        1e4,
        False,
    )
    with pytest.raises(ValueError, match="context of 131072 tokens; got a window of 4096"):
        values = tiny_llama.config("mistral")
        del values["max_position_embeddings"], values["sliding_window"]
        LlamaConfig.from_hf(values)


def test_both_spellings_of_the_rotary_settings():
    values = tiny_llama.config(rope_theta=5e5, rope_scaling=LLAMA3, torch_dtype="bfloat16")
    config = LlamaConfig.from_hf(values)
    assert config.rope_theta == 5e5 and config.rope_scaling.kind == "llama3"
    del values["rope_theta"], values["rope_scaling"], values["torch_dtype"]
    newer = values | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"}
    assert LlamaConfig.from_hf(newer) == config
    # The rotary base alone, and what is null in one place and stands in another.
    assert LlamaConfig.from_hf(values | {"rope_parameters": {"rope_theta": 1e6}}).rope_theta == 1e6
    assert LlamaConfig.from_hf(newer | {"rope_scaling": None, "rope_theta": None}) == config
    beside = values | {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_theta": None}}
    assert LlamaConfig.from_hf(beside) == config
