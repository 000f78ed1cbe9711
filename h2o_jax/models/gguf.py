"""GGUF files: config and tensors, under the names and in the layout of Hugging Face."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from h2o_jax.models._optional import require
from h2o_jax.models.config import LlamaConfig, refuse_window, unsupported_architecture
from h2o_jax.models.weights import Tensor
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


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: of the file.
        metadata: its key-value pairs.
        tensors: its tensors by GGUF name, shapes as in NumPy (the file lists them reversed).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file; tensors are read and dequantised when asked for.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, corrupt or not GGUF.
    """
    library = require("gguf")
    base: Any = library.GGUFReader

    class Reader(base):
        # A slice past the end of the file is silently short: a string loses its tail, and an array's
        # length is followed for as long as it says.
        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> np.ndarray:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, and its header refers to byte {end}")
            return super()._get(offset, dtype, count, *args, **kwargs)

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    # The reader meets bad bytes with whatever exception its NumPy calls or enums give.
    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise ValueError(f"{path}: truncated or corrupt GGUF file: {error}") from error
    size = path.stat().st_size
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > size:
            raise ValueError(
                f"{path}: truncated or corrupt GGUF file: tensor {tensor.name} ends at byte {end} of {size}"
            )

    def dequantised(tensor: Any) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            try:
                return library.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ValueError(
                    f"{path}: tensor {tensor.name} has the unsupported type {tensor.tensor_type.name}"
                ) from error

        return read

    tensors = {t.name: Tensor(tuple(int(n) for n in t.shape[::-1]), dequantised(t)) for t in reader.tensors}
    return GGUFFile(path, metadata, tensors)


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The model's config, from the file's metadata and from which tensors it has.

    Raises:
        ValueError: an unsupported architecture or feature, or a missing key; the message names it.
    """
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise unsupported_architecture(architecture)

    def optional(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def required(key: str) -> Any:
        value = optional(key)
        if value is None:
            raise ValueError(f"{architecture}.{key}: expected in the file's metadata; it is missing")
        return value

    def per_model(key: str) -> int:
        value = required(key)
        if isinstance(value, list):
            raise ValueError(f"{architecture}.{key}: expected one number for all layers; got {value}")
        return int(value)

    if optional("expert_count", 0):
        raise ValueError(f"{architecture}.expert_count: expected no experts; got {optional('expert_count')}")
    context = per_model("context_length")
    # 0 says none. The first Mistral has a window, of which its files, being of "llama", say nothing.
    window = optional("attention.sliding_window", 0) or None
    refuse_window(f"{architecture}.attention.sliding_window", window, context)
    hidden_size, num_heads = per_model("embedding_length"), per_model("attention.head_count")
    head_dim = int(optional("attention.key_length", hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if optional(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key}: expected head_dim = {head_dim}; got {optional(key)}")
    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight: expected in the file; it is missing")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=per_model("feed_forward_length"),
        num_layers=per_model("block_count"),
        num_heads=num_heads,
        num_kv_heads=int(optional("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        max_position_embeddings=context,
        norm_epsilon=float(required("attention.layer_norm_rms_epsilon")),
        rope_theta=float(optional("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, architecture),
        # The format has no flag for it: a file without an output head is tied.
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
    )


def _rope_scaling(file: GGUFFile, architecture: str) -> RopeScaling | None:
    key = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{key}.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"{key}.type: rope type {kind!r} is not supported; expected none or linear")
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ValueError(f"{key}.type: expected none beside {_ROPE_FACTORS}; got {kind!r}")
        return RopeScaling("factors", factors=tuple(file.tensors[_ROPE_FACTORS].read().tolist()))
    return RopeScaling("linear", float(file.metadata.get(f"{key}.factor", 1.0))) if kind == "linear" else None


def gguf_tensors(file: GGUFFile, config: LlamaConfig) -> dict[str, Tensor]:
    """The file's tensors under Hugging Face names. A name without a counterpart stays as it is, for the
    loader to report."""
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        if config.architecture == "llama":
            kind = name.split(".")[-2] if name.startswith("blk.") else None
            if kind == "attn_q":
                tensor = _unpermuted(tensor, config.num_heads)
            elif kind == "attn_k":
                tensor = _unpermuted(tensor, config.num_kv_heads)
        tensors[_hf_name(name)] = tensor
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
