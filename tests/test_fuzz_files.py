"""Hostile files: whatever a model's files hold, loading returns or raises an error that names the file.

`H2O_JAX_EXAMPLES=5000 python -m pytest tests/test_fuzz_files.py -n 0` is the long run; its seed is printed
with a failure. The files of an example that ends the process stay in the test's temporary directory.
"""

import functools
import json
import os
import resource
import struct
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from h2o_jax.models import load
from tests import tiny_llama

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("H2O_JAX_EXAMPLES", "100"))
MOST_SECONDS, MOST_MEGABYTES = 5, 500
VALUES = tiny_llama.config(num_hidden_layers=1)
TEXT = "hello world, 2 ünits\n <|im_end|>"
MESSAGES = [{"role": "user", "content": "hello"}]


def fuzz(*strategies, share=1.0):
    """A test of `share * EXAMPLES` examples."""

    def decorate(test):
        settings = hypothesis.settings(
            max_examples=max(int(share * EXAMPLES), 1),
            deadline=None,
            database=None,
            derandomize=EXAMPLES <= 100,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        return settings(hypothesis.given(*strategies)(test))

    return decorate


class Files:
    """A directory `hf` and a file `m.gguf` of one model under `root`, and what they hold."""

    def __init__(self, root, contents):
        self.root, self.contents = root, contents

    def __repr__(self):  # a failure prints it
        return f"Files({self.root})"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    os.environ["RUST_BACKTRACE"] = "0"  # a trace takes longer than the rest of an example
    root = tmp_path_factory.mktemp("model")
    weights = tiny_llama.tensors(VALUES)
    tiny_llama.write_directory(root / "hf", VALUES, weights, shards=2)
    tiny_llama.write_gguf(root / "m.gguf", VALUES, weights)
    contents = {path.name: path.read_bytes() for path in [*(root / "hf").iterdir(), root / "m.gguf"]}
    return Files(root, contents)


def check(model, changes):
    """Loads the model with these contents of files in place of its own, and uses the tokenizer."""
    root, contents = model.root, model.contents
    path = root / "m.gguf" if "m.gguf" in changes else root / "hf"
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for name, content in changes.items():
            (root / "m.gguf" if path.is_file() else path / name).write_bytes(content)
        try:
            _, tokenizer = load(path)
        except (ValueError, OSError) as error:
            assert str(path) in str(error) and str(error).isprintable() and len(str(error)) < 12_000
            return
        use(tokenizer)
    finally:
        assert time.process_time() - start < MOST_SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEGABYTES << 10
        for name in changes:
            (root / "m.gguf" if path.is_file() else path / name).write_bytes(contents[name])


def use(tokenizer):
    try:
        assert all(0 <= index < VALUES["vocab_size"] for index in tokenizer.eos_ids)
        tokenizer.decode(tokenizer.encode(TEXT))
    except ValueError as error:
        assert "the model's tokenizer cannot" in str(error)
    if tokenizer.chat_template not in (None, tiny_llama.TEMPLATE):
        try:
            assert isinstance(tokenizer.apply_chat_template(MESSAGES), str)
        except ValueError as error:
            assert "the model's chat template" in str(error)


INTEGERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)


@st.composite
def damaged(draw, content):
    """Bytes with a few of them changed; half of the changes are near the beginning, where headers are."""
    for _ in range(draw(st.integers(1, 3))):
        ends = [size for size in (64, 8000, len(content)) if size <= len(content)] or [len(content)]
        at = draw(st.integers(0, draw(st.sampled_from(ends))))
        kind = draw(st.sampled_from(["flip", "number", "cut", "insert", "extend", "swap", "repeat", "drop"]))
        if kind == "flip":
            new = bytes([content[at] ^ draw(st.integers(1, 255))]) if at < len(content) else b""
            content = content[:at] + new + content[at + 1 :]
        elif kind == "number":
            new = struct.pack("<Q", draw(INTEGERS))[: draw(st.sampled_from([1, 4, 8]))]
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=20)) + content[at:]
        elif kind == "extend":
            content += draw(st.binary(min_size=1, max_size=100)) * draw(st.sampled_from([1, 1000]))
        else:
            size = draw(st.integers(1, 64))
            piece, rest = content[at : at + size], content[at + size :]
            if kind == "swap":
                content = content[:at] + rest[:size] + piece + rest[size:]
            else:
                content = content[:at] + (piece + piece if kind == "repeat" else b"") + rest
    return content


