"""Cases of `top_k_pages`: one table for tests, lowering checks and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("normal", "ties", "same", "nan", "rising", "falling")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call. Letters as in `api.py`.

    Attributes:
        id: readable name.
        k: pages to choose.
        pages_per_request: M.
        windows: (start, stop) of each row.
        num_kv_heads: Hkv.
        kind: "normal": independent; "ties": few values, some of them signed zeros, infinite or NaN; "same":
            one value; "nan": only NaN; "rising", "falling": sorted, so that the best stand side by side.
        benchmark: too large for the interpreter.
    """

    id: str
    k: int
    pages_per_request: int
    windows: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    kind: str = "normal"
    benchmark: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {self.kind!r}")

    @property
    def options(self) -> dict:
        """Keyword arguments of the call."""
        return {"k": self.k}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, by argument name."""
        batch = len(self.windows)
        return {
            "scores": jax.ShapeDtypeStruct((batch, self.num_kv_heads, self.pages_per_request), jnp.float32),
            "start": jax.ShapeDtypeStruct((batch,), jnp.int32),
            "stop": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of scores that must be read at least once."""
        return 4 * self.num_kv_heads * sum(max(0, stop - start) for start, stop in self.windows)


def make(case: Case, *, seed: int = 0, poison: float = np.nan) -> dict[str, jax.Array]:
    """Arguments of `top_k_pages` for a case, k excepted. Scores outside the windows are poison."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(case.shapes["scores"].shape, np.float32)
    if case.kind == "ties":
        scores = np.round(2 * scores) / 2
        for value, share in ((-0.0, 0.2), (0.0, 0.1), (np.nan, 0.05), (-np.inf, 0.05), (np.inf, 0.01)):
            scores[rng.random(scores.shape) < share] = value
    elif case.kind in ("same", "nan"):
        scores[:] = np.nan if case.kind == "nan" else 0.25
    elif case.kind in ("rising", "falling"):
        scores = np.sort(scores, axis=-1)
        scores = scores if case.kind == "rising" else scores[..., ::-1]
    logical = np.arange(case.pages_per_request)
    inside = [(logical >= start) & (logical < stop) for start, stop in case.windows]
    arrays = {
        "scores": np.where(np.stack(inside)[:, None], scores, poison),
        "start": [start for start, _ in case.windows],
        "stop": [stop for _, stop in case.windows],
    }
    return {name: jnp.asarray(array, case.shapes[name].dtype) for name, array in arrays.items()}


_RAGGED = ((1, 1), (0, 1), (3, 9), (5, 100), (9, 4))

CASES = (
    *(Case(f"m100-k7-{kind}", 7, 100, _RAGGED, kind=kind) for kind in KINDS),
    Case("one-of-one", 1, 1, ((0, 1), (0, 0)), num_kv_heads=1),
    Case("k-above-m", 60, 37, ((0, 37), (2, 30)), kind="ties"),
    Case("m5000-k130", 130, 5000, ((1, 4990), (700, 900)), num_kv_heads=1),
    Case("m5000-k130-ties", 130, 5000, ((1, 4990), (700, 900)), num_kv_heads=1, kind="ties"),
    Case("m20000-k300", 300, 20000, ((1, 19990), (16000, 16301)), num_kv_heads=1),
    Case("m20000-k300-ties", 300, 20000, ((1, 19990), (16000, 16301)), num_kv_heads=1, kind="ties"),
)

LARGE_CASES = tuple(
    Case(
        f"b8-m{m}-k{k}-{kind}",
        k,
        m,
        ((1, m - 2), (0, m), (1, k + 1), (7, m // 3), (m // 2, m), (0, 0), (1, 5), (3, m - 1)),
        num_kv_heads=8,
        kind=kind,
        benchmark=True,
    )
    for m, k in ((8192, 128), (16384, 4096), (32768, 512), (100000, 4096), (131072, 2048))
    for kind in KINDS
) + tuple(
    Case(f"bench-r64-m{m}-k{k}", k, m, ((0, m),) * 8, num_kv_heads=8, benchmark=True)
    for m, k in ((8192, 128), (16384, 256), (32768, 512), (131072, 2048), (131072, 4096))
)
