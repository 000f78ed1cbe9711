"""Files that a command writes: what may stand at their paths, and errors that say which file."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path


def check_outputs(**outputs: Path | None) -> None:
    """Checks that a file can stand at each path, and that no two are one file, by whatever links.

    Args:
        **outputs: paths by the name that a message gives them; None is skipped.

    Raises:
        FileNotFoundError: no directory to hold the file.
        PermissionError: the system would refuse to write it.
        ValueError: something that is not a regular file, such as a directory or a device, or one file twice.
    """
    found = {}
    for name, path in outputs.items():
        if path is None:
            continue
        target = Path(os.path.realpath(path))
        if os.path.lexists(target) and not target.is_file():
            raise ValueError(
                f"{name}: expected a file or none yet at {path}; it is a directory, a pipe or a device"
            )
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{name}: {target.parent}: no such directory")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(f"{name}: {path}: permission denied")
        found[name] = target.stat()[1:3] if target.exists() else target  # inode and device: links may be hard
    for one, other in itertools.combinations(found, 2):
        if found[one] == found[other]:
            raise ValueError(
                f"{other}: expected another file than that of {one}; got {outputs[other]} for both"
            )


@contextlib.contextmanager
def os_errors_name(path: str | Path) -> Iterator[None]:
    """Gives an error of the system the path that it lacks, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise
