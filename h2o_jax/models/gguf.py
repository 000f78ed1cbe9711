"""The model in a GGUF file: config and tensors, under the names and in the layout of Hugging Face."""

import dataclasses
import re
import reprlib
from typing import Any

import numpy as np

from h2o_jax.models.config import LlamaConfig, refuse_window, required, unsupported_architecture
from h2o_jax.models.files import one_line, typed
from h2o_jax.models.gguf_file import GGUFFile
from h2o_jax.models.weights import Tensor, read_tensor
from h2o_jax.rope import RopeScaling

# Mistral files say "llama".
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The model's config, from the file's metadata and from which tensors it has.

    Raises:
        ValueError: an unsupported architecture or feature, or a missing key; the message names it.
    """
    metadata, tensors = file.metadata, file.tensors
    architecture = typed(metadata, "general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise unsupported_architecture(architecture)

    def optional(key: str, kind: type, default: Any = None) -> Any:
        return typed(metadata, f"{architecture}.{key}", kind, default)

    def needed(key: str, kind: type) -> Any:
        return required(metadata, f"{architecture}.{key}", kind)

    if optional("expert_count", int, 0):
        raise ValueError(
            f"{architecture}.expert_count: expected no experts; got {optional('expert_count', int)}"
        )
    context = needed("context_length", int)
    # 0 says none. The first Mistral has a window, of which its files, being of "llama", say nothing.
    window = optional("attention.sliding_window", int, 0) or None
    refuse_window(f"{architecture}.attention.sliding_window", window, context)
    hidden_size, num_heads = needed("embedding_length", int), needed("attention.head_count", int)
    head_dim = optional("attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if optional(key, int, head_dim) != head_dim:
            raise ValueError(
                f"{architecture}.{key}: expected head_dim = {head_dim}; got {optional(key, int)}"
            )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ValueError("token_embd.weight: expected in the file as a matrix; it is missing or a number")
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=needed("feed_forward_length", int),
        num_layers=needed("block_count", int),
        num_heads=num_heads,
        num_kv_heads=optional("attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        norm_epsilon=needed("attention.layer_norm_rms_epsilon", float),
        rope_theta=optional("rope.freq_base", float, 10000.0),
        # The format has no flag for it: a file without an output head is tied.
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
    )
    return dataclasses.replace(config, rope_scaling=_rope_scaling(file, config))


def _rope_scaling(file: GGUFFile, config: LlamaConfig) -> RopeScaling | None:
    key = f"{config.architecture}.rope.scaling"
    kind = typed(file.metadata, f"{key}.type", str, "none")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{key}.type: rope type {reprlib.repr(kind)} is not supported; expected none or linear"
        )
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ValueError(f"{key}.type: expected none beside {_ROPE_FACTORS}; got {kind!r}")
        factors = read_tensor(_ROPE_FACTORS, file.tensors[_ROPE_FACTORS], (config.head_dim // 2,))
        return RopeScaling("factors", factors=tuple(factors.tolist()))
    if kind == "linear":
        return RopeScaling("linear", typed(file.metadata, f"{key}.factor", float, 1.0))
    return None


def gguf_tensors(file: GGUFFile, config: LlamaConfig) -> dict[str, Tensor]:
    """The file's tensors under Hugging Face names. A name without a counterpart stays as it is, for the
    loader to report.

    Raises:
        ValueError: two tensors that have the same name there.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        if config.architecture == "llama":
            kind = name.split(".")[-2] if name.startswith("blk.") else None
            if kind == "attn_q":
                tensor = _unpermuted(tensor, config.num_heads)
            elif kind == "attn_k":
                tensor = _unpermuted(tensor, config.num_kv_heads)
        name = _hf_name(name)
        if name in tensors:
            raise ValueError(f"tensors: expected one {one_line(name)}; got two, under other names")
        tensors[name] = tensor
    return tensors


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    top, _, kind = name.rpartition(".")
    return f"{_TOP[top]}.{kind}" if top in _TOP else name


def _unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """Undoes the converter's row order. For `llama` alone it stores each head's rows as pairs
    (i, i + D/2), for a rotation of neighbours; the rotation here pairs halves."""

    def read() -> np.ndarray:
        array = tensor.read()
        if array.shape[0] % (2 * num_heads):
            return array  # a wrong shape, which the loader reports
        return array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return Tensor(tensor.shape, read)
