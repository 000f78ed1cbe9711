"""The oracle against numbers worked out by hand, so that it is right for reasons of its own."""

import ast
import math
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from h2o_jax import reference
from h2o_jax.reference import Request


def single_tokens(policy, **options):
    return Request(policy, num_kv_heads=1, page_size=1, **options)


def unit(index, size):
    vector = np.zeros(size)
    vector[index] = 1.0
    return vector


def test_imports_only_numpy_and_the_standard_library():
    tree = ast.parse(pathlib.Path(reference.__file__).read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert roots - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # half way, down to the even neighbour
        (1 + 3 * 2**-8, 1 + 2**-6),  # half way, up to the even neighbour
        (1 + 2**-8 + 2**-40, 1 + 2**-7),  # float32 in between would lose the last bit and round down
        (-(1 + 2**-8 + 2**-40), -(1 + 2**-7)),
        (0.999, 1.0),
        (0.984375, 0.984375),
        (255.4, 255.0),
        (256 + 1, 256.0),
        (1e39, math.inf),
        (-1e39, -math.inf),
        ((2 - 2**-7) * 2.0**127, (2 - 2**-7) * 2.0**127),
        ((2 - 2**-8) * 2.0**127, math.inf),
        (2.0**-133, 2.0**-133),
        (2.0**-134, 0.0),
        (1.5 * 2.0**-133, 2.0**-132),
        (math.inf, math.inf),
        (math.nan, math.nan),
    ],
)
def test_bfloat16_rounds_once_half_to_even(value, rounded):
    np.testing.assert_array_equal(reference.round_bfloat16(value), rounded)


