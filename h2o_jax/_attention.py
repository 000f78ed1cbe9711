"""What the NNX and the Linen attention module share: all but their parameters.

Letters: B rows, T new tokens per row, Hq/Hkv query and KV heads, D head_dim.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from h2o_jax.decode import decode_attention
from h2o_jax.policy import is_integer, require_policy
from h2o_jax.prefill import prefill_attention
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels._checks import check_kind, check_row_ints, check_shape

# Arguments of Flax's attention modules (NNX's, Linen's or both) that replace a part of its arithmetic.
_CUSTOM_MATH = (
    "attention_fn",
    "qkv_promote_dtype",
    "out_promote_dtype",
    "ln_promote_dtype",
    "qkv_dot_general",
    "out_dot_general",
    "qkv_dot_general_cls",
    "out_dot_general_cls",
    "qk_attn_weights_einsum_cls",
    "attn_weights_value_einsum_cls",
)


def matmul_precision(dtype) -> jax.lax.Precision | None:
    """HIGHEST where operands may be float32 (which a GPU would otherwise round to TF32), else None."""
    if dtype is None or jnp.dtype(dtype).itemsize >= 4:
        return jax.lax.Precision.HIGHEST
    return None


def resolve_sizes(in_features, num_heads, num_kv_heads, head_dim, out_features, rope) -> tuple[int, int, int]:
    """`num_kv_heads`, `head_dim` and `out_features` with their defaults; raises unless all sizes fit."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    out_features = in_features if out_features is None else out_features
    sizes = dict(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
    sizes |= dict(head_dim=1 if head_dim is None else head_dim, out_features=out_features)
    for name, size in sizes.items():
        if not is_integer(size, 1):
            raise ValueError(f"{name}: expected a positive integer; got {size!r}")
    if num_heads % num_kv_heads:
        raise ValueError(
            "num_kv_heads: expected a divisor of num_heads; got "
            f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}"
        )
    if head_dim is None:
        if in_features % num_heads:
            raise ValueError(
                "head_dim: expected in_features to be a multiple of num_heads where no head_dim is "
                f"given; got in_features = {in_features}, num_heads = {num_heads}"
            )
        head_dim = in_features // num_heads
    if rope is not None and rope.head_dim != head_dim:
        raise ValueError(f"rope: expected head_dim = {head_dim}; got head_dim = {rope.head_dim}")
    return num_kv_heads, head_dim, out_features


def resolve_norm(qk_norm) -> str | None:
    """The kind of norm that `qk_norm` names: "rms", "layer" or None."""
    if qk_norm is None or isinstance(qk_norm, bool):
        return "rms" if qk_norm else None
    if qk_norm not in ("rms", "layer"):
        raise ValueError(f'qk_norm: expected "rms", "layer" or a bool; got {qk_norm!r}')
    return qk_norm


