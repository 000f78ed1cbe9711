"""Llama-family models that run real weights over the paged cache."""

from h2o_jax.models.config import SUPPORTED_ARCHITECTURES, LlamaConfig
from h2o_jax.models.llama import Llama
from h2o_jax.models.loading import default_model_path, load
from h2o_jax.models.tokenizer import StreamDecoder, Tokenizer
from h2o_jax.models.weights import load_weights

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Llama",
    "LlamaConfig",
    "StreamDecoder",
    "Tokenizer",
    "default_model_path",
    "load",
    "load_weights",
]