def nested(depth):
    return functools.reduce(lambda inner, _: [inner], range(depth), 0)


ODD = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2, 3, 0.5, 2**31, -(2**63), 2**64, 10**400, 1e308, -0.0]
        + [float("nan"), float("inf"), float("-inf"), "", "0", "\0", "\ud800", "a" * 10**5, [], {}, [[]]]
        + [{"content": 1}, {"type": "Sequence"}, nested(50), nested(500)]
        + ["..", "/etc/passwd", "../../etc/passwd", "pipe", ".", "model-00001-of-00002.safetensors"]
    ),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 300), max_size=4),
)


@st.composite
def changed(draw, value, odd=ODD, depth=0):
    """A JSON value with one value somewhere in it replaced, left out or doubled."""
    if not isinstance(value, (dict, list)) or not value or depth > 9 or draw(st.integers(0, 4)) == 0:
        return draw(odd)
    value = value.copy()
    # Early keys are often the interesting ones of a long list.
    key = (
        draw(st.sampled_from(list(value)[:40]))
        if isinstance(value, dict)
        else draw(st.integers(0, len(value) - 1))
    )
    kind = draw(st.sampled_from(["in it", "in it", "in it", "left out", "doubled"]))
    if kind == "left out":
        del value[key]
    elif kind == "in it":
        value[key] = draw(changed(value[key], odd, depth + 1))
    elif isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[draw(st.sampled_from([*value, "x"]))] = value[key]
    return value


@st.composite
def changed_json(draw, values, odd=ODD):
    """The bytes of a JSON object that was changed and perhaps also damaged."""
    for _ in range(draw(st.integers(1, 2))):
        values = draw(changed(values, odd))
    content = json.dumps(values)
    if draw(st.integers(0, 9)) == 0:
        content = draw(
            st.sampled_from(
                ["[" * 10**5, '{"a":' * 10**5, content[:-1] + ',"vocab_size":' + "9" * 5000 + "}"]
            )
        )
    content = content.encode()
    return draw(damaged(content)) if draw(st.integers(0, 4)) == 0 else content


@fuzz(st.data())
def test_config_json(model, data):
    values = draw_architecture(data)
    check(model, {"config.json": data.draw(changed_json(values))})


