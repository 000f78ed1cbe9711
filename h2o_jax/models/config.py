"""The shape of a Llama-family model, from a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from h2o_jax.rope import RopeScaling, RotaryEmbedding

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported_architecture(name) -> ValueError:
    """The error for an architecture this package has no model for."""
    return ValueError(
        f"architecture: {name!r} is not supported; expected one of {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a Llama-family decoder. Frozen and hashable.

    Attributes:
        architecture: one of SUPPORTED_ARCHITECTURES.
        vocab_size: V, rows of the embedding.
        hidden_size: features of the residual stream.
        intermediate_size: features inside the MLP.
        num_layers, num_heads, num_kv_heads, head_dim: as named; num_kv_heads divides num_heads.
        max_position_embeddings: tokens of context the model was trained for.
        norm_epsilon: of every RMS norm.
        rope_theta, rope_scaling: see `h2o_jax.rope`.
        tie_embeddings: whether the embedding is the output head.
        qkv_bias, out_bias, mlp_bias: biases of the projections.
        qk_norm: RMS norm of each head's queries and keys (Qwen3).

    Raises:
        ValueError: names the field, what was expected and what came.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise unsupported_architecture(self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a positive integer; got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}; got {self.num_kv_heads}"
            )
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon: expected a positive number; got {self.norm_epsilon!r}")
        self.rope()

    def rope(self) -> RotaryEmbedding:
        """The rotary embedding of every layer."""
        return RotaryEmbedding(self.head_dim, self.rope_theta, self.rope_scaling)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the dictionary of a Hugging Face config.json.

        Raises:
            ValueError: an architecture or feature that this package does not compute (it would
                otherwise give wrong text), or a missing key.
        """
        architecture = values.get("model_type")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise unsupported_architecture(architecture)
        _refuse_other_computation(values)
        _refuse_sliding_window(architecture, values)

        hidden_size = _required(values, "hidden_size")
        num_heads = _required(values, "num_attention_heads")
        head_dim = values.get("head_dim")
        if head_dim is None:
            head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
        if architecture == "llama":
            num_kv_heads = values.get("num_key_value_heads") or num_heads
        else:
            num_kv_heads = _required(values, "num_key_value_heads")
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        max_position_embeddings = values.get("max_position_embeddings", 2048)
        bias = architecture in ("llama", "qwen3") and bool(values.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_required(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(values, "intermediate_size"),
            num_layers=_required(values, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            norm_epsilon=values.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope, max_position_embeddings),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or bias,
            out_bias=bias,
            mlp_bias=architecture == "llama" and bool(values.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
        )


def _required(values, key):
    if values.get(key) is None:
        raise ValueError(f"{key}: expected in the model's config; it is missing")
    return values[key]


def _refuse_other_computation(values):
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act: expected 'silu'; got {activation!r}")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise ValueError(f"quantization_config: expected unquantised tensors; got quant_method {method!r}")
    rotary = values.get("partial_rotary_factor", 1.0)
    if rotary not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: expected 1.0; got {rotary!r}")


def _refuse_sliding_window(architecture, values):
    """An attention window is another rule of which tokens are read: pages outside it must never be."""
    # Mistral's absent key means a window of 4096, as in transformers' MistralConfig.
    window = values.get("sliding_window", 4096 if architecture == "mistral" else None)
    layer_types = values.get("layer_types")
    if architecture not in ("mistral", "qwen2", "qwen3") or window is None:
        active = False
    elif architecture == "mistral":
        active = window < values.get("max_position_embeddings", 131072)
    elif layer_types is not None:
        active = False
    else:
        active = bool(values.get("use_sliding_window")) and values.get("max_window_layers", 28) < _required(
            values, "num_hidden_layers"
        )
    active = active or any(kind != "full_attention" for kind in layer_types or ())
    if active:
        raise ValueError(
            f"sliding_window: expected none; got an active window of {window} tokens. Such a model must not "
            "see older tokens, and the policies here keep every page readable"
        )


def _rope_scaling(rope, max_position_embeddings):
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(_required(rope, "factor")))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(_required(rope, "factor")),
            float(_required(rope, "low_freq_factor")),
            float(_required(rope, "high_freq_factor")),
            int(rope.get("original_max_position_embeddings") or max_position_embeddings),
        )
    raise ValueError(f"rope_scaling: rope type {kind!r} is not supported; expected default, linear or llama3")
