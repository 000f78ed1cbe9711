"""What a small budget costs the default model on a long real text (the prose of Python's help topics)."""

import pydoc_data.topics

import pytest

import h2o_jax
from h2o_jax import eval as evaluation
from h2o_jax.generate import generate
from tests.test_models_real import smollm  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

CONTEXT, STEPS, PAGE_SIZE = 1984, 64, 16


def test_a_quarter_of_the_context_keeps_the_predictions(smollm):  # noqa: F811
    model, tokenizer, _ = smollm
    text = "\n".join(pydoc_data.topics.topics.values())
    setup = evaluation.Setup(model, tokenizer, text, context=CONTEXT, steps=STEPS, rows=1)
    specs = [evaluation.PolicySpec(name) for name in ("gqa_h2o_sparse_attention", "sink_recent_attention")]
    cells = evaluation.grid(["perplexity"], specs, [PAGE_SIZE], [CONTEXT // 4], CONTEXT)
    sparse, recent = (results for _, results in evaluation.evaluate(setup, cells))
    assert sparse["top1"] >= 0.9
    assert sparse["kl"] < 0.08
    # The choice of pages is what does it: as many recent pages keep far less.
    assert recent["kl"] > 3 * sparse["kl"]


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
