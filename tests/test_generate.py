"""Generation with a tiny random model: ragged batches, stopping, sampling, refusals, compilations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax
from h2o_jax import generate as generate_module
from h2o_jax.generate import GenerationLoop, check_stop_tokens, generate
from h2o_jax.models import Llama, LlamaConfig
from h2o_jax.sampling import sample_top_p
from h2o_jax.teacher_forcing import agreement, teacher_forced_logits

VOCAB = 61
PROMPTS = [[5, 9, 33], [7] * 21, [1], [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 40)]]
SCORING = [name for name in h2o_jax.list_policies() if name not in ("dense_attention", "sink_recent_attention")]


def tiny_model():
    config = LlamaConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


DENSE = h2o_jax.get_policy("dense_attention")
SPARSE = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=2, reserved_eos=1)


def run(model, prompts, policy=DENSE, *, max_new_tokens=12, page_size=4, **options):
    """`generate` with sizes that most tests share, so that they share its compilations."""
    config = model.cache_config(4, 64 // page_size, page_size)
    return generate(model, prompts, policy=policy, max_new_tokens=max_new_tokens, config=config, **options)


def test_dense_generation_is_the_repeated_forward(model):
    tokens = list(PROMPTS[0])
    state = h2o_jax.init_state(model.cache_config(1, 1, 32), DENSE)
    forward = jax.jit(lambda state, tokens, count: model(state, tokens, count, policy=DENSE)[1])
    for _ in range(12):
        count = jnp.array([len(tokens)], jnp.int32)
        table, _ = h2o_jax.extend(state.table, count)
        padded = jnp.array([tokens + [0] * (32 - len(tokens))], jnp.int32)
        logits = forward(h2o_jax.PagedState(table, state.layers), padded, count)
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    assert run(model, PROMPTS)[0] == tokens[len(PROMPTS[0]) :]


def test_ragged_batch_equals_each_prompt_alone(model):
    together = run(model, PROMPTS, SPARSE)
    assert [len(tokens) for tokens in together] == [12] * len(PROMPTS)
    for prompt, tokens in zip(PROMPTS, together):
        assert run(model, [prompt], SPARSE) == [tokens]


def test_generate_is_a_name_of_the_package(model):
    assert "generate" in h2o_jax.__all__
    with pytest.raises(ValueError, match="prompts: expected at least one"):
        h2o_jax.generate(model, [], policy=DENSE, max_new_tokens=1)


def test_sizes_fitted_to_the_prompts_give_the_same_tokens(model):
    assert generate(model, PROMPTS, policy=SPARSE, max_new_tokens=12, page_size=4) == run(model, PROMPTS, SPARSE)


@pytest.mark.parametrize("name", SCORING)
def test_a_budget_that_covers_the_context_gives_the_dense_tokens(model, name):
    policy = h2o_jax.get_policy(name, top_k=64)
    assert run(model, PROMPTS, policy, page_size=policy.page_size or 4) == run(model, PROMPTS)


def test_a_small_budget_changes_the_logits(model):
    prompt, continuation = PROMPTS[3], PROMPTS[3][:10]
    exact = teacher_forced_logits(model, prompt, continuation, policy=DENSE, page_size=4)
    sparse = teacher_forced_logits(model, prompt, continuation, policy=SPARSE, page_size=4)
    np.testing.assert_array_equal(exact[0], sparse[0])  # prefill is dense
    assert agreement(exact, sparse).mean_kl > 1e-6
    assert agreement(exact, exact) == (1.0, 0.0)
    for rows in ((10, 3), (0, 0)):
        message = rf"dense_logits, policy_logits: expected one shape .*; got \[{rows[0]}, 61\], \[{rows[1]}, 61\]"
        with pytest.raises(ValueError, match=message):
            agreement(exact[: rows[0]], sparse[: rows[1]])
    for wrong in ([], [VOCAB]):
        with pytest.raises(ValueError, match="continuation: expected .*token id"):
            teacher_forced_logits(model, prompt, wrong, policy=DENSE, page_size=4)
    for name, pair in (("dense", (exact.at[0, 0].set(jnp.nan), sparse)), ("policy", (exact, sparse / 0))):
        with pytest.raises(FloatingPointError, match=f"{name}_logits: expected finite numbers, got NaN"):
            agreement(*pair)


def test_logits_that_are_not_finite_are_no_tokens(model):
    """Of the rows alone that hold a request and have not met a stop token."""

    def prefilled(hidden_row=0, cached_rows=(), **options):
        config = model.cache_config(4, 16, 4)
        loop = GenerationLoop(model, PROMPTS[:3], policy=DENSE, max_new_tokens=12, config=config, **options)
        for _ in loop.prefill():
            loop._hidden = loop._hidden.at[hidden_row].set(jnp.nan)
        for row in cached_rows:
            first, *layers = loop._state.layers
            v = first.v.at[loop._state.table.pages[row, 0]].set(jnp.nan)
            loop._state = h2o_jax.PagedState(loop._state.table, (dataclasses.replace(first, v=v), *layers))
        return loop

    stop = run(model, PROMPTS[:3])[2][0]
    message = r"logits: expected finite numbers, got NaN or infinity for prompts \[0\], computing in float32"
    with pytest.raises(FloatingPointError, match=message):
        prefilled(0).decode(1)
    assert prefilled(3).decode() == run(model, PROMPTS[:3])
    with pytest.raises(FloatingPointError, match=r"prompts \[1\]"):
        prefilled(3, (1, 2), stop_tokens=[stop]).decode()


def test_teacher_forced_logits_choose_the_generated_tokens(model):
    tokens = run(model, PROMPTS)[3][:10]
    logits = teacher_forced_logits(model, PROMPTS[3], tokens, policy=DENSE, page_size=4)
    assert logits.argmax(-1).tolist() == tokens


def test_dense_layers_read_everything(model):
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=2, reserved_eos=1, dense_layers=(0, 1))
    assert run(model, PROMPTS, policy) == run(model, PROMPTS)


def test_a_stop_token_ends_its_row_only(model):
    free = run(model, PROMPTS)
    stop = free[1][3]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert run(model, PROMPTS, stop_tokens=[stop]) == expected


STOPS = [3, 60]


@pytest.mark.parametrize(
    "stops",
    [STOPS, set(STOPS), iter(STOPS), np.array(STOPS, np.uint8), jnp.array(STOPS), list(jnp.array(STOPS))],
    ids=["list", "set", "iterator", "NumPy", "JAX", "JAX scalars"],
)
def test_stop_tokens_in_any_iterable(stops):
    assert check_stop_tokens(stops, VOCAB) == {3, 60}
    assert all(type(token) is int for token in check_stop_tokens([np.int64(3)], VOCAB))
    assert check_stop_tokens((), VOCAB) == check_stop_tokens(jnp.zeros(0, jnp.int32), VOCAB) == set()


@pytest.mark.parametrize(
    "stops",
    [
        "3",
        b"3",
        3,
        None,
        [True],
        [3.0],
        [-1],
        [VOCAB],
        [[3]],
        np.array([3.0]),
        np.array(3),
        jnp.array([True]),
        jnp.array([[3]]),
    ],
    ids=repr,
)
def test_stop_tokens_that_are_none(stops):
    with pytest.raises(ValueError, match=rf"^stop_tokens: expected a sequence of integers in \[0, {VOCAB}\), got "):
        check_stop_tokens(stops, VOCAB)


def test_a_loop_without_its_state_says_so(model, monkeypatch):
    loop = GenerationLoop(model, PROMPTS, policy=DENSE, max_new_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "prefill_chunk", None)
        with pytest.raises(TypeError):
            next(loop.prefill())
    with pytest.raises(RuntimeError, match="donated to a call that an exception ended; make a new loop"):
        next(loop.prefill())


def test_streaming_gives_the_same_tokens_with_one_compilation(model):
    loop = GenerationLoop(
        model, PROMPTS, policy=SPARSE, max_new_tokens=12, config=model.cache_config(4, 16, 4)
    )
    loop.compile()
    done = list(loop.prefill())
    assert done[-1] == sum(map(len, PROMPTS))
    before = generate_module.decode_loop._cache_size()
    rows = [[] for _ in PROMPTS]
    with pytest.raises(ValueError, match="num_tokens: expected None or a positive integer, got 0"):
        loop.decode(0)
    while not loop.finished:
        for row, new in zip(rows, loop.decode(5)):
            row.extend(new)
    assert generate_module.decode_loop._cache_size() == before
    assert rows == loop.tokens == run(model, PROMPTS, SPARSE)


def test_chunked_prefill_gives_the_same_tokens(model, monkeypatch):
    expected = run(model, PROMPTS, SPARSE)
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", 8)
    assert run(model, PROMPTS, SPARSE) == expected


def test_sampling_is_reproducible_and_a_row_does_not_depend_on_the_batch(model):
    first = run(model, PROMPTS, seed=3, temperature=1.5, top_p=0.95)
    assert run(model, PROMPTS, seed=3, temperature=1.5, top_p=0.95) == first
    assert run(model, PROMPTS, seed=4, temperature=1.5, top_p=0.95) != first
    assert run(model, PROMPTS[:1], seed=3, temperature=1.5, top_p=0.95) == first[:1]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.25, 0.15]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def draw(top_p, temperature=1.0):
        chosen = sample_top_p(
            jnp.broadcast_to(logits, (4000, 4)), keys, jnp.float32(temperature), jnp.float32(top_p)
        )
        return np.bincount(np.asarray(chosen), minlength=4) / 4000

    np.testing.assert_allclose(draw(1.0), [0.1, 0.5, 0.25, 0.15], atol=0.03)
    np.testing.assert_allclose(draw(0.7), [0, 2 / 3, 1 / 3, 0], atol=0.03)
    np.testing.assert_allclose(draw(1e-6), [0, 1, 0, 0])
    assert draw(1.0, temperature=0.25)[1] > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts=[]), "prompts: expected at least one prompt"),
        (dict(prompts=[5, 6]), r"prompts\[0\]: expected a sequence of token ids, got 5"),
        (dict(prompts=["text"]), r"prompts\[0\]: expected a sequence of token ids, got 'text'"),
        (dict(stop_tokens=2), r"stop_tokens: expected a sequence of integers in \[0, 61\), got 2"),
        (dict(prompts=[[1], []]), r"prompts\[1\]: expected at least one token"),
        (dict(prompts=[[1, VOCAB]]), r"prompts\[0\]: expected token ids in \[0, 61\)"),
        (dict(prompts=[[0.5]]), r"prompts\[0\]: expected token ids"),
        (dict(prompts=[[1] * 125]), "125 tokens and 4 new ones exceed the model's context of 128"),
        (dict(max_new_tokens=0), "max_new_tokens: expected a positive integer, got 0"),
        (dict(max_new_tokens=True), "max_new_tokens: expected a positive integer, got True"),
        (dict(stop_tokens="a"), r"stop_tokens: expected a sequence of integers in \[0, 61\), got 'a'"),
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(seed=-1), r"seed: expected an integer in \[0, 2\*\*32\), got -1"),
        (dict(max_new_tokens=10**20), "new ones exceed the model's context of 128 tokens"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(page_size=0), "page_size"),
        (dict(policy="token", page_size=16), "page_size: .* needs pages of 1 token, got 16"),
        (dict(rows=1), "prompts: expected at most max_requests = 1, got 2"),
        (dict(row_pages=2), r"prompts\[1\]: 21 tokens and 4 new ones need 6 pages; .* pages_per_request = 2"),
        (dict(pool_pages=3), "prompts: 8 pages needed in all; the pool has num_pages = 3"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, change, message, monkeypatch):
    monkeypatch.setattr(generate_module, "prefill_chunk", None)
    options = dict(prompts=PROMPTS[:2], policy=DENSE, max_new_tokens=4)
    sizes = {name: change[name] for name in ("rows", "row_pages", "pool_pages") if name in change}
    change = {name: value for name, value in change.items() if name not in sizes}
    if sizes:
        options["config"] = model.cache_config(
            sizes.get("rows", 2), sizes.get("row_pages", 8), 4, sizes.get("pool_pages")
        )
    if change.get("policy") == "token":
        change["policy"] = h2o_jax.get_policy("h2o_token_sparse_attention", top_k=4)
    with pytest.raises(ValueError, match=message):
        generate(model, **(options | change))
