"""`h2o-jax info`: versions, devices, and which implementation of each op would be used here."""

import argparse
import dataclasses
import functools
import platform
from collections.abc import Sequence
from importlib import metadata

import jax
import jax.numpy as jnp

import pallas_kernels
from h2o_jax import __version__, memory
from h2o_jax.cli.policy_options import add_policy_options, policy_from_options
from h2o_jax.config import CacheConfig
from h2o_jax.policy import Policy, get_policy
from h2o_jax.state import check_layers, init_state
from pallas_kernels._dispatch import IMPLEMENTATIONS, candidates

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-triton", "gguf", "tokenizers")
NOT_INSTALLED = "not installed"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its options."""
    parser = subparsers.add_parser(
        "info",
        help="show versions, devices and kernels",
        description="Shows versions, devices, and which implementation of each op runs here, and why. With "
        "--config, the memory that a state of these sizes takes instead.",
    )
    parser.set_defaults(run=run)
    fields = ", ".join(field.name for field in dataclasses.fields(CacheConfig))
    parser.add_argument(
        "--config", nargs="+", metavar="FIELD=VALUE", help=f"{fields}; default all rows' pages, in bfloat16"
    )
    add_policy_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `h2o-jax info --help`."""
    if args.config is not None:
        print("\n".join(section(*each) for each in state_memory(*_config(args))), end="")
        return 0
    print(section("versions", versions()))
    print(section("devices", devices()))
    print(section("implementation of each op", implementations()))
    return 0


def _config(args: argparse.Namespace) -> tuple[CacheConfig, Policy]:
    """The config and the policy that the options name; ValueError where they name none."""
    given = dict(part.partition("=")[::2] for part in args.config)
    if args.page_size is None and "page_size" in given:
        args.page_size = _integer("page_size", given["page_size"])
    policy, page_size = policy_from_options(args)
    known = [field.name for field in dataclasses.fields(CacheConfig)]
    for name in given:
        if name not in known:
            raise ValueError(f"--config: unknown field {name!r}; the fields are {', '.join(known)}")
    sizes = {name: _integer(name, value) for name, value in given.items() if name != "dtype"}
    sizes["page_size"] = page_size
    for name in known:
        if name not in sizes and name not in ("num_pages", "dtype"):
            raise ValueError(f"--config: {name} is missing")
    sizes.setdefault("num_pages", sizes["max_requests"] * sizes["pages_per_request"])
    return CacheConfig(**sizes, dtype=given.get("dtype", "bfloat16")), policy


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--config: expected {name}=NUMBER, got {name}={text}") from None


