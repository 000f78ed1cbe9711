"""Fills a model from tensors under their Hugging Face names: the one mapping that every file format uses."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from h2o_jax.models.config import LlamaConfig
from h2o_jax.models.files import one_line
from h2o_jax.models.llama import Llama

# Tables some old checkpoints carry; the model computes its own.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file, read only when asked for.

    Attributes:
        shape: of the tensor, as in the Hugging Face model (a projection is [out, in]).
        read: returns it as a NumPy array.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def parameter_names(config: LlamaConfig) -> dict[str, tuple[str | int, ...]]:
    """Hugging Face tensor name -> path of the parameter in `Llama`. The paths end in "kernel" where the
    parameter is the transposed tensor."""
    names: dict[str, tuple[str | int, ...]] = {
        "model.embed_tokens.weight": ("embed", "embedding"),
        "model.norm.weight": ("norm", "scale"),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head", "kernel")
    for index in range(config.num_layers):
        prefix, block = f"model.layers.{index}.", ("blocks", index)
        names[prefix + "input_layernorm.weight"] = (*block, "attention_norm", "scale")
        names[prefix + "post_attention_layernorm.weight"] = (*block, "mlp_norm", "scale")
        projections = [
            ("self_attn", "attention", name, config.qkv_bias) for name in ("q_proj", "k_proj", "v_proj")
        ]
        projections.append(("self_attn", "attention", "o_proj", config.out_bias))
        projections += [
            ("mlp", "mlp", name, config.mlp_bias) for name in ("gate_proj", "up_proj", "down_proj")
        ]
        for theirs, ours, name, bias in projections:
            names[f"{prefix}{theirs}.{name}.weight"] = (*block, ours, name, "kernel")
            if bias:
                names[f"{prefix}{theirs}.{name}.bias"] = (*block, ours, name, "bias")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                names[f"{prefix}self_attn.{name}.weight"] = (*block, "attention", name, "scale")
    return names


def load_weights(config: LlamaConfig, tensors: Mapping[str, Tensor], dtype: DTypeLike) -> Llama:
    """Builds the model with these weights. Each tensor is cast on its own, so that no second copy of the
    whole model exists.

    Args:
        config: sizes and switches of the model.
        tensors: by Hugging Face name. With tied embeddings an `lm_head.weight` is checked and not used.
        dtype: of the parameters and the computation.

    Returns:
        The model, on the default device.

    Raises:
        ValueError: more layers than the tensors can be for, or a tensor that is missing, unexpected, of the
            wrong shape or not floating point; the message names it and says what was expected.
    """
    if config.num_layers > len(tensors):
        raise ValueError(f"num_layers: {config.num_layers} need more than the file's {len(tensors)} tensors")
    names = parameter_names(config)
    _check_names(config, names, tensors)
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    parameters = dict(nnx.to_flat_state(state))
    if set(names.values()) != set(parameters):
        raise AssertionError(f"mapping and model differ: {set(names.values()) ^ set(parameters)}")

    filled = []
    for name, path in names.items():
        transposed = path[-1] == "kernel"
        expected = parameters[path].get_value().shape
        array = read_tensor(name, tensors[name], expected[::-1] if transposed else expected)
        with np.errstate(over="ignore"):  # what is too large for the dtype is infinite
            value = jnp.array(array.T if transposed else array, dtype=dtype)
        filled.append((path, parameters[path].replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _check_names(config: LlamaConfig, names: Collection[str], tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        why = ""
        if "lm_head.weight" in missing:
            why = " (the config says tie_word_embeddings = false, so the output head needs its own tensor)"
        raise ValueError(f"tensors: expected {_listed(missing)}; missing from the file{why}")
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    unexpected = [
        name
        for name in tensors
        if name not in names and name not in optional and not _IGNORED.fullmatch(name)
    ]
    if unexpected:
        raise ValueError(
            f"tensors: expected only those of a {config.architecture} model; got also {_listed(unexpected)}"
        )
    if optional & set(tensors):
        _check_shape(
            "lm_head.weight", tensors["lm_head.weight"].shape, (config.vocab_size, config.hidden_size)
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return one_line(", ".join(names[:5])) + more


def _check_shape(name: str, got: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(got) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}; got {tuple(got)}")


def read_tensor(name: str, tensor: Tensor, expected: Sequence[int]) -> np.ndarray:
    """The array of a tensor, which is read only if it has the expected shape.

    Raises:
        ValueError: another shape, or numbers that are not floating point.
    """
    _check_shape(name, tensor.shape, expected)
    array = tensor.read()
    if not jax.dtypes.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name}: expected a floating point tensor; got {array.dtype}")
    return array
