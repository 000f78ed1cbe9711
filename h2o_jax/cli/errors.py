"""What the command line says of an error."""

import argparse
import errno

# Arguments of the library that no option has the name of.
_SHOWN = {"path": "--model", "prompts[0]": "the prompt"}


def describe(error: Exception, args: argparse.Namespace) -> str:
    """The message, with the option in place of the argument that it names, and without error numbers."""
    if isinstance(error, OSError) and error.strerror:
        # Whatever else is written is named: see `os_errors_name`.
        path = "standard output" if error.errno == errno.ENOSPC and error.filename is None else error.filename
        return ": ".join(str(part) for part in (path, error.strerror.lower()) if part is not None)
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    name, colon, rest = str(error).partition(":")
    if colon and hasattr(args, name):
        name = f"--{name.replace('_', '-')}"
    return _SHOWN.get(name, name) + colon + rest