def check_call(cache, table, x, num_tokens, policy, *, in_features, num_kv_heads, head_dim):
    """Raises unless the arguments of a call fit each other and the module."""
    if policy is None:
        raise ValueError("policy: expected one from the constructor or the call; got None in both")
    require_policy(policy)
    check_kind("cache", cache, LayerCache)
    check_kind("table", table, PageTable)
    if x.ndim != 3 or x.shape[-1] != in_features:
        raise ValueError(f"x: expected [B, T, {in_features}]; got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: expected a floating dtype; got {x.dtype.name}")
    rows = x.shape[0]
    check_shape("table.seq_lens", table.seq_lens, (rows,), "[B] of x")
    check_row_ints(rows, num_tokens=num_tokens)
    if (cache.k.shape[1], cache.k.shape[3]) != (num_kv_heads, head_dim):
        raise ValueError(
            f"cache: expected {num_kv_heads} KV heads of head_dim {head_dim}; "
            f"got a pool of shape {cache.k.shape}"
        )


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """[B, T, H * D] to [B, T, H, D]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)  # no -1, for B or T may be 0


def attend_new(cache, table, q, k, v, num_tokens, *, policy, rope, scale, implementation):
    """Rotates queries and keys, writes the new tokens and attends: decode where T == 1, else prefill.

    Args:
        cache, table, num_tokens, policy, implementation: as of a module's call.
        q: [B, T, Hq, D].
        k, v: [B, T, Hkv, D], any floating dtype.
        rope: RotaryEmbedding, or None for none.
        scale: factor of the logits; None is `D ** -0.5`.

    Returns:
        The cache after the step, and the output, [B, T, Hq * D] in q's dtype.
    """
    rows, length, num_heads, head_dim = q.shape
    if rope is not None:
        positions = (table.seq_lens - num_tokens)[:, None] + jnp.arange(length, dtype=jnp.int32)
        q, k = rope(q, positions), rope(k, positions)
    k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
    how = dict(policy=policy, scale=scale, implementation=implementation)
    if length == 1:
        cache, out = decode_attention(
            cache, table, q[:, 0], k[:, 0], v[:, 0], active=num_tokens > 0, **how
        )
    else:
        cache, out = prefill_attention(cache, table, q, k, v, num_tokens, **how)
    return cache, out.reshape(rows, length, num_heads * head_dim)


def check_convertible(attention: Any, flax_class: type[Any], *same: type) -> None:
    """Raises unless an attention module of Flax's computes plain attention.

    Args:
        attention: the module.
        flax_class: what it must be.
        same: classes derived from that whose `__call__` computes the same.
    """
    if not isinstance(attention, flax_class):
        raise ValueError(f"attention: expected a {flax_class.__name__}; got {type(attention).__name__}")
    if not any(type(attention).__call__ is known.__call__ for known in (flax_class, *same)):
        raise ValueError(
            f"attention: __call__ can't be carried over: expected that of {flax_class.__name__}; "
            f"got that of {type(attention).__name__}"
        )
    check_defaults("attention", attention, flax_class, _CUSTOM_MATH)
    check_precision("attention", attention)
    if attention.dropout_rate > 0 and attention.deterministic is False:
        raise ValueError(
            "attention: dropout can't be carried over: expected dropout_rate = 0 or deterministic not "
            f"False; got dropout_rate = {attention.dropout_rate}, deterministic = False"
        )


def check_defaults(where: str, module: Any, flax_class: type[Any], names: Iterable[str]) -> None:
    """Raises unless these attributes, where the module has them, are the defaults of its class."""
    arguments = inspect.signature(flax_class.__init__).parameters
    for name in names:
        if hasattr(module, name) and getattr(module, name) != arguments[name].default:
            got = getattr(module, name)
            raise ValueError(f"{where}: {name} can't be carried over: expected the default; got {got!r}")


def check_precision(where: str, module) -> None:
    """Raises where the precision names an algorithm; others ask for no more than products have here."""
    precision = module.precision
    for value in precision if isinstance(precision, tuple) else (precision,):
        try:
            jax.lax.Precision(value)
        except ValueError:
            raise ValueError(
                f"{where}: precision can't be carried over: expected None or a jax.lax.Precision; "
                f"got {precision!r}"
            ) from None


# Submodule there, submodule here, and the axis of the heads, which head_dim follows, in kernel and bias.
PROJECTIONS = (
    ("query", "q_proj", 1, 0),  # [in, H, D] and [H, D]
    ("key", "k_proj", 1, 0),
    ("value", "v_proj", 1, 0),
    ("out", "o_proj", 0, None),  # [H, D, out] and [out]
)
NORMS = (("query_ln", "q_norm"), ("key_ln", "k_norm"))


def check_parameter(
    where: str, array, part: str, name: str, *, in_features, num_heads, num_kv_heads, head_dim, out_features
) -> None:
    """Raises unless an array has the shape of parameter `name` of submodule `part` of Flax's attention.

    Args:
        where: its name in the message.
        array: the parameter.
        part, name: such as "query" and "kernel".
        in_features, num_heads, num_kv_heads, head_dim, out_features: sizes; None for any.
    """
    heads, letter = (num_heads, "Hq") if part in ("query", "out") else (num_kv_heads, "Hkv")
    shape: tuple[int | None, ...]
    if part in dict(NORMS):
        shape, letters = (head_dim,), "[D]"
    elif part == "out":
        shape, letters = (heads, head_dim, out_features), f"[{letter}, D, out]"
        if name == "bias":
            shape, letters = (out_features,), "[out]"
    else:
        shape, letters = (in_features, heads, head_dim), f"[in, {letter}, D]"
        if name == "bias":
            shape, letters = (heads, head_dim), f"[{letter}, D]"
    check_shape(where, array, shape, letters)


def merge_heads(x: jax.Array, axis: int, names=()):
    """Makes one of axes `axis` (heads) and `axis + 1` (head_dim) of `x`, and of their names.

    The merged axis is heads first, so that it keeps the name of the heads.
    """
    shape = x.shape
    merged = x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return merged, (*names[: axis + 1], *names[axis + 2 :])
