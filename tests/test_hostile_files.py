"""Files made to harm: each ends in a clear error that names it, soon, and without taking much memory."""

import dataclasses
import json
import os
import struct
import tracemalloc

import numpy as np
import pytest

from h2o_jax.models import Tokenizer, chat_template, load
from h2o_jax.models.gguf import gguf_config, gguf_tensors
from h2o_jax.models.gguf_file import open_gguf
from h2o_jax.models.weights import Tensor, load_weights
from h2o_jax.rope import RopeScaling
from tests import tiny_llama
from tests.test_models import LLAMA3
from tests.test_tokenizer import metadata

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

MESSAGES = [{"role": "user", "content": "hello"}]
VALUES = tiny_llama.config(num_hidden_layers=1)


@pytest.fixture
def directory(tmp_path):
    return tiny_llama.write_directory(tmp_path, VALUES, tiny_llama.tensors(VALUES), shards=2)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size: expected a whole number; got '32'"),
        ({"hidden_size": True}, "hidden_size: expected a whole number; got True"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            r"num_heads: expected a positive integer below 2\*\*31; got 0",
        ),
        ({"num_hidden_layers": 10**9}, r"num_layers: 1000000000 need more than the file's \d+ tensors"),
        ({"vocab_size": 2**31}, r"vocab_size: expected a positive integer below 2\*\*31; got 2147483648"),
        (
            {"max_position_embeddings": [512]},
            r"max_position_embeddings: expected a whole number; got \[512\]",
        ),
        ({"rope_theta": 10**400}, "rope_theta: expected a finite number; got 1000"),
        ({"rope_theta": float("inf")}, "rope_theta: expected a finite number; got inf"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a finite number; got 'small'"),
        ({"rms_norm_eps": 1e300}, "norm_epsilon: expected a positive number in float32's range; got 1e"),
        ({"rms_norm_eps": 1e-320}, "norm_epsilon: expected a positive number in float32's range; got 1e"),
        ({"rope_theta": 5e-324}, "theta: expected a positive number in float32's range; got 5e-324"),
        ({"head_dim": 2**16}, "head_dim: expected an even number from 2 to 32768; got 65536"),
        (
            {"rope_scaling": {"type": "linear", "factor": 5e-324}},
            "factor: expected a positive number in float32's range; got 5e-324",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 10**400}},
            r"original_max_position: expected a positive integer below 2\*\*31; got 1000",
        ),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 1e-300}},
            "low_freq_factor: expected a positive number in float32's range; got 1e-300",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1e300}},
            "high_freq_factor: expected a positive number in float32's range; got 1e.300",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object; got 'linear'"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope_scaling: rope type \['linear'\] is not supported"),
        ({"layer_types": 1}, "layer_types: expected a list; got 1"),
        ({"layer_types": [["full"]]}, r"layer_types: expected full_attention in every layer; got \['full'\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false; got 'false'"),
        ({"quantization_config": 4}, "quantization_config: expected an object; got 4"),
        ({"model_type": ["llama"]}, r"architecture: \['llama'\] is not supported"),
        ({"eos_token_id": 999}, r"eos_token_id: expected ids below vocab_size = \d+; got 999"),
        ({"eos_token_id": -1}, "eos_token_id: expected an id >= 0; got -1"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id: expected a whole number; got 'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_config_values(changes, message, directory):
    edit(directory / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(directory)
    assert str(directory) in str(error.value)


def test_rope_factors_of_a_wrong_shape(tmp_path):
    """They are read for the config, so before the shapes of the weights are checked."""
    file = open_gguf(tiny_llama.write_gguf(tmp_path / "m.gguf", VALUES, tiny_llama.tensors(VALUES)))
    for shape, head_dim in (((2**30,), 8), ((2, 2), 8), ((2**29,), 2**30)):
        factors = Tensor(shape, lambda: pytest.fail("it was read"))
        odd = dataclasses.replace(
            file,
            metadata=file.metadata
            | {f"llama.{key}": head_dim for key in ("rope.dimension_count", "attention.key_length")}
            | {"llama.attention.value_length": head_dim},
            tensors=file.tensors | {"rope_freqs.weight": factors},
        )
        with pytest.raises(ValueError, match=r"rope_freqs.weight: expected shape \(4,\)|head_dim: expected an"):
            gguf_config(odd)


HOSTILE = "\x1b[2J\n\u202e" * 10**5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"rope_parameters": {f"{HOSTILE[:9]}{i}": {} for i in range(10**4)}}),
        ("config.json", {"layer_types": [f"{HOSTILE[:9]}{i}" for i in range(10**5)]}),
        ("model.safetensors.index.json", {"weight_map": {HOSTILE: "missing"}}),
        ("model.safetensors.index.json", {"weight_map": {HOSTILE: 3}}),
        ("model.safetensors.index.json", {"weight_map": {HOSTILE: "model-00001-of-00002.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": {"x": HOSTILE[:30]}}),
        ("model.safetensors.index.json", {"weight_map": {"x": "x" * 10**5}}),
        ("tokenizer_config.json", {"bos_token": HOSTILE}),
        ("tokenizer.json", {"version": HOSTILE}),
    ],
    ids=["rope", "layers", "no shard", "shard type", "tensor", "shard", "long shard", "token", "version"],
)
def test_message_of_a_directory(name, changes, directory):
    """It is short and on one line, whatever texts of a file it tells."""
    edit(directory / name, **changes)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(directory)
    assert_short(error.value, directory)


