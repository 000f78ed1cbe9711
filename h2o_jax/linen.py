"""Grouped-query attention over a paged cache, as a Flax Linen module.

Letters: B rows, T new tokens per row, Hq/Hkv query and KV heads, D head_dim.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from h2o_jax._attention import (
    NORMS,
    PROJECTIONS,
    attend_new,
    check_call,
    check_convertible,
    check_parameter,
    matmul_precision,
    merge_heads,
    resolve_norm,
    resolve_sizes,
    split_heads,
)
from h2o_jax.policy import Policy
from h2o_jax.rope import RotaryEmbedding
from h2o_jax.state import LayerCache, PageTable

# Of a parameter: submodule there, submodule here, its name, the axis of its heads to be merged if any.
_Carried = tuple[str, str, str, int | None]


class H2OAttention(nn.Module):
    """Grouped-query attention that reads the pages its policy chooses.

    The module holds parameters only; keys and values live in the cache that each call takes and returns.
    Axis names are given to parameters through their initializers, `nn.with_partitioning(init, names)` or
    `nn.with_logical_partitioning(init, names)`. With parameters of the same names and values,
    `h2o_jax.nnx.H2OAttention` computes the same.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq; default Hq.
        head_dim: D; default the input's features divided by Hq.
        out_features: size of the output's last axis; default that of the input.
        policy: the policy of calls that name none. Static: it must be hashable.
        rope: rotary embedding of queries and keys; None for none.
        use_qkv_bias, use_out_bias: whether the projections add a bias.
        qk_norm: norm of each head's queries and keys, of D weights, before the rotation: "rms" (or True),
            "layer" (without bias), or False.
        norm_epsilon: added to the mean square or variance in that norm.
        scale: factor of the logits; default `head_dim ** -0.5`.
        dtype: dtype of the computation; default: that of the input and parameters.
        param_dtype: dtype of new parameters.
        kernel_init: initializer of the kernels, [features, H * D] and [Hq * D, out_features].
        bias_init: initializer of the biases.
        out_kernel_init, out_bias_init: those of the output projection; default as the others.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    policy: Policy | None = None
    rope: RotaryEmbedding | None = None
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    qk_norm: bool | str = False
    norm_epsilon: float = 1e-6
    scale: float | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros_init()
    out_kernel_init: Callable | None = None
    out_bias_init: Callable | None = None

    @classmethod
    def from_attention(
        cls,
        attention: nn.MultiHeadDotProductAttention,
        params: Mapping[str, Any],
        *,
        policy: Policy | None = None,
    ) -> tuple["H2OAttention", dict[str, Any]]:
        """The same attention over a paged cache: that of `attention` in its decode mode.

        The arrays are those of `params`, reshaped, and boxed with axis names where those are; of the axis
        names of heads and head_dim, which become one axis, that of heads remains. Nothing is dropped out.
        Products of float32 keep float32 precision.

        Args:
            attention: with biases or not, `normalize_qk` or not, and the default attention function.
            params: its parameters: `variables["params"]`, with the entries "query", "key", "value", "out".
                The number of KV heads is that of its keys.
            policy: the policy of calls that name none. Static: it must be hashable.

        Returns:
            The module and its parameters, for `module.apply({"params": params}, ...)`.

        Raises:
            ValueError: not a MultiHeadDotProductAttention, something in it that can't be carried over, or
                parameters that are not its own; the message names it.
        """
        check_convertible(attention, nn.MultiHeadDotProductAttention, nn.SelfAttention)
        carried = list(_carried(attention))
        num_kv_heads, head_dim, out_features = _check_params(attention, params, carried)
        merged: dict[str, dict[str, Any]] = {}
        for theirs, ours, name, axis in carried:
            merged.setdefault(ours, {})[name] = _merged(params[theirs][name], axis)
        module = cls(
            attention.num_heads,
            num_kv_heads,
            head_dim,
            out_features,
            policy=policy,
            use_qkv_bias=attention.use_bias,
            use_out_bias=attention.use_bias,
            qk_norm="layer" if attention.normalize_qk else False,
            dtype=attention.dtype,
            param_dtype=attention.param_dtype,
        )
        return module, merged

    @nn.compact
    def __call__(
        self,
        cache: LayerCache,
        table: PageTable,
        x: jax.Array,
        num_tokens: jax.Array,
        *,
        policy: Policy | None = None,
        implementation: str | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        """Writes the new tokens' keys and values to the cache and attends.

        T > 1 is prefill (dense causal attention to the cached prefix and the new tokens); T == 1 is a
        decode step, in which a row of no new token is inactive: nothing written, attention output 0.

        Args:
            cache: LayerCache of this layer.
            table: PageTable, already extended by `num_tokens`.
            x: [B, T, features], right-padded.
            num_tokens: [B] int32, valid tokens of each row, at most T.
            policy: overrides the attribute.
            implementation: "xla", "pallas", "pallas_interpret" or None (the best available).

        Returns:
            (cache, y): the cache after the step and y [B, T, out_features]; y of padding is not defined
            beyond being finite where x is.

        Raises:
            ValueError: no policy, head counts or sizes that do not fit each other, another `qk_norm`, or a
                shape that does not fit the module or the cache.
        """
        policy = self.policy if policy is None else policy
        in_features = jnp.shape(x)[-1]
        num_kv_heads, head_dim, out_features = resolve_sizes(
            in_features, self.num_heads, self.num_kv_heads, self.head_dim, self.out_features, self.rope
        )
        check_call(
            cache,
            table,
            x,
            num_tokens,
            policy,
            in_features=in_features,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        dense = functools.partial(
            nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, precision=matmul_precision(self.dtype)
        )
        qkv = functools.partial(
            dense, use_bias=self.use_qkv_bias, kernel_init=self.kernel_init, bias_init=self.bias_init
        )
        q = split_heads(qkv(self.num_heads * head_dim, name="q_proj")(x), head_dim)
        k = split_heads(qkv(num_kv_heads * head_dim, name="k_proj")(x), head_dim)
        v = split_heads(qkv(num_kv_heads * head_dim, name="v_proj")(x), head_dim)
        kind = resolve_norm(self.qk_norm)
        if kind:
            norm: Callable[..., Callable] = (
                nn.RMSNorm if kind == "rms" else functools.partial(nn.LayerNorm, use_bias=False)
            )
            norm = functools.partial(
                norm, epsilon=self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype
            )
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        cache, out = attend_new(
            cache,
            table,
            q,
            k,
            v,
            num_tokens,
            policy=policy,
            rope=self.rope,
            scale=self.scale,
            implementation=implementation,
        )
        return cache, dense(
            out_features,
            use_bias=self.use_out_bias,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="o_proj",
        )(out)


def _carried(attention: nn.MultiHeadDotProductAttention) -> Iterator[_Carried]:
    """All parameters of Flax's attention."""
    for theirs, ours, kernel_axis, bias_axis in PROJECTIONS:
        yield theirs, ours, "kernel", kernel_axis
        if attention.use_bias:
            yield theirs, ours, "bias", bias_axis
    if attention.normalize_qk:
        for theirs, ours in NORMS:
            yield theirs, ours, "scale", None


def _check_params(
    attention: nn.MultiHeadDotProductAttention, params: Mapping[str, Any], carried: Sequence[_Carried]
) -> tuple[int, int, int]:
    """num_kv_heads, head_dim and out_features of Flax's attention; raises unless `params` are its own."""
    expected = sorted(f"{theirs}/{name}" for theirs, _, name, _ in carried)
    if not isinstance(params, Mapping):
        raise ValueError(f"params: expected those of attention, {expected}; got {params!r:.80}")
    got = sorted(flatten_dict(params, sep="/"))
    if got != expected:
        raise ValueError(f"params: expected those of attention, {expected}; got {got}")

    def check(part: str, name: str, **sizes: int | None) -> tuple[int, ...]:
        array = _unboxed(params[part][name])
        check_parameter(f"params[{part!r}][{name!r}]", array, part, name, **sizes)
        return array.shape

    unknown = dict(in_features=None, num_kv_heads=None, head_dim=None, out_features=None)
    in_features, num_heads, head_dim = check("query", "kernel", **unknown, num_heads=attention.num_heads)
    if (attention.qkv_features or in_features) != num_heads * head_dim:
        raise ValueError(
            f"attention: expected qkv_features = {num_heads * head_dim}, the {num_heads} heads of {head_dim} "
            f"in params; got {attention.qkv_features or in_features}"
        )
    sizes = dict(in_features=in_features, num_heads=num_heads, head_dim=head_dim)
    sizes["out_features"] = attention.out_features or in_features
    _, num_kv_heads, _ = check("key", "kernel", **sizes, num_kv_heads=None)
    for theirs, _, name, _ in carried:
        check(theirs, name, **sizes, num_kv_heads=num_kv_heads)
    return num_kv_heads, head_dim, sizes["out_features"]


def _unboxed(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, nn.Partitioned) else leaf


def _merged(leaf: Any, axis: int | None) -> Any:
    """A parameter with its heads and head_dim merged, boxed as it was."""
    if axis is None:
        return leaf
    value, names = merge_heads(_unboxed(leaf), axis, getattr(leaf, "names", ()))
    return leaf.replace(value=value, names=names) if isinstance(leaf, nn.Partitioned) else value
