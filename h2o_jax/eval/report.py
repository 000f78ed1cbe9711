"""Finished cells as columns of text, and as a CSV file."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from h2o_jax._outputs import os_errors_name
from h2o_jax.eval.budget import DENSE
from h2o_jax.eval.cells import COVERAGE, PASSKEY, PERPLEXITY, PolicySpec

METRICS = {
    PERPLEXITY: ("perplexity", "kl", "top1"),
    COVERAGE: ("mass", "recall"),
    PASSKEY: ("accuracy",),
}
_FORMS = {"perplexity": ".3f", "kl": ".4f"}  # all others are shares
_CELL = ("task", "policy", "options", "page_size", "budget", "context", "steps", "rows")
_AROUND = ("model", "dtype", "device", "date", "text")


def policy_of(record: Mapping[str, Any]) -> PolicySpec:
    """The policy of a record."""
    return PolicySpec(record["policy"], tuple(sorted(record["options"].items())))


def table(task: str, records: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A header and a row for each record of the task, in order."""
    records = [record for record in records if record["task"] == task]
    depths = list(records[0]["accuracy_by_depth"]) if task == PASSKEY and records else []
    header = ["policy", "page size", "budget", *METRICS[task], *(f"at {depth}%" for depth in depths)]
    return header, [
        [
            str(policy_of(record)),
            str(record["page_size"]),
            "all" if record["policy"] == DENSE else str(record["budget"]),
            *(_number(record[name], _FORMS.get(name, ".1%")) for name in METRICS[task]),
            *(_number(record["accuracy_by_depth"][depth], ".0%") for depth in depths),
        ]
        for record in records
    ]


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes all records, under one header, into the file at `path`; where one is wrong, nothing."""
    columns = [*_CELL, *(name for names in METRICS.values() for name in names), *_AROUND]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    for record in records:
        options = ",".join(f"{name}={value}" for name, value in policy_of(record).options)
        writer.writerow({**record, "options": options})
    with os_errors_name(path):
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