def assert_short(error, path):
    text = str(error)
    assert text.startswith(str(path)) and text.isprintable() and len(text) < 12_000


@pytest.mark.parametrize("name", ["tensor", "key", "dimensions", "merge", "alignment", "dtype"])
def test_message_of_a_tensor_file(name, directory, tmp_path):
    path = tmp_path / "m.gguf"
    if name in ("merge", "tensor"):
        tiny_llama.write_gguf(path, VALUES, tiny_llama.tensors(VALUES))
        file = open_gguf(path)
        if name == "merge":
            with pytest.raises(ValueError) as error:
                Tokenizer.from_gguf(file.metadata | {"tokenizer.ggml.merges": [HOSTILE]})
            return assert_short(error.value, "tokenizer.ggml.merges")
        config, tensors = gguf_config(file), gguf_tensors(file, gguf_config(file))
        with pytest.raises(ValueError) as error:
            load_weights(config, tensors | {HOSTILE: Tensor((), lambda: pytest.fail("read"))}, np.float32)
        return assert_short(error.value, "tensors: expected")
    if name == "key":
        write_header(path, 2 * (text(HOSTILE) + struct.pack("<II", 4, 0)), num_values=2)
    elif name == "dimensions":
        write_header(path, tensors=tensor(HOSTILE, [1] * 5, 0), num_tensors=1)
    elif name == "alignment":
        write_header(path, text("general.alignment") + struct.pack("<I", 8) + text(HOSTILE), num_values=1)
    else:
        path = directory
        for shard in directory.glob("model*"):
            shard.unlink()
        values = {"shape": [], "dtype": HOSTILE, "data_offsets": [0, 4]}
        header = json.dumps({"x": values}).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(4)
        (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError) as error:
        load(path)
    assert_short(error.value, path)


def test_message_of_rope_factors():
    with pytest.raises(ValueError, match="^factors: expected a positive number in float32's range; got -1.0$"):
        RopeScaling("factors", factors=(1.0, -1.0) * 10**6)


def test_relative_paths(directory, monkeypatch):
    """The name of the file comes first, however short it is."""
    monkeypatch.chdir(directory)
    edit(directory / "config.json", hidden_size=64)
    with pytest.raises(ValueError, match=r"^\.: model.embed_tokens.weight: expected shape"):
        load(".")
    edit(directory / "config.json", hidden_size="e")
    with pytest.raises(ValueError, match="^config.json: hidden_size: expected a whole number; got 'e'"):
        load(".")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100000, "config.json: expected JSON; maximum recursion depth"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "config.json: expected JSON; Exceeds the limit"),
        (b"\xff", "config.json: 'utf-8' codec can't decode"),
        (b" " * (9 << 20), "config.json: expected at most 8388608 bytes of text; got more"),
    ],
    ids=["deep", "long number", "not UTF-8", "large"],
)
def test_no_config(content, message, directory):
    (directory / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ]
    + ["model-00001-of-00002.safetensors", "m.gguf"],
)
def test_pipe(name, directory):
    """A pipe that nothing writes to would be read for ever."""
    path = directory / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name}: expected a file; it is a directory, a pipe or a device"):
        load(path if path.suffix == ".gguf" else directory)


