"""Cases of `decayed_softmax_scores`: one table for tests, lowering checks and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._cases import window_pages


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call. Letters as in `api.py`; a page holds one token.

    Attributes:
        id: readable name.
        group: "max" or "mean".
        group_size, num_kv_heads, head_dim: G, Hkv, D.
        windows: (start, stop) of each row.
        dtype: of the keys.
        q_dtype: of the queries; None: that of the keys.
        score_dtype: of the accumulated scores.
        pages_per_request: M; 0: the longest row and one token more.
        holes: some tokens of each window are no pages.
        decay: as the argument.
        benchmark: too large for the interpreter.
    """

    id: str
    group: str = "max"
    group_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    windows: tuple[tuple[int, int], ...] = ((1, 1), (2, 3), (1, 70))
    dtype: str = "bfloat16"
    q_dtype: str | None = None
    score_dtype: str = "float32"
    pages_per_request: int = 0
    holes: bool = False
    decay: float = 0.984375
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
        return {"decay": self.decay, "scale": self.head_dim**-0.5, "group": self.group}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, by argument name."""
        batch, num_pages = len(self.windows), len(self.windows) * self.row_pages + 3
        q = (batch, self.num_kv_heads * self.group_size, self.head_dim)
        pool = (num_pages, self.num_kv_heads, 1, self.head_dim)
        return {
            "q": jax.ShapeDtypeStruct(q, jnp.dtype(self.q_dtype or self.dtype)),
            "k_pool": jax.ShapeDtypeStruct(pool, jnp.dtype(self.dtype)),
            "scores": jax.ShapeDtypeStruct(pool[:3], jnp.dtype(self.score_dtype)),
            "pages": jax.ShapeDtypeStruct((batch, self.row_pages), jnp.int32),
            "start": jax.ShapeDtypeStruct((batch,), jnp.int32),
            "stop": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of keys that must be read: the floor of the time is this by the bandwidth."""
        tokens = sum(max(0, stop - start) for start, stop in self.windows)
        return tokens * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def make(case: Case, *, seed: int = 0, poison: float = np.nan) -> dict[str, jax.Array]:
    """Arguments of `decayed_softmax_scores` for a case, the options excepted.

    Page ids are permuted, and keys and scores of every token outside the windows are poison. Where decay is
    0 the old scores are infinite, for they count for nothing.
    """
    rng = np.random.default_rng(seed)
    shapes = case.shapes
    num_pages = shapes["k_pool"].shape[0]
    pages, scored = window_pages(rng, case.windows, case.holes, shapes["pages"].shape, num_pages)
    scored = scored[:, None, None]
    keys = rng.standard_normal(shapes["k_pool"].shape, np.float32)
    arrays = {
        "q": 2 * rng.standard_normal(shapes["q"].shape, np.float32),
        "k_pool": np.where(scored[..., None], keys, poison),
        "scores": np.where(scored, rng.random(shapes["scores"].shape, np.float32) / 8, poison),
        "pages": pages,
        "start": [start for start, _ in case.windows],
        "stop": [stop for _, stop in case.windows],
    }
    if not case.decay:
        arrays["scores"] = np.where(scored, np.inf, arrays["scores"])
    return {name: jnp.asarray(array, shapes[name].dtype) for name, array in arrays.items()}


_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

CASES = (
    Case("g1-d64-bf16-max", group_size=1),
    Case("g2-d80-f16-mean", "mean", group_size=2, head_dim=80, dtype="float16"),
    Case("g3-d96-f32-max-score-bf16", group_size=3, head_dim=96, dtype="float32", score_dtype="bfloat16"),
    Case("g4-d128-bf16-mean", "mean", head_dim=128, num_kv_heads=3),
    Case(
        "g5-d192-f32-mean-score-f16",
        "mean",
        group_size=5,
        head_dim=192,
        dtype="float32",
        score_dtype="float16",
    ),
    Case("g7-d72-bf16-q-f32-max-decay-0", group_size=7, head_dim=72, q_dtype="float32", decay=0.0),
    Case(
        "g20-d8-f16-q-bf16-max-plain-sum",
        group_size=20,
        head_dim=8,
        dtype="float16",
        q_dtype="bfloat16",
        decay=1.0,
    ),
    Case("holes-many-chunks", holes=True, windows=((0, 33), (500, 1100), (5, 4)), num_kv_heads=1),
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
            f"bench-b{batch}-m{m}-{_DTYPES[dtype]}-{group}",
            group,
            num_kv_heads=8,
            head_dim=128,
            dtype=dtype,
            windows=((4, m - 8),) * batch,
            pages_per_request=m,
            benchmark=True,
        )
        for batch, m, dtype, group in (
            (8, 131072, "bfloat16", "max"),
            (8, 131072, "bfloat16", "mean"),
            (1, 131072, "bfloat16", "max"),
            (1, 8192, "bfloat16", "max"),
            (8, 8192, "float32", "max"),
        )
    ),
)
