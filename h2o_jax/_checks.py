"""Static checks of the arguments that the functions of a decode step share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from h2o_jax.config import CacheConfig
from h2o_jax.policy import Policy, is_number, require_policy
from h2o_jax.state import LayerCache, PageTable, check_rows, made_aux
from pallas_kernels._checks import check_dtype, check_kind, check_pool_array, check_shape
from pallas_kernels._dispatch import candidates


def check_pool(cache: LayerCache, table: PageTable, implementation: str | None) -> None:
    """Raises unless the pool has pages, the table is one of it, and the implementation is known."""
    candidates(implementation)
    check_kind("cache", cache, LayerCache)
    check_rows(table)
    check_pool_array("cache.k", cache.k, (None,) * 4, "[num_pages, Hkv, P, D]")
    check_shape("cache.v", cache.v, cache.k.shape, "[num_pages, Hkv, P, D]")
    check_dtype("cache.v", cache.v, (cache.k.dtype.name,))
    for name, expected, got in (
        ("page_size", cache.k.shape[2], table.page_size),
        ("num_pages", cache.k.shape[0], table.num_pages),
    ):
        if expected != got:
            raise ValueError(f"table: expected {name} = {expected} as in cache, got {got}")


def check_new(cache: LayerCache, table: PageTable, letters: str, **arrays: jax.Array) -> None:
    """Raises unless `k` and `v` have the pool's dtype and shape [B, Hkv, D] or [B, T, Hkv, D], as `letters`."""
    batch, (_, num_kv_heads, _, head_dim) = table.pages.shape[0], cache.k.shape
    tokens = (None,) if "T" in letters else ()
    for name, array in arrays.items():
        check_shape(name, array, (batch, *tokens, num_kv_heads, head_dim), letters)
        check_dtype(name, array, (cache.k.dtype.name,))


def check_policy(cache: LayerCache, policy: Policy) -> None:
    """Raises unless the cache holds the arrays that the policy declares."""
    require_policy(policy)
    name = type(policy).__name__
    policy.check_page_size(cache.k.shape[2])
    if cache.summary_kinds != policy.summary_kinds:
        raise ValueError(
            f"cache: expected the summaries of {name}, {policy.summary_kinds}, "
            f"got {cache.summary_kinds}: was the state made with another policy?"
        )
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # it decides the default dtypes of what is declared
    for key, expected in _declared_aux(policy, *cache.k.shape, cache.k.dtype, x64).items():
        got = cache.aux.get(key)
        if got is None or (got.shape, got.dtype) != (expected.shape, expected.dtype):
            found = "none" if got is None else f"{got.dtype.name}{list(got.shape)}"
            raise ValueError(
                f"cache: expected aux[{key!r}] of {name}, {expected.dtype.name}{list(expected.shape)}, got {found}"
            )


@functools.cache
def _declared_aux(
    policy: Policy, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype, x64: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    config = CacheConfig(1, num_kv_heads, head_dim, page_size, num_pages, 1, 1, dtype)
    return jax.eval_shape(lambda: made_aux(policy, config))


def check_budget(policy: Policy, pages_per_request: int) -> int:
    """The policy's budget W; raises unless it is what its options add up to, or all M pages."""
    budget = policy.budget(pages_per_request)
    expected = policy.top_k + policy.reserved_bos + policy.reserved_eos
    if budget not in (expected, pages_per_request):
        raise ValueError(f"budget() of {type(policy).__name__}: expected {expected} or M, got {budget}")
    return budget


def check_scored(policy: Policy, result: Any) -> tuple[LayerCache, jax.Array]:
    """What `score` of the policy gave; raises unless it is a cache and an array of real numbers."""
    name = f"score() of {type(policy).__name__}"
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{name}: expected (cache, scores), got a {type(result).__name__}")
    cache, scores = result
    check_kind(f"{name}, cache", cache, LayerCache)
    if jnp.iscomplexobj(scores):
        raise ValueError(f"{name}: expected real scores, got dtype {scores.dtype.name}")
    return cache, scores


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the logits: `scale`, or `head_dim ** -0.5` where that is None."""
    if scale is None:
        return head_dim**-0.5
    if not is_number(scale):
        raise ValueError(f"scale: expected None or a number that float32 holds, got {scale!r}")
    return float(scale)
