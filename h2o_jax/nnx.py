"""Grouped-query attention over a paged cache, as a Flax NNX module.

Letters: B rows, T new tokens per row, Hq/Hkv query and KV heads, D head_dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from h2o_jax.decode import decode_attention
from h2o_jax.prefill import prefill_attention
from h2o_jax.rope import RotaryEmbedding


def matmul_precision(dtype) -> jax.lax.Precision | None:
    """HIGHEST where operands may be float32 (which a GPU would otherwise round to TF32), else None."""
    if dtype is None or jnp.dtype(dtype).itemsize >= 4:
        return jax.lax.Precision.HIGHEST
    return None


class H2OAttention(nnx.Module):
    """Grouped-query attention that reads the pages its policy chooses.

    The module holds parameters only; keys and values live in the cache that each call takes and returns.

    Args:
        in_features: size of the input's last axis.
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq; default Hq.
        head_dim: D; default `in_features // num_heads`.
        out_features: size of the output's last axis; default `in_features`.
        policy: the policy of calls that name none. Static: it must be hashable.
        rope: rotary embedding of queries and keys; None for none.
        use_qkv_bias, use_out_bias: whether the projections add a bias.
        qk_norm: whether each head's queries and keys pass an RMS norm of D weights before the rotation.
        norm_epsilon: added to the mean square in that norm.
        scale: factor of the logits; default `head_dim ** -0.5`.
        dtype: dtype of the computation; default: that of the input and parameters.
        param_dtype: dtype of new parameters.
        rngs: source of the initial parameters.

    Raises:
        ValueError: head counts or sizes that do not fit each other.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        *,
        policy=None,
        rope: RotaryEmbedding | None = None,
        use_qkv_bias: bool = False,
        use_out_bias: bool = False,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        scale: float | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        out_features = in_features if out_features is None else out_features
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
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

        self.in_features = in_features
        self.out_features = out_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.policy = policy
        self.rope = rope
        self.scale = scale

        def linear(features_in, features_out, use_bias):
            return nnx.Linear(
                features_in,
                features_out,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=matmul_precision(dtype),
                rngs=rngs,
            )

        def norm():
            return nnx.RMSNorm(
                head_dim, epsilon=norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        self.q_proj = linear(in_features, num_heads * head_dim, use_qkv_bias)
        self.k_proj = linear(in_features, num_kv_heads * head_dim, use_qkv_bias)
        self.v_proj = linear(in_features, num_kv_heads * head_dim, use_qkv_bias)
        self.o_proj = linear(num_heads * head_dim, out_features, use_out_bias)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = norm()
            self.k_norm = norm()

    def __call__(self, cache, table, x, num_tokens, *, policy=None, implementation=None):
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
        if policy is None:
            raise ValueError("policy: expected one from the constructor or the call; got None in both")
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: expected [B, T, {self.in_features}]; got shape {x.shape}")
        rows, length, _ = x.shape
        if num_tokens.shape != (rows,) or table.seq_lens.shape != (rows,):
            raise ValueError(
                f"num_tokens, table: expected {rows} rows as in x; got num_tokens {num_tokens.shape}, "
                f"seq_lens {table.seq_lens.shape}"
            )
        if (cache.k.shape[1], cache.k.shape[3]) != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"cache: expected {self.num_kv_heads} KV heads of head_dim {self.head_dim}; "
                f"got a pool of shape {cache.k.shape}"
            )

        q = self.q_proj(x).reshape(rows, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).reshape(rows, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(rows, length, self.num_kv_heads, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            start = table.seq_lens - num_tokens
            positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)
            q, k = self.rope(q, positions), self.rope(k, positions)
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)

        if length == 1:
            cache, out = decode_attention(
                cache,
                table,
                q[:, 0],
                k[:, 0],
                v[:, 0],
                policy=policy,
                scale=self.scale,
                active=num_tokens > 0,
                implementation=implementation,
            )
        else:
            cache, out = prefill_attention(
                cache,
                table,
                q,
                k,
                v,
                num_tokens,
                policy=policy,
                scale=self.scale,
                implementation=implementation,
            )
        return cache, self.o_proj(out.reshape(rows, length, self.num_heads * self.head_dim))
