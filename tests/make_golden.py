"""Makes tests/golden: tiny random models of each family, and the logits that `transformers` gives for them.

A development script; the tests read what it wrote. It runs from the repository root, in an environment of its
own, whose versions it records beside the models:

    pip install torch transformers
    python tests/make_golden.py

Each model is saved by transformers itself, so that config.json and the tensor names are those of real
checkpoints. The weights are bfloat16, as in these; the logits are those of the same weights in float32. A
feature that the model is here for must change the logits by far more than the tests' tolerance of 1e-4.
"""

import copy
import json
import pathlib
import platform
import shutil

import numpy as np
import safetensors
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "golden"
TOKENS, VOCAB = 48, 64
LEAST_EFFECT = 0.05  # of a feature, on the largest difference of a logit

# The band of wavelengths that is blended, 10 to 40 tokens, holds the second of eight frequencies.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}


def config(kind, heads, kv_heads, **changes):
    values = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    return kind(**(values | changes))


def plain_rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def configs():
    llama, mistral = transformers.LlamaConfig, transformers.MistralConfig
    qwen2, qwen3 = transformers.Qwen2Config, transformers.Qwen3Config
    scaled = dict(hidden_size=64, rope_parameters=LLAMA3 | {"factor": 8.0})
    scaled_further = dict(hidden_size=64, rope_parameters=LLAMA3 | {"factor": 32.0})
    return {
        "llama2": config(llama, 4, 4, rope_parameters=plain_rope(1e4)),
        "llama3_1": config(llama, 4, 2, **scaled),
        "llama3_2": config(llama, 4, 1, **scaled_further, tie_word_embeddings=True),
        "mistral": config(mistral, 4, 2, head_dim=16, sliding_window=None, rope_parameters=plain_rope(1e6)),
        "qwen2": config(qwen2, 4, 2, rope_parameters=plain_rope(1e6), tie_word_embeddings=True),
        "qwen3": config(qwen3, 4, 2, head_dim=16, rope_parameters=plain_rope(1e6), tie_word_embeddings=True),
        "smollm2": config(
            llama, 9, 3, hidden_size=72, rope_parameters=plain_rope(1e5), tie_word_embeddings=True
        ),
    }


def new_model(config):
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_model(config, generator):
    """A model whose every tensor matters, its values exact in bfloat16."""
    model = new_model(config)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif "embed_tokens" in name:
            noise = 0.25 * noise  # as a tied head, it gives logits of about 2
        else:
            noise = noise / parameter.shape[1] ** 0.5
        parameter.data = noise.to(torch.bfloat16).float()
    return model


@torch.no_grad()
def logits(model, tokens):
    return model(tokens[None], use_cache=False).logits[0]


def without(feature, model, generator):
    """The model with one feature left out."""
    other = copy.deepcopy(model)
    layers = other.model.layers
    if feature == "norm weights":
        for name, parameter in other.named_parameters():
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                parameter.data = torch.ones_like(parameter)
    elif feature == "tied head":
        head = torch.randn(model.lm_head.weight.shape, generator=generator)
        other.lm_head.weight = torch.nn.Parameter(head)
    elif feature == "rope scaling":
        plain = copy.deepcopy(model.config)
        plain.rope_parameters = plain_rope(plain.rope_parameters["rope_theta"])
        other = new_model(plain)
        other.load_state_dict(model.state_dict())
    elif feature == "qkv bias":
        for layer in layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias = None
    elif feature == "qk norm":
        for layer in layers:
            layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    return other


def features(config):
    found = ["norm weights"]
    if config.tie_word_embeddings:
        found.append("tied head")
    if config.rope_parameters["rope_type"] != "default":
        found.append("rope scaling")
    if config.model_type == "qwen2":
        found.append("qkv bias")
    if config.model_type == "qwen3":
        found.append("qk norm")
    return found


def save(name, model, tokens, expected):
    directory = FOLDER / name
    shards = {"max_shard_size": "20KB"} if name == "llama2" else {}
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory, **shards)
    (directory / "generation_config.json").unlink()
    np.savez(directory / "golden.npz", tokens=tokens.numpy().astype(np.int32), logits=expected.numpy())


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, config) in enumerate(configs().items()):
        generator = torch.Generator().manual_seed(seed)
        model = random_model(config, generator)
        tokens = torch.randint(VOCAB, (TOKENS,), generator=generator)
        expected = logits(model, tokens)
        for feature in features(config):
            effect = (logits(without(feature, model, generator), tokens) - expected).abs().max().item()
            print(f"{name}: logits up to {expected.abs().max():.1f}; without {feature}: {effect:.2f} off")
            assert effect > LEAST_EFFECT, (name, feature, effect)
        save(name, model, tokens, expected)
    versions = {"python": platform.python_version()}
    versions |= {library.__name__: library.__version__ for library in (torch, transformers, safetensors)}
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
