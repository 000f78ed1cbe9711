"""Tokenizers from GGUF vocabularies and Hugging Face files, and the streaming decoder."""

import json
import random

import pytest

tokenizers = pytest.importorskip("tokenizers")

from h2o_jax.models import StreamDecoder, Tokenizer, default_model_path  # noqa: E402
from h2o_jax.models.gguf_file import open_gguf  # noqa: E402
from tests import tiny_llama  # noqa: E402

TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog. It's 1,234.56 o'clock, don't we'll they've I'd!",
    "spaces": "  two  spaces   three\ttab\n\n\nlines \r\n end  ",
    "code": "def f(x):\n    return {'a': x**2, \"b\": [1, 2, 3]}  # done\n",
    "scripts": "naïve café — Ελλάδα, Москва, 日本語, العربية, हिन्दी, 한국어",
    "emoji": "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u200d \ufeff",
    "digits": "2024 3.14159 ½ ² Ⅷ ٣",
    "replacement": "a real \ufffd character",
    "empty": "",
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def smollm():
    pytest.importorskip("gguf")
    try:
        path = default_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return Tokenizer.from_gguf(open_gguf(path).metadata)


def metadata(**changes):
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": list(tiny_llama.TOKENS),
        "merges": [" ".join(pair) for pair in tiny_llama.MERGES],
        "token_type": [3] * 3 + [1] * (tiny_llama.VOCAB - 3),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None} | {
        "tokenizer.chat_template": tiny_llama.TEMPLATE
    }


def pieces(tokenizer, text):
    return [tokenizer.decode([index], skip_special_tokens=False) for index in tokenizer.encode(text)]


@pytest.mark.parametrize("name", TEXTS)
def test_smollm_round_trip(name, smollm):
    assert smollm.decode(smollm.encode(TEXTS[name])) == TEXTS[name]