def draw_architecture(data):
    scaling = {"rope_type": data.draw(st.sampled_from(["default", "linear", "llama3"])), "factor": 2.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    architecture = data.draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    more = {"layer_types": ["full_attention"], "use_sliding_window": False, "mlp_bias": False}
    more |= {"attention_bias": False, "quantization_config": None}
    kept = data.draw(st.sets(st.sampled_from([*more, "rope_scaling"])))
    more = {key: value for key, value in (more | {"rope_scaling": scaling}).items() if key in kept}
    return VALUES | {"model_type": architecture} | more


@fuzz(st.data())
def test_tokenizer_config(model, data):
    values = json.loads(model.contents["tokenizer_config.json"])
    values |= {"add_eos_token": False, "unk_token": None, "pad_token": {"content": "a"}}
    if data.draw(st.booleans()):
        values["chat_template"] = [{"name": "default", "template": tiny_llama.TEMPLATE}]
    check(model, {"tokenizer_config.json": data.draw(changed_json(values))})


@fuzz(st.data())
def test_index(model, data):
    values = json.loads(model.contents["model.safetensors.index.json"])
    check(model, {"model.safetensors.index.json": data.draw(changed_json(values))})


PATTERNS = st.one_of(
    st.sampled_from(
        [r"\p{L}+", "", "(a+)+$", "(?:(?:a{9}){999}){999}", r"(?<x>a\g<x>?b)", "(" * 500, "[a-", "."]
    ),
    st.text("ab|()[]{}*+?.^$\\1,", max_size=8),
).flatmap(lambda text: st.sampled_from([{"Regex": text}, {"String": text}]))
TYPES = {
    "normalizer": "Sequence BertNormalizer Strip StripAccents NFC NFKD Lowercase Nmt Precompiled Replace "
    "Prepend ByteLevel",
    "pre_tokenizer": "Sequence ByteLevel BertPreTokenizer CharDelimiterSplit Metaspace Whitespace Split "
    "Digits Punctuation UnicodeScripts FixedLength",
    "post_processor": "Sequence ByteLevel RobertaProcessing BertProcessing TemplateProcessing",
    "decoder": "Sequence ByteLevel BPEDecoder WordPiece CTC Fuse ByteFallback Metaspace Strip Replace",
}
PIECES = st.lists(
    st.sampled_from([{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "z", "type_id": 0}}])
)
FIELDS = {
    "pattern": PATTERNS,
    "content": st.sampled_from(["", "a", "aa", "a" * 300]),
    "prepend": st.sampled_from(["", "a", "a" * 1000]),
    "behavior": st.sampled_from(["Isolated", "Removed", "MergedWithNext", "Contiguous"]),
    "invert": st.booleans(),
    "add_prefix_space": st.booleans(),
    "trim_offsets": st.booleans(),
    "use_regex": st.booleans(),
    "precompiled_charsmap": st.sampled_from(["", "AAAA", "BAAAAAAAAAA=", "/////w=="]),
    "replacement": st.sampled_from(["▁", "", "ab"]),
    "prepend_scheme": st.sampled_from(["always", "first", "never"]),
    "split": st.booleans(),
    "delimiter": st.sampled_from([" ", "ab"]),
    "single": PIECES,
    "pair": PIECES,
    "special_tokens": st.sampled_from(
        [{}, {"z": {"id": "z", "ids": [2**32 - 1], "tokens": ["z"]}}]
        + [{"z": {"id": "z", "ids": [1] * count, "tokens": ["z"] * count}} for count in (100, 10**4)]
    ),
    "individual_digits": st.booleans(),
    "length": st.sampled_from([0, 1, 2**63]),
    "start": st.sampled_from([0, 1, 2**60]),
    "stop": st.sampled_from([0, 1, 2**60]),
    "strip_left": st.booleans(),
    "strip_right": st.booleans(),
    "sep": st.just(["a", 0]),
    "cls": st.just(["a", 0]),
    "cleanup": st.booleans(),
    "suffix": st.text(max_size=2),
    "prefix": st.text(max_size=2),
    "pad_token": st.text(max_size=2),
    "word_delimiter_token": st.text(max_size=2),
    "clean_text": st.booleans(),
    "handle_chinese_chars": st.booleans(),
    "strip_accents": st.booleans(),
    "lowercase": st.booleans(),
}


@st.composite
def parts(draw, place, depth=0):
    """A part of a tokenizer.json for that place, with all the fields of all types."""
    part = {name: draw(field) for name, field in FIELDS.items()}
    part["type"] = draw(st.sampled_from(TYPES[place].split()))
    if part["type"] == "Sequence":
        inner = draw(st.lists(parts(place, depth + 1), max_size=3)) if depth < 2 else []
        inner *= draw(st.sampled_from([1, 1, 30]))
        part |= dict.fromkeys(["normalizers", "pretokenizers", "processors", "decoders"], inner)
    if draw(st.integers(0, 19)) == 0:
        del part[draw(st.sampled_from(list(part)))]
    return part


