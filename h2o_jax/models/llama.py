"""A Llama-family decoder over a paged cache, as a Flax NNX module.

Letters: B rows, T new tokens per row, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from h2o_jax import debug
from h2o_jax.config import CacheConfig
from h2o_jax.models.config import LlamaConfig
from h2o_jax.nnx import H2OAttention, matmul_precision
from h2o_jax.policy import Policy
from h2o_jax.state import LayerCache, PagedState, PageTable


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))` (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(
                features_in,
                features_out,
                use_bias=config.mlp_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=matmul_precision(dtype),
                rngs=rngs,
            )

        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One pre-norm decoder layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, dtype, param_dtype, rngs)
        self.attention = H2OAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope=config.rope(),
            use_qkv_bias=config.qkv_bias,
            use_out_bias=config.out_bias,
            qk_norm=config.qk_norm,
            norm_epsilon=config.norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config, dtype, param_dtype, rngs)
        self.mlp = MLP(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        cache: LayerCache,
        table: PageTable,
        x: jax.Array,
        num_tokens: jax.Array,
        *,
        policy: Policy,
        implementation: str | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        cache, attended = self.attention(
            cache, table, self.attention_norm(x), num_tokens, policy=policy, implementation=implementation
        )
        x = x + attended
        return cache, x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """Llama, Mistral (without a sliding window), Qwen2 or Qwen3. Holds parameters only.

    Args:
        config: sizes and switches.
        dtype: dtype of the computation and of hidden states.
        param_dtype: dtype of new parameters; default `dtype`.
        rngs: source of the initial parameters.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        param_dtype = dtype if param_dtype is None else param_dtype
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.blocks = nnx.List(
            [Block(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = _norm(config, dtype, param_dtype, rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=matmul_precision(dtype),
                rngs=rngs,
            )

    def cache_config(
        self,
        max_requests: int,
        pages_per_request: int,
        page_size: int,
        num_pages: int | None = None,
        *,
        dtype: DTypeLike | None = None,
    ) -> CacheConfig:
        """A CacheConfig that fits this model.

        Args:
            max_requests, pages_per_request, page_size: as in CacheConfig.
            num_pages: default `max_requests * pages_per_request`, which no request can exhaust.
            dtype: of the pool; default the model's.
        """
        return CacheConfig(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            num_pages=max_requests * pages_per_request if num_pages is None else num_pages,
            max_requests=max_requests,
            pages_per_request=pages_per_request,
            dtype=self.dtype if dtype is None else dtype,
        )

    def hidden(
        self,
        state: PagedState,
        tokens: jax.Array,
        num_tokens: jax.Array,
        *,
        policy: Policy,
        implementation: str | None = None,
    ) -> tuple[PagedState, jax.Array]:
        """Runs the layers, without the output head.

        Args:
            state: PagedState whose table is already extended by `num_tokens`.
            tokens: [B, T] int32 token ids, right-padded; padding may be any valid id.
            num_tokens: [B] int32, valid tokens of each row. T > 1 is prefill, T == 1 decode.
            policy: the policy; layer i runs `policy.for_layer(i)`.
            implementation: "xla", "pallas", "pallas_interpret" or None (the best available).

        Returns:
            (state, h): the state after the step, with the same table, and h [B, T, hidden_size] in the
            model's dtype, normed and ready for `logits`.

        Raises:
            ValueError: tokens that are not [B, T] integers, or a state of another number of layers.
        """
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: expected [B, T] integers; got {tokens.dtype} of shape {tokens.shape}")
        if len(state.layers) != self.config.num_layers:
            raise ValueError(
                f"state: expected {self.config.num_layers} layers as in the model; got {len(state.layers)}"
            )
        x = self.embed(tokens)
        layers = []
        for index, (block, cache) in enumerate(zip(self.blocks, state.layers)):
            with debug.layer(index):
                cache, x = block(
                    cache,
                    state.table,
                    x,
                    num_tokens,
                    policy=policy.for_layer(index),
                    implementation=implementation,
                )
            layers.append(cache)
        return PagedState(table=state.table, layers=tuple(layers)), self.norm(x)

    def logits(self, h: jax.Array) -> jax.Array:
        """The output head: h [..., hidden_size] to float32 logits [..., V]."""
        if self.config.tie_embeddings:
            weight, axis = self.embed.embedding[...], 1
        else:
            weight, axis = self.lm_head.kernel[...], 0
        return jax.lax.dot_general(
            h.astype(self.dtype),
            weight.astype(self.dtype),
            (((h.ndim - 1,), (axis,)), ((), ())),
            precision=matmul_precision(self.dtype),
            preferred_element_type=jnp.float32,
        )

    def __call__(
        self,
        state: PagedState,
        tokens: jax.Array,
        num_tokens: jax.Array,
        *,
        policy: Policy,
        implementation: str | None = None,
    ) -> tuple[PagedState, jax.Array]:
        """`hidden` and then `logits` at every position: (state, logits [B, T, V] float32)."""
        state, h = self.hidden(state, tokens, num_tokens, policy=policy, implementation=implementation)
        return state, self.logits(h)


def _norm(config: LlamaConfig, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
