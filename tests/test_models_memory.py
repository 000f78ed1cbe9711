"""Loading a bfloat16 model makes no second copy of it, in float32 least of all."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest
from flax import nnx

from h2o_jax.models import LlamaConfig, load_weights
from h2o_jax.models.files import read_json
from h2o_jax.models.gguf import gguf_config, gguf_tensors
from h2o_jax.models.gguf_file import open_gguf
from h2o_jax.models.safetensors import read_directory
from h2o_jax.models.weights import Tensor
from tests import tiny_llama

gguf = pytest.importorskip("gguf")

# 5.2 million parameters: 10 MB in bfloat16, of which the largest matrix is a fortieth.
VALUES = tiny_llama.config(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=8)
LARGEST = 512 * 256 * 4  # bytes, in float32


@pytest.fixture(params=["directory", "gguf"])
def stored(request, tmp_path):
    """(config, tensors) of the model in bfloat16 files."""
    weights = tiny_llama.tensors(VALUES)
    if request.param == "directory":
        weights = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
        path = tiny_llama.write_directory(tmp_path, VALUES, weights)
        return LlamaConfig.from_hf(read_json(path / "config.json")), read_directory(path)
    path = tmp_path / "model.gguf"
    file = open_gguf(tiny_llama.write_gguf(path, VALUES, weights, quantise=gguf.GGMLQuantizationType.BF16))
    config = gguf_config(file)
    return config, gguf_tensors(file, config)


def test_no_second_copy(stored):
    config, tensors = stored
    load_weights(config, tensors, jnp.bfloat16)  # what is compiled and cached once does not count
    others = {id(array) for array in jax.live_arrays()}
    on_device = []

    def watched(tensor):
        def read():
            on_device.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in others))
            return tensor.read()

        return Tensor(tensor.shape, read)

    tracemalloc.start()  # NumPy's arrays are counted, JAX's are not
    try:
        model = load_weights(config, {name: watched(t) for name, t in tensors.items()}, jnp.bfloat16)
        _, on_host = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    leaves = jax.tree.leaves(nnx.state(model))
    size = sum(leaf.nbytes for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert max(on_device) <= size + LARGEST
    assert on_host < size / 2
