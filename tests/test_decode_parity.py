"""Every policy against the float64 oracle, over 200 decode steps of a ragged, permuted, poisoned world."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from tests import worlds
from tests.decode_check import check_trace
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
GROUPS = {"float32": (3, 7, 1, 3, 4, 7, 3, 1), "bfloat16": (4, 3, 3, 4, 7, 1, 1, 3)}


def scenario_of(policy, dtype, **changes):
    group = GROUPS[dtype][reference.POLICIES.index(policy)]
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
