"""What must hold of a result before it is timed: checks against the `jax.numpy` definitions, at full size.

The definitions copy what they read to float32, so they run row by row. Tolerances follow from the arithmetic.
A sum of n float32 terms is off by at most n ulps of the sum of their magnitudes, where tensor cores cut each
addition, and two such sums differ by twice that. A kernel with 16-bit results may be off by twice as much as
their rounding, half an ulp of the largest, and one ulp more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.bench.inputs import LARGEST, Sizes
from h2o_jax.bench.row import Parity
from h2o_jax.decode import Selection, attend, select_pages
from h2o_jax.policy import Policy, get_policy
from h2o_jax.state import LayerCache, PageTable
from pallas_kernels import top_k_pages

_ULP = 2.0**-23  # float32, relative


def compare(what: str, got, want, tolerance) -> Parity:
    """The largest difference between two arrays; infinities must stand in the same places.

    Args:
        what: the quantity, for messages.
        got, want: arrays of one shape.
        tolerance: a number, or one for each entry.
    """
    got, want, tolerance = (np.asarray(x, np.float64) for x in (got, want, tolerance))
    tolerance = np.where(np.isfinite(want), tolerance, 0)
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, and any error beside a tolerance of 0
        error = np.where(got == want, 0, np.abs(got - want))
        error = np.where(np.isnan(error), np.inf, error)
        at = np.unravel_index(np.argmax(error / np.maximum(tolerance, 1e-300)), error.shape)
    return Parity(what, float(error[at]), float(tolerance[at]))


def equal(what: str, got, want) -> Parity:
    """The number of entries in which two arrays differ, of which none is allowed."""
    return Parity(what, int((np.asarray(got) != np.asarray(want)).sum()), 0)


def worst(checks: Iterable[Parity]) -> Parity:
    """The check that failed, or came closest to it."""

    def closeness(check):
        return not check.passed, check.error / check.tolerance if check.tolerance else 0

    return max(checks, key=closeness)


def jit_definition(function: Callable, **options) -> Callable:
    """`jax.jit` without the search for the fastest products, which takes longer than the products."""
    return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0}, **options)


def row_by_row(function: Callable, arguments: Sequence[jax.Array], batched: Sequence[int]) -> np.ndarray:
    """`function(*arguments)` of each row on its own, joined.

    Args:
        function: of arrays, to an array with a row axis first.
        arguments: for all rows.
        batched: those of them that have a row axis first.
    """
    rows = []
    for b in range(arguments[batched[0]].shape[0]):
        row = [x[b : b + 1] if i in batched else x for i, x in enumerate(arguments)]
        rows.append(np.asarray(function(*row)))
    return np.concatenate(rows)


def score_tolerance(sizes: Sizes, q: jax.Array) -> float:
    """Of page scores, the sum of a mean term and a peak term."""
    terms = sizes.head_dim + sizes.group_size + 4
    return 2 * terms * _ULP * 2 * _largest_product(sizes, q)


def probability_tolerance(sizes: Sizes, q: jax.Array, scale: float) -> float:
    """Of accumulated probabilities, relative. A logit's error is one of both exponents, the token's and the
    largest's; the sum over tokens is taken in two levels."""
    logit = (sizes.head_dim + sizes.group_size + 4) * scale * _largest_product(sizes, q)
    return 2 * _ULP * (2 * logit + 2 * math.sqrt(max(sizes.lengths)) + 8)


def output_tolerance(exact, dtype) -> float:
    """Of attention's output in `dtype`: twice half an ulp of the largest, and one."""
    largest = float(np.abs(np.asarray(exact, np.float64)).max())
    return 2 * 2.0 ** (math.floor(math.log2(largest)) - jnp.finfo(dtype).nmant) if largest else 0.0


def _largest_product(sizes: Sizes, q: jax.Array) -> float:
    return LARGEST * float(np.abs(np.asarray(q, np.float32)).sum(axis=-1).max())


def check_step(
    sizes: Sizes,
    policy: Policy,
    table: PageTable,
    new: tuple,
    cache: LayerCache,
    scores_before: jax.Array | None,
    selection: Selection,
    out: jax.Array,
) -> Parity:
    """Checks one step of a layer: what was written, scored, stored, chosen and attended to.

    Scores are held against their tolerance, and the pages chosen against those very scores, since scores that
    differ in rounding may rank two pages either way.

    Args:
        sizes, policy, table: of the layer.
        new: query, key and value of its new token.
        cache: the layer after the step.
        scores_before: "hh_score" before it; None where the policy has none.
        selection, out: what the step chose and gave.

    Returns:
        The worst of the checks.
    """
    return worst(_check_layer(sizes, policy, table, new, cache, scores_before, selection, out))


