"""Reading files that came from elsewhere: what is wrong with one is said beside its name."""

import contextlib
import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# In bytes. What Python builds from JSON takes up to 20 times its size.
MOST_TEXT = 8 << 20

_MOST_MESSAGE = 1000  # characters

_KINDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def one_line(text: object) -> str:
    """`str(text)` as a message can hold it, whatever a file says: with at most _MOST_MESSAGE of its characters,
    and escapes for line ends and all else that a terminal would not show but obey."""
    text, half = str(text), _MOST_MESSAGE // 2
    if len(text) > _MOST_MESSAGE:
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class FileError(ValueError):
    """Its message begins with the path of the file that it is about."""


def file_error(path: Path, error: object) -> FileError:
    """The error for what is wrong with a file, on one line."""
    return FileError(f"{path}: {one_line(error)}")


@contextlib.contextmanager
def errors_name(path: Path | None) -> Iterator[None]:
    """Makes a FileError of any other ValueError, and of values nested too deep for Python. Where no path is
    known, errors stay as they are."""
    try:
        yield
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        if path is None:
            raise
        raise file_error(path, error) from error


def require_file(path: Path, what: str = "this file") -> None:
    """Checks that `path` is a regular file (a pipe or a device may never end).

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is something else, such as a directory or a pipe.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected {what}; it is missing")
    if not path.is_file():
        raise file_error(path, "expected a file; it is a directory, a pipe or a device")


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The text of a UTF-8 file.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: there is no such file, or the system refuses it.
        ValueError: not a regular file, larger than `most`, or not UTF-8.
    """
    require_file(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise file_error(path, f"expected at most {most} bytes of text; got more")
    with errors_name(path):
        return content.decode("utf-8")


def read_json(path: Path, most: int = MOST_TEXT) -> dict:
    """The object in a JSON file of at most `most` bytes.

    Raises:
        OSError, ValueError: as in `read_text`; also a file that does not hold a JSON object.
    """
    text = read_text(path, most)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"expected JSON; {error}") from error
    if not isinstance(values, dict):
        raise file_error(path, f"expected a JSON object; got {type(values).__name__}")
    return values


def typed(values: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """`values[key]`, checked to be of a kind that a file can hold.

    Args:
        values: what was read from a file.
        key: in `values`.
        kind: int, float (a whole number is one too), bool (0 and 1 are too), str, list or dict.
        default: what stands for a key that is missing or null.

    Raises:
        ValueError: a value of another kind.
    """
    value = values.get(key)
    if value is None:
        return default
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number:
        # A whole number may be too large for a float.
        right = abs(value) <= sys.float_info.max
        value = float(value) if right else value
    elif kind is bool:
        right = isinstance(value, int) and value in (0, 1)
    else:
        right = isinstance(value, kind) and not isinstance(value, bool)
    if not right:
        raise ValueError(f"{key}: expected {_KINDS[kind]}; got {reprlib.repr(value)}")
    return bool(value) if kind is bool else value
