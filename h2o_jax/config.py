"""The fixed sizes of a paged cache."""

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp

POOL_DTYPES = ("bfloat16", "float16", "float32")
MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes of a paged KV cache. Frozen and hashable, so it can be a static argument of a jitted function.

    Attributes:
        num_layers: attention layers, each with a pool of its own.
        num_kv_heads: KV heads of a layer.
        head_dim: components of a key or value.
        page_size: tokens of a page; the unit of allocation and of selection.
        num_pages: physical pages of each layer's pool.
        max_requests: rows of the page table.
        pages_per_request: logical pages a row can hold, so at most
            `pages_per_request * page_size` tokens.
        dtype: of the pool: bfloat16, float16 or float32.

    Raises:
        ValueError: a size that is not a positive integer, or a dtype that is not one of the three;
            the message names the field.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    max_requests: int
    pages_per_request: int
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"CacheConfig.{field.name}: expected a positive integer, got {value!r}")
            object.__setattr__(self, field.name, int(value))
        for name, value in (
            ("num_pages", self.num_pages),
            ("pages_per_request * page_size", self.max_tokens),
            ("max_requests * pages_per_request", self.max_requests * self.pages_per_request),
        ):
            if value > MAX_INT32:
                raise ValueError(f"CacheConfig: {name} must fit in int32 (at most {MAX_INT32}), got {value}")
        if math.prod(self.pool_shape) >= 2**60:
            raise ValueError(f"CacheConfig: expected pools of fewer than 2**60 numbers, got {self.pool_shape}")
        try:
            if self.dtype is None:  # NumPy's word for float64
                raise TypeError
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"CacheConfig.dtype: expected one of {POOL_DTYPES}, got {self.dtype!r}") from None
        if dtype.name not in POOL_DTYPES:
            raise ValueError(f"CacheConfig.dtype: expected one of {POOL_DTYPES}, got {dtype.name}")
        object.__setattr__(self, "dtype", dtype)

    @property
    def max_tokens(self) -> int:
        """Tokens that one row can hold."""
        return self.pages_per_request * self.page_size

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's `k` and `v`: `[num_pages, num_kv_heads, page_size, head_dim]`."""
        return (self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