def check_output(
    sizes: Sizes, table: PageTable, cache: LayerCache, q: jax.Array, pages: jax.Array, out: jax.Array
) -> Parity:
    """Checks attention over the logical pages [B, Hkv, W]; `cache` is one of the dense policy."""
    counts = jnp.full(pages.shape[:2], pages.shape[2], jnp.int32)
    selection = Selection(pages, counts, jnp.zeros((*pages.shape[:2], 0), jnp.float32))
    dense = get_policy("dense_attention")
    exact = np.stack([_row(cache, table, q, selection, b, policy=dense)[2] for b in range(sizes.batch)])
    return compare("output", out, exact, output_tolerance(exact, out.dtype))


def check_stored(pool: jax.Array, table: PageTable, scores: jax.Array) -> Parity:
    """Checks that the pool [num_pages, Hkv, 1] holds the scores [B, Hkv, M] of all tokens scored."""
    given = np.asarray(scores)
    stored = np.where(np.isneginf(given), given, _stored(pool, table.pages))
    # An ulp, for the two may come from two roundings of one expression.
    return compare("stored score", stored, given, _ULP * np.abs(given))


@jax.jit
def _stored(pool, pages):
    return pool.at[pages].get(mode="fill", fill_value=0)[..., 0].swapaxes(1, 2).astype(jnp.float32)


def _check_layer(sizes, policy, table, new, cache, before, selection, out):
    q, k, v = new
    yield from _check_written(sizes, table, cache, k, v)
    scored = cache
    if before is not None:
        scored = dataclasses.replace(cache, aux=cache.aux | {"hh_score": before})
    rows = [_row(scored, table, q, selection, b, policy=policy) for b in range(sizes.batch)]
    scores, between, exact = (np.stack([np.asarray(row[i]) for row in rows]) for i in range(3))

    tolerance: float | np.ndarray
    if before is None:
        tolerance = score_tolerance(sizes, q)
    else:
        tolerance = np.abs(scores) * probability_tolerance(sizes, q, policy.resolve_scale(sizes.head_dim))
        yield check_stored(cache.aux["hh_score"], table, selection.scores)
    yield compare("score", selection.scores, scores, tolerance)

    pages = np.asarray(selection.pages)
    for b, n in enumerate(sizes.pages_in_use):
        expected = np.arange(n)
        if n > policy.budget(sizes.pages_per_request):
            parts = expected[: policy.reserved_bos], between[b], expected[n - policy.reserved_eos :]
            heads = [np.broadcast_to(x, (sizes.num_kv_heads, x.shape[-1])) for x in parts]
            expected = np.concatenate(heads, axis=-1)
        got = pages[b, :, : expected.shape[-1]]
        yield equal("chosen page", got, np.broadcast_to(expected, got.shape))
        yield equal("number of pages", selection.counts[b], expected.shape[-1])
    yield compare("output", out, exact, output_tolerance(exact, out.dtype))


def _check_written(sizes, table, cache, k, v):
    rows = np.flatnonzero(sizes.lengths)
    for name, stored, new in zip(("key", "value"), _newest(cache, table), (k, v)):
        yield equal(f"written {name}", np.asarray(stored)[rows], np.asarray(new)[rows])


@jax.jit
def _newest(cache, table):
    """Key and value of each row's last token, [B, Hkv, D]; those of an empty row mean nothing."""
    position = jnp.maximum(table.seq_lens - 1, 0)
    page = jnp.take_along_axis(table.pages, (position // table.page_size)[:, None], axis=1)[:, 0]
    return cache.k[page, :, position % table.page_size], cache.v[page, :, position % table.page_size]


@functools.partial(jit_definition, static_argnames="policy")
def _row(cache, table, q, selection, row, *, policy):
    """Of one row by the definitions: scores [Hkv, M], pages between the reserved ones [Hkv, top_k] as the
    selection's own scores rank them, and the output [Hq, D] over the selection, float32."""

    def only(x):
        return jax.lax.dynamic_slice_in_dim(x, row, 1)

    table = dataclasses.replace(table, pages=only(table.pages), seq_lens=only(table.seq_lens))
    q, selection = only(q).astype(jnp.float32), jax.tree.map(only, selection)
    _, expected = select_pages(cache, table, q, policy=policy, implementation="xla")
    between = jnp.zeros((cache.k.shape[1], 0), jnp.int32)
    if policy.top_k:
        start, stop = jnp.full(1, policy.reserved_bos, jnp.int32), table.pages_in_use - policy.reserved_eos
        between = top_k_pages(selection.scores, start, stop, k=policy.top_k, implementation="xla")[0]
    out = attend(cache, table, q, selection, implementation="xla")
    return expected.scores[0], between, out[0]
