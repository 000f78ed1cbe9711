"""Cases of `paged_attention`: one table for tests, lowering checks and benchmarks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call. Letters as in `api.py`; G query heads share a KV head.

    Attributes:
        id: readable name.
        group, num_kv_heads, head_dim, page_size: G, Hkv, D, P.
        budget: W, entries of `selected`.
        lengths: tokens of each row.
        counts: entries that count, for each row; None: as many as the row has pages, at most W.
        dtype: of the pools.
        q_dtype: of the queries; None: that of the pools.
        pages_per_request: M; 0: as the longest row needs.
        benchmark: too large for the interpreter.
    """

    id: str
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    budget: int = 3
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 64)
    counts: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    q_dtype: str | None = None
    pages_per_request: int = 0
    benchmark: bool = False

    def __post_init__(self):
        if self.counts is not None and len(self.counts) != len(self.lengths):
            raise ValueError(f"counts: expected {len(self.lengths)} of them, got {len(self.counts)}")

    @property
    def row_pages(self) -> int:
        """M."""
        return self.pages_per_request or max(1, math.ceil(max(self.lengths) / self.page_size))

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, by argument name."""
        batch, heads = len(self.lengths), self.num_kv_heads
        num_pages = batch * self.row_pages + 3
        q = (batch, heads * self.group, self.head_dim)
        pool = jax.ShapeDtypeStruct((num_pages, heads, self.page_size, self.head_dim), jnp.dtype(self.dtype))
        table = {
            "pages": (batch, self.row_pages),
            "seq_lens": (batch,),
            "selected": (batch, heads, self.budget),
            "counts": (batch, heads),
        }
        return {
            "q": jax.ShapeDtypeStruct(q, jnp.dtype(self.q_dtype or self.dtype)),
            "k_pool": pool,
            "v_pool": pool,
        } | {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in table.items()}

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that must be read: the floor of the time is this by the bandwidth."""
        rows = zip(self.row_counts, self.lengths, strict=True)
        tokens = sum(min(count * self.page_size, length) for count, length in rows)
        return 2 * tokens * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Entries of `selected` that count, for each row."""
        return self.counts or tuple(min(self.budget, -(-n // self.page_size)) for n in self.lengths)


def make(case: Case, *, seed: int = 0, poison: float = np.nan) -> dict[str, jax.Array]:
    """Arguments of `paged_attention` for a case, the scale excepted.

    Page ids are permuted, KV heads choose different pages in ascending order with the row's last page among
    them, and whatever may not be read (unowned pages, unused slots, entries that do not count) is poison.
    """
    rng = np.random.default_rng(seed)
    shapes = {name: (x.shape, x.dtype) for name, x in case.shapes.items()}
    num_pages, heads, size, _ = shapes["k_pool"][0]
    in_use = [-(-n // size) for n in case.lengths]
    ids = rng.permutation(num_pages)

    pages = np.full(shapes["pages"][0], num_pages, np.int32)
    owned = np.zeros((num_pages, size), bool)
    selected = np.full(shapes["selected"][0], num_pages, np.int32)
    counts = np.zeros(shapes["counts"][0], np.int32)
    for row, (length, n, count) in enumerate(zip(case.lengths, in_use, case.row_counts, strict=True)):
        pages[row, :n], ids = ids[:n], ids[n:]
        for logical in range(n):
            owned[pages[row, logical], : max(0, length - logical * size)] = True
        counts[row] = count = min(count, n)
        for head in range(heads):
            if count:
                chosen = np.sort(rng.permutation(n - 1)[: count - 1])
                selected[row, head, :count] = [*chosen, n - 1]
            if count < case.budget:
                selected[row, head, count:] = rng.choice([num_pages, 0, -1, 2**31 - 1], case.budget - count)

    def pool():
        values = rng.standard_normal(shapes["k_pool"][0], np.float32)
        return np.where(owned[:, None, :, None], values, poison)

    arrays = {
        "q": rng.standard_normal(shapes["q"][0], np.float32),
        "k_pool": pool(),
        "v_pool": pool(),
        "pages": pages,
        "seq_lens": np.asarray(case.lengths, np.int32),
        "selected": selected,
        "counts": counts,
    }
    return {name: jnp.asarray(array, shapes[name][1]) for name, array in arrays.items()}


_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

CASES = (
    *(Case(f"g{g}", group=g, lengths=(1, 33)) for g in (1, 2, 3, 5, 6, 7, 8, 16)),
    Case("g32-wide", group=32, num_kv_heads=1, lengths=(37,)),
    Case("g24-wide", group=24, num_kv_heads=2, lengths=(37,)),
    *(Case(f"d{d}", head_dim=d, lengths=(37, 17)) for d in (8, 72, 80, 96, 128, 192, 256)),
    *(
        Case(f"p{p}-{_DTYPES[dtype]}", page_size=p, budget=b, dtype=dtype, lengths=(0, 1, p - 1, p, p + 1, n))
        for p, b, n in ((1, 40, 70), (16, 3, 64), (32, 3, 100), (64, 3, 200))
        for dtype in ("bfloat16", "float16", "float32")
    ),
    Case("p24-odd", page_size=24, lengths=(0, 23, 25, 90)),
    Case("q-f32", q_dtype="float32", lengths=(17, 64)),
    Case("q-f16", q_dtype="float16", lengths=(17, 64)),
    Case("q-bf16-pool-f32", q_dtype="bfloat16", dtype="float32", lengths=(17, 64)),
    Case("short-counts", budget=8, lengths=(130, 130, 130, 130), counts=(0, 1, 5, 8)),
    Case("many-splits", budget=40, lengths=(3, 257, 640), num_kv_heads=1),
    Case("many-splits-p1", budget=600, page_size=1, lengths=(3, 257, 640), num_kv_heads=1),
    *(
        Case(
            f"bench-b{b}-w{w * p}-p{p}-{_DTYPES[dtype]}",
            num_kv_heads=8,
            head_dim=128,
            page_size=p,
            budget=w,
            lengths=(16384,) * b,
            dtype=dtype,
            benchmark=True,
        )
        for b, w, p, dtype in (
            (1, 128, 16, "bfloat16"),
            (8, 128, 16, "bfloat16"),
            (8, 32, 64, "bfloat16"),
            (8, 2048, 1, "bfloat16"),
            (8, 128, 16, "float32"),
        )
    ),
    *(
        Case(
            f"bench-dense-b{b}-131072",
            num_kv_heads=8,
            head_dim=128,
            budget=8192,
            lengths=(131072,) * b,
            benchmark=True,
        )
        for b in (1, 8)
    ),
)
