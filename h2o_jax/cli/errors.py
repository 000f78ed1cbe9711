"""What the command line says of an error."""

import argparse

# Arguments of the library that no option has the name of.
_SHOWN = {"path": "--model", "prompts[0]": "the prompt"}


def describe(error: Exception, args: argparse.Namespace) -> str:
    """The message, with the option in place of the argument that it names, and without error numbers."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror.lower()) if part is not None)
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    name, colon, rest = str(error).partition(":")
    if colon and hasattr(args, name):
        name = f"--{name.replace('_', '-')}"
    return _SHOWN.get(name, name) + colon + rest
