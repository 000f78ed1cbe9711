"""Finished cells, a line of JSON each, so that an interrupted run goes on where it stopped."""

import contextlib
import fcntl
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from h2o_jax._outputs import check_outputs, os_errors_name

MOST_BYTES = 64 << 20  # Python takes up to 20 times as much for what it reads from JSON
_BEGIN = b'{"task": '


class Store(contextlib.AbstractContextManager):
    """The finished cells of a file, which no other store can have at the same time.

    A cell's record holds its key, "task" first, which says all that its results depend on, and then the
    results. The last line of a process that was killed may be torn: one that begins as a record and has no
    end is dropped when the file is opened. A context manager, which closes the file.

    Args:
        path: a regular file, made where there is none; None keeps the records in memory alone.

    Attributes:
        note: what was dropped; empty where nothing was.

    Raises:
        OSError: the file can't be written, or another store has it.
        ValueError: something else than a file, one that is too large, or a line that is not a record; the
            file is left as it is.
    """

    def __init__(self, path: Path | None = None):
        self._records: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self.note = ""
        if path is None:
            return
        check_outputs(path=path)
        self._file = path.open("a+b")
        try:
            with os_errors_name(path):
                self._read(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_) -> None:
        if self._file is not None:
            with os_errors_name(self._file.name):
                self._file.close()

    def _read(self, file: BinaryIO, path: Path) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{path}: in use by another evaluation") from None
        file.seek(0)
        content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"{path}: expected at most {MOST_BYTES} bytes of records, got more")
        lines = content.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            record, is_cut = _record(line), number == len(lines) and not line.endswith(b"\n")
            if record is not None:
                self._records.append(record)
                if is_cut:
                    file.write(b"\n")
            elif is_cut and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                file.truncate(len(content) - len(line))
                self.note = f"{path}: dropped a torn last line"
            else:
                raise ValueError(
                    f"{path}, line {number}: expected a record of an evaluation, got {line[:40]!r}"
                )

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The latest record with this key, or None."""
        for record in reversed(self._records):
            if all(name in record and record[name] == value for name, value in key.items()):
                return record
        return None

    def append(self, key: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a cell and has it in the file before it returns; the record, results with six digits.

        Args:
            key: what the results depend on, and whatever else is to be known.
            results: numbers, and lists and mappings of numbers. One that is not finite becomes None.
        """
        record = {**key, **_rounded(results)}
        self._records.append(record)
        if self._file is not None:
            with os_errors_name(self._file.name):
                self._file.write(json.dumps(record).encode() + b"\n")
                self._file.flush()
        return record


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "task" in record else None


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
