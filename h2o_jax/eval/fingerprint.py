"""What tells one model from another, whatever its files are called."""

import hashlib

import jax
import numpy as np
from flax import nnx

from h2o_jax.models import Llama, Tokenizer


def fingerprint(model: Llama, tokenizer: Tokenizer) -> str:
    """12 hexadecimal digits of a SHA-256 over all that `load` made of a model's files.

    Told apart is what differs in one bit of a parameter as it was loaded, in its dtype, in the configuration
    or in the tokenizer and its chat template. Not told apart are files that load as the same numbers, such as
    a model in one file and in shards, nor versions of this package or of JAX. Reads all parameters: about a
    second for each gigabyte.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype.name}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    digest.update(repr(vars(tokenizer) | {"backend": tokenizer.backend.to_str(), "path": None}).encode())
    return digest.hexdigest()[:12]
