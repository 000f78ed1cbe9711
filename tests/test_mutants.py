"""The judge of the parity tests must reject what is known to be wrong.

Each mutant is a fault that a paged, sparse, grouped decode step really can have, put into an otherwise right
loop. The unmutated loop passes, so a rejection is the mutant's doing.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from pallas_kernels import envelope_scores, paged_attention
from tests import tolerance, worlds
from tests.decode_check import check_trace
from tests.test_decode_parity import short_scenario_of

pytestmark = pytest.mark.slow

PAGE, GQA_PAGE = "h2o_sparse_attention", "gqa_h2o_sparse_attention"
TOKEN, GQA_TOKEN = "h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"


def scenario_of(policy, dtype="float32"):
    # D is not a power of two, so that a kernel's padding could show in the scale.
    return short_scenario_of(policy, dtype, head_dim=6, group=3, steps=16)


def assert_rejected(scenario, message=None, **parts):
    trace = worlds.run(scenario, **parts)
    with pytest.raises(AssertionError, match=message):
        check_trace(scenario, trace)


@pytest.fixture(scope="module", params=[GQA_PAGE, GQA_TOKEN])
def right(request):
    """A scenario and its right trace."""
    scenario = scenario_of(request.param)
    trace = worlds.run(scenario)
    check_trace(scenario, trace)
    return scenario, trace


def last_live(trace):
    at, row = np.argwhere(trace.live)[-1]
    return at, row


def zeros(trace):
    trace.out[:] = 0


def one_row_is_zero(trace):
    trace.out[last_live(trace)] = 0


def one_output_is_not_a_number(trace):
    trace.out[(*last_live(trace), 0, 0)] = np.nan


def heads_are_swapped(trace):
    trace.out[:] = np.roll(trace.out, 1, axis=2)


def rows_are_swapped(trace):
    trace.out[:] = np.roll(trace.out, 1, axis=1)


def idle_row_has_output(trace):
    trace.out[tuple(np.argwhere(~trace.live)[0])] = 1e-30


def one_count_is_short(trace):
    trace.counts[(*last_live(trace), 0)] -= 1


def one_page_is_repeated(trace):
    trace.pages[(*last_live(trace), 0, 2)] = trace.pages[(*last_live(trace), 0, 1)]


def score_outside_the_window(trace):
    trace.scores[(*last_live(trace), 0, 0)] = 0.0


def scores_are_rounded_to_bfloat16(trace):
    trace.scores[:] = reference.round_bfloat16(trace.scores)


def cached_key_is_wrong(trace):
    trace.keys[last_live(trace)[1], 0, 0, 0, 0] += 1e-6


def unowned_page_is_written(trace):
    trace.after[0][np.flatnonzero(~trace.owned)[0]] = 0


def retraced(trace):
    trace.compiled = 2


@pytest.mark.parametrize(
    "mutate",
    [
        zeros,
        one_row_is_zero,
        one_output_is_not_a_number,
        heads_are_swapped,
        rows_are_swapped,
        idle_row_has_output,
        one_count_is_short,
        one_page_is_repeated,
        score_outside_the_window,
        scores_are_rounded_to_bfloat16,
        cached_key_is_wrong,
        unowned_page_is_written,
        retraced,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_wrong_result(mutate, right):
    scenario, trace = right
    trace = copy.deepcopy(trace)
    trace.after = [x.copy() for x in trace.after]
    mutate(trace)
    with pytest.raises(AssertionError):
        check_trace(scenario, trace)


def test_stored_score_is_wrong():
    scenario = scenario_of(TOKEN)
    trace = worlds.run(scenario)
    at, row = last_live(trace)
    trace.hh_score[at, 1, row, 4] *= 1 + 1e-5
    trace.scores[at, row, :, 4] = trace.hh_score[at, 1, row, 4, :, 0]
    with pytest.raises(AssertionError, match="scores: off by"):
        check_trace(scenario, trace)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_stored_summary_is_wrong(kind):
    scenario = scenario_of(PAGE, "bfloat16")
    trace = worlds.run(scenario)
    row = last_live(trace)[1]
    first = trace.summaries[:, :, row, 0, 0, kind, 0]
    first += tolerance.ulp(first, "bfloat16")
    with pytest.raises(AssertionError, match=f"{('mean', 'max', 'min')[kind]} of page 0"):
        check_trace(scenario, trace)


def values_are_keys(cache, table, q, chosen, **options):
    return h2o_jax.attend(dataclasses.replace(cache, v=cache.k), table, q, chosen, **options)


def newest_key_is_dropped(cache, table, q, chosen, **options):
    shorter = dataclasses.replace(table, seq_lens=jnp.maximum(table.seq_lens - 1, 0))
    return h2o_jax.attend(cache, shorter, q, chosen, **options)


def first_page_is_dropped(cache, table, q, chosen, **options):
    pages = jnp.roll(chosen.pages, -1, axis=2)
    counts = jnp.where(chosen.counts > 1, chosen.counts - 1, chosen.counts)
    return h2o_jax.attend(cache, table, q, dataclasses.replace(chosen, pages=pages, counts=counts), **options)


def neighbours_page(cache, table, q, chosen, **options):
    beside = jnp.where(table.pages < table.num_pages, (table.pages + 1) % table.num_pages, table.num_pages)
    return h2o_jax.attend(cache, dataclasses.replace(table, pages=beside), q, chosen, **options)


def neighbour_in_the_row(cache, table, q, chosen, **options):
    beside = jnp.where((chosen.pages > 0) & (chosen.counts[..., None] > 1), chosen.pages - 1, chosen.pages)
    return h2o_jax.attend(cache, table, q, dataclasses.replace(chosen, pages=beside), **options)


def first_head_chooses_for_all(cache, table, q, chosen, **options):
    pages = jnp.broadcast_to(chosen.pages[:, :1], chosen.pages.shape)
    return h2o_jax.attend(cache, table, q, dataclasses.replace(chosen, pages=pages), **options)


def heads_are_interleaved(cache, table, q, chosen, **options):
    """Query head h reads KV head h % Hkv."""
    num_kv_heads = cache.k.shape[1]
    order = jnp.arange(q.shape[1]).reshape(-1, num_kv_heads).T.reshape(-1)
    out = h2o_jax.attend(cache, table, q[:, order], chosen, **options)
    return out[:, jnp.argsort(order)]


def padded_scale(cache, table, q, chosen, *, scale, **options):
    return h2o_jax.attend(cache, table, q, chosen, scale=8**-0.5, **options)


def softmax_is_not_normalised(cache, table, q, chosen, **options):
    out, lse = _out_and_lse(cache, table, q, chosen, chosen.counts, **options)
    return jnp.where(jnp.isfinite(lse)[..., None], out * jnp.exp(lse)[..., None], 0)


def padding_token_is_counted(cache, table, q, chosen, **options):
    """A key and value of zeros beside the real ones, logit 0."""
    out, lse = _out_and_lse(cache, table, q, chosen, chosen.counts, **options)
    return out * jax.nn.sigmoid(lse)[..., None]


def splits_merge_without_rescaling(cache, table, q, chosen, **options):
    counts = chosen.counts // 2
    first, first_lse = _out_and_lse(cache, table, q, chosen, counts, **options)
    budget = chosen.pages.shape[2]
    entry = jnp.minimum(jnp.arange(budget) + counts[..., None], budget - 1)
    rest = dataclasses.replace(chosen, pages=jnp.take_along_axis(chosen.pages, entry, axis=2))
    second, _ = _out_and_lse(cache, table, q, rest, chosen.counts - counts, **options)
    return jnp.where(jnp.isfinite(first_lse)[..., None], (first + second) / 2, second)


def _out_and_lse(cache, table, q, chosen, counts, *, scale, active, implementation):
    counts = jnp.where(active[:, None], counts, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pools, rows = (cache.k, cache.v), (table.pages, table.seq_lens)
    return paged_attention(q, *pools, *rows, chosen.pages, counts, scale=scale, implementation=implementation)


@pytest.mark.parametrize(
    "attend",
    [
        values_are_keys,
        newest_key_is_dropped,
        first_page_is_dropped,
        neighbours_page,
        neighbour_in_the_row,
        first_head_chooses_for_all,
        heads_are_interleaved,
        padded_scale,
        softmax_is_not_normalised,
        padding_token_is_counted,
        splits_merge_without_rescaling,
    ],
    ids=lambda attend: attend.__name__,
)
def test_wrong_attention(attend):
    assert_rejected(scenario_of(PAGE, "bfloat16"), "output: ", attend=attend)


@dataclasses.dataclass(frozen=True)
class MaximumOfTheSum(h2o_jax.Policy):
    """`max_g(q_g.mu + peak(q_g))` in place of two maxima."""

    w_avg: float = 1.0
    w_peak: float = 1.0
    summary_kinds = ("mean", "max", "min")

    def score(self, cache, table, q, window, *, implementation=None):
        group = q.shape[1] // cache.k.shape[1]
        inputs = (cache.aux["summaries"], table.pages, window.start, window.stop)
        options = {"kinds": cache.summary_kinds, "group": "max", "w_avg": self.w_avg, "w_peak": self.w_peak}
        heads = [envelope_scores(q[:, g::group], *inputs, **options) for g in range(group)]
        return cache, jnp.stack(heads).max(axis=0)


def test_maximum_of_the_sum():
    scenario = scenario_of(GQA_PAGE)
    assert_rejected(scenario, policy=MaximumOfTheSum(**dict(scenario.options)))


@pytest.mark.parametrize(
    ("asked", "used"), [(PAGE, GQA_PAGE), (GQA_PAGE, PAGE), (TOKEN, GQA_TOKEN), (GQA_TOKEN, TOKEN)]
)
def test_mean_and_maximum_over_the_group_mixed_up(asked, used):
    scenario = scenario_of(asked)
    assert_rejected(scenario, policy=h2o_jax.get_policy(used, **dict(scenario.options)))


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (PAGE, {"w_avg": 0.0}),
        (GQA_PAGE, {"w_peak": 0.5}),
        (TOKEN, {"decay": 0.984375**2}),  # applied twice
        (TOKEN, {"decay": 1.0}),
        (GQA_TOKEN, {"scale": 8**-0.5}),  # of the padded head_dim
        (TOKEN, {"reserved_eos": 2, "top_k": 7}),  # the same budget, a window that is longer by one
        (PAGE, {"reserved_bos": 0, "top_k": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_option(policy, changes):
    scenario = scenario_of(policy)
    assert_rejected(scenario, policy=h2o_jax.get_policy(policy, **(dict(scenario.options) | changes)))


def one_envelope_only(cache, table, q, **options):
    summaries = cache.aux["summaries"]
    largest = summaries.at[:, :, 2].set(summaries[:, :, 1])
    wrong = dataclasses.replace(cache, aux=cache.aux | {"summaries": largest})
    return cache, h2o_jax.select_pages(wrong, table, q, **options)[1]


def mean_is_a_sum(cache, table, q, **options):
    summaries = cache.aux["summaries"]
    wrong = dataclasses.replace(cache, aux=cache.aux | {"summaries": summaries.at[:, :, 0].multiply(4)})
    return cache, h2o_jax.select_pages(wrong, table, q, **options)[1]


@pytest.mark.parametrize("select", [one_envelope_only, mean_is_a_sum], ids=lambda select: select.__name__)
@pytest.mark.parametrize("policy", [PAGE, GQA_PAGE])
def test_wrong_page_score(policy, select):
    assert_rejected(scenario_of(policy), select=select)


def scores_of_before_the_step(cache, table, q, *, policy, active, implementation):
    options = {"policy": policy, "active": active, "implementation": implementation}
    after, right = h2o_jax.select_pages(cache, table, q, **options)
    old = cache.aux["hh_score"].at[table.pages].get(mode="fill", fill_value=0)[..., 0].swapaxes(1, 2)
    return after, dataclasses.replace(right, scores=jnp.where(jnp.isfinite(right.scores), old, -jnp.inf))


def padding_page_is_counted(cache, table, q, *, policy, active, implementation):
    """One more token of logit 0 takes its share of the softmax: the update is a little small."""
    options = {"policy": policy, "active": active, "implementation": implementation}
    after, right = h2o_jax.select_pages(cache, table, q, **options)
    old, new = cache.aux["hh_score"], after.aux["hh_score"]
    scored = jnp.isfinite(right.scores).sum(axis=2).max()
    less = new - (new - policy.decay * old) / (scored + 1)
    less = jnp.where(new == old, new, less)
    scores = less.at[table.pages].get(mode="fill", fill_value=0)[..., 0].swapaxes(1, 2)
    scores = jnp.where(jnp.isfinite(right.scores), scores, -jnp.inf)
    return dataclasses.replace(after, aux={"hh_score": less}), dataclasses.replace(right, scores=scores)


def all_tokens_decay(cache, table, q, *, policy, active, implementation):
    options = {"policy": policy, "active": active, "implementation": implementation}
    after, right = h2o_jax.select_pages(cache, table, q, **options)
    old, new = cache.aux["hh_score"], after.aux["hh_score"]
    return dataclasses.replace(after, aux={"hh_score": jnp.where(new == old, policy.decay * old, new)}), right


def idle_rows_are_scored(cache, table, q, *, active, **options):
    q = jnp.where(jnp.isnan(q), 1, q)
    return h2o_jax.select_pages(cache, table, q, active=None, **options)


@pytest.mark.parametrize(
    "select",
    [scores_of_before_the_step, padding_page_is_counted, all_tokens_decay, idle_rows_are_scored],
    ids=lambda select: select.__name__,
)
def test_wrong_accumulation(select):
    assert_rejected(scenario_of(TOKEN), select=select)


def scores_are_inherited(cache, table, k, v, num_tokens, **options):
    written = h2o_jax.write_tokens(cache, table, k, v, num_tokens, **options)
    return dataclasses.replace(written, aux=cache.aux)


def idle_rows_are_written(cache, table, k, v, num_tokens, **options):
    return h2o_jax.write_tokens(cache, table, k, v, jnp.minimum(table.seq_lens, 1), **options)


@pytest.mark.parametrize(
    "write", [scores_are_inherited, idle_rows_are_written], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("policy", [PAGE, TOKEN])
def test_wrong_write(policy, write):
    """For a page policy the first leaves a page's summary to its earlier owner."""
    assert_rejected(scenario_of(policy), write=write)


