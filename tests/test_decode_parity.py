"""Every policy against the float64 oracle, over 200 decode steps of a ragged, permuted, poisoned world."""

import dataclasses

import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from tests import worlds
from tests.decode_check import KINDS, check_trace
from tests.worlds import Scenario

PAGE = {"top_k": 3, "reserved_bos": 1, "reserved_eos": 2}
TOKEN = {"top_k": 6, "reserved_bos": 2, "reserved_eos": 3}
WEIGHTS = {"w_avg": 0.5, "w_peak": 1.5}
OPTIONS = {
    "h2o_sparse_attention": PAGE | WEIGHTS,
    "gqa_h2o_sparse_attention": PAGE | WEIGHTS,
    "h2o_token_sparse_attention": TOKEN,
    "gqa_h2o_token_sparse_attention": TOKEN,
    "block_sparse_attention": PAGE,
    "gqa_quest_sparse_attention": PAGE,
    "sink_recent_attention": {"reserved_bos": 1, "reserved_eos": 2},
    "dense_attention": {},
}
# In the order of the policies, so that each sees two of them.
GROUPS = {"float32": (3, 7, 1, 3, 4, 1, 3, 1), "bfloat16": (4, 3, 3, 4, 1, 3, 7, 3)}


def scenario_of(policy, dtype, **changes):
    group = GROUPS.get(dtype, GROUPS["float32"])[reference.POLICIES.index(policy)]
    options = dict(OPTIONS[policy])
    if policy in reference.TOKEN_POLICIES:
        options["score_dtype"] = dtype
        changes = {"page_size": 1, "pages_per_request": 208, "prompts": (0, 1, 2, 9, 205)} | changes
        changes = {"readmit": (4, 70, 5)} | changes
    scenario = Scenario(policy, tuple(sorted(options.items())), dtype=dtype, group=group)
    return dataclasses.replace(scenario, **changes)


def test_the_policies_are_those_of_the_oracle():
    assert set(h2o_jax.list_policies()) >= set(reference.POLICIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", reference.POLICIES)
def test_200_steps(policy, dtype, implementation):
    scenario = scenario_of(policy, dtype)
    check_trace(scenario, worlds.run(scenario, implementation=implementation))


SHORT = {"prompts": (0, 3, 25, 45), "pages_per_request": 12, "readmit": (3, 10, 5), "steps": 24}
SHORT_TOKEN = {"prompts": (0, 1, 17, 39), "pages_per_request": 40, "readmit": (3, 10, 12), "steps": 24}


def short_scenario_of(policy, dtype="float32", **changes):
    """A few steps of a small world, where most rows soon outgrow the budget."""
    sizes = SHORT_TOKEN if policy in reference.TOKEN_POLICIES else SHORT
    return scenario_of(policy, dtype, **(sizes | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", KINDS)
def test_exact_inputs_select_exactly_ties_included(policy, dtype, implementation):
    changes = {"grid": True, "head_dim": 2, "steps": 40, "group": 3, "pages_per_request": 20}
    scenario = short_scenario_of(policy, **(changes | {"dtype": dtype}))
    trace = worlds.run(scenario, implementation=implementation)
    finite = [row[np.isfinite(row)] for row in trace.scores.reshape(-1, trace.scores.shape[-1])]
    assert sum(len(row) > len(set(row)) for row in finite) > 20, "the inputs make too few ties"
    check_trace(scenario, trace)


@pytest.mark.parametrize("policy", ["gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_float16(policy, implementation):
    scenario = short_scenario_of(policy, "float16")
    check_trace(scenario, worlds.run(scenario, implementation=implementation))


@pytest.mark.parametrize("policy", reference.TOKEN_POLICIES)
def test_options_of_the_token_policies(policy, implementation):
    options = (("decay", 0.75), ("reserved_bos", 0), ("reserved_eos", 1), ("scale", 0.9), ("top_k", 5))
    scenario = short_scenario_of(policy, options=options, group=2, scale=0.2)
    check_trace(scenario, worlds.run(scenario, implementation=implementation))


@pytest.mark.parametrize("score_dtype", ["bfloat16", "float32"])
def test_score_dtype_is_independent_of_the_pool(score_dtype, implementation):
    dtype = "float32" if score_dtype == "bfloat16" else "bfloat16"
    scenario = short_scenario_of("gqa_h2o_token_sparse_attention", dtype)
    options = dict(scenario.options) | {"score_dtype": score_dtype}
    scenario = dataclasses.replace(scenario, options=tuple(options.items()))
    check_trace(scenario, worlds.run(scenario, implementation=implementation))


@pytest.mark.parametrize("scale", [0.09, 1.0])
def test_explicit_attention_scale(scale, implementation):
    scenario = short_scenario_of("h2o_sparse_attention", scale=scale)
    check_trace(scenario, worlds.run(scenario, implementation=implementation))


@pytest.mark.parametrize("policy", ["gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_poison(policy, implementation):
    """What nobody owns makes no difference, not by a bit."""
    scenario = short_scenario_of(policy, "bfloat16")
    zero, nan, inf = (
        worlds.run(scenario, implementation=implementation, poison=x) for x in (0.0, np.nan, np.inf)
    )
    for other in (nan, inf):
        for name in ("out", "pages", "counts", "scores"):
            np.testing.assert_array_equal(getattr(zero, name), getattr(other, name), name)
    check_trace(scenario, zero)
    check_trace(scenario, inf)


@pytest.mark.parametrize("policy", reference.POLICIES)
def test_decode_attention_is_write_select_attend(policy, implementation):
    scenario = short_scenario_of(policy)

    def attend(cache, table, q, selection, **_):
        return whole[1]

    def write(cache, table, k, v, num_tokens, *, policy, implementation):
        inputs[:] = [cache, k[:, 0], v[:, 0]]
        return h2o_jax.write_tokens(
            cache, table, k, v, num_tokens, policy=policy, implementation=implementation
        )

    def select(cache, table, q, *, policy, active, implementation):
        before, k, v = inputs
        options = {"policy": policy, "active": active, "implementation": implementation}
        whole[:] = h2o_jax.decode_attention(before, table, q, k, v, **options)
        cache, selection = h2o_jax.select_pages(cache, table, q, **options)
        return whole[0], selection

    inputs, whole = [], []
    check_trace(
        scenario,
        worlds.run(scenario, implementation=implementation, write=write, select=select, attend=attend),
    )
