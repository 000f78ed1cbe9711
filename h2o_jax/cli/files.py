"""Options that name files."""

import argparse
from pathlib import Path

MOST_TEXT = 64 << 20  # characters: a device may have no end


def path_option(text: str) -> Path:
    """The `type` of an option that names a file or directory; an empty name would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Declares `--model`."""
    model_help = "Hugging Face directory or .gguf file; default SmolLM2-135M-Instruct"
    parser.add_argument("--model", type=path_option, help=model_help)


def read_option(option: str, path: Path) -> str:
    """The text of the UTF-8 file, pipe or device that an option names, without a byte order mark.

    Raises:
        OSError: the system refuses it.
        ValueError: not UTF-8, or more than 64 Mi characters; the message says the option.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            text = file.read(MOST_TEXT + 1)
        except UnicodeDecodeError as error:
            raise ValueError(f"{option} {path}: expected UTF-8 text, {error}") from None
    if len(text) > MOST_TEXT:
        raise ValueError(f"{option} {path}: expected at most {MOST_TEXT} characters, got more")
    return text