@pytest.mark.parametrize("shard", ["../secret", "/etc/passwd", "a/b", "", ".", 3, None, ["x"]], ids=repr)
def test_index_names_files_beside_it(shard, directory):
    edit(directory / "model.safetensors.index.json", weight_map={"lm_head.weight": shard})
    with pytest.raises(
        ValueError, match="index.json: expected the name of a file beside it for lm_head.weight; got"
    ):
        load(directory)


def test_index_names_a_directory(directory):
    (directory / "folder").mkdir()
    for name in ("folder", ".."):
        edit(directory / "model.safetensors.index.json", weight_map={"lm_head.weight": name})
        with pytest.raises(ValueError, match="expected a file; it is a directory"):
            load(directory)


def test_long_safetensors_header(directory):
    (directory / "model-00001-of-00002.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    message = "corrupt safetensors file: expected a header of at most 16777216 bytes; got 1099511627776"
    with pytest.raises(ValueError, match=message):
        load(directory)


def text(value):
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def write_header(path, values=b"", tensors=b"", num_values=0, num_tensors=0, data=b""):
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + values + tensors
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def tensor(name, shape, offset, kind=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"num_values": 2**40}, "1099511627776 values are announced, more than 65536"),
        ({"num_tensors": 2**40}, "1099511627776 tensors and 0 values are announced"),
        ({"num_values": 1, "values": text("x") + struct.pack("<IIQ", 9, 9, 1)}, "value type 9 is none of"),
        (
            {"num_values": 1, "values": text("x") + struct.pack("<IIQ", 9, 0, 2**63)},
            "byte 92233720.* is referred to",
        ),
        (
            {"num_values": 1, "values": text("x") + struct.pack("<IQ", 8, 2**63)},
            "byte 92233720.* is referred to",
        ),
        ({"num_values": 2, "values": 2 * (text("x") + struct.pack("<II", 4, 0))}, "the key x comes twice"),
        (
            {"num_values": 1, "values": text("general.alignment") + struct.pack("<II", 4, 3)},
            "a power of two; got 3",
        ),
        ({"num_tensors": 1, "tensors": tensor("x", [1] * 5, 0)}, "tensor x has 5 dimensions"),
        (
            {"num_tensors": 1, "tensors": tensor("x", [2**32, 2**32], 0)},
            "tensor x ends at byte 73786976294838",
        ),
        (
            {"num_tensors": 1, "tensors": tensor("x", [31], 0, kind=8)},
            "rows of 31 numbers, not a multiple of 32",
        ),
        (
            {"num_tensors": 1, "tensors": tensor("x", [31], 0, kind=99)},
            "99 is not a valid GGMLQuantizationType",
        ),
        ({"num_tensors": 2, "tensors": 2 * tensor("x", [0], 0)}, "two tensors have the same name"),
        (
            {"num_tensors": 2, "tensors": tensor("x", [4], 0) + tensor("y", [4], 8), "data": b"0" * 99},
            "y overlaps",
        ),
    ],
    ids="values tensors lists list text twice alignment dimensions product row type names overlap".split(),
)
def test_gguf_header(header, message, tmp_path):
    path = write_header(tmp_path / "m.gguf", **header)
    with pytest.raises(ValueError, match=f"m.gguf: truncated or corrupt GGUF file: .*{message}"):
        load(path)