def test_bfloat16_agrees_with_the_dtype_of_the_pool():
    values = np.float32(np.random.default_rng(0).standard_normal(4096) * np.logspace(-30, 30, 4096))
    expected = values.astype(jnp.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(reference.round_to(values, "bfloat16"), expected)


def test_round_to_other_dtypes():
    assert reference.round_to(1 + 2**-11, "float16") == 1.0
    assert reference.round_to(70000.0, "float16") == math.inf
    assert reference.round_to(0.1, "float32") == np.float64(np.float32(0.1))
    assert reference.round_to(0.1, "float64") == 0.1
    with pytest.raises(ValueError, match="dtype"):
        reference.round_to(1.0, "int32")


def test_summaries_of_a_page():
    keys = [np.array([1.0, -4.0]), np.array([3.0, 2.0])]
    np.testing.assert_array_equal(reference.page_mean(keys), [2.0, -1.0])
    np.testing.assert_array_equal(reference.page_max(keys), [3.0, 2.0])
    np.testing.assert_array_equal(reference.page_min(keys), [1.0, -4.0])


def test_peak_needs_both_envelopes():
    # The bound takes the maximum where q >= 0 and the minimum where q < 0.
    assert reference.peak(np.array([2.0, -1.0]), np.array([1.0, 6.0]), np.array([-1.0, -5.0])) == 2.0 + 5.0


def test_peak_bounds_every_key_of_the_page():
    rng = np.random.default_rng(1)
    for _ in range(50):
        keys, query = rng.standard_normal((4, 8)), rng.standard_normal(8)
        bound = reference.peak(query, reference.page_max(keys), reference.page_min(keys))
        assert bound >= (keys @ query).max() - 1e-12


QUERIES = [np.array([1.0, 0.0]), np.array([0.0, 3.0])]
MEAN, LARGEST, SMALLEST = np.array([2.0, 0.5]), np.array([4.0, 1.0]), np.array([-1.0, -2.0])


@pytest.mark.parametrize(
    ("policy", "score"),
    [
        # qbar = (0.5, 1.5): qbar.mu = 1.75, peak(qbar) = 2 + 1.5 = 3.5
        ("block_sparse_attention", 1.75),
        ("h2o_sparse_attention", 2 * 1.75 + 10 * 3.5),
        # q_g.mu = 2 and 1.5; peak = 4 and 3
        ("gqa_quest_sparse_attention", 4.0),
        ("gqa_h2o_sparse_attention", 2 * 2.0 + 10 * 4.0),
    ],
)
def test_page_scores_by_hand(policy, score):
    assert reference.page_score(policy, QUERIES, MEAN, LARGEST, SMALLEST, w_avg=2.0, w_peak=10.0) == score


def test_gqa_score_is_two_maxima_not_the_maximum_of_the_sum():
    # Head 0 has the larger mean term (3 against 1), head 1 the larger peak term (9 against 2).
    queries = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    mean, largest, smallest = np.array([3.0, 1.0]), np.array([2.0, 9.0]), np.array([0.0, 0.0])
    assert reference.page_score("gqa_h2o_sparse_attention", queries, mean, largest, smallest) == 3.0 + 9.0


def test_page_scores_refuse_other_policies():
    with pytest.raises(ValueError, match="page-level"):
        reference.page_score("h2o_token_sparse_attention", QUERIES, MEAN, LARGEST, SMALLEST)


def test_token_probabilities_by_hand():
    # Logits of head 0: 0, ln 3; of head 1: ln 4, 0; of the mean query: ln 2, ln sqrt 3.
    queries = [np.array([0.0, math.log(3)]), np.array([math.log(4), 0.0])]
    keys = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    gqa = reference.token_probabilities("gqa_h2o_token_sparse_attention", queries, keys, 1.0)
    np.testing.assert_allclose(gqa, [0.8, 0.75], rtol=1e-14)
    mean = reference.token_probabilities("h2o_token_sparse_attention", queries, keys, 1.0)
    np.testing.assert_allclose(mean, [2 / (2 + math.sqrt(3)), math.sqrt(3) / (2 + math.sqrt(3))], rtol=1e-14)


@pytest.mark.parametrize(("size", "expected"), [(0, []), (3, []), (4, [1]), (6, [1, 2, 3])])
def test_window(size, expected):
    assert list(reference.window(size, 1, 2)) == expected


def test_ties_go_to_the_lower_page_and_nan_ranks_last():
    scores = [9.0, 1.0, 2.0, 2.0, 2.0, math.nan, -math.inf, 0.0]
    assert reference.top_pages(scores, range(1, 8), 2) == [2, 3]
    assert reference.top_pages(scores, range(1, 8), 6) == [1, 2, 3, 4, 6, 7]
    assert reference.top_pages(scores, range(1, 8), 20) == [1, 2, 3, 4, 5, 6, 7]
    assert reference.select(scores, 8, top_k=1, reserved_bos=1, reserved_eos=1) == [0, 2, 7]


def test_select_takes_everything_within_the_budget():
    # Scores are not even looked at: None would raise.
    assert reference.select(None, 4, top_k=1, reserved_bos=1, reserved_eos=2) == [0, 1, 2, 3]


def test_attention_by_hand():
    keys, values = [np.array([0.0]), np.array([2 * math.log(3)])], [np.array([8.0]), np.array([4.0])]
    out, lse = reference.attend(np.array([1.0]), keys, values, 0.5)
    np.testing.assert_allclose(out, [0.25 * 8 + 0.75 * 4], rtol=1e-14)
    assert lse == pytest.approx(math.log(4))
    out, lse = reference.attend(np.array([1.0]), [], [], 0.5)
    assert out.tolist() == [0.0] and lse == -math.inf


def test_rope_by_hand():
    # D = 4, theta = 100: pair (0, 2) turns by the position, pair (1, 3) by a tenth of it.
    turned = reference.rope([1.0, 1.0, 0.0, 0.0], 2, theta=100.0)
    np.testing.assert_allclose(turned, [math.cos(2), math.cos(0.2), math.sin(2), math.sin(0.2)], rtol=1e-15)
    turned = reference.rope([0.0, 0.0, 1.0, 1.0], 2, theta=100.0)
    np.testing.assert_allclose(turned, [-math.sin(2), -math.sin(0.2), math.cos(2), math.cos(0.2)], rtol=1e-15)


def test_rope_logit_depends_on_the_distance_alone():
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 16))
    near = np.dot(reference.rope(q, 7), reference.rope(k, 3))
    far = np.dot(reference.rope(q, 32767), reference.rope(k, 32763))
    assert near == pytest.approx(far, abs=1e-9)


@pytest.mark.parametrize(
    ("decay", "dtype", "expected"),
    [
        (1.0, "float32", 5000.0),
        (0.99, "float32", 100.0),
        (0.999, "float32", 993.28),
        (1.0, "bfloat16", 256.0),
        (1.0, "float64", 5000.0),
        (0.0, "bfloat16", 1.0),
    ],
)
def test_freeze(decay, dtype, expected):
    score = 0.0
    for _ in range(5000):
        score = reference.decayed_update(score, 1.0, decay, dtype)
    assert score == pytest.approx(expected, rel=1e-4)


