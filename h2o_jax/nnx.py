"""Grouped-query attention over a paged cache, as a Flax NNX module.

Letters: B rows, T new tokens per row, Hq/Hkv query and KV heads, D head_dim.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike

from h2o_jax._attention import (
    NORMS,
    PROJECTIONS,
    attend_new,
    check_call,
    check_convertible,
    check_defaults,
    check_parameter,
    check_precision,
    matmul_precision,
    merge_heads,
    resolve_norm,
    resolve_sizes,
    split_heads,
)
from h2o_jax.policy import Policy, require_policy
from h2o_jax.rope import RotaryEmbedding
from h2o_jax.state import LayerCache, PageTable

# Of Flax's attention: what `H2OAttention` takes, and what in a projection replaces a part of its arithmetic.
_SIZES = ("in_features", "num_heads", "num_kv_heads", "head_dim", "out_features")
_CUSTOM_LINEAR = ("batch_axis", "promote_dtype", "dot_general", "dot_general_cls", "preferred_element_type")
_NORM_KINDS: dict[type, str] = {nnx.LayerNorm: "layer", nnx.RMSNorm: "rms"}


class H2OAttention(nnx.Module):
    """Grouped-query attention that reads the pages its policy chooses.

    The module holds parameters only; keys and values live in the cache that each call takes and returns.
    Axis names are given to parameters through their initializers, `nnx.with_partitioning(init, names)`.

    Args:
        in_features: size of the input's last axis.
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq; default Hq.
        head_dim: D; default `in_features // num_heads`.
        out_features: size of the output's last axis; default `in_features`.
        policy: the policy of calls that name none. Static: it must be hashable.
        rope: rotary embedding of queries and keys; None for none.
        use_qkv_bias, use_out_bias: whether the projections add a bias.
        qk_norm: norm of each head's queries and keys, of D weights, before the rotation: "rms" (or True),
            "layer" (without bias), or False.
        norm_epsilon: added to the mean square or variance in that norm.
        scale: factor of the logits; default `head_dim ** -0.5`.
        dtype: dtype of the computation; default: that of the input and parameters.
        param_dtype: dtype of new parameters.
        kernel_init: initializer of the kernels, [in_features, H * D] and [Hq * D, out_features].
        bias_init: initializer of the biases.
        out_kernel_init, out_bias_init: those of the output projection; default as the others.
        rngs: source of the initial parameters.

    Raises:
        ValueError: head counts or sizes that do not fit each other, or another `qk_norm`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        *,
        policy: Policy | None = None,
        rope: RotaryEmbedding | None = None,
        use_qkv_bias: bool = False,
        use_out_bias: bool = False,
        qk_norm: bool | str = False,
        norm_epsilon: float = 1e-6,
        scale: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_kernel_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        if policy is not None:
            require_policy(policy)
        num_kv_heads, head_dim, out_features = resolve_sizes(
            in_features, num_heads, num_kv_heads, head_dim, out_features, rope
        )
        self.in_features = in_features
        self.out_features = out_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.policy = policy
        self.rope = rope
        self.scale = scale

        linear = functools.partial(
            nnx.Linear, dtype=dtype, param_dtype=param_dtype, precision=matmul_precision(dtype), rngs=rngs
        )
        qkv = functools.partial(linear, use_bias=use_qkv_bias, kernel_init=kernel_init, bias_init=bias_init)
        self.q_proj = qkv(in_features, num_heads * head_dim)
        self.k_proj = qkv(in_features, num_kv_heads * head_dim)
        self.v_proj = qkv(in_features, num_kv_heads * head_dim)
        self.o_proj = linear(
            num_heads * head_dim,
            out_features,
            use_bias=use_out_bias,
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        self.qk_norm = resolve_norm(qk_norm)
        if self.qk_norm:
            norm: Callable[..., nnx.RMSNorm | nnx.LayerNorm] = (
                nnx.RMSNorm if self.qk_norm == "rms" else functools.partial(nnx.LayerNorm, use_bias=False)
            )
            norm = functools.partial(
                norm, epsilon=norm_epsilon, dtype=dtype, param_dtype=param_dtype, promote_dtype=_unpromoted
            )
            self.q_norm = norm(head_dim, rngs=rngs)
            self.k_norm = norm(head_dim, rngs=rngs)

    @classmethod
    def from_attention(
        cls, attention: nnx.MultiHeadAttention, *, policy: Policy | None = None
    ) -> "H2OAttention":
        """The same attention over a paged cache: that of `attention` in its decode mode.

        The arrays are those of `attention`, reshaped, and so are other metadata of its parameters; of the
        axis names of heads and head_dim, which become one axis, that of heads remains. What `attention` has
        cached is not taken over. Nothing is dropped out. Products of float32 keep float32 precision.

        Args:
            attention: with any number of KV heads, a bias in each projection or not, `normalize_qk` or not,
                any LayerNorm or RMSNorm there, and the default attention function.
            policy: the policy of calls that name none. Static: it must be hashable.

        Raises:
            ValueError: not a MultiHeadAttention, or something in it that can't be carried over, such as a
                `__call__` of its own or a projection of another dtype; the message names it.
        """
        check_convertible(attention, nnx.MultiHeadAttention)
        if attention.in_kv_features != attention.in_features:
            raise ValueError(
                f"attention: expected in_kv_features = in_features = {attention.in_features}, as keys are of "
                f"the same input; got {attention.in_kv_features}"
            )
        sizes = {name: getattr(attention, name) for name in _SIZES}
        for part, *_ in PROJECTIONS:
            _check_projection(attention, part, sizes)
        module = nnx.eval_shape(
            lambda: cls(
                **sizes,
                policy=policy,
                dtype=attention.dtype,
                param_dtype=attention.param_dtype,
                rngs=nnx.Rngs(0),
            )
        )
        for theirs, ours, kernel_axis, bias_axis in PROJECTIONS:
            given, linear = getattr(attention, theirs), getattr(module, ours)
            linear.kernel = _merged(given.kernel, kernel_axis)
            linear.use_bias = given.bias is not None
            if linear.use_bias:
                linear.bias = _merged(given.bias, bias_axis)
            linear.param_dtype = given.param_dtype
        if attention.normalize_qk:
            module.qk_norm = _norm_kind(attention, sizes)
            for theirs, ours in NORMS:
                norm = nnx.clone(getattr(attention, theirs))
                norm.promote_dtype = _unpromoted
                setattr(module, ours, norm)
        return module

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
            x: [B, T, in_features], right-padded.
            num_tokens: [B] int32, valid tokens of each row, at most T.
            policy: overrides the constructor's.
            implementation: "xla", "pallas", "pallas_interpret" or None (the best available).

        Returns:
            (cache, y): the cache after the step and y [B, T, out_features]; y of padding is not defined
            beyond being finite where x is.

        Raises:
            ValueError: no policy, or a shape that does not fit the module or the cache.
        """
        policy = self.policy if policy is None else policy
        check_call(
            cache,
            table,
            x,
            num_tokens,
            policy,
            in_features=self.in_features,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        q, k, v = (split_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
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
        return cache, self.o_proj(out)


def _check_projection(attention: nnx.MultiHeadAttention, part: str, sizes: Mapping[str, Any]) -> None:
    """Raises unless a projection of Flax's attention is a plain one."""
    where, linear = f"attention.{part}", getattr(attention, part)
    if type(linear) is not nnx.LinearGeneral:
        raise ValueError(f"{where}: expected a LinearGeneral; got {type(linear).__name__}")
    check_defaults(where, linear, nnx.LinearGeneral, _CUSTOM_LINEAR)
    check_precision(where, linear)
    axis = (-2, -1) if part == "out" else (-1,)
    if linear.axis != axis:
        raise ValueError(f"{where}: axis can't be carried over: expected {axis}; got {linear.axis}")
    _check_part(attention, part, sizes)


def _norm_kind(attention: nnx.MultiHeadAttention, sizes: Mapping[str, Any]) -> str:
    """The kind of norm of queries and keys in Flax's attention; raises unless they are norms of one kind."""
    kinds = []
    for part, _ in NORMS:
        where, norm = f"attention.{part}", getattr(attention, part)
        if type(norm) not in _NORM_KINDS:
            raise ValueError(f"{where}: expected a LayerNorm or RMSNorm; got {type(norm).__name__}")
        check_defaults(where, norm, type(norm), ("promote_dtype",))
        _check_part(attention, part, sizes)
        kinds.append(type(norm))
    if kinds[0] is not kinds[1]:
        raise ValueError(
            f"attention.key_ln: expected a {kinds[0].__name__} as in query_ln; got {kinds[1].__name__}"
        )
    return _NORM_KINDS[kinds[0]]


def _check_part(attention: nnx.MultiHeadAttention, part: str, sizes: Mapping[str, Any]) -> None:
    """Raises unless a submodule computes in the dtype of the whole, with parameters that fit `sizes`."""
    where, module = f"attention.{part}", getattr(attention, part)
    got, expected = (None if x.dtype is None else jnp.dtype(x.dtype).name for x in (module, attention))
    if got != expected:
        raise ValueError(
            f"{where}: dtype can't be carried over: expected {expected} as in attention; got {got}"
        )
    for name in ("kernel", "scale", "bias"):
        variable = getattr(module, name, None)
        if variable is not None:
            check_parameter(f"{where}.{name}", variable, part, name, **sizes)


def _unpromoted(arrays: tuple, *, dtype: Any) -> tuple:
    """A `promote_dtype` that keeps a norm's weights as they are in a 16-bit computation, as Linen does."""
    return arrays


def _merged(variable: nnx.Variable, axis: int | None) -> nnx.Variable:
    """A parameter with its heads and head_dim merged, its metadata kept."""
    if axis is None:
        return variable.replace(variable[...])
    names = variable.get_metadata("out_sharding", None)
    value, merged_names = merge_heads(variable[...], axis, names or ())
    return variable.replace(value, **({"out_sharding": merged_names} if names else {}))