def test_memory_of_a_gguf_header(tmp_path):
    """A hundred thousand numbers, and as many empty texts: what is made of them is not much longer."""
    values = text("x") + struct.pack("<IIQ", 9, 0, 10**5) + bytes(10**5)
    values += text("y") + struct.pack("<IIQ", 9, 8, 10**5) + bytes(8 * 10**5)
    path = write_header(tmp_path / "m.gguf", values, num_values=2)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="m.gguf: architecture: None is not supported"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.block_count": "x"}, "llama.block_count: expected a whole number; got 'x'"),
        ({"llama.attention.head_count": 0}, r"num_heads: expected a positive integer below 2\*\*31; got 0"),
        ({"llama.attention.key_length": "x"}, "llama.attention.key_length: expected a whole number; got 'x'"),
        ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base: expected a finite number; got 'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_gguf_values(extra, message, tmp_path):
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", VALUES, tiny_llama.tensors(VALUES), extra=extra)
    with pytest.raises(ValueError, match=f"m.gguf: {message}"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "tokenizer.ggml.model: expected a text; got 3"),
        ({"pre": [3]}, r"tokenizer.ggml.pre: expected a text; got \[3\]"),
        ({"tokens": "x"}, "tokenizer.ggml.tokens: expected a list; got 'x'"),
        ({"merges": np.zeros(3)}, r"tokenizer.ggml.merges: expected a list; got array\("),
        ({"token_type": 3}, r"tokenizer.ggml.token_type: expected \d+ entries; got 1"),
        # As an array of texts they would take 400 GB.
        (
            {"token_type": ["x" * 10**6] + [""] * 10**5},
            r"tokenizer.ggml.token_type: expected \d+ entries; got 100001",
        ),
        ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id: expected a whole number; got 'x'"),
        ({"add_bos_token": 2}, "tokenizer.ggml.add_bos_token: expected true or false; got 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_gguf_tokenizer(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_numbers_too_large_for_the_dtype(tmp_path):
    """Infinite scales of quantised blocks, and a float64 beyond float32: infinite or NaN, not a warning."""
    weights = tiny_llama.tensors(tiny_llama.config(num_hidden_layers=1, intermediate_size=64))
    values = VALUES | {"intermediate_size": 64}
    kind = gguf.GGMLQuantizationType.Q8_0
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", values, weights, quantise=kind)
    content = path.read_bytes()
    path.write_bytes(content[:-4000] + b"\x00\x7c" * 2000)
    load(path)
    weights["model.norm.weight"] = np.full(32, 1e300)
    model, _ = load(tiny_llama.write_directory(tmp_path / "hf", values, weights))
    assert np.isinf(model.norm.scale[...]).all()


def replace(content):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def sequence(kind, part, count):
    return {"type": "Sequence", kind: [part] * count}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT, SPECIAL = ({kind: {"id": "A", "type_id": 0}} for kind in ("Sequence", "SpecialToken"))
TWICE = {"type": "TemplateProcessing", "single": [TEXT] * 2}


def template(ids, tokens, **pieces):
    special = {"A": {"id": "A", "ids": ids, "tokens": tokens}}
    return {"type": "TemplateProcessing", "single": [TEXT], "pair": [], "special_tokens": special} | pieces


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", sequence("normalizers", replace("aa"), 40)),
        ("normalizer", replace("a" * 1000)),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 1000}),
        ("pre_tokenizer", sequence("pretokenizers", BYTE_LEVEL, 40)),
        ("post_processor", sequence("processors", TWICE, 40)),
        ("post_processor", template([1] * 100, ["a"] * 100, single=[SPECIAL, TEXT, SPECIAL])),
        ("post_processor", template([1] * 100, ["a"] * 100, pair=[TEXT, SPECIAL, TEXT])),
        ("post_processor", template([1], ["a"] * 300)),
        ("post_processor", template([], [], single=[TEXT] * 300)),
        ("decoder", sequence("decoders", sequence("decoders", replace("aa"), 7), 7)),
    ],
    ids=["replace", "replacement", "prepend", "bytes", "template"]
    + ["template ids", "template ids of a pair", "template tokens", "template texts", "decoder"],
)
def test_tokenizer_that_fills_the_memory(name, part, directory):
    edit(directory / "tokenizer.json", **{name: part})
    with pytest.raises(
        ValueError, match="tokenizer.json: expected parts that make a text at most 256 times longer"
    ):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
            "Precompiled is not supported",
        ),
        ({"normalizer": {"prepend": "a"}}, "expected an object with a type for each part; got"),
        ({"decoder": 3}, "expected an object with a type for each part; got 3"),
        ({"model": None}, "model: expected an object; it is missing"),
        ({"model": {"type": "BPE"}}, "expected a tokenizer of the `tokenizers` library: "),
        (
            {"model": {"type": "BPE", "continuing_subword_prefix": "##"}},
            "continuing_subword_prefix: expected none in a BPE; got '##'",
        ),
        (
            {"model": {"type": "WordPiece", "continuing_subword_prefix": "#" * 10**6}},
            "continuing_subword_prefix: expected at most 16 characters; got 1000000",
        ),
        (
            {"model": {"type": "BPE", "end_of_word_suffix": "w" * 10**6}},
            "end_of_word_suffix: expected at most 16 characters; got 1000000",
        ),
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 2**62}},
            "max_input_chars_per_word: expected at most 256; got 4611686018427387904",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["a" * 10**6, -1.0]]}},
            "vocab: expected tokens of at most 256 characters in a Unigram; got one of 1000000",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "length: expected at least 1; got 0"),
        (
            {"post_processor": template([1], ["a" * 10**6])},
            "special_tokens: expected texts of at most 1024 characters in all; got more",
        ),
        (
            {"normalizer": sequence("normalizers", {"type": "NFKD"}, 10**5)},
            "expected at most 64 normalizers, pre-tokenizers, post-processors and decoders; got 100003",
        ),
        (
            {"decoder": sequence("decoders", sequence("decoders", {"type": "Fuse"}, 0), 100)},
            "expected at most 64 normalizers, pre-tokenizers, post-processors and decoders; got 102",
        ),
    ],
    ids=["precompiled", "no type", "number", "no model", "no vocabulary", "prefix", "long prefix", "suffix"]
    + ["long words", "long token", "fixed length", "template text", "many parts", "many sequences"],
)
def test_tokenizer_parts(changes, message, directory):
    edit(directory / "tokenizer.json", **changes)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "retry-limit-in-match over",
        ),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "z"}}, "Missing .UNK. token"),
    ],
    ids=["panic", "no unknown token"],
)
def test_tokenizer_fails_on_a_text(changes, message, directory):
    edit(directory / "tokenizer.json", **changes)
    tokenizer = load(directory)[1]
    expected = f"{directory}: text: the model's tokenizer cannot encode it: .*{message}"
    with pytest.raises(ValueError, match=expected):
        tokenizer.encode("a" * 40 + "b")