@st.composite
def models(draw):
    vocabulary = draw(
        st.dictionaries(
            st.sampled_from(["a", "b", "ab", "", "##b", "é", "<unk>", "Ġ"]),
            st.sampled_from([0, 1, 2, 2**32 - 1]),
        )
    )
    return {
        "type": draw(st.sampled_from(["BPE", "WordPiece", "WordLevel", "Unigram"])),
        "vocab": draw(st.sampled_from([vocabulary, [[token, -1.0] for token in vocabulary]])),
        "merges": draw(st.lists(st.sampled_from(["a b", ["a", "b"], "a é", "", "a", "a b c"]), max_size=2)),
        "unk_token": draw(st.sampled_from([None, "<unk>", "z"])),
        "unk_id": draw(st.sampled_from([None, 0, 9])),
        "continuing_subword_prefix": draw(st.sampled_from([None, "##", "日本語" * 4])),
        "end_of_word_suffix": draw(st.sampled_from([None, "</w>"])),
        "max_input_chars_per_word": draw(st.sampled_from([0, 100, 2**63])),
        "byte_fallback": draw(st.booleans()),
        "fuse_unk": draw(st.booleans()),
        "dropout": draw(st.sampled_from([None, 0.0, 1.0, 5.0])),
        "ignore_merges": draw(st.booleans()),
    }


@fuzz(st.data())
def test_tokenizer_json(model, data):
    values = json.loads(model.contents["tokenizer.json"])
    what = data.draw(st.sampled_from(["any", "part", "part", "part", "model"]))
    if what == "model":
        values["model"] = data.draw(models())
    for _ in range(2 if what == "part" else 0):
        name = data.draw(st.sampled_from(list(TYPES)))
        values[name] = data.draw(parts(name))
    check(
        model,
        {"tokenizer.json": data.draw(changed_json(values)) if what == "any" else json.dumps(values).encode()},
    )


SHARD = "model-00001-of-00002.safetensors"


@fuzz(st.data())
def test_safetensors(model, data):
    content = model.contents[SHARD]
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
    else:
        size = struct.unpack_from("<Q", content)[0]
        odd = ODD | st.sampled_from(
            "BOOL U8 I8 F8_E5M2 F8_E4M3 F4 I16 F16 BF16 I32 U32 F32 F64 I64 C64".split()
        )
        header = data.draw(changed_json(json.loads(content[8 : 8 + size]), odd))
        told = len(header) if data.draw(st.integers(0, 4)) else data.draw(INTEGERS)
        content = struct.pack("<Q", told) + header + content[8 + size :]
    check(model, {SHARD: content})


@functools.cache
def gguf_parts(content):
    """Keys and raw values of a GGUF file, its tensors as (name, dimensions, type, offset), and their data."""
    import tempfile

    import gguf

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        reader = gguf.GGUFReader(file.name)
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    ends = [*(field.offset for field in fields[1:]), reader.tensors[0].field.offset]
    pairs = [(f.name, content[f.offset + 8 + len(f.name) : end]) for f, end in zip(fields, ends)]
    infos = [
        (t.name, t.shape.tolist(), int(t.tensor_type), t.data_offset - reader.data_offset)
        for t in reader.tensors
    ]
    return pairs, infos, content[reader.data_offset :]


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def number(form, value):
    return struct.pack("<" + form, value)


RAW_TEXT = st.one_of(
    st.sampled_from(
        ["", "llama", "qwen2", "qwen3", "gpt2", "default", "linear", "a b", "he", b"\xff\xfe"]
    ).map(text),
    INTEGERS.map(lambda size: number("Q", size) + b"abc"),
)
RAW_VALUE = st.one_of(
    INTEGERS.map(lambda v: number("I", 10) + number("Q", v)),
    st.integers(0, 2**32 - 1).map(lambda v: number("I", 4) + number("I", v)),
    st.sampled_from([0, 1, 2, 3, 4, 8, 32, 48]).map(lambda v: number("I", 4) + number("I", v)),
    st.integers(-(2**31), 2**31 - 1).map(lambda v: number("I", 5) + number("i", v)),
    st.floats(width=32).map(lambda v: number("I", 6) + number("f", v)),
    st.booleans().map(lambda v: number("I", 7) + number("?", v)),
    RAW_TEXT.map(lambda raw: number("I", 8) + raw),
    st.lists(RAW_TEXT, max_size=3).map(
        lambda raw: number("I", 9) + number("I", 8) + number("Q", len(raw)) + b"".join(raw)
    ),
    st.tuples(st.integers(0, 13), INTEGERS, st.binary(max_size=40)).map(
        lambda v: number("I", 9) + number("I", v[0]) + number("Q", v[1]) + v[2]
    ),
    st.integers(1, 2000).map(lambda depth: number("I", 9) * (depth + 1) + number("Q", 1) * depth),
    st.binary(max_size=20),
)


