"""Inputs, made on the device in seconds.

A value is a hash of its position, so one fused loop fills a pool of any size and needs no room beside it.
Letters: B rows, M logical pages, P page size, G query heads of a KV head, D head_dim, N pages in use.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.config import CacheConfig
from h2o_jax.policy import Policy
from h2o_jax.state import LayerCache, PageTable

LARGEST = 3**0.5  # magnitude of a value; they are uniform, of variance 1
# Odd factors of a position's coordinates, one an axis.
_FACTORS = (0x915F77F5, 0x93D765DD, 0xADB4A92D, 0xA13FC965, 0xB2AE3D27)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one layer's attention.

    Attributes:
        lengths: tokens of each row, the one being decoded included; 0 for an empty row.
        page_size: P.
        num_kv_heads, group_size, head_dim: as named, G and D.
        row_tokens: tokens that a row can hold; None for those of the longest.
        pool_times: pages of the pool, as a multiple of those that the page table can hold.
    """

    lengths: tuple[int, ...]
    page_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    row_tokens: int | None = None
    pool_times: int = 1

    dtype = jnp.bfloat16

    def __str__(self) -> str:
        tokens = "+".join(f"{self.lengths.count(n)}x{n}" for n in dict.fromkeys(self.lengths) if n)
        pool = f" pool x{self.pool_times}" if self.pool_times > 1 else ""
        heads = f"{self.num_kv_heads}x{self.group_size}x{self.head_dim}"
        return f"{tokens} P={self.page_size} {heads}{pool}"

    @property
    def batch(self) -> int:
        """B, empty rows included."""
        return len(self.lengths)

    @property
    def rows_in_use(self) -> int:
        """Rows that are not empty."""
        return sum(length > 0 for length in self.lengths)

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """N of each row."""
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def pages_per_request(self) -> int:
        """M."""
        return -(-(self.row_tokens or max(self.lengths)) // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.batch * self.pages_per_request * self.pool_times

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def vector_bytes(self) -> int:
        """Bytes of one key."""
        return self.head_dim * jnp.dtype(self.dtype).itemsize

    def config(self) -> CacheConfig:
        """The same for `h2o_jax`, of one layer."""
        return CacheConfig(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_requests=self.batch,
            pages_per_request=self.pages_per_request,
            dtype=self.dtype,
        )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def uniform(seed, *, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    """Values uniform in [-LARGEST, LARGEST), of mean 0 and variance 1.

    Args:
        seed: uint32 scalar.
        shape, dtype: of the result (static); at most five axes.
    """
    bits = jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B9)
    for axis, factor in zip(range(len(shape)), _FACTORS, strict=False):
        bits = bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(factor)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):  # a finaliser of hash-prospector
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    bits = bits ^ (bits >> 15)
    fraction = (bits >> 8).astype(jnp.float32) * 2.0**-24  # [0, 1)
    return ((2 * fraction - 1) * LARGEST).astype(dtype)


def page_table(sizes: Sizes) -> PageTable:
    """A table whose rows own permuted pages of the pool, and a free stack of those left over."""
    no_page = sizes.num_pages
    ids = np.random.default_rng(0).permutation(no_page).astype(np.int32)
    pages = np.full((sizes.batch, sizes.pages_per_request), no_page, np.int32)
    used = 0
    for row, n in zip(pages, sizes.pages_in_use):
        row[:n] = ids[used : used + n]
        used += n
    return PageTable(
        pages=jnp.asarray(pages),
        seq_lens=jnp.asarray(sizes.lengths, jnp.int32),
        free_pages=jnp.asarray(np.roll(ids, -used)),
        num_free=jnp.asarray(no_page - used, jnp.int32),
        page_size=sizes.page_size,
    )


def layer_cache(sizes: Sizes, policy: Policy, seed: int) -> LayerCache:
    """A cache as `policy` needs it, all pages full.

    Summaries are those of the keys. Accumulated scores are of the size that a step adds to a token of the
    longest row, so that a wrong addition shows.
    """
    shape = sizes.config().pool_shape
    k, v = (uniform(np.uint32(2 * seed + i), shape=shape) for i in range(2))
    aux = {}
    for name, declared in jax.eval_shape(lambda: policy.init_aux(sizes.config())).items():
        if name == "summaries":
            aux[name] = summarise(k, policy.summary_kinds)
        else:
            aux[name] = _scores(np.uint32(seed), max(sizes.lengths), declared=declared)
    return LayerCache(k, v, aux, policy.summary_kinds)


@functools.partial(jax.jit, static_argnames="declared")
def _scores(seed, length, *, declared):
    return jnp.abs(uniform(seed, shape=declared.shape, dtype=declared.dtype)) / length


@functools.partial(jax.jit, static_argnames="kinds")
def summarise(k: jax.Array, kinds: tuple[str, ...]) -> jax.Array:
    """Summaries of all pages: k [num_pages, Hkv, P, D] -> [num_pages, Hkv, S, D] in its dtype."""
    rows = [getattr(jnp, kind)(k.astype(jnp.float32), axis=2).astype(k.dtype) for kind in kinds]
    return jnp.stack(rows, axis=2)


@functools.partial(jax.jit, static_argnames=("sizes", "number"))
def new_tokens(seed, *, sizes: Sizes, number: int) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Queries [B, Hq, D] and the key and value [B, Hkv, D] of one new token a row, `number` times."""
    heads = (sizes.num_q_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    shapes = [(number, sizes.batch, h, sizes.head_dim) for h in heads]
    arrays = [uniform(3 * seed + i, shape=shape, dtype=sizes.dtype) for i, shape in enumerate(shapes)]
    return [tuple(array[i] for array in arrays) for i in range(number)]


@functools.partial(jax.jit, static_argnames=("sizes", "policy"))
def selections(seed, *, sizes: Sizes, policy: Policy) -> jax.Array:
    """[B, Hkv, W] int32: logical pages as `policy` might choose them in rows that all have M pages."""
    m, bos, eos = sizes.pages_per_request, policy.reserved_bos, policy.reserved_eos
    rows = (sizes.batch, sizes.num_kv_heads)
    chance = uniform(seed, shape=(*rows, m - bos - eos), dtype=jnp.float32)
    chosen = bos + jnp.sort(jax.lax.top_k(chance, policy.top_k)[1], axis=-1)
    first, last = jnp.arange(bos, dtype=jnp.int32), m - eos + jnp.arange(eos, dtype=jnp.int32)
    first, last = (jnp.broadcast_to(x, (*rows, len(x))) for x in (first, last))
    return jnp.concatenate([first, chosen, last], axis=-1)


@jax.jit
def contiguous(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Full rows without pages: [num_pages, Hkv, P, D] and [B, M] -> [B, M * P, Hkv, D]."""
    rows = pool[pages].swapaxes(2, 3)  # [B, M, P, Hkv, D]
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
