"""How close is close enough: bounds that are computed from the case, never picked."""

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax import reference

FLOAT32_HALF_ULP = 2.0**-24


def ulp(size, dtype):
    """Spacing of `dtype` at `size` (array or scalar, its sign ignored): float64, of the same shape."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(np.asarray(size, np.float64)), float(info.tiny))))
    return 2.0 ** (exponent - info.nmant)


def assert_as_good_as_plain(got, exact, plain, dtype, *, name, relative=False):
    """Asserts that the largest error is at most twice that of the plain version, plus one ulp.

    Args:
        got: the result judged.
        exact: the float64 result.
        plain: the result of a straightforward `jax.numpy` version in the same dtype.
        dtype: the dtype of the result.
        name: what is compared, for the message.
        relative: False compares absolute errors, the ulp being that of the largest result: right where terms
            cancel. True counts errors in ulps of each element: right for sums of positive terms, and the
            only way to see an error in a small element beside large ones.
    """
    got, exact, plain = (np.asarray(x, np.float64) for x in (got, exact, plain))
    assert got.shape == exact.shape == plain.shape, f"{name}: {got.shape}, {exact.shape}, {plain.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    if got.size == 0:
        return
    unit = ulp(exact if relative else np.abs(exact).max(), dtype)
    error, allowed = np.abs(got - exact) / unit, 2 * (np.abs(plain - exact) / unit).max() + 1
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= allowed, (
        f"{name}: off by {error[worst]:.3g} ulp at {tuple(map(int, worst))}, allowed {allowed:.3g}: "
        f"got {got[worst]}, exact {exact[worst]}"
    )


def assert_as_good_as_plains(got, exact, plains, dtype, *, name, relative=False):
    """`assert_as_good_as_plain` with the worst of several plain versions, all of which are equally right.

    One version is no yardstick for products, since float32 leaves the order of a sum open and the error of a
    sum depends on it. The definition takes 16-bit values to float32 first and adds fused products in a good
    order. Tensor cores, which any product formed in the arrays' own dtype runs on, add 16 exact products at a
    time and cut the sum towards zero; and a dot of float32 on a GPU adds term after term along D. Compare
    therefore with the definition, with `products_in_dtype` and with `products_in_sequence`.

    Args:
        got, exact, dtype, name, relative: as of `assert_as_good_as_plain`.
        plains: results of the plain versions.
    """
    exact = np.asarray(exact, np.float64)
    if exact.size:
        unit = ulp(exact if relative else np.abs(exact).max(), dtype)
        plains = [max(plains, key=lambda x: (np.abs(np.asarray(x, np.float64) - exact) / unit).max())]
    assert_as_good_as_plain(got, exact, plains[0], dtype, name=name, relative=relative)


def products_in_sequence(q, vectors):
    """float32 products that round after each term along D.

    Args:
        q: [B, Hkv, G, D].
        vectors: [B, M, Hkv, D].

    Returns:
        [B, Hkv, G, M] float32, a NumPy array.
    """
    q, vectors = np.asarray(q, np.float32), np.asarray(vectors, np.float32)
    total = np.zeros((*q.shape[:3], vectors.shape[1]), np.float32)
    for i, terms in enumerate(np.ascontiguousarray(vectors.transpose(3, 0, 2, 1))):
        total += q[..., i, None] * terms[:, :, None]
    return total


def products_in_dtype(q, vectors):
    """Products formed by `jax.numpy` in the dtype of `vectors` and added in float32.

    Queries that a 16-bit dtype does not hold are a sum of three terms that it does, with one product each:
    rounding them to it is an error that no kernel may make. Arguments and result as `products_in_sequence`.
    """
    q, dtype = np.asarray(q, np.float32), jnp.dtype(vectors.dtype)
    scale = np.float32(1)
    if dtype == jnp.float16:  # it lacks the range for the last terms of small queries
        scale = np.float32(2.0 ** (14 - np.floor(np.log2(max(np.abs(q).max(), 1)))))
    rest, terms = q * scale, []
    while np.any(rest) and len(terms) < 3:
        terms.append(rest.astype(dtype))
        rest = rest - terms[-1].astype(np.float32)
    products = [np.asarray(_product(term, vectors)) for term in terms[::-1]]
    return sum(products, np.zeros((), np.float32)) / scale


@jax.jit
def _product(q, vectors):
    precision = jax.lax.Precision.HIGHEST if vectors.dtype == jnp.float32 else None
    return jnp.einsum("bhgd,bmhd->bhgm", q, vectors, precision=precision, preferred_element_type=jnp.float32)


def assert_rounding_of(got, exact, float32_error, dtype, *, name):
    """Asserts that `got` is a right rounding to `dtype` of something within `float32_error` of `exact`."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    error = np.abs(got - exact)
    # A value just below a power of two may round up across it, hence the ulp of the larger of the two.
    allowed = 0.5 * ulp(np.maximum(np.abs(exact), np.abs(got)), dtype) + float32_error
    assert (error <= allowed).all(), f"{name}: off by {error.max():.3g}, allowed {np.max(allowed):.3g}"


