"""Text to token ids and back, from a Hugging Face directory or a GGUF file's own vocabulary."""

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from h2o_jax.models._optional import require
from h2o_jax.models.safetensors import read_json

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is cut before byte-level merging, by `tokenizer.ggml.pre`: each pattern cuts the pieces of the
# one before it.
_PRE_TOKENIZERS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    # What llama.cpp does for "default".
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_CONTROL, _USER_DEFINED = 3, 4
# GGUF names one end token, and chat models end their turns with another. llama.cpp stops at these too.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text as one model expects it.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        bos_id: token that opens a text, or None.
        eos_ids: tokens at which generation stops.
        add_bos, add_eos: whether `encode` adds `bos_id`, the first of `eos_ids`; None leaves it to the
            backend's own post-processor.
        chat_template: Jinja source, or None.
        special_tokens: text of "bos_token", "eos_token" ..., which chat templates refer to.
    """

    backend: Any = dataclasses.field(repr=False)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool = False
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json (end tokens).

        Raises:
            FileNotFoundError: no tokenizer.json.
            ValueError: a file that cannot be parsed, or a special token outside the vocabulary.
        """
        library = require("tokenizers")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected this file; it is missing")
        try:
            backend = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: expected a tokenizer of the `tokenizers` library: {error}") from error
        # A checkpoint may record the truncation of its training run.
        backend.no_truncation()
        backend.no_padding()
        config, generation, model = (
            read_json(directory / name) if (directory / name).is_file() else {}
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            if value is not None:
                special[name] = value["content"] if isinstance(value, dict) else value
        ids = {
            name: backend.token_to_id(special[name]) for name in ("bos_token", "eos_token") if name in special
        }
        for name, token_id in ids.items():
            if token_id is None:
                raise ValueError(f"{name}: expected a token of the vocabulary; got {special[name]!r}")
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if "eos_token" in ids:
            eos = [ids["eos_token"], *eos]
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            backend=backend,
            bos_id=ids.get("bos_token"),
            eos_ids=tuple(dict.fromkeys(eos)),
            add_bos=config.get("add_bos_token"),
            add_eos=bool(config.get("add_eos_token", False)),
            chat_template=template,
            special_tokens=special,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer from a GGUF file's `tokenizer.*` metadata.

        Raises:
            ValueError: a vocabulary that is not byte-level BPE, a pre-tokeniser that is not known, or
                metadata that is missing or out of range.
        """
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2":
            raise ValueError(f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE); got {kind!r}")
        if pre not in _PRE_TOKENIZERS:
            raise ValueError(f"tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}; got {pre!r}")
        tokens: Any = metadata.get("tokenizer.ggml.tokens")
        merges: Any = metadata.get("tokenizer.ggml.merges")
        for name, value in (("tokens", tokens), ("merges", merges)):
            if not isinstance(value, list):
                raise ValueError(f"tokenizer.ggml.{name}: expected in the file's metadata; it is missing")
        types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if len(types) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type: expected {len(tokens)} entries; got {len(types)}")
        ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        ids |= {
            "unk": _token_id(metadata, "unknown", len(tokens)),
            "pad": _token_id(metadata, "padding", len(tokens)),
        }

        backend = _byte_level_bpe(tokens, merges, types, pre)
        ends = [ids["eos"], ids["eot"], ids["eom"]]
        ends += [
            index for index, token in enumerate(tokens) if types[index] == _CONTROL and token in _END_TOKENS
        ]
        return cls(
            backend=backend,
            bos_id=ids["bos"],
            eos_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            chat_template=metadata.get("tokenizer.chat_template"),
            special_tokens={
                f"{name}_token": tokens[ids[name]]
                for name in ("bos", "eos", "unk", "pad")
                if ids[name] is not None
            },
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. The text of a special token gives that token.

        Args:
            text: any text.
            add_special_tokens: whether to open (and, for a few models, close) the text as the model's
                config says. A text that already begins with the opening token, as the output of
                `apply_chat_template` may, gets no second one.
        """
        by_backend = add_special_tokens and self.add_bos is None
        ids = self.backend.encode(text, add_special_tokens=by_backend).ids
        if add_special_tokens and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special_tokens and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        if add_special_tokens and self.add_bos is not None and self.add_eos and self.eos_ids:
            ids = [*ids, self.eos_ids[0]]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, as the model was trained to see it.

        Args:
            messages: dictionaries with "role" and "content".
            add_generation_prompt: whether to open the assistant's next turn.
            **variables: more variables for the template, such as `tools`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("chat_template: expected one in the model's files; it has none")
        jinja2, sandbox = require("jinja2"), require("jinja2.sandbox")
        # The template comes with the weights: it is other people's code.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        variables = {**self.special_tokens, **variables}
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from error


class StreamDecoder:
    """Decodes tokens one at a time into text that can be printed at once: a character whose bytes are
    spread over several tokens is held back until it is whole.

    Args:
        tokenizer: of the model.
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The tokens of the last text given out stay, since some decoders treat a text's first token
        # differently; the rest are pending.
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._ids.append(int(token_id))
        return self._take(final=False)

    def flush(self) -> str:
        """What is still held back, incomplete bytes as U+FFFD; the decoder is then as new."""
        text = self._take(final=True)
        self._ids, self._given = [], 0
        return text

    def _take(self, final: bool) -> str:
        before, after = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < size:
        raise ValueError(f"{key}: expected an id below {size}; got {value}")
    return int(value)


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre: str) -> Any:
    library = require("tokenizers")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = [merge for merge, pair in zip(merges, pairs) if len(pair) != 2]
    if wrong:
        raise ValueError(f"tokenizer.ggml.merges: expected two parts in each; got {wrong[0]!r}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        # Llama 3 takes a piece that is a token as it stands, without merging its way there.
        model = library.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer.ggml.merges: expected merges of the file's tokens: {error}") from error
    backend = library.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = library.normalizers.NFC()
    splits = [
        library.pre_tokenizers.Split(library.Regex(pattern), behavior="isolated")
        for pattern in _PRE_TOKENIZERS[pre]
    ]
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = library.pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = library.decoders.ByteLevel()
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        added = [token for token, token_type in zip(tokens, types) if token_type == kind]
        add([library.AddedToken(token, normalized=False, special=kind == _CONTROL) for token in added])
    return backend


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise require("jinja2").TemplateError(message)
