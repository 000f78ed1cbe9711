"""Results of one model are not taken for those of another of the same name."""

import json

import numpy as np
import pytest

from h2o_jax.eval import Setup
from h2o_jax.models import load
from tests import tiny_llama

VALUES = tiny_llama.config(num_hidden_layers=1)


def key(path, values=VALUES, *, change=None, tokenizer_config=None, dtype="float32"):
    """Of a model written to `path` and loaded from there."""
    tensors = tiny_llama.tensors(VALUES)
    if change:
        change(tensors)
    tiny_llama.write_directory(path, values, tensors)
    if tokenizer_config:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer_config))
    return Setup(*load(path, dtype=dtype), text="", context=8, steps=1, rows=1).key()


def next_number(tensors):
    (norm,) = (array for name, array in tensors.items() if name == "model.norm.weight")
    norm[-1] = np.nextafter(norm[-1], np.float32(2))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return key(tmp_path_factory.mktemp("one") / "tiny")


def test_the_same_files_elsewhere_are_the_same_model(one, tmp_path):
    assert key(tmp_path / "other") == one and len(one["fingerprint"]) == 12


@pytest.mark.parametrize(
    "options",
    [
        dict(change=next_number),
        dict(values=VALUES | {"rope_theta": 5e5}),
        dict(tokenizer_config={"chat_template": "{{ messages }}"}),
        dict(dtype="bfloat16"),
    ],
    ids=["one number", "config", "template", "dtype"],
)
def test_another_model_of_the_same_name(one, options, tmp_path):
    assert key(tmp_path / "tiny", **options)["fingerprint"] != one["fingerprint"]
