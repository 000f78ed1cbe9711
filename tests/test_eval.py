"""What `h2o_jax.eval` measures, against the library's own decode loop and NumPy float64.

Letters: B rows, M pages a row, P page size, Hkv KV heads, G query heads of each, D head_dim.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax, softmax

import h2o_jax
from h2o_jax.eval import coverage, passkey, perplexity
from h2o_jax.eval.baselines import OraclePolicy, RandomPolicy
from h2o_jax.eval.exact import page_mass
from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.eval.observed import observe
from h2o_jax.eval.prefix import prefill
from h2o_jax.eval.windows import Windows
from h2o_jax.models import load
from h2o_jax.policy import Window
from h2o_jax.state import LayerCache, PageTable
from h2o_jax.teacher_forcing import teacher_forced_logits
from tests import tiny_llama

CONTEXT, STEPS, ROWS, PAGE_SIZE = 40, 6, 2, 4
SPARSE = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=3)
TOKENS = np.random.default_rng(0).integers(3, tiny_llama.VOCAB, 200).astype(np.int32)


def nothing(_):
    pass


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    values = tiny_llama.config()
    return load(
        tiny_llama.write_directory(tmp_path_factory.mktemp("model"), values, tiny_llama.tensors(values))
    )


@pytest.fixture(scope="module")
def windows(loaded):
    return Windows(Layerwise(loaded[0]), [1], TOKENS, CONTEXT, STEPS, ROWS, nothing)


@pytest.fixture(scope="module")
def texts():
    """The windows, each an opening and the tokens from where it starts."""
    return [[1, *TOKENS[start:][: CONTEXT + STEPS].tolist()] for start in (0, len(TOKENS) // ROWS)]


def test_predictions_are_those_of_the_library(loaded, windows, texts):
    model = loaded[0]
    _, found = windows.run(SPARSE, PAGE_SIZE)
    for row, text in enumerate(texts):
        prompt, rest = text[:CONTEXT], text[CONTEXT:]
        dense, sparse = (
            np.asarray(
                teacher_forced_logits(model, prompt, rest, policy=policy, page_size=PAGE_SIZE), np.float64
            )[1:]
            for policy in (h2o_jax.get_policy("dense_attention"), SPARSE)
        )
        targets = rest[1:]
        logs = log_softmax(sparse, axis=-1)
        surprise = -logs[np.arange(STEPS), targets]
        np.testing.assert_allclose(found.surprise[:, row], surprise, rtol=1e-3, atol=1e-3)
        kl = (softmax(dense, axis=-1) * (log_softmax(dense, axis=-1) - logs)).sum(axis=-1)
        assert kl.max() > 1e-3  # the budget does cost something here
        np.testing.assert_allclose(found.kl[:, row], kl, rtol=2e-2, atol=1e-5)
        np.testing.assert_array_equal(found.same[:, row], sparse.argmax(-1) == dense.argmax(-1))
        np.testing.assert_array_equal(found.correct[:, row], sparse.argmax(-1) == targets)


def test_perplexity_is_the_mean_over_steps_and_windows(windows):
    _, found = windows.run(SPARSE, PAGE_SIZE)
    results = perplexity.summarise(found)
    assert results["perplexity"] == pytest.approx(np.exp(found.surprise.astype(np.float64).mean()))
    assert (
        results["kl"] == pytest.approx(np.mean(results["kl_by_step"])) and len(results["kl_by_step"]) == STEPS
    )
    dense = perplexity.summarise(windows.dense)
    assert (dense["kl"], dense["top1"]) == (0, 1)


def test_windows_do_not_overlap(loaded):
    with pytest.raises(ValueError, match="text: expected at least 230 tokens for 5 windows, got 200"):
        Windows(Layerwise(loaded[0]), [1], TOKENS, CONTEXT, STEPS, 5, nothing)


def test_a_ragged_prefill_serves_another_page_size(loaded):
    """Each row as if alone; what a policy's own prefill leaves is what the dense one is rewritten to."""
    model = Layerwise(loaded[0])
    prompts = [TOKENS[:37], TOKENS[50:59]]
    prefix = prefill(model, prompts, nothing)
    state = prefix.state_for(SPARSE, PAGE_SIZE, STEPS)
    h2o_jax.check_state(state, model.cache_config(2, -(-(37 + STEPS) // PAGE_SIZE), PAGE_SIZE))
    assert state.table.seq_lens.tolist() == [37, 9]
    for row, prompt in enumerate(prompts):
        alone = h2o_jax.init_state(model.cache_config(1, 10, PAGE_SIZE), SPARSE)
        padded = np.pad(prompt, (0, 40 - len(prompt)))[None]
        alone, _ = model.advance(alone, padded, np.array([len(prompt)], np.int32), policy=SPARSE)
        full = len(prompt) // PAGE_SIZE
        ours, theirs = (np.asarray(each.table.pages[i, :full]) for each, i in ((state, row), (alone, 0)))
        for a, b in zip(jax.tree.leaves(state.layers), jax.tree.leaves(alone.layers), strict=True):
            np.testing.assert_allclose(np.asarray(a)[ours], np.asarray(b)[theirs], rtol=1e-4, atol=1e-5)


def random_cache(rng, lengths, num_pages, page_size, num_kv_heads=2, head_dim=8):
    """A cache with NaN wherever no token stands, its table, and queries for G = 3."""
    pages = -(-max(lengths) // page_size)
    ids = rng.permutation(num_pages)
    table = np.full((len(lengths), pages), num_pages, np.int32)
    pool = np.full((num_pages, num_kv_heads, page_size, head_dim), np.nan, np.float32)
    rows, used = [], 0
    for row, length in enumerate(lengths):
        count = -(-length // page_size)
        table[row, :count] = ids[used : used + count]
        used += count
        keys = 2 * rng.standard_normal((length, num_kv_heads, head_dim)).astype(np.float32)
        for position, key in enumerate(keys):
            pool[table[row, position // page_size], :, position % page_size] = key
        rows.append(keys)
    q = rng.standard_normal((len(lengths), 3 * num_kv_heads, head_dim)).astype(np.float32)
    cache = LayerCache(
        jnp.asarray(pool), jnp.asarray(pool), {"observed": jnp.zeros((num_pages, num_kv_heads, 3))}
    )
    free = jnp.zeros(num_pages, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    return cache, PageTable(jnp.asarray(table), lengths, free, jnp.int32(0), page_size), jnp.asarray(q), rows


def exact_mass(q, keys, page_size, pages):
    """[Hkv, pages] float64 share of dense attention on each page."""
    length, num_kv_heads, head_dim = keys.shape
    logits = np.einsum("hgd,lhd->hgl", np.float64(q).reshape(num_kv_heads, -1, head_dim), np.float64(keys))
    mass = softmax(logits / np.sqrt(head_dim), axis=-1).mean(axis=1)
    padded = np.zeros((num_kv_heads, pages * page_size))
    padded[:, :length] = mass
    return padded.reshape(num_kv_heads, pages, page_size).sum(axis=-1)


def test_page_mass(rng):
    cache, table, q, keys = random_cache(rng, (22, 5, 0), 16, 4)
    found = np.asarray(jax.jit(page_mass)(cache, table, q))
    for row in range(2):
        np.testing.assert_allclose(found[row], exact_mass(q[row], keys[row], 4, 6), atol=1e-6)
    assert not found[2].any()


def best(scores, start, stop, count):
    """The pages of [start, stop) with the best scores, [Hkv] sets."""
    return [set(start + np.argsort(-row[start:stop], kind="stable")[:count]) for row in scores]


@pytest.mark.parametrize("choice", ["oracle", "last"])
def test_observations(rng, choice):
    """Mass and recall of the best pages, and of those that `sink_recent_attention` reads."""
    top_k, bos, eos = 2, 1, 1
    cache, table, q, keys = random_cache(rng, (22, 18, 9, 0), 16, 4)
    if choice == "oracle":
        inner = OraclePolicy(top_k, bos, eos)
    else:
        recent = h2o_jax.get_policy("sink_recent_attention", reserved_bos=bos, reserved_eos=top_k + 2)
        inner = coverage.scored(recent, 16)
        assert (inner.top_k, inner.reserved_eos) == (top_k, 2)
        eos = 2
    observed = observe(inner)
    select = jax.jit(h2o_jax.select_pages, static_argnames="policy")
    cache, selection = select(cache, table, q, policy=observed)
    if choice == "last":
        _, expected = select(cache, table, q, policy=recent)
        np.testing.assert_array_equal(selection.pages, expected.pages)
    for row, in_use in enumerate((6, 5, 3, 0)):
        found = np.asarray(cache.aux["observed"][table.pages[row, 0]]) if in_use else np.zeros((2, 3))
        if in_use <= observed.budget(6):  # all pages are read, nothing is chosen
            assert not found.any()
            continue
        mass = exact_mass(q[row], keys[row], 4, 6)
        start, stop = bos, in_use - eos
        good = best(mass, start, stop, top_k)
        for head, pages in enumerate(np.asarray(selection.pages[row])):
            np.testing.assert_allclose(found[head, 0], mass[head, pages].sum(), atol=1e-6)
            assert found[head, 1] == len(good[head] & set(pages.tolist())) / top_k
        assert (found[:, 2] == 1).all()
        if choice == "oracle":
            assert (found[:, 1] == 1).all()


def test_observing_changes_nothing_else(windows):
    """Coverage of an accumulating policy: the same predictions, and means within what they can be."""
    policy = h2o_jax.get_policy("gqa_h2o_token_sparse_attention", top_k=9)
    _, plain = windows.run(policy, 1)
    _, seen = windows.run(observe(policy), 1)
    np.testing.assert_array_equal(plain.surprise, seen.surprise)
    results = coverage.measure(windows, observe(policy), 1)
    assert np.shape(results["mass_by_head"]) == (tiny_llama.LAYERS, tiny_llama.KV_HEADS)
    assert 0 < results["recall"] < 1 and 12 / 46 < results["mass"] < 1
    assert results["mass"] == pytest.approx(np.mean(results["mass_by_head"]))


def test_a_model_that_is_not_finite_has_no_shares(loaded, monkeypatch):
    """As its most likely token is always the first, it would agree with itself, and read the best pages."""
    model = Layerwise(nnx.clone(loaded[0]))
    _, blocks = model._blocks[0]
    blocks["attention_norm"]["scale"][...] *= jnp.nan
    windows = Windows(model, [1], TOKENS, CONTEXT, STEPS, ROWS, nothing)
    found = perplexity.summarise(windows.dense)
    assert np.isnan([found[name] for name in ("perplexity", "kl", "top1")]).all()
    policy = h2o_jax.get_policy("gqa_h2o_token_sparse_attention", top_k=9)
    found = coverage.measure(windows, observe(policy), 1)
    assert np.isnan(found["mass"]) and np.isnan(found["recall"])
    monkeypatch.setattr(passkey, "QUESTION_TOKENS", 80)
    keys = passkey.Passkeys(model, loaded[1], "Hello world. " * 60, 300, 1, nothing)
    found = keys.measure(h2o_jax.get_policy("dense_attention"), 16)
    assert np.isnan([found["accuracy"], *found["accuracy_by_depth"].values()]).all()


def test_random_pages_differ_by_step_layer_row_and_seed(rng):
    cache, table, q, _ = random_cache(rng, (40, 40), 24, 4)
    window = Window(jnp.array([1, 1]), jnp.array([8, 8]))

    def scores(q=q, table=table, seed=0):
        return np.asarray(RandomPolicy(2, seed=seed).score(cache, table, q, window)[1])

    first = scores()
    np.testing.assert_array_equal(first, scores())
    later = PageTable(table.pages, table.seq_lens - 1, table.free_pages, table.num_free, 4)
    others = [scores(table=later), scores(q=q + 1), scores(seed=1), first[::-1], first[:, ::-1]]
    assert all((first != other).all() for other in others)
    many = np.concatenate([scores(q=q + i).ravel() for i in range(50)])
    assert abs(many.mean() - 0.5) < 0.03


def test_accuracy_needs_the_whole_answer():
    correct = np.zeros((4, 10), bool)
    counts, answers = np.full(10, 3), [2] * 10
    correct[1:3, :4] = True  # the answers of the first two depths
    correct[2, 4] = True  # half an answer
    correct[3, 5:] = correct[0, 5:] = True  # past the text, and in the question
    found = passkey.accuracy(correct, counts, answers)
    assert found == {
        "accuracy": 0.4,
        "accuracy_by_depth": {"0": 1.0, "25": 1.0, "50": 0.0, "75": 0.0, "100": 0.0},
    }


@pytest.mark.parametrize("depth", [0, 0.5, 1])
@pytest.mark.parametrize("chat", [True, False])
def test_hidden_number(loaded, depth, chat):
    """Text, question and number join to one text; the number stands at the nearest end of a sentence."""
    tokenizer = dataclasses.replace(loaded[1], chat_template=loaded[1].chat_template if chat else None)
    filler = tokenizer.encode("This is a sentence. " * 40)
    prompt, question, answer = passkey.hide(tokenizer, filler, depth, "86420")
    text, question, answer = (tokenizer.decode(part) for part in (prompt, question, answer))
    assert answer == "86420" and question.startswith("What is the pass key?") and question.endswith("is ")
    assert "What" not in text and len(prompt) <= len(filler)
    before, after = text.split("The pass key is 86420. Remember it. 86420 is the pass key.")
    before, after = (part.count("This is a sentence.") for part in (before, after))
    assert before + after > 20 and abs(before - depth * (before + after)) < 1
    if chat:
        assert "assistant\n" in question and text.startswith("user\n")


def test_passkeys_run_ragged(loaded, monkeypatch):
    """All tokens of question and number are fed, and only the number's are judged."""
    model, tokenizer = loaded
    monkeypatch.setattr(passkey, "QUESTION_TOKENS", 80)  # of a vocabulary of bytes
    keys = passkey.Passkeys(Layerwise(model), tokenizer, "Hello world. " * 60, 300, 1, nothing)
    seen = {}
    monkeypatch.setattr(
        passkey, "accuracy", lambda *args: seen.update(zip(("correct", "counts", "answers"), args))
    )
    keys.measure(h2o_jax.get_policy("dense_attention"), 16)
    assert seen["answers"] == [5] * 5 and len(set(seen["counts"])) == 1
    assert seen["correct"].shape == (seen["counts"][0], 5)
    monkeypatch.setattr(passkey, "QUESTION_TOKENS", 8)
    with pytest.raises(
        ValueError, match="question: expected at most 8 tokens with this model's template, got "
    ):
        passkey.Passkeys(Layerwise(model), tokenizer, "Hello world. " * 60, 300, 1, nothing)
    with pytest.raises(ValueError, match="text: expected at least 304 tokens for 5 passages of 300, got "):
        passkey.Passkeys(Layerwise(model), tokenizer, "Hello", 300, 1, nothing)