def test_ties_to_the_higher_page():
    scores = [9.0, 1.0, 2.0, 2.0, 2.0, 0.0, 9.0]
    budget = {"top_k": 2, "reserved_bos": 1, "reserved_eos": 1, "name": "tie"}
    tolerance.assert_selection([0, 2, 3, 6], scores, lambda page: 0.0, 7, **budget)
    with pytest.raises(AssertionError, match="tie: page 4 taken for page 2"):
        tolerance.assert_selection([0, 3, 4, 6], scores, lambda page: 0.0, 7, **budget)


def test_selection_within_the_error_of_the_scores_only():
    scores = [9.0, 1.0, 1.0 + 2**-20, 0.0, 9.0]
    budget = {"top_k": 1, "reserved_bos": 1, "reserved_eos": 1, "name": "near"}
    tolerance.assert_selection([0, 1, 4], scores, lambda page: 2.0**-20, 5, **budget)
    for pages, error in (([0, 1, 4], 2.0**-22), ([0, 3, 4], 2.0**-20), ([0, 4], 1.0), ([1, 2, 4], 1.0)):
        with pytest.raises(AssertionError, match="near"):
            tolerance.assert_selection(pages, scores, lambda page, error=error: error, 5, **budget)


def test_tolerance_is_twice_the_plain_error_and_one_ulp():
    exact = np.array([1.0, -1.5])
    plain = exact + [0.0, 2.0**-22]
    near, far = exact + [2.0**-21 + 2.0**-23, 0], exact + [2.0**-21 + 2.0**-22, 0]
    tolerance.assert_as_good_as_plain(near, exact, plain, "float32", name="x")
    with pytest.raises(AssertionError, match="x: off by 6 ulp"):
        tolerance.assert_as_good_as_plain(far, exact, plain, "float32", name="x")