def state_memory(config: CacheConfig, policy: Policy) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles and lines: what a state takes for a layer of each kind, and in all."""
    check_layers(policy, config)
    num_dense = len(policy.dense_layers)
    one_layer = dataclasses.replace(config, num_layers=1)
    found, all_parts = [], {"page table": 0}
    for kind, like, num_layers in (
        ("", dataclasses.replace(policy, dense_layers=()), config.num_layers - num_dense),
        ("dense ", get_policy("dense_attention"), num_dense),
    ):
        if num_layers:
            parts = memory.parts(jax.eval_shape(functools.partial(init_state, one_layer, like)))
            all_parts["page table"] = parts.pop("page table")
            found.append((f"each of {num_layers} {kind}layers", _sizes(parts)))
            for name, size in parts.items():
                all_parts[name] = all_parts.get(name, 0) + num_layers * size
    total = sum(all_parts.values())
    a_token = total / (config.num_pages * config.page_size)
    found.append(("in all", [*_sizes(all_parts), ("state", f"{memory.shown(total)}, {a_token:,.0f} bytes a token")]))
    return found


def _sizes(found: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, memory.shown(size)) for name, size in found.items()]


def section(title: str, lines: Sequence[tuple[str, str]]) -> str:
    """A title with aligned lines under it, and an empty line after them."""
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines), ""])


def versions() -> list[tuple[str, str]]:
    """Name and version of Python and of the packages that matter here."""
    own = [("python", platform.python_version()), ("h2o-jax", __version__)]
    return [*own, *((name, _version(name)) for name in PACKAGES)]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def devices() -> list[tuple[str, str]]:
    """Name, kind and memory (where JAX knows it) of each device of the default backend."""
    return [(f"{device.platform}:{device.id}", _device(device)) for device in jax.devices()]


def _device(device: jax.Device) -> str:
    limit = memory.counted(device).get("bytes_limit")
    return device.device_kind + (f", {limit / 2**30:.1f} GiB for JAX" if limit else "")


def implementations() -> list[tuple[str, str]]:
    """Name of each op of `pallas_kernels`, and what `chosen_implementation` says of it."""
    return [(op, chosen_implementation(op)) for op in pallas_kernels.__all__]


def chosen_implementation(op: str) -> str:
    """Which implementation `implementation=None` gives for an op of `pallas_kernels`, why, and which exist.

    The op is traced, not run, for a typical case: 32 query and 8 KV heads of 128, bfloat16 pages.
    """
    lacks = {name: _why_not(op, name) for name in IMPLEMENTATIONS}
    names = candidates(None)
    chosen = next((name for name in names if lacks[name] is None), None)
    reasons = [f"{name!r} can't: {lacks[name]}" for name in names if lacks[name] is not None]
    untried = "pallas" not in names
    if untried:
        reasons.append(f"no CUDA GPU (the backend is {jax.default_backend()}), so 'pallas' is not tried")
    elif chosen == names[0]:
        reasons.append(f"first choice on a {jax.default_backend()}, and it takes a typical case")
    others = [name for name in IMPLEMENTATIONS if name != chosen and lacks[name] is None]
    if untried and "pallas" in others:
        others.remove("pallas")  # it traces here, but compiles for a GPU alone
    also = f"; by name also {', '.join(others)}" if others else ""
    return f"{chosen or 'none'}: {'; '.join(reasons)}{also}"


def _why_not(op: str, implementation: str) -> str | None:
    arguments, arrays, options = _typical_case(op)
    call = functools.partial(getattr(pallas_kernels, op), **options, implementation=implementation)
    try:
        jax.eval_shape(call, *arguments, **arrays)
    except NotImplementedError as error:
        return str(error)
    return None


def _typical_case(op: str) -> tuple[list, dict, dict]:
    """Positional arrays of an op and arrays by name, as shapes and dtypes, and its static options."""
    batch, num_logical, num_pages, page_size, chosen = 4, 128, 512, 16, 32
    num_q_heads, num_kv_heads, head_dim = 32, 8, 128

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = array(batch, num_q_heads, head_dim)
    pool = array(num_pages, num_kv_heads, page_size, head_dim)
    new = array(batch, 1, num_kv_heads, head_dim)
    summaries = array(num_pages, num_kv_heads, 3, head_dim)
    kinds = ("mean", "max", "min")
    pages, row = array(batch, num_logical, dtype=jnp.int32), array(batch, dtype=jnp.int32)
    if op == "write_pages":
        return [pool, pool, new, new, pages, row, row], dict(summaries=summaries), dict(summary_kinds=kinds)
    if op == "envelope_scores":
        return [q, summaries, pages, row, row], {}, dict(kinds=kinds, group="max")
    if op == "decayed_softmax_scores":
        token_pool = array(num_pages, num_kv_heads, 1, head_dim)
        scores = array(num_pages, num_kv_heads, 1, dtype=jnp.float32)
        options = dict(decay=0.984375, scale=head_dim**-0.5, group="max")
        return [q, token_pool, scores, pages, row, row], {}, options
    if op == "top_k_pages":
        return [array(batch, num_kv_heads, num_logical, dtype=jnp.float32), row, row], {}, dict(k=chosen)
    if op == "paged_attention":
        selected = array(batch, num_kv_heads, chosen, dtype=jnp.int32)
        counts = array(batch, num_kv_heads, dtype=jnp.int32)
        return [q, pool, pool, pages, row, selected, counts], {}, dict(scale=head_dim**-0.5)
    raise KeyError(f"no typical case for the op {op!r}")
