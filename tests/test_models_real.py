"""The default model, SmolLM2-135M-Instruct: real weights through the paged cache."""

import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax.models import LlamaConfig, default_model_path, load
from tests.test_models import DENSE, stepper

TEXT = "Water boils at 100 degrees Celsius at sea level, and at a lower temperature high up in the mountains."
PAGE_SIZE, PAGES = 16, 4


def require_default_model():
    """Skips a test where the default model, or what reads it, is not installed."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        default_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm():
    require_default_model()
    model, tokenizer = load(dtype=jnp.float32)
    return model, tokenizer, stepper(model)


def fresh_state(model):
    return h2o_jax.init_state(model.cache_config(1, PAGES, PAGE_SIZE), DENSE)


def padded(tokens):
    """[1, 48] int32: one shape for all prompts, for one compilation."""
    return jnp.asarray(list(tokens) + [0] * (48 - len(tokens)), jnp.int32)[None]


def test_config(smollm):
    assert smollm[0].config == LlamaConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        norm_epsilon=float(np.float32(1e-5)),
        rope_theta=100000.0,
        tie_embeddings=True,
    )


def test_decode_equals_forward(smollm):
    model, tokenizer, step = smollm
    tokens = tokenizer.encode(TEXT)[:24]
    assert len(tokens) == 24
    _, forward, _ = step(fresh_state(model), padded(tokens), jnp.array([24], jnp.int32))
    state = fresh_state(model)
    for position, token in enumerate(tokens):
        state, logits, ok = step(state, jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32))
        assert bool(ok.all())
        assert np.abs(logits[0, 0] - forward[0, position]).max() < 1e-3
    h2o_jax.check_state(state, model.cache_config(1, PAGES, PAGE_SIZE))


def test_greedy_continuation_is_coherent(smollm):
    model, tokenizer, step = smollm
    for prompt, answer in (
        ("The capital of France is", "Paris"),
        (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "What color is the sky on a clear day?"}]
            ),
            "blue",
        ),
    ):
        ids = tokenizer.encode(prompt)
        state, logits, _ = step(fresh_state(model), padded(ids), jnp.array([len(ids)], jnp.int32))
        token, written = int(logits[0, len(ids) - 1].argmax()), []
        while token not in tokenizer.eos_ids and len(written) < 20:
            written.append(token)
            state, logits, _ = step(state, jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32))
            token = int(logits[0, 0].argmax())
        assert answer in tokenizer.decode(written)
