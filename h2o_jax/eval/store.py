"""Finished cells, a line of JSON each, so that an interrupted run goes on where it stopped."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Store:
    """The finished cells of a file.

    A cell's record holds its key, which says all that its results depend on, and then the results. The last
    line of a process that was killed may be torn: it is dropped when the file is opened.

    Args:
        path: the file, made where there is none; None keeps the records in memory alone.

    Attributes:
        note: what was dropped; empty where nothing was.

    Raises:
        OSError: the file can't be written.
        ValueError: a line that is not a record, other than the last.
    """

    def __init__(self, path: Path | None = None):
        self._path, self._records, self.note = path, [], ""
        if path is None:
            return
        path.open("ab").close()  # a file that can't be written is to be known at once
        lines = path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                if number < len(lines):
                    raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}")
                with path.open("r+b") as file:
                    file.truncate(sum(map(len, lines[:-1])))
                self.note = f"{path}: dropped a torn last line"
            elif not line.endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")
                self._records.append(record)
            else:
                self._records.append(record)

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
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file, flush=True)
        return record


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
