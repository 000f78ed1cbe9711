"""Prefill: dense causal attention of a prompt, or of its next chunk.

Letters: B request rows, M logical pages a row, P page size, T new tokens a row, S = M P, Hq query heads, Hkv
KV heads, D head_dim.
"""

import jax
import jax.numpy as jnp

from h2o_jax import debug
from h2o_jax._checks import check_new, check_pool, resolve_scale
from h2o_jax.decode import write_tokens
from h2o_jax.policy import Policy
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels._checks import FLOAT_DTYPES, check_dtype, check_heads, check_shape
from pallas_kernels._paging import physical_pages


def prefill_attention(
    cache: LayerCache,
    table: PageTable,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    num_tokens: jax.Array,
    *,
    policy: Policy,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[LayerCache, jax.Array]:
    """Writes new tokens and attends from each to all tokens of its row up to itself.

    Tokens cached before are attended to as well, so a prompt may be given in chunks. Nothing is scored. A value in v
    that is not finite can make all of the row's outputs for its KV head NaN, those of earlier tokens too: their weight
    of 0 is no help.

    Args:
        cache: the layer's cache.
        table: page table, already extended by `num_tokens`.
        q: [B, T, Hq, D] queries, right-padded, bfloat16, float16 or float32.
        k, v: [B, T, Hkv, D] keys and values, right-padded, in the pool's dtype.
        num_tokens: [B] int32 new tokens of each row, 0 to T.
        policy: the layer's policy; decides which summaries and scores the write keeps.
        scale: factor on the logits; None is `D ** -0.5`.
        implementation: of the write: "xla", "pallas", "pallas_interpret" or None for the best here. The
            attention is `jax.nn.dot_product_attention`.

    Returns:
        The cache after the write, and the output, [B, T, Hq, D] in q's dtype; 0 for padding.

    Raises:
        ValueError: a wrong shape, dtype or head count (at trace time); the message names the argument.
        NotImplementedError: the named implementation can't.
    """
    check_pool(cache, table, implementation)
    num_kv_heads, head_dim = cache.k.shape[1], cache.k.shape[3]
    check_new(cache, table, "[B, T, Hkv, D]", k=k, v=v)
    scale = resolve_scale(scale, head_dim)
    check_shape("q", q, (table.pages.shape[0], jnp.shape(k)[1], None, head_dim), "[B, T, Hq, D]")
    check_dtype("q", q, FLOAT_DTYPES)
    check_heads(q.shape[2], num_kv_heads)
    cache = write_tokens(cache, table, k, v, num_tokens, policy=policy, implementation=implementation)
    q = jnp.asarray(q)

    position = jnp.arange(table.pages.shape[1] * table.page_size, dtype=jnp.int32)[None]  # [1, S]
    cached = position < table.seq_lens[:, None]  # [B, S]
    dtype = q.dtype if q.dtype == cache.k.dtype else jnp.dtype(jnp.float32)
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        dtype = jnp.dtype(jnp.float32)  # a CPU has no float16 product with float32 sums
    keys, values = (_contiguous(pool, table, cached, dtype) for pool in (cache.k, cache.v))
    token = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    query_position = (table.seq_lens - num_tokens)[:, None] + token  # [B, T]
    real = token < num_tokens[:, None]
    mask = (position[None] <= query_position[..., None]) & cached[:, None]
    precision = "highest" if dtype == jnp.float32 else None  # float32 is not to run as TF32
    with jax.default_matmul_precision(precision):
        out = jax.nn.dot_product_attention(q.astype(dtype), keys, values, mask=mask[:, None], scale=scale)
    out = jnp.where(real[..., None, None], out, 0).astype(q.dtype)
    debug.check_output(out)
    return cache, out


def _contiguous(pool: jax.Array, table: PageTable, cached: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[B, S, Hkv, D] tokens of each row in order; 0 where none is cached, for 0 * NaN is NaN."""
    batch, num_logical = table.pages.shape
    num_pages, num_kv_heads, page_size, head_dim = pool.shape
    logical = jnp.broadcast_to(jnp.arange(num_logical, dtype=jnp.int32), (batch, num_logical))
    page = physical_pages(table.pages, logical, jnp.ones_like(logical, bool), num_pages)
    tokens = pool.at[page].get(mode="fill", fill_value=0).swapaxes(2, 3)  # [B, M, P, Hkv, D]
    tokens = tokens.reshape(batch, num_logical * page_size, num_kv_heads, head_dim)
    return jnp.where(cached[..., None, None], tokens, 0).astype(dtype)