def test_decoder_fails(directory):
    edit(
        directory / "tokenizer.json", decoder={"type": "Strip", "content": "h", "start": 2**60, "stop": 2**60}
    )
    tokenizer = load(directory)[1]
    with pytest.raises(
        ValueError, match=f"{directory}: ids: the model's tokenizer cannot decode them: index out of bounds"
    ):
        tokenizer.decode(tokenizer.encode("h"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token": 3}, "bos_token: expected a text; got 3"),
        ({"eos_token": {}, "unk_token": ["x"]}, r"unk_token: expected a text; got \['x'\]"),
        ({"bos_token": "\ud800"}, "'utf-8' codec can't encode"),
        ({"add_bos_token": "no"}, "add_bos_token: expected true or false; got 'no'"),
        ({"chat_template": 3}, "chat_template: expected a text; got 3"),
        ({"chat_template": [3, {"name": "default", "template": 4}]}, "template: expected a text; got 4"),
    ],
    ids=["number", "list", "surrogate", "bool", "template", "templates"],
)
def test_tokenizer_config(changes, message, directory):
    edit(directory / "tokenizer_config.json", **changes)
    with pytest.raises(ValueError, match=f"tokenizer_config.json: {message}"):
        load(directory)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "was stopped"),
        ("{{ 9 ** (9 ** 9) }}", "was stopped"),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'ab ' * 10 ** 7 }}", "makes a text of more than 4194304 characters of them"),
        ("{{ '%9999999999d' % 1 }}", "MemoryError"),
        ("{{ 'a' | center(10 ** 10) }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) }}", "OverflowError: Range too big"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.__init__.__globals__ }}", "SecurityError"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
    ],
)
def test_chat_template(source, message):
    with pytest.raises(ValueError, match=f"messages: the model's chat template .*{message}"):
        chat_template.render(source, {"messages": MESSAGES})


def test_refusal_of_a_chat_template():
    """Its text may be long, of many lines, or meant for the terminal."""
    with pytest.raises(ValueError) as error:
        chat_template.render("{{ raise_exception('a\nb\x1b[31m\u202e' * 10 ** 6) }}", {})
    text = str(error.value)
    assert text.startswith(
        r"messages: the model's chat template refuses them: TemplateError: a\nb\x1b[31m\u202ea\nb"
    )
    assert text.isprintable() and len(text) < 10_000



def test_errors_of_a_chat_template_name_the_files(directory, tmp_path):
    for path in (directory, tiny_llama.write_gguf(tmp_path / "m.gguf", VALUES, tiny_llama.tensors(VALUES))):
        tokenizer = dataclasses.replace(load(path)[1], chat_template="{{ 1 / 0 }}")
        with pytest.raises(ValueError, match=f"^{path}: messages: the model's chat template refuses them: Zero"):
            tokenizer.apply_chat_template(MESSAGES)


def test_messages_that_are_not_json(directory):
    tokenizer = load(directory)[1]
    for content in (object(), np.zeros(1)):
        with pytest.raises(
            ValueError, match="messages: expected JSON values; Object of type .* is not JSON serializable"
        ):
            tokenizer.apply_chat_template([{"role": "user", "content": content}])
