"""A tokenizer.json as the `tokenizers` library takes it, without what could harm the process."""

import contextlib
import json
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h2o_jax.models._optional import require
from h2o_jax.models.files import errors_name, one_line, read_json, typed

# In bytes: 32 MB hold 300 thousand tokens and their merges.
_MOST_TEXT = 32 << 20
_MOST_PARTS = 64
_MOST_DOUBLINGS = 8
_MOST_SPECIAL = 1 << 10  # characters
# Characters that the library looks at from each character of a text. Without such a limit its time grows with
# the square of a text's length.
_MOST_WORD = 256
_MOST_AFFIX = 16  # characters, which the library adds to each part of a word or to each word


@contextlib.contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Makes a ValueError of what the library raises: plain Exception, and the panics of its Rust code, whose
    class can't be imported and is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {one_line(error)}") from error


def read_backend(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a file.

    The time of the file's regular expressions has no limit here: one written to harm can take a minute for a
    thousand characters, during which the library does not see Ctrl-C.

    Raises:
        OSError: there is no such file, or the system refuses it.
        ValueError: a file that cannot be parsed, or a tokenizer that could make a text too long or take time
            beyond measure.
    """
    library = require("tokenizers")
    with errors_name(path):
        values = read_json(path, _MOST_TEXT)
        places = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        parts = [part for place in places for part in _parts(values.get(place))]
        if len(parts) > _MOST_PARTS:
            raise ValueError(
                f"expected at most {_MOST_PARTS} normalizers, pre-tokenizers, post-processors and decoders; "
                f"got {len(parts)}"
            )
        if sum(map(_doublings, parts)) > _MOST_DOUBLINGS:
            raise ValueError(
                f"expected parts that make a text at most {2**_MOST_DOUBLINGS} times longer; got more"
            )
        _check_model(values)
        # From what was checked, not from the file: JSON with a key twice can be read in two ways.
        with backend_errors("expected a tokenizer of the `tokenizers` library"):
            return library.Tokenizer.from_str(json.dumps(values))


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer.json, or none, and what it is a sequence of."""
    if part is None:
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"expected an object with a type for each part; got {reprlib.repr(part)}")
    yield part
    if part["type"] == "Sequence":
        for inner in (inner for value in part.values() if isinstance(value, list) for inner in value):
            yield from _parts(inner)


def _doublings(part: dict[str, Any]) -> float:
    """How often a part doubles the length of a text, at most; a sequence does nothing itself. A thousand bytes
    of parts in a row could fill any memory, and where the library gets none, it ends the process."""
    kind: str = part["type"]
    times: float = 1
    if kind == "Precompiled":
        # Its bytes say how much memory the library is to take.
        raise ValueError("normalizer: type Precompiled is not supported")
    if kind == "Replace":
        content, pattern = typed(part, "content", str, ""), typed(part, "pattern", dict, {})
        replaced = typed(pattern, "String", str, "")
        times = len(content) / len(replaced) if replaced else 1 + len(content)
    elif kind == "Prepend":
        times = 1 + len(typed(part, "prepend", str, ""))
    elif kind == "ByteLevel":
        times = 2
    elif kind == "TemplateProcessing":
        pieces = max(len(typed(part, name, list, [])) for name in ("single", "pair"))
        times = pieces * _most_ids(typed(part, "special_tokens", dict, {}))
    elif kind == "FixedLength" and typed(part, "length", int, 1) < 1:
        raise ValueError(f"length: expected at least 1; got {part['length']}")
    return math.log2(max(times, 1))


def _most_ids(special: dict[str, Any]) -> int:
    """The most ids, at least 1, that a special token of a template stands for."""
    entries = [typed(special, name, dict, {}) for name in special]
    lists = [typed(entry, field, list, []) for entry in entries for field in ("ids", "tokens")]
    # Each piece of the template copies them.
    if sum(len(text) for texts in lists for text in texts if isinstance(text, str)) > _MOST_SPECIAL:
        raise ValueError(f"special_tokens: expected texts of at most {_MOST_SPECIAL} characters in all; got more")
    return max([1, *map(len, lists)])


def _check_model(values: dict[str, Any]) -> None:
    """Refuses models whose time or memory for a text is out of proportion."""
    model = typed(values, "model", dict)
    if model is None:
        raise ValueError("model: expected an object; it is missing")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        length = len(typed(model, name, str, ""))
        if length > _MOST_AFFIX:
            raise ValueError(f"{name}: expected at most {_MOST_AFFIX} characters; got {length}")
    prefix, kind = model.get("continuing_subword_prefix"), model.get("type")
    # The library cuts as many bytes off each merge, whatever they are.
    if prefix and kind == "BPE":
        raise ValueError(f"continuing_subword_prefix: expected none in a BPE; got {prefix!r}")
    longest = typed(model, "max_input_chars_per_word", int, 100)
    if longest > _MOST_WORD:
        raise ValueError(f"max_input_chars_per_word: expected at most {_MOST_WORD}; got {longest}")
    if isinstance(model.get("vocab"), list):
        entries = [entry for entry in model["vocab"] if isinstance(entry, list) and entry]
        longest = max((len(entry[0]) for entry in entries if isinstance(entry[0], str)), default=0)
        if longest > _MOST_WORD:
            raise ValueError(
                f"vocab: expected tokens of at most {_MOST_WORD} characters in a Unigram; got one of {longest}"
            )
