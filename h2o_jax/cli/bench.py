"""`h2o-jax bench`: checked measurements on the GPU that is there."""

import argparse
import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax

from h2o_jax import bench
from h2o_jax._outputs import os_errors_name
from h2o_jax.cli.files import path_option
from h2o_jax.cli.info import devices, section, versions
from pallas_kernels._dispatch import candidates

FAILED = 1
_VERSIONS = ("h2o-jax", "jax", "jaxlib", "python")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its options."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this GPU",
        description="Measures each op, the attention step of each policy and whole models, against the read "
        "bandwidth of the device and against what would be used instead. Each result is checked before it is "
        "timed. The exit code is 1 if a check fails.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="groups of rows; default all")
    parser.add_argument("--list", action="store_true", help="list the groups")
    output_help = "also write JSON lines, one a row, after those that are there"
    parser.add_argument("--output", type=path_option, metavar="FILE", help=output_help)
    tokens_help = f"of the longest row in most groups; default {bench.TOKENS}, needed without a GPU"
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens_help)


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `h2o-jax bench --help`."""
    if args.list:
        groups = [(name, str(function.__doc__).splitlines()[0]) for name, function in bench.GROUPS.items()]
        print(section("groups", groups), end="")
        return 0
    for name in args.names:
        if name not in bench.GROUPS:
            raise ValueError(f"NAME: expected some of {', '.join(bench.GROUPS)}, got {name!r}")
    settings = _settings(args.tokens)
    shown = dict(versions())
    environment = {"device": jax.devices()[0].device_kind, "date": datetime.date.today().isoformat()}
    environment |= {name: shown[name] for name in _VERSIONS}

    rows = []
    with _appended(args.output) as file:
        print(section("versions", [(name, shown[name]) for name in _VERSIONS]))
        print(section("devices", devices()))
        print(bench.HEADER)
        for row in bench.run_groups(settings, args.names or bench.GROUPS):
            rows.append(row)
            print(row.to_line(), flush=True)
            if file:
                print(row.to_json(environment), file=file, flush=True)
    return _summary(rows)


@contextlib.contextmanager
def _appended(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with os_errors_name(path), path.open("a", encoding="utf-8") as file:
        yield file


def _settings(tokens: int | None) -> bench.Run:
    on_gpu = jax.default_backend() == "gpu"
    if tokens is None:
        if not on_gpu:
            raise ValueError(
                f"--tokens: expected a number, such as {bench.LEAST_TOKENS}, where there is no GPU "
                f"(the backend is {jax.default_backend()}); got none"
            )
        tokens = bench.TOKENS
    if tokens < bench.LEAST_TOKENS or tokens % bench.LEAST_TOKENS:
        raise ValueError(f"--tokens: expected a positive multiple of {bench.LEAST_TOKENS}, got {tokens}")
    device = jax.devices()[0]
    if on_gpu:
        memory = device.memory_stats()["bytes_limit"]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    judged = "H200" in device.device_kind and tokens == bench.TOKENS  # the targets are those of one device
    return bench.Run(candidates(None)[0], memory, tokens=tokens, judged=judged)


def _summary(rows: list[bench.Row]) -> int:
    failed = [row.name for row in rows if row.failure]
    judged = [row for row in rows if row.met is not None and not row.failure]
    missed = [f"{row.name} ({row.shape})" for row in judged if not row.met]
    print(f"\n{len(rows)} rows, {len(failed)} failed")
    if judged:
        print(f"{len(judged) - len(missed)} of {len(judged)} rows with a target reach it")
        for name in missed:
            print(f"  missed: {name}")
    return FAILED if failed else 0
