"""H2O heavy-hitter sparse attention (arXiv:2306.14048) for LLM decoding in JAX.

A functional paged KV pool is carried as explicit state through a jitted decode step; a policy chooses which
pages a new token reads. `h2o_jax.nnx` has Flax modules, `h2o_jax.models` loads models that use them, and
`h2o_jax.reference` is the NumPy float64 oracle.
"""

import importlib
import typing

from h2o_jax import policies as _policies  # noqa: F401 (registers the built-in policies)
from h2o_jax.config import CacheConfig
from h2o_jax.decode import Selection, attend, decode_attention, select_pages, write_tokens
from h2o_jax.policy import Policy, Window, get_policy, list_policies, register_policy
from h2o_jax.pool import extend, release
from h2o_jax.prefill import prefill_attention
from h2o_jax.state import LayerCache, PagedState, PageTable, check_state, init_state, page_summaries

if typing.TYPE_CHECKING:
    from h2o_jax.generate import generate
    from h2o_jax.serving import Server

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "LayerCache",
    "PageTable",
    "PagedState",
    "Policy",
    "Selection",
    "Server",
    "Window",
    "attend",
    "check_state",
    "decode_attention",
    "extend",
    "generate",
    "get_policy",
    "init_state",
    "list_policies",
    "page_summaries",
    "prefill_attention",
    "register_policy",
    "release",
    "select_pages",
    "write_tokens",
]


_ON_FIRST_USE = ("generate", "linen", "models", "nnx", "reference", "viz")  # most of them need flax

if not typing.TYPE_CHECKING:  # to a type checker, every name would be there

    def __getattr__(name: str) -> typing.Any:
        if name in _ON_FIRST_USE:
            return importlib.import_module(f"h2o_jax.{name}")
        if name == "Server":
            return importlib.import_module("h2o_jax.serving").Server
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_ON_FIRST_USE})
