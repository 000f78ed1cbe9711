"""What a small budget costs the default model on a long real text (the prose of Python's help topics)."""

import pydoc_data.topics

import pytest

import h2o_jax
from h2o_jax.generate import generate
from h2o_jax.teacher_forcing import agreement, teacher_forced_logits
from tests.test_models_real import smollm  # noqa: F401 (a fixture)

CONTEXT, STEPS, PAGE_SIZE = 2000, 100, 16
BUDGET = CONTEXT // 4 // PAGE_SIZE  # pages


def test_a_quarter_of_the_context_keeps_the_predictions(smollm):  # noqa: F811
    model, tokenizer, _ = smollm
    tokens = tokenizer.encode("\n".join(pydoc_data.topics.topics.values())[:20_000])[: CONTEXT + STEPS]
    assert len(tokens) == CONTEXT + STEPS
    prompt, continuation = tokens[:CONTEXT], tokens[CONTEXT:]
    policies = (
        h2o_jax.get_policy("dense_attention"),
        h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=BUDGET - 3, reserved_bos=1, reserved_eos=2),
        h2o_jax.get_policy("sink_recent_attention", reserved_bos=1, reserved_eos=BUDGET - 1),
    )
    dense, sparse, recent = (
        teacher_forced_logits(model, prompt, continuation, policy=policy, page_size=PAGE_SIZE)
        for policy in policies
    )
    found = agreement(dense, sparse)
    assert found.top1 >= 0.9
    assert found.mean_kl < 0.08
    # The choice of pages is what does it: as many recent pages keep far less.
    assert agreement(dense, recent).mean_kl > 3 * found.mean_kl


@pytest.mark.parametrize("name", ["gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_a_budget_that_covers_the_context_gives_the_dense_tokens(smollm, name):  # noqa: F811
    model, tokenizer, _ = smollm
    prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("Once upon a time, in a land")]
    policy = h2o_jax.get_policy(name, top_k=32)
    page_size = policy.page_size or PAGE_SIZE
    config = model.cache_config(2, 64 if page_size == 1 else 40, page_size)  # the budget leaves room to score
    dense = h2o_jax.get_policy("dense_attention")
    expected = generate(model, prompts, policy=dense, max_new_tokens=12, config=config)
    assert generate(model, prompts, policy=policy, max_new_tokens=12, config=config) == expected
