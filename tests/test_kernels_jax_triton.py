"""Envelope scoring a second time, from its equations, as a Triton kernel called through jax-triton.

It shares nothing with the Pallas kernel but the case table: one program scores one page of one KV head in
float32, without matrix products and without splitting the queries by sign.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.envelope_scores.cases import CASES, LARGE_CASES, make
from tests.kernel_runs import GPU_MARKS
from tests.test_kernels_envelope import MAX_BYTES, check, score

triton = pytest.importorskip("triton", reason="needs triton")
tl = pytest.importorskip("triton.language", reason="needs triton")
# Imported where JAX has no CUDA plugin, jax-triton raises an ImportError of its own.
jax_triton = pytest.importorskip("jax_triton", reason="needs jax-triton and a GPU", exc_type=ImportError)

pytestmark = list(GPU_MARKS)
OUT_TYPE = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
SMALL = [case for case in CASES + LARGE_CASES if case.bytes_read <= MAX_BYTES]


@triton.jit
def _kernel(
    q_ptr,  # [B, Hkv, G, D]
    summaries_ptr,  # [num_pages, Hkv, S, D]
    pages_ptr,  # [B, M]
    start_ptr,  # [B]
    stop_ptr,  # [B]
    out_ptr,  # [B, Hkv, M]
    NUM_PAGES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_LOGICAL: tl.constexpr,
    NUM_KINDS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # D padded to a power of two
    MEAN: tl.constexpr,  # summary row of each kind, -1 where there is none
    MAX: tl.constexpr,
    MIN: tl.constexpr,
    OF_MEAN_QUERY: tl.constexpr,
    W_AVG: tl.constexpr,
    W_PEAK: tl.constexpr,
):
    logical, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = tl.load(pages_ptr + row * NUM_LOGICAL + logical)
    inside = (logical >= tl.load(start_ptr + row)) & (logical < tl.load(stop_ptr + row))
    inside = inside & (page >= 0) & (page < NUM_PAGES)
    d = tl.arange(0, LANES)
    real = d < HEAD_DIM
    q_ptr += (row * NUM_KV_HEADS + head) * GROUP_SIZE * HEAD_DIM
    summaries_ptr += (page.to(tl.int64) * NUM_KV_HEADS + head) * NUM_KINDS * HEAD_DIM

    mean_query = tl.zeros([LANES], tl.float32)
    if OF_MEAN_QUERY:
        for g in range(GROUP_SIZE):
            mean_query += tl.load(q_ptr + g * HEAD_DIM + d, mask=real, other=0.0).to(tl.float32)
        mean_query = tl.div_rn(mean_query, tl.full([LANES], GROUP_SIZE, tl.float32))

    by_mean = float("-inf")
    by_peak = float("-inf")
    for g in range(1 if OF_MEAN_QUERY else GROUP_SIZE):
        if OF_MEAN_QUERY:
            query = mean_query
        else:
            query = tl.load(q_ptr + g * HEAD_DIM + d, mask=real, other=0.0).to(tl.float32)
        if MEAN >= 0:
            mean = tl.load(summaries_ptr + MEAN * HEAD_DIM + d, mask=real & inside, other=0.0).to(tl.float32)
            by_mean = tl.maximum(by_mean, tl.sum(query * mean))
        if MAX >= 0:
            high = tl.load(summaries_ptr + MAX * HEAD_DIM + d, mask=real & inside, other=0.0).to(tl.float32)
            low = tl.load(summaries_ptr + MIN * HEAD_DIM + d, mask=real & inside, other=0.0).to(tl.float32)
            by_peak = tl.maximum(by_peak, tl.sum(tl.maximum(query * high, query * low)))

    value = 0.0
    if MEAN >= 0:
        value += W_AVG * by_mean
    if MAX >= 0:
        value += W_PEAK * by_peak
    value = tl.where(inside, value, float("-inf"))
    tl.store(out_ptr + (row * NUM_KV_HEADS + head) * NUM_LOGICAL + logical, value)


def by_hand(case, **options):
    """A function of the arrays of a case; `options` go to `triton_call`."""
    batch, heads = len(case.windows), case.num_kv_heads
    row_of = {kind: case.kinds.index(kind) if kind in case.kinds else -1 for kind in ("mean", "max", "min")}
    options = options | {OUT_TYPE: jax.ShapeDtypeStruct((batch, heads, case.row_pages), jnp.float32)}

    def call(q, summaries, pages, start, stop):
        return jax_triton.triton_call(
            q,
            summaries,
            pages,
            start,
            stop,
            kernel=_kernel,
            grid=(case.row_pages, heads, batch),
            num_warps=1,
            NUM_PAGES=summaries.shape[0],
            NUM_KV_HEADS=heads,
            NUM_LOGICAL=case.row_pages,
            NUM_KINDS=len(case.kinds),
            GROUP_SIZE=case.group_size,
            HEAD_DIM=case.head_dim,
            LANES=triton.next_power_of_2(case.head_dim),
            MEAN=row_of["mean"],
            MAX=row_of["max"],
            MIN=row_of["min"],
            OF_MEAN_QUERY=case.group == "mean",
            W_AVG=case.w_avg,
            W_PEAK=case.w_peak,
            **options,
        )

    return call


def sizes(arrays, case):
    """What the magnitudes of a score's terms add up to at most: [B, Hkv, M], -inf where there is no score."""
    summaries = jnp.abs(arrays["summaries"])
    if "max" in case.kinds:
        both = [case.kinds.index(kind) for kind in ("max", "min")]
        largest = jnp.max(summaries[:, :, jnp.array(both)], axis=2)
        for i in both:
            summaries = summaries.at[:, :, i].set(largest)
    return score(arrays | {"q": jnp.abs(arrays["q"]), "summaries": summaries}, case, "xla")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_pallas_agrees(case):
    """All three implementations agree with each other, and the one written here with float64."""
    arrays = make(case)
    got = np.asarray(jax.jit(by_hand(case))(**arrays))
    check(got, arrays, case)
    # D + G + 4 additions and products of a score, each off by an ulp of at most the sum of magnitudes.
    allowed = (case.head_dim + case.group_size + 4) * 2.0**-23 * sizes(arrays, case)
    scored = ~np.isneginf(got)
    for implementation in ("xla", "pallas"):
        other = score(arrays, case, implementation)
        np.testing.assert_array_equal(~np.isneginf(other), scored)
        difference = np.abs(got[scored].astype(np.float64) - other[scored])
        assert (difference <= 2 * allowed[scored]).all(), f"{implementation}: off by {difference.max():.3g}"