def test_smollm_known_tokens(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1 and smollm.eos_ids == (2, 0)
    assert pieces(smollm, "Hello world") == ["Hello", " world"]
    assert pieces(smollm, "it's 2024") == ["it", "'s", " ", "2", "0", "2", "4"]
    assert smollm.encode("<|im_start|>user\n")[0] == 1
    assert smollm.decode([1, *smollm.encode("hi"), 2]) == "hi"
    assert (
        smollm.decode([1, *smollm.encode("hi"), 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    )


def test_smollm_equals_its_own_pre_tokeniser(smollm):
    """As Hugging Face's tokenizer.json of SmolLM2 has it: single digits, then GPT-2's byte-level rule."""
    from tokenizers import pre_tokenizers

    theirs = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS.values():
        assert smollm.encode(text) == theirs.encode(text).ids


def test_smollm_chat_template(smollm):
    assert smollm.apply_chat_template(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.apply_chat_template(MESSAGES[1:], add_generation_prompt=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n"
    )


@pytest.mark.parametrize("name", TEXTS)
def test_stream_equals_decode(name, smollm):
    stream = StreamDecoder(smollm)
    given = [stream.push(index) for index in smollm.encode(TEXTS[name])]
    for text in given[:-1]:
        assert not text.endswith("\ufffd")
    assert "".join(given) + stream.flush() == TEXTS[name]


def test_stream_holds_back_half_a_character(smollm):
    ids = smollm.encode("日🙂x")
    stream = StreamDecoder(smollm)
    given = [stream.push(index) for index in ids]
    assert "" in given and all("\ufffd" not in text for text in given)
    assert "".join(given) == "日🙂x" and stream.flush() == ""

    cut = smollm.encode("🙂")[:-1]
    assert "".join(stream.push(index) for index in cut) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(smollm.encode("ok")[0]) == "ok"


def test_stream_recovers_from_broken_bytes(smollm):
    """Bytes that never become a character come out once something whole follows."""
    broken = [*smollm.encode("a🙂")[:-1], *smollm.encode(" and on"), *smollm.encode("日本")]
    stream = StreamDecoder(smollm)
    assert "".join(stream.push(index) for index in broken) + stream.flush() == smollm.decode(broken)
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(17, 300) for _ in range(12)]
        assert "".join(stream.push(index) for index in ids) + stream.flush() == smollm.decode(ids)


def test_stream_skips_special_tokens(smollm):
    ids = [1, *smollm.encode("hi"), 2]
    stream = StreamDecoder(smollm)
    assert "".join(stream.push(index) for index in ids) == "hi"
    stream = StreamDecoder(smollm, skip_special_tokens=False)
    assert "".join(stream.push(index) for index in ids) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab12 34!! x", ["ab", "12", " 34", "!!", " x"]),
        ("smollm", "ab12 34!! x", ["ab", "1", "2", " ", "3", "4", "!!", " x"]),
        ("llama-bpe", "ab1234 IT'S\n\nx", ["ab", "123", "4", " IT", "'S", "\n\n", "x"]),
        ("qwen2", "ab12 IT'S\n\nx", ["ab", "1", "2", " IT", "'S", "\n\n", "x"]),
        ("default", "ab1234 x=1!", ["ab", "123", "4", " x", "=", "1", "!"]),
    ],
)
def test_pre_tokenisers(pre, text, expected):
    tokenizer = Tokenizer.from_gguf(metadata(pre=pre))
    # The space before a word is spelt as one visible character, a newline likewise.
    spelt = str.maketrans({" ": "Ġ", "\n": "Ċ"})
    got = [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert got == [piece.translate(spelt) for piece in expected]


def test_byte_level_merges():
    tokenizer = Tokenizer.from_gguf(metadata())
    assert pieces(tokenizer, "hello") == ["hello"]
    assert pieces(tokenizer, "<|im_start|>hell w") == ["<|im_start|>", "hell", " w"]
    for text in TEXTS.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_composes_accents():
    tokenizer = Tokenizer.from_gguf(metadata(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_user_defined_tokens_are_whole_and_shown():
    types = [3] * 3 + [1] * (tiny_llama.VOCAB - 3)
    types[0] = 4
    tokenizer = Tokenizer.from_gguf(metadata(token_type=types))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert ids[1] == 0 and tokenizer.decode(ids) == "a<|endoftext|>b"


def test_end_tokens_from_gguf():
    assert Tokenizer.from_gguf(metadata()).eos_ids == (2, 0)
    assert Tokenizer.from_gguf(metadata(eos_token_id=1, eot_token_id=5)).eos_ids == (1, 5, 0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model: expected 'gpt2' \(byte-level BPE\); got 'llama'"),
        ({"model": None}, "tokenizer.ggml.model: .*; got None"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: expected one of gpt-2, smollm, .*; got 'tekken'"),
        ({"tokens": None}, "tokenizer.ggml.tokens: expected in the file's metadata; it is missing"),
        ({"merges": None}, "tokenizer.ggml.merges: expected in the file's metadata; it is missing"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges: expected two parts in each; got 'a'"),
        ({"merges": ["zz zz"]}, "tokenizer.ggml.merges: expected merges of the file's tokens"),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type: expected \d+ entries; got 1"),
        ({"eos_token_id": 99999}, r"tokenizer.ggml.eos_token_id: expected an id below \d+; got 99999"),
    ],
    ids=["model", "no model", "pre", "tokens", "merges", "merge", "merge of others", "types", "eos"],
)
def test_gguf_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        if "tokens" in changes:
            changes = changes | {"token_type": None}
        Tokenizer.from_gguf(metadata(**changes))


def test_opening_token():
    plain, opened = Tokenizer.from_gguf(metadata()), Tokenizer.from_gguf(metadata(add_bos_token=True))
    assert opened.encode("hello") == [1, *plain.encode("hello")]
    assert opened.encode("hello", add_special_tokens=False) == plain.encode("hello")
    # The text of a chat template already begins with it.
    assert opened.encode("<|im_start|>hello") == plain.encode("<|im_start|>hello")
    closed = Tokenizer.from_gguf(metadata(add_eos_token=True))
    assert closed.encode("hello") == [*plain.encode("hello"), 2]


def test_directory(tmp_path):
    tiny_llama.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama.config()))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), tiny_llama.VOCAB)
    assert tokenizer.encode("hello") == Tokenizer.from_gguf(metadata()).encode("hello")
    assert tokenizer.apply_chat_template(MESSAGES[1:]) == (
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tiny_llama.write_tokenizer(tmp_path, add_bos_token=True)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>Be brief."
    assert tokenizer.encode("hello")[0] == 1

    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tiny_llama.write_tokenizer(tmp_path, chat_template=templates)
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(MESSAGES) == "d"


def test_opening_token_of_a_post_processor(tmp_path):
    """Llama 3 leaves the opening token to tokenizer.json, and its config says nothing."""
    tiny_llama.write_tokenizer(tmp_path, add_bos_token=None)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("hello w") == [1, *tokenizer.encode("hello w", add_special_tokens=False)]
    assert tokenizer.encode("<|im_start|>hello w") == tokenizer.encode("hello w")


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
OPENING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [
        {kind: {"id": name, "type_id": index}}
        for index, text in enumerate("AB")
        for kind, name in (("SpecialToken", "<|im_start|>"), ("Sequence", text))
    ],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}


@pytest.mark.parametrize(
    "parts",
    [
        {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\p{L}+|\p{N}{1,3}"), BYTES]},
            "post_processor": {"type": "Sequence", "processors": [BYTES, OPENING]},
        },
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "pre_tokenizer": None,
            "post_processor": OPENING,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        },
        {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [split(r"\p{N}{1,3}"), split("[一-龥]+"), split(r"\p{L}+"), BYTES],
            },
            "post_processor": BYTES,
        },
    ],
    ids=["Llama 3", "Llama 2", "DeepSeek"],
)
def test_parts_as_models_have_them(parts, tmp_path):
    """The limits on a tokenizer.json leave room for them."""
    tiny_llama.write_tokenizer(tmp_path, add_bos_token=None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_directory_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json: expected this file; it is missing"):
        Tokenizer.from_directory(tmp_path)
    tiny_llama.write_tokenizer(tmp_path, eos_token="<|nothing|>")
    with pytest.raises(
        ValueError, match=r"eos_token: expected a token of the vocabulary; got '<\|nothing\|>'"
    ):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: model: expected an object; it is missing"):
        Tokenizer.from_directory(tmp_path)


def template(source):
    return Tokenizer.from_gguf(metadata() | {"tokenizer.chat_template": source})


def test_chat_template_helpers():
    text = template(
        "{%- for m in messages %}\n  {%- if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m | tojson }}\n{% endfor %}"
        "{{ eos_token }}{% if tools %}{{ tools | length }}{% endif %}"
    ).apply_chat_template(MESSAGES, tools=[1, 2])
    assert text == '{"role": "system", "content": "Be brief."}\n<|im_end|>2'
    assert len(template("{{ strftime_now('%Y') }}").apply_chat_template(MESSAGES)) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
    ],
    ids=["refusal", "mutation", "escape", "syntax"],
)
def test_chat_template_refuses(source):
    with pytest.raises(ValueError, match="messages: the model's chat template refuses them"):
        template(source).apply_chat_template(MESSAGES)


def test_chat_template_missing():
    values = metadata()
    del values["tokenizer.chat_template"]
    with pytest.raises(ValueError, match="chat_template: expected one in the model's files; it has none"):
        Tokenizer.from_gguf(values).apply_chat_template(MESSAGES)
