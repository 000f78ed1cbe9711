"""Text to token ids and back, from a Hugging Face directory or a GGUF file's own vocabulary."""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from h2o_jax.models import chat_template
from h2o_jax.models._optional import require
from h2o_jax.models.config import required
from h2o_jax.models.files import errors_name, read_json, read_text, typed
from h2o_jax.models.tokenizer_json import backend_errors, read_backend

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
        path: the directory or file it was read from, which errors name; None if that is not known.
    """

    backend: Any = dataclasses.field(repr=False)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool = False
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json (end tokens).

        Raises:
            OSError: no tokenizer.json, or a file that the system refuses.
            ValueError: a file that cannot be parsed, a special token outside the vocabulary, or a tokenizer
                that could make a text too long; the message names the file.
        """
        path = directory / "tokenizer.json"
        backend = read_backend(path)
        # A checkpoint may record the truncation of its training run.
        backend.no_truncation()
        backend.no_padding()
        eos = []
        for name in ("generation_config.json", "config.json"):
            path = directory / name
            values = read_json(path) if path.exists() else {}
            if "eos_token_id" in values:
                with errors_name(path):
                    eos = _ids(values["eos_token_id"])
                break
        path = directory / "tokenizer_config.json"
        with errors_name(path):
            config = read_json(path) if path.exists() else {}
            special = _special_tokens(config)
            ids = {name: backend.token_to_id(text) for name, text in special.items()}
            for name in ("bos_token", "eos_token"):
                if name in ids and ids[name] is None:
                    raise ValueError(f"{name}: expected a token of the vocabulary; got {reprlib.repr(special[name])}")
            add_bos = typed(config, "add_bos_token", bool)
            add_eos = typed(config, "add_eos_token", bool, False)
            template = _chat_template(config)
        if "eos_token" in ids:
            eos = [ids["eos_token"], *eos]
        path = directory / "chat_template.jinja"
        if path.exists():
            template = read_text(path)
        return cls(
            backend=backend,
            bos_id=ids.get("bos_token"),
            eos_ids=tuple(dict.fromkeys(eos)),
            add_bos=add_bos,
            add_eos=add_eos,
            chat_template=template,
            special_tokens=special,
            path=directory,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path | None = None) -> "Tokenizer":
        """Builds the tokenizer from a GGUF file's `tokenizer.*` metadata; `path` is that file's.

        Raises:
            ValueError: a vocabulary that is not byte-level BPE, a pre-tokeniser that is not known, or
                metadata that is missing or out of range.
        """
        kind = typed(metadata, "tokenizer.ggml.model", str)
        pre = typed(metadata, "tokenizer.ggml.pre", str, "default")
        if kind != "gpt2":
            raise ValueError(
                f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE); got {reprlib.repr(kind)}"
            )
        if pre not in _PRE_TOKENIZERS:
            raise ValueError(
                f"tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}; got {reprlib.repr(pre)}"
            )
        tokens, merges = (_texts(metadata, f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
        types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        types = list(types) if isinstance(types, (list, np.ndarray)) else [types]
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
            add_bos=typed(metadata, "tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe"),
            add_eos=typed(metadata, "tokenizer.ggml.add_eos_token", bool, False),
            chat_template=typed(metadata, "tokenizer.chat_template", str),
            special_tokens={
                f"{name}_token": tokens[index]
                for name in ("bos", "eos", "unk", "pad")
                if (index := ids[name]) is not None
            },
            path=path,
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

        Raises:
            ValueError: the model's tokenizer fails on this text.
        """
        by_backend = add_special_tokens and self.add_bos is None
        with errors_name(self.path), backend_errors("text: the model's tokenizer cannot encode it"):
            ids = self.backend.encode(text, add_special_tokens=by_backend).ids
        if add_special_tokens and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special_tokens and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        if add_special_tokens and self.add_bos is not None and self.add_eos and self.eos_ids:
            ids = [*ids, self.eos_ids[0]]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not valid UTF-8 become U+FFFD.

        Raises:
            ValueError: the model's tokenizer fails on these ids.
        """
        ids = [int(index) for index in ids]
        with errors_name(self.path), backend_errors("ids: the model's tokenizer cannot decode them"):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, as the model was trained to see it. The template runs in a process of
        its own, which takes about a tenth of a second.

        Args:
            messages: dictionaries with "role" and "content"; JSON values.
            add_generation_prompt: whether to open the assistant's next turn.
            **variables: more variables for the template, such as `tools`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages, fails or takes
                too long (see `chat_template.render`).
        """
        given = {"messages": list(map(dict, messages)), "add_generation_prompt": add_generation_prompt}
        with errors_name(self.path):
            if self.chat_template is None:
                raise ValueError("chat_template: expected one in the model's files; it has none")
            require("jinja2")
            return chat_template.render(self.chat_template, {**self.special_tokens, **variables, **given})


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

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Text by name."""
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        entry = config if not isinstance(config.get(name), dict) else {name: config[name].get("content")}
        text = typed(entry, name, str)
        if text is not None:
            special[name] = text
    return special


def _chat_template(config: Mapping[str, Any]) -> str | None:
    templates = config.get("chat_template")
    if not isinstance(templates, list):
        return typed(config, "chat_template", str)
    named = (entry for entry in templates if isinstance(entry, dict) and entry.get("name") == "default")
    return typed(next(named, {}), "template", str)


def _ids(value: Any) -> list[int]:
    """End tokens: one, several or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for index in ids:
        if required({"eos_token_id": index}, "eos_token_id", int) < 0:
            raise ValueError(f"eos_token_id: expected an id >= 0; got {index}")
    return ids


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = typed(metadata, key, list)
    if value is None:
        raise ValueError(f"{key}: expected in the file's metadata; it is missing")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = typed(metadata, key, int)
    if value is not None and not 0 <= value < size:
        raise ValueError(f"{key}: expected an id below {size}; got {value}")
    return value


def _byte_level_bpe(tokens: list[str], merges: list[str], types: list[int], pre: str) -> Any:
    library = require("tokenizers")
    pairs = [tuple(merge.split(" ", 2)) for merge in merges]
    wrong = [merge for merge, pair in zip(merges, pairs) if len(pair) != 2]
    if wrong:
        raise ValueError(f"tokenizer.ggml.merges: expected two parts in each; got {reprlib.repr(wrong[0])}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    with backend_errors("tokenizer.ggml.merges: expected merges of the file's tokens"):
        # Llama 3 takes a piece that is a token as it stands, without merging its way there.
        model = library.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
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
