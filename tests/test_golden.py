"""The logits of `transformers`, reproduced from both file formats. tests/make_golden.py made them."""

import json
import pathlib
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from h2o_jax.models import load
from tests import tiny_llama
from tests.test_models import run

gguf = pytest.importorskip("gguf")

FOLDER = pathlib.Path(__file__).parent / "golden"
NAMES = ("llama2", "llama3_1", "llama3_2", "mistral", "qwen2", "qwen3", "smollm2")
PREFILL = 29  # of 48 tokens; the others are decoded one by one
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def golden(request):
    directory = FOLDER / request.param
    weights = {}
    for file in directory.glob("*.safetensors"):
        weights |= {name: weight.astype(np.float32) for name, weight in load_file(file).items()}
    arrays = np.load(directory / "golden.npz")
    return types.SimpleNamespace(
        directory=directory,
        values=json.loads((directory / "config.json").read_text()),
        weights=weights,
        tokens=arrays["tokens"],
        logits=arrays["logits"],
    )


def assert_reproduced(path, golden):
    model, _ = load(path, dtype=jnp.float32)
    chunks = [PREFILL] + [1] * (len(golden.tokens) - PREFILL)
    got = run(model, chunks, golden.tokens, pages=12)
    np.testing.assert_allclose(got, golden.logits, rtol=0, atol=TOLERANCE)


def test_directory(golden, tmp_path):
    directory = shutil.copytree(golden.directory, tmp_path / "model")
    tiny_llama.write_tokenizer(directory)
    assert_reproduced(directory, golden)


def test_gguf(golden, tmp_path):
    file = tiny_llama.write_gguf(
        tmp_path / "model.gguf",
        golden.values,
        golden.weights,
        quantise=gguf.GGMLQuantizationType.BF16,
    )
    assert_reproduced(file, golden)


def test_float64(golden):
    """The other tests' oracle computes these models too."""
    got = tiny_llama.forward(golden.values, golden.weights, golden.tokens)
    np.testing.assert_allclose(got, golden.logits, rtol=0, atol=TOLERANCE)


def test_the_folder_holds_these_models_and_is_small():
    assert {path.name for path in FOLDER.iterdir()} == {*NAMES, "versions.json"}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 2**20