def test_without_decay_an_overflowed_score_is_forgotten():
    assert reference.decayed_update(float("inf"), 0.25, 0.0, "float16") == 0.25
    assert reference.decayed_update(float("inf"), 0.25, 0.5, "float16") == float("inf")


@pytest.mark.parametrize(("decay", "expected"), [(0.99, 64.0), (0.999, 256.0)])
def test_freeze_with_a_decay_rounded_to_the_storage_dtype(decay, expected):
    """The fault that the library must not have, to show that the oracle's rounding reproduces it."""
    decay = float(reference.round_to(decay, "bfloat16"))
    score = 0.0
    for _ in range(5000):
        score = reference.decayed_update(score, 1.0, decay, "bfloat16")
    assert score == expected


def test_fp16_range():
    size, rng = 128, np.random.default_rng(3)
    options = {"num_kv_heads": 1, "page_size": 2, "top_k": 1, "reserved_eos": 1, "dtype": "float16"}
    request = Request("gqa_h2o_sparse_attention", **options)
    values = rng.standard_normal((8, 1, size))
    q, k = np.full((2, size), 256.0), np.full((1, size), 256.0)
    request.prefill(np.broadcast_to(q, (7, 2, size)), np.broadcast_to(k, (7, 1, size)), values[:7])
    step = request.decode(q, k, values[7])
    assert 256.0 * 256.0 * size * size**-0.5 == pytest.approx(741455, abs=1)
    assert step.pages == [[0, 1, 3]]
    assert step.scores[0, 1] == 2 * 128 * 65536.0
    np.testing.assert_allclose(step.out[0], values[[0, 1, 2, 3, 6, 7], 0].mean(0), rtol=1e-12)


def test_tf32():
    size = 128
    request = single_tokens("block_sparse_attention", top_k=1, reserved_eos=1)
    for component in (0.0, 1.0, 1 + 2**-12):
        request.write(np.full((1, size), component), np.zeros((1, size)))
    step = request.decode(np.ones((1, size)), np.zeros((1, size)), np.zeros((1, size)))
    assert step.pages == [[0, 2, 3]]
    assert step.scores[0, 1:3].tolist() == [128.0, 128.03125]


def test_newcomer():
    rng = np.random.default_rng(4)
    size, matching = 8, 4.0 * unit(0, 8)
    request = Request("h2o_sparse_attention", num_kv_heads=1, page_size=4, top_k=2, reserved_eos=1)
    noise = 0.1 * rng.standard_normal((48, 3, 1, size))
    request.prefill(noise[:8, 0], noise[:8, 1], noise[:8, 2])
    first = None
    for step in range(1, 41):
        q, k, v = noise[7 + step]
        k = matching[None] if step == 9 else k
        q = matching[None] if step >= 10 else q
        pages = request.decode(q, k, v).pages[0]
        assert request.num_pages - 1 in pages
        if step > 12 and first is None and 4 in pages[1:-1]:
            first = step  # step 9 is token 16, in page 4, which leaves the last page at step 13
    assert first == 13


def test_newcomer_outranks_the_prompt_under_decay():
    request = single_tokens("h2o_token_sparse_attention", top_k=2, reserved_eos=1, decay=0.98)
    rng, size = np.random.default_rng(5), 8
    request.prefill(*(0.1 * rng.standard_normal((3, 8, 1, size))))
    for step in range(1, 41):
        q, k, v = 0.1 * rng.standard_normal((3, 1, size))
        k = 6.0 * unit(0, size)[None] if step == 9 else k
        q = 6.0 * unit(0, size)[None] if step >= 10 else q
        pages = request.decode(q, k, v).pages[0]
    assert 16 in pages
    assert request.hh_score[0][16] > max(request.hh_score[0][:8])


