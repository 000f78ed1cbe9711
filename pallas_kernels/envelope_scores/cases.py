"""Cases of `envelope_scores`: one table for tests, lowering checks and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._cases import window_pages

ALL = ("mean", "max", "min")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call. Letters as in `api.py`.

    Attributes:
        id: readable name.
        group: "max" or "mean".
        group_size, num_kv_heads, head_dim: G, Hkv, D.
        kinds: summary rows.
        windows: (start, stop) of each row.
        dtype: of the summaries.
        q_dtype: of the queries; None: that of the summaries.
        pages_per_request: M; 0: the longest row and one page more.
        holes: some pages of each window are no pages.
        w_avg, w_peak: weights.
        benchmark: too large for the interpreter.
    """

    id: str
    group: str = "max"
    group_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    kinds: tuple[str, ...] = ALL
    windows: tuple[tuple[int, int], ...] = ((1, 1), (2, 3), (1, 70))
    dtype: str = "bfloat16"
    q_dtype: str | None = None
    pages_per_request: int = 0
    holes: bool = False
    w_avg: float = 0.5
    w_peak: float = 2.0
    benchmark: bool = False

    def __post_init__(self):
        if self.group not in ("max", "mean"):
            raise ValueError(f"group: expected 'max' or 'mean', got {self.group!r}")

    @property
    def row_pages(self) -> int:
        """M."""
        return self.pages_per_request or 1 + max(stop for _, stop in self.windows)

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        return {"kinds": self.kinds, "group": self.group, "w_avg": self.w_avg, "w_peak": self.w_peak}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, by argument name."""
        batch, num_pages = len(self.windows), len(self.windows) * self.row_pages + 3
        q = (batch, self.num_kv_heads * self.group_size, self.head_dim)
        summaries = (num_pages, self.num_kv_heads, len(self.kinds), self.head_dim)
        return {
            "q": jax.ShapeDtypeStruct(q, jnp.dtype(self.q_dtype or self.dtype)),
            "summaries": jax.ShapeDtypeStruct(summaries, jnp.dtype(self.dtype)),
            "pages": jax.ShapeDtypeStruct((batch, self.row_pages), jnp.int32),
            "start": jax.ShapeDtypeStruct((batch,), jnp.int32),
            "stop": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of summaries that must be read: the floor of the time is this by the bandwidth."""
        pages = sum(max(0, stop - start) for start, stop in self.windows)
        page = self.num_kv_heads * len(self.kinds) * self.head_dim * jnp.dtype(self.dtype).itemsize
        return pages * page


def make(case: Case, *, seed: int = 0, poison: float = np.nan) -> dict[str, jax.Array]:
    """Arguments of `envelope_scores` for a case, the options excepted.

    Page ids are permuted, and every page outside the windows is poison.
    """
    rng = np.random.default_rng(seed)
    shapes = case.shapes
    num_pages, heads, _, size = shapes["summaries"].shape
    pages, scored = window_pages(rng, case.windows, case.holes, shapes["pages"].shape, num_pages)
    keys = np.sort(rng.standard_normal((3, num_pages, heads, size), np.float32), axis=0)
    by_kind = dict(zip(("min", "mean", "max"), keys))
    summaries = np.stack([by_kind[kind] for kind in case.kinds], axis=2)
    arrays = {
        "q": rng.standard_normal(shapes["q"].shape, np.float32),
        "summaries": np.where(scored[:, None, None, None], summaries, poison),
        "pages": pages,
        "start": [start for start, _ in case.windows],
        "stop": [stop for _, stop in case.windows],
    }
    return {name: jnp.asarray(array, shapes[name].dtype) for name, array in arrays.items()}


_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

CASES = (
    Case("g1-d64-bf16-max", group_size=1),
    Case("g2-d80-f16-mean", "mean", group_size=2, head_dim=80, dtype="float16"),
    Case("g3-d96-f32-max", group_size=3, head_dim=96, dtype="float32"),
    Case("g4-d128-bf16-mean", "mean", head_dim=128, num_kv_heads=3),
    Case("g5-d192-f32-mean-peak", "mean", group_size=5, head_dim=192, dtype="float32", kinds=("max", "min")),
    Case("g6-d256-bf16-max-mean", group_size=6, head_dim=256, kinds=("mean",)),
    Case("g7-d72-bf16-q-f32-max", group_size=7, head_dim=72, q_dtype="float32"),
    Case("g8-d64-f16-q-bf16-peak", group_size=8, dtype="float16", q_dtype="bfloat16", kinds=("max", "min")),
    Case("g20-d8-f32-q-f16-max", group_size=20, head_dim=8, dtype="float32", q_dtype="float16"),
    Case("holes-many-tiles", holes=True, windows=((0, 33), (130, 300), (5, 4)), num_kv_heads=1),
)

LARGE_CASES = (
    *(
        Case(
            f"g{g}-d{d}-{_DTYPES[dtype]}-{group}",
            group,
            group_size=g,
            head_dim=d,
            dtype=dtype,
            benchmark=True,
        )
        for g, d, dtype in (
            (1, 64, "float16"),
            (2, 80, "float32"),
            (3, 96, "bfloat16"),
            (5, 192, "bfloat16"),
            (6, 128, "float32"),
            (7, 256, "float16"),
            (8, 128, "float16"),
            (16, 256, "float32"),
        )
        for group in ("max", "mean")
    ),
    *(
        Case(
            f"bench-b{batch}-m{m}-{_DTYPES[dtype]}-{group}-{len(kinds)}",
            group,
            num_kv_heads=8,
            head_dim=128,
            dtype=dtype,
            kinds=kinds,
            windows=((1, m - 2),) * batch,
            pages_per_request=m,
            benchmark=True,
        )
        for batch, m, dtype, group, kinds in (
            (8, 8192, "bfloat16", "max", ALL),
            (8, 8192, "bfloat16", "mean", ALL),
            (8, 8192, "bfloat16", "max", ("max", "min")),
            (8, 8192, "bfloat16", "mean", ("mean",)),
            (8, 8192, "float32", "max", ALL),
            (1, 8192, "bfloat16", "max", ALL),
        )
    ),
)
