"""Cases of `write_pages`: one table for tests, lowering checks and benchmarks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call. Letters as in `api.py`.

    Attributes:
        id: readable name.
        num_kv_heads, head_dim, page_size: Hkv, D, P.
        lengths: tokens of each row, the new ones included.
        num_tokens: new tokens of each row.
        max_tokens: T; 0: as the row with most new tokens needs.
        dtype: of the pools.
        summary_kinds: kinds of summaries; none: no summaries.
        score_dtype: of the scores, or None for none.
        benchmark: too large for the interpreter.
    """

    id: str
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 32, 32)
    num_tokens: tuple[int, ...] = (0, 1, 1, 1, 1, 1, 0)
    max_tokens: int = 0
    dtype: str = "bfloat16"
    summary_kinds: tuple[str, ...] = ("mean", "max", "min")
    score_dtype: str | None = None
    benchmark: bool = False

    def __post_init__(self):
        if len(self.num_tokens) != len(self.lengths):
            raise ValueError(f"num_tokens: expected {len(self.lengths)} of them, got {len(self.num_tokens)}")

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, by argument name."""
        batch, dtype = len(self.lengths), jnp.dtype(self.dtype)
        row_pages = max(1, math.ceil(max(self.lengths) / self.page_size))
        num_pages, tokens = batch * row_pages + 3, self.max_tokens or max(self.num_tokens)
        sizes = (num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        pool = jax.ShapeDtypeStruct(sizes, dtype)
        new = jax.ShapeDtypeStruct((batch, tokens, self.num_kv_heads, self.head_dim), dtype)
        shapes = {"k_pool": pool, "v_pool": pool, "k": new, "v": new}
        shapes["pages"] = jax.ShapeDtypeStruct((batch, row_pages), jnp.int32)
        shapes["seq_lens"] = shapes["num_tokens"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
        if self.summary_kinds:
            shape = (num_pages, self.num_kv_heads, len(self.summary_kinds), self.head_dim)
            shapes["summaries"] = jax.ShapeDtypeStruct(shape, dtype)
        if self.score_dtype:
            shapes["scores"] = jax.ShapeDtypeStruct(sizes[:3], jnp.dtype(self.score_dtype))
        return shapes


def make(case: Case, *, seed: int = 0, poison: float = np.nan) -> dict[str, jax.Array]:
    """Arguments of `write_pages` for a case, `summary_kinds` excepted.

    Page ids are permuted. Tokens written earlier are random; all else in the pools, summaries and scores, and
    the padding of `k` and `v`, is poison.
    """
    rng = np.random.default_rng(seed)
    shapes = case.shapes
    num_pages, _, size, _ = shapes["k_pool"].shape
    ids = rng.permutation(num_pages)
    pages = np.full(shapes["pages"].shape, num_pages, np.int32)
    old = np.zeros((num_pages, size), bool)
    for row, (length, new) in enumerate(zip(case.lengths, case.num_tokens, strict=True)):
        n = -(-length // size)
        pages[row, :n], ids = ids[:n], ids[n:]
        for position in range(length - new):
            old[pages[row, position // size], position % size] = True
    padding = np.arange(shapes["k"].shape[1]) >= np.asarray(case.num_tokens)[:, None]

    arrays = {"pages": pages, "seq_lens": case.lengths, "num_tokens": case.num_tokens}
    for name in ("k_pool", "v_pool"):
        values = rng.standard_normal(shapes[name].shape, np.float32)
        arrays[name] = np.where(old[:, None, :, None], values, poison)
    for name in ("k", "v"):
        values = rng.standard_normal(shapes[name].shape, np.float32)
        arrays[name] = np.where(padding[:, :, None, None], poison, values)
    for name in ("summaries", "scores"):
        if name in shapes:
            arrays[name] = np.full(shapes[name].shape, poison, np.float32)
    return {name: jnp.asarray(arrays[name], x.dtype) for name, x in shapes.items()}


_DECODE = (0, 1, 0, 1, 1, 1, 1, 1)
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

CASES = (
    *(
        Case(
            f"p{p}-{_DTYPES[dtype]}",
            page_size=p,
            lengths=(0, 1, 2, p, p + 1, 2 * p, 2 * p + 1, max(p - 1, 1)),
            num_tokens=_DECODE,
            dtype=dtype,
        )
        for p in (1, 16, 32, 64)
        for dtype in _DTYPES
    ),
    *(Case(f"d{d}", head_dim=d) for d in (8, 72, 80, 96, 128, 192, 256)),
    Case("p24-odd", page_size=24, lengths=(24, 23, 48, 60), num_tokens=(1, 1, 1, 1)),
    Case("mean-only", summary_kinds=("mean",)),
    Case("max-min", summary_kinds=("max", "min")),
    Case("no-summaries", summary_kinds=()),
    Case(
        "scores-p1",
        page_size=1,
        lengths=(0, 1, 5, 5),
        num_tokens=(0, 1, 1, 0),
        summary_kinds=(),
        score_dtype="float32",
    ),
    Case("scores-bf16", page_size=4, lengths=(0, 4, 5), num_tokens=(0, 1, 1), score_dtype="bfloat16"),
    *(
        Case(
            f"prefill-p{p}",
            page_size=p,
            lengths=(0, 37, 37, 3 * p + 1, 5, 64),
            num_tokens=(0, 37, 5, min(3 * p + 1, 37), 0, 33),
            max_tokens=40,
            score_dtype="float32",
        )
        for p in (1, 16, 64)
    ),
    Case(
        "bench-b8-p16",
        num_kv_heads=8,
        head_dim=128,
        lengths=(4096,) * 8,
        num_tokens=(1,) * 8,
        benchmark=True,
    ),
    Case(
        "bench-prefill-4096",
        num_kv_heads=8,
        head_dim=128,
        lengths=(4096,) * 2,
        num_tokens=(4096,) * 2,
        benchmark=True,
    ),
)
