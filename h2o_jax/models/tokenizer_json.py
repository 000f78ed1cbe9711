"""A tokenizer.json as the `tokenizers` library takes it, without what could harm the process."""

import contextlib
import json
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h2o_jax.models._optional import require
from h2o_jax.models.files import errors_name, read_json, typed

# In bytes: 32 MB hold 300 thousand tokens and their merges.
_MOST_TEXT = 32 << 20
_MOST_DOUBLINGS = 8


@contextlib.contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Makes a ValueError of what the library raises: plain Exception, and the panics of its Rust code, whose
    class can't be imported and is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


def read_backend(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a file.

    Raises:
        OSError: there is no such file, or the system refuses it.
        ValueError: a file that cannot be parsed, or a tokenizer that could make a text too long.
    """
    library = require("tokenizers")
    with errors_name(path):
        values = read_json(path, _MOST_TEXT)
        parts = [values.get(key) for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
        if sum(map(_doublings, parts)) > _MOST_DOUBLINGS:
            raise ValueError(
                f"expected parts that make a text at most {2**_MOST_DOUBLINGS} times longer; got more"
            )
        # From what was checked, not from the file: JSON with a key twice can be read in two ways.
        with backend_errors("expected a tokenizer of the `tokenizers` library"):
            return library.Tokenizer.from_str(json.dumps(values))


def _doublings(part: Any) -> float:
    """How often a part of a tokenizer.json doubles the length of a text, at most. A thousand bytes of parts
    in a row could fill any memory, and where the library gets none, it ends the process."""
    if part is None:
        return 0
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"expected an object with a type for each part; got {reprlib.repr(part)}")
    kind: str = part["type"]
    times: float = 1
    if kind == "Sequence":
        return sum(_doublings(inner) for value in part.values() if isinstance(value, list) for inner in value)
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
        times = len(typed(part, "single", list, []))
    return math.log2(max(times, 1))
