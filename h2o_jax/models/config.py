"""The shape of a Llama-family model, from a Hugging Face config.json."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from h2o_jax.models.files import one_line, typed
from h2o_jax.rope import RopeScaling, RotaryEmbedding, check_positive

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# What transformers takes where a config.json has no max_position_embeddings.
_CONTEXTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def unsupported_architecture(name: Any) -> ValueError:
    """The error for an architecture this package has no model for."""
    expected = ", ".join(SUPPORTED_ARCHITECTURES)
    return ValueError(f"architecture: {reprlib.repr(name)} is not supported; expected one of {expected}")


def refuse_window(key: str, window: int | None, context: int) -> None:
    """Checks that a sliding window hides nothing: a token sees itself and the `window - 1` before it, so a
    window of the whole context is none.

    Args:
        key: of the window in the model's config.
        window: in tokens, or None.
        context: tokens of context the model was trained for.

    Raises:
        ValueError: the window is shorter than the context.
    """
    if window is not None and window < context:
        raise ValueError(
            f"{key}: expected none, or at least the context of {context} tokens; got a window of {window}. "
            "Such a model must not see older tokens, and the policies here keep every page readable"
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

    def __post_init__(self) -> None:
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
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ValueError(f"{name}: expected a positive integer below 2**31; got {reprlib.repr(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}; got {self.num_kv_heads}"
            )
        check_positive("norm_epsilon", self.norm_epsilon)
        self.rope()

    def rope(self) -> RotaryEmbedding:
        """The rotary embedding of every layer."""
        return RotaryEmbedding(self.head_dim, self.rope_theta, self.rope_scaling)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the dictionary of a Hugging Face config.json. The rotary settings may stand under
        `rope_parameters`, or as `rope_theta` and `rope_scaling`, as before transformers 5. The tensors' dtype
        (`dtype`, `torch_dtype` before) is not read: the files tell it.

        Raises:
            ValueError: an architecture or feature that this package does not compute (it would
                otherwise give wrong text), or a missing key.
        """
        architecture = values.get("model_type")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise unsupported_architecture(architecture)
        _refuse_other_computation(values)
        max_position_embeddings = typed(values, "max_position_embeddings", int, _CONTEXTS[architecture])
        refuse_window("sliding_window", _sliding_window(architecture, values), max_position_embeddings)

        hidden_size = required(values, "hidden_size", int)
        num_heads = required(values, "num_attention_heads", int)
        head_dim = typed(values, "head_dim", int)
        if head_dim is None:
            head_dim = 128 if architecture == "qwen3" else hidden_size // max(num_heads, 1)
        if architecture == "llama":
            num_kv_heads = typed(values, "num_key_value_heads", int) or num_heads
        else:
            num_kv_heads = required(values, "num_key_value_heads", int)
        rope = _rope_settings(values)
        bias = architecture in ("llama", "qwen3") and typed(values, "attention_bias", bool, False)
        return cls(
            architecture=architecture,
            vocab_size=required(values, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=required(values, "intermediate_size", int),
            num_layers=required(values, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            norm_epsilon=typed(values, "rms_norm_eps", float, 1e-6),
            rope_theta=typed(rope, "rope_theta", float, 10000.0),
            rope_scaling=_rope_scaling(rope, max_position_embeddings),
            tie_embeddings=typed(values, "tie_word_embeddings", bool, False),
            qkv_bias=architecture == "qwen2" or bias,
            out_bias=bias,
            mlp_bias=architecture == "llama" and typed(values, "mlp_bias", bool, False),
            qk_norm=architecture == "qwen3",
        )


def required(values: Mapping[str, Any], key: str, kind: type) -> Any:
    """`values[key]`, of that kind (see `files.typed`).

    Raises:
        ValueError: a value of another kind, or none.
    """
    value = typed(values, key, kind)
    if value is None:
        raise ValueError(f"{key}: expected in the model's config; it is missing")
    return value


def _refuse_other_computation(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act: expected 'silu'; got {reprlib.repr(activation)}")
    quantisation = typed(values, "quantization_config", dict)
    if quantisation:
        method = reprlib.repr(quantisation.get("quant_method"))
        raise ValueError(f"quantization_config: expected unquantised tensors; got quant_method {method}")


def _sliding_window(architecture: str, values: Mapping[str, Any]) -> int | None:
    """The window of the layers that slide, by the rules of transformers, or None."""
    window = typed({"sliding_window": 4096, **values}, "sliding_window", int)
    layer_types = typed(values, "layer_types", list)
    if architecture == "mistral":
        return window
    if layer_types is None:
        layers = required(values, "num_hidden_layers", int)
        dense = typed(values, "max_window_layers", int, 28)
        return window if typed(values, "use_sliding_window", bool) and dense < layers else None
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others and (others != ["sliding_attention"] or window is None):
        got = one_line(", ".join(others))
        raise ValueError(f"layer_types: expected full_attention in every layer; got {got}")
    return window if others else None


def _rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, in either spelling; a setting that is None is left out."""
    old, new = (typed(values, key, dict, {}) for key in ("rope_scaling", "rope_parameters"))
    if old and new and old != new:
        raise ValueError(
            "rope_parameters, rope_scaling: expected one of them, or the same in both; got "
            f"{reprlib.repr(new)}, {reprlib.repr(old)}"
        )
    beside = {key: values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    settings = {
        key: value for source in (beside, old, new) for key, value in source.items() if value is not None
    }
    nested = [key for key, value in settings.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            "rope_parameters: expected the same for all layers; got them apart for "
            + one_line(", ".join(nested))
        )
    rotary = typed(settings, "partial_rotary_factor", float, 1.0)
    if rotary != 1:
        raise ValueError(f"partial_rotary_factor: expected 1.0; got {rotary!r}")
    return settings


def _rope_scaling(rope: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", required(rope, "factor", float))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            required(rope, "factor", float),
            required(rope, "low_freq_factor", float),
            required(rope, "high_freq_factor", float),
            typed(rope, "original_max_position_embeddings", int, max_position_embeddings),
        )
    raise ValueError(
        f"rope_scaling: rope type {reprlib.repr(kind)} is not supported; expected default, linear or llama3"
    )
