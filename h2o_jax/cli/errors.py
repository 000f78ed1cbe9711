"""What the command line says of an error, and of a file that is no text."""

import argparse
from pathlib import Path

# Arguments of the library that no option has the name of.
_SHOWN = {"path": "--model", "prompts[0]": "the prompt"}


def read_option(option: str, path: Path) -> str:
    """The text of the UTF-8 file that an option names; ValueError that says the option where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: expected UTF-8 text, {error}") from None


def describe(error: Exception, args: argparse.Namespace) -> str:
    """The message, with the option in place of the argument that it names, and without error numbers."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror.lower()) if part is not None)
    name, colon, rest = str(error).partition(":")
    if colon and hasattr(args, name):
        name = f"--{name.replace('_', '-')}"
    return _SHOWN.get(name, name) + colon + rest