def mean_error(keys):
    """Bound of the float32 error of a page's mean: `keys` [P, D] -> [D].

    P - 1 additions and one division, each off by at most half an ulp of a partial sum, none of which exceeds
    the sum of magnitudes.
    """
    keys = np.abs(np.asarray(keys, np.float64))
    return (len(keys) + 1) * FLOAT32_HALF_ULP * keys.mean(axis=0)


def page_score_error(policy, queries, mean, largest, smallest, *, w_avg=1.0, w_peak=1.0):
    """Bound of the float32 error of a page score computed from the *stored* summaries.

    A dot of D terms, in any order of summation, is off by at most (D - 1 + 1) half-ulps of the sum of its
    terms' magnitudes; the mean over G adds G to that, splitting a term into its positive and negative part 1,
    weighting and adding the two terms 3. A maximum adds nothing. Arguments as `reference.page_score`.
    """
    queries = np.abs(np.asarray(queries, np.float64))
    terms = queries.shape[1] + queries.shape[0] + 4
    by_mean = (queries @ np.abs(mean)).max()
    by_peak = (queries @ np.maximum(np.abs(largest), np.abs(smallest))).max()
    if policy == "block_sparse_attention":
        by_peak = 0.0
    elif policy == "gqa_quest_sparse_attention":
        by_mean, w_peak = 0.0, 1.0
    return 1.01 * terms * FLOAT32_HALF_ULP * (abs(w_avg) * by_mean + abs(w_peak) * by_peak)


def assert_selection(got, scores, score_error, num_pages, *, top_k, reserved_bos, reserved_eos, name):
    """Asserts that `got` is the oracle's selection, or differs from it by pages no arithmetic could rank.

    A page may stand in for another only if their exact scores differ by no more than the two errors that the
    scores can have; with errors of zero the selection must be equal, ties included.

    Args:
        got: logical pages chosen, ascending.
        scores: [N] exact scores.
        score_error: from a page, the bound of its score's error.
        num_pages: N.
        top_k, reserved_bos, reserved_eos: the budget.
        name: what is compared, for the message.
    """
    expected = reference.select(
        scores, num_pages, top_k=top_k, reserved_bos=reserved_bos, reserved_eos=reserved_eos
    )
    if got == expected:
        return
    assert got == sorted(set(got)), f"{name}: pages {got} are not ascending and distinct"
    assert len(got) == len(expected), f"{name}: {len(got)} pages, expected {len(expected)}"
    missing, extra = set(expected) - set(got), set(got) - set(expected)
    allowed = set(reference.window(num_pages, reserved_bos, reserved_eos))
    assert missing | extra <= allowed, f"{name}: pages {got}, expected {expected}"
    for better in missing:
        for worse in extra:
            gap, error = scores[better] - scores[worse], score_error(better) + score_error(worse)
            assert gap <= error and error > 0, (
                f"{name}: page {worse} taken for page {better}, whose score is higher by {gap:.3g} "
                f"where {error:.3g} could be an error"
            )
