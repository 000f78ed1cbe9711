"""Tiny Llama-family models: their files, and their forward pass in NumPy float64.

The forward pass is written from the papers' equations and shares nothing with the package. Letters: T tokens,
Hq/Hkv query and KV heads, D head_dim.
"""

import json
import math

import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 48, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet():
    """The printable stand-ins of the 256 bytes in byte-level BPE, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


TOKENS = (*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "Ġw")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"))
VOCAB = len(TOKENS)


def config(architecture="llama", **changes):
    """A config.json of a model with 4 query heads, 2 KV heads, D = 8."""
    values = {
        "model_type": architecture,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "eos_token_id": 2,
    }
    return values | changes


def head_size(values):
    """D of a config, which may leave it out."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def rotary(values):
    """The rotary settings of a config, under either of their keys."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return {"rope_type": "default", "rope_theta": values.get("rope_theta")} | found


def tensors(values, seed=0):
    """Random tensors of that config, by Hugging Face name, float32."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    heads, kv_heads, head_dim = (
        values["num_attention_heads"],
        values["num_key_value_heads"],
        head_size(values),
    )
    bias = values["model_type"] == "qwen2" or values.get("attention_bias", False)

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def gain(size):
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    out = {"model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32)}
    out["model.norm.weight"] = gain(hidden)
    if not values["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = gain(hidden)
        out[prefix + "post_attention_layernorm.weight"] = gain(hidden)
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            out[f"{prefix}{name}.weight"] = matrix(*shape)
            wants_bias = bias and name.startswith("self_attn")
            if values["model_type"] == "qwen2" and name == "self_attn.o_proj":
                wants_bias = False
            if wants_bias or (values.get("mlp_bias") and name.startswith("mlp")):
                out[f"{prefix}{name}.bias"] = (0.5 * rng.standard_normal(shape[0])).astype(np.float32)
        if values["model_type"] == "qwen3":
            out[prefix + "self_attn.q_norm.weight"] = gain(head_dim)
            out[prefix + "self_attn.k_norm.weight"] = gain(head_dim)
    return out


def write_directory(path, values, weights, *, shards=1):
    """Writes a Hugging Face directory; returns its path."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    write_tokenizer(path)
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    placement = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, path / file)
        placement |= dict.fromkeys(names[shard::shards], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placement}))
    return path


def write_tokenizer(path, **changes):
    """Writes tokenizer.json and tokenizer_config.json of a byte-level BPE."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(path / "tokenizer.json"))
    values = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(values | changes))


_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """The converter's name of a Hugging Face tensor."""
    stem, kind = name.removeprefix("model.").rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{_TO_GGUF[rest]}.{kind}"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem] + "." + kind


def converter_rows(weight, heads):
    """The row order in which the converter stores q and k of the `llama` architecture: row 2j + h of a
    head is row h * D/2 + j of the model's."""
    size = weight.shape[0] // heads
    order = [
        head * size + half * (size // 2) + j
        for head in range(heads)
        for j in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(path, values, weights, *, extra=None, quantise=None):
    """Writes a GGUF file as llama.cpp's converter does; returns its path.

    Args:
        values: config.json.
        weights: float32, by Hugging Face name.
        extra: more metadata, integers and strings; it wins over what is written otherwise.
        quantise: gguf.GGMLQuantizationType of the matrices; None for float32.
    """
    import gguf

    architecture = {"mistral": "llama"}.get(values["model_type"], values["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    settings = rotary(values)
    writer.add_rope_freq_base(settings["rope_theta"])
    if values.get("head_dim"):
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
    if settings["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(settings["factor"])
    others = extra or {}
    if architecture == "llama":
        others = {"llama.rope.dimension_count": head_size(values)} | others
    for key, value in others.items():
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (VOCAB - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    if settings["rope_type"] == "llama3":
        # The file does not name the rule: it holds what the rule divides each frequency by.
        divisors = plain_frequencies(values) / frequencies(values)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, weight in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            weight = converter_rows(weight, values["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            weight = converter_rows(weight, values["num_key_value_heads"])
        if quantise is not None and weight.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_frequencies(values):
    """Radians per token of each pair, float64, not stretched."""
    head_dim = head_size(values)
    return rotary(values)["rope_theta"] ** (-2 * np.arange(head_dim // 2) / head_dim)


def frequencies(values):
    """Radians per token of each pair, float64, with the linear or the Llama 3 stretch."""
    settings = rotary(values)
    out = []
    for frequency in plain_frequencies(values):
        if settings["rope_type"] == "linear":
            frequency /= settings["factor"]
        elif settings["rope_type"] == "llama3":
            context = settings["original_max_position_embeddings"]
            wavelength = 2 * math.pi / frequency
            low, high = settings["low_freq_factor"], settings["high_freq_factor"]
            if wavelength > context / low:
                frequency /= settings["factor"]
            elif wavelength > context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / settings["factor"] + smooth * frequency
        out.append(frequency)
    return np.array(out)


def forward(values, weights, tokens):
    """Logits [T, V] of the whole sequence, float64."""
    weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
    heads, kv_heads, head_dim = (
        values["num_attention_heads"],
        values["num_key_value_heads"],
        head_size(values),
    )
    length = len(tokens)

    def norm(x, name):
        return (
            x
            / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + values["rms_norm_eps"])
            * weights[name + ".weight"]
        )

    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)

    turn = np.exp(1j * np.arange(length)[:, None] * frequencies(values))  # [T, D/2]

    def rotate(x):
        pairs = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * turn[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm")
        q = linear(h, prefix + "self_attn.q_proj").reshape(length, heads, head_dim)
        k = linear(h, prefix + "self_attn.k_proj").reshape(length, kv_heads, head_dim)
        v = linear(h, prefix + "self_attn.v_proj").reshape(length, kv_heads, head_dim)
        if values["model_type"] == "qwen3":
            q, k = norm(q, prefix + "self_attn.q_norm"), norm(k, prefix + "self_attn.k_norm")
        q, k = rotate(q), rotate(k)
        attended = np.zeros((length, heads, head_dim))
        for head in range(heads):
            for i in range(length):
                logits = k[: i + 1, head // (heads // kv_heads)] @ q[i, head] / math.sqrt(head_dim)
                p = np.exp(logits - logits.max())
                attended[i, head] = p / p.sum() @ v[: i + 1, head // (heads // kv_heads)]
        x = x + linear(attended.reshape(length, -1), prefix + "self_attn.o_proj")
        h = norm(x, prefix + "post_attention_layernorm")
        gate = linear(h, prefix + "mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, prefix + "mlp.up_proj"), prefix + "mlp.down_proj"
        )
    h = norm(x, "model.norm")
    head = "model.embed_tokens.weight" if values["tie_word_embeddings"] else "lm_head.weight"
    return h @ weights[head].T