@st.composite
def changed_gguf(draw, content):
    """A GGUF file with changed values, tensors and counts."""
    pairs, infos, data = gguf_parts(content)
    pairs, infos = pairs.copy(), infos.copy()
    counts = [None, None]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(["value", "value", "value", "key", "drop", "double", "tensor", "tensor", "count"])
        )
        at, tensor = draw(st.integers(0, len(pairs) - 1)), draw(st.integers(0, len(infos) - 1))
        if kind == "value":
            pairs[at] = (pairs[at][0], draw(RAW_VALUE))
        elif kind == "key":
            keys = [
                "general.alignment",
                "llama.expert_count",
                "llama.attention.sliding_window",
                "tokenizer.ggml.pre",
            ]
            keys += ["llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.ggml.eot_token_id"]
            pairs.append((draw(st.sampled_from(keys)), draw(RAW_VALUE)))
        elif kind == "drop":
            del pairs[at]
        elif kind == "double":
            pairs.append(pairs[at])
        elif kind == "count":
            counts[draw(st.integers(0, 1))] = draw(INTEGERS)
        else:
            name, shape, dtype, offset = infos[tensor]
            field = draw(st.sampled_from(["name", "shape", "type", "offset", "drop", "double"]))
            if field == "name":
                name = draw(
                    st.sampled_from(
                        [infos[0][0], "rope_freqs.weight", "output.weight", "", "blk.9.attn_q.weight"]
                    )
                )
            elif field == "shape":
                sizes = st.one_of(INTEGERS, st.sampled_from([8, 32, 48, *shape]))
                shape = draw(st.lists(sizes, max_size=5))
            elif field == "type":
                dtype = draw(st.integers(0, 45))
            elif field == "offset":
                offset = draw(st.one_of(INTEGERS, st.sampled_from([info[3] for info in infos])))
            infos[tensor] = (name, shape, dtype, offset)
            if field == "drop":
                del infos[tensor]
            elif field == "double":
                infos.append(infos[tensor])
    told = [len(infos) if counts[0] is None else counts[0], len(pairs) if counts[1] is None else counts[1]]
    out = b"GGUF" + struct.pack("<IQQ", 3, *told) + b"".join(text(key) + raw for key, raw in pairs)
    for name, shape, dtype, offset in infos:
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, dtype, offset)
    return out + b"\0" * (-len(out) % 32) + data


@fuzz(st.data(), share=2)
def test_gguf(model, data):
    content = model.contents["m.gguf"]
    change = damaged if data.draw(st.integers(0, 3)) == 0 else changed_gguf
    check(model, {"m.gguf": data.draw(change(content))})


FRAGMENTS = """\
{{ messages }}
{{ messages[0].content * 9999999999 }}
{{ messages[9].content }}
{{ messages|tojson(indent=2) }}
{{ messages|map(attribute='__class__')|list }}
{{ 'a'.__class__.__mro__ }}
{{ cycler.__init__.__globals__ }}
{{ self._TemplateReference__context }}
{{ range(10**9)|list }}
{{ lipsum(n=10**8) }}
{{ '%99999999999d' % 1 }}
{{ strftime_now('%Y' * 99) }}
{{ raise_exception('no') }}
{{ x ~ x }}{{ x.y.z }}
{{ 1 / 0 }}
{% for i in range(99999) %}
{% endfor %}
{% break %}
{% macro f() %}{{ f() }}
{% endmacro %}{{ f() }}
{% set x = messages %}
{% include '/etc/passwd' %}
{% import 'os' as os %}
{% while %}
{% raw %}
{#
""".splitlines()


@fuzz(
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), min_size=1, max_size=5).map("".join),
    share=0.05,
)
def test_chat_template(model, source):
    values = json.loads(model.contents["tokenizer_config.json"]) | {"chat_template": source}
    check(model, {"tokenizer_config.json": json.dumps(values).encode()})