def test_group_choice():
    options = {"top_k": 1, "reserved_bos": 0, "reserved_eos": 1}
    request = Request("gqa_h2o_sparse_attention", num_kv_heads=2, page_size=1, **options)
    for token in range(5):
        request.write(np.tile(unit(token, 8), (2, 1)), np.tile(unit(token, 8), (2, 1)))
    q = np.concatenate([np.tile(8 * unit(1, 8), (4, 1)), np.tile(8 * unit(3, 8), (4, 1))])
    pages, _ = request.select(q)
    assert pages == [[1, 4], [3, 4]]
    out = request.attend(q, pages)
    assert (out[:4, 1] > 0.9).all() and (out[4:, 3] > 0.9).all()


def test_budget_at_least_the_length_is_dense_and_moves_no_score():
    rng = np.random.default_rng(6)
    data = rng.standard_normal((3, 12, 2, 4))
    policy = Request("h2o_token_sparse_attention", num_kv_heads=2, page_size=1, top_k=8, reserved_eos=3)
    dense = Request("dense_attention", num_kv_heads=2, page_size=1, reserved_eos=3)
    for q, k, v in data.transpose(1, 0, 2, 3):
        step, expected = policy.decode(q, k, v), dense.decode(q, k, v)
        np.testing.assert_array_equal(step.out, expected.out)
        assert np.isneginf(step.scores).all()
    assert set(policy.hh_score[0] + policy.hh_score[1]) == {0.0}


def test_only_the_window_is_updated_and_decayed():
    request = single_tokens("h2o_token_sparse_attention", top_k=1, reserved_eos=2, decay=0.5)
    for _ in range(5):
        request.write(np.zeros((1, 2)), np.zeros((1, 2)))
    request.hh_score[0] = [8.0, 4.0, 2.0, 7.0, 0.0]
    pages, scores = request.select(np.ones((1, 2)))
    # Window: tokens 1 and 2, each with probability one half.
    assert request.hh_score[0] == [8.0, 2.5, 1.5, 7.0, 0.0]
    assert scores[0].tolist() == [-math.inf, 2.5, 1.5, -math.inf, -math.inf]
    assert pages == [[0, 1, 3, 4]]


def test_selection_uses_the_stored_score():
    # The two tokens differ by less than a bfloat16 ulp, so as stored they tie and the lower one wins.
    keys = [0.0, 1.0, 1.001, 0.0]
    chosen = {}
    for dtype in ("bfloat16", "float32"):
        options = {"top_k": 1, "reserved_eos": 1, "score_dtype": dtype}
        request = single_tokens("h2o_token_sparse_attention", **options)
        for key in keys:
            request.write([[key]], [[0.0]])
        chosen[dtype] = request.select(np.ones((1, 1)))[0][0][1]
    assert chosen == {"bfloat16": 1, "float32": 2}


def test_prefill_equals_dense_decode_and_scores_nothing():
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((5, 4, 8)), rng.standard_normal((5, 2, 8)), rng.standard_normal((5, 2, 8))
    dense = Request("dense_attention", num_kv_heads=2, page_size=2)
    expected = np.stack([dense.decode(*token).out for token in zip(q, k, v)])
    chunked = Request("h2o_sparse_attention", num_kv_heads=2, page_size=2, reserved_bos=0, reserved_eos=1)
    out = np.concatenate([chunked.prefill(q[:3], k[:3], v[:3]), chunked.prefill(q[3:], k[3:], v[3:])])
    np.testing.assert_array_equal(out, expected)
    assert len(chunked.means[0]) == 2  # the third page is half full and has no summary yet
    np.testing.assert_array_equal(chunked.maxima[1][1], np.float32(k[2:4, 1].max(0)))


def test_sink_recent_reads_the_reserved_pages_alone():
    request = Request("sink_recent_attention", num_kv_heads=1, page_size=2, top_k=5)
    data = np.random.default_rng(8).standard_normal((9, 3, 1, 4))
    for q, k, v in data:
        step = request.decode(q, k, v)
    assert step.pages == [[0, 3, 4]] and np.isneginf(step.scores).all()


@pytest.mark.parametrize(
    ("policy", "page_size", "reserved_eos", "message"),
    [
        ("no_such_attention", 1, 1, "policy"),
        ("h2o_token_sparse_attention", 16, 1, "page_size"),
        ("h2o_sparse_attention", 16, 0, "reserved_eos"),
    ],
)
def test_refusals(policy, page_size, reserved_eos, message):
    with pytest.raises(ValueError, match=message):
        Request(policy, num_kv_heads=1, page_size=page_size, reserved_eos=reserved_eos)
