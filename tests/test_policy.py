"""The registry, the options of policies, and policies of a user's own.

Letters: B request rows, M pages_per_request, P page_size, Hq/Hkv heads, D head_dim.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import policy as policy_module
from tests.test_cases_numbers import decode, empty, prefill

BUILT_IN = (
    "sink_recent_attention",
    "dense_attention",
    "h2o_sparse_attention",
    "gqa_h2o_sparse_attention",
    "block_sparse_attention",
    "gqa_quest_sparse_attention",
    "h2o_token_sparse_attention",
    "gqa_h2o_token_sparse_attention",
)
NO_SCORES = ("sink_recent_attention", "dense_attention")
TOKEN = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")


def make(name, **options):
    return h2o_jax.get_policy(name, **({} if name in NO_SCORES else {"top_k": 4}) | options)


@pytest.fixture
def register(monkeypatch):
    """`register_policy` into a registry that is forgotten after the test."""
    monkeypatch.setattr(policy_module, "_REGISTRY", dict(policy_module._REGISTRY))
    return h2o_jax.register_policy


def test_list_policies():
    assert set(BUILT_IN) <= set(h2o_jax.list_policies())
    assert isinstance(h2o_jax.list_policies(), tuple)


@pytest.mark.parametrize("name", BUILT_IN)
def test_defaults_and_hash(name):
    policy = make(name)
    assert (policy.reserved_bos, policy.reserved_eos, policy.dense_layers) == (1, 2, ())
    assert policy.top_k == (0 if name in NO_SCORES else 4)
    assert policy == make(name) and hash(policy) == hash(make(name))
    assert policy != make(name, reserved_eos=3)
    assert make(name, dense_layers=[0, 2]).dense_layers == (0, 2)
    hash(make(name, dense_layers=[0, 2]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.reserved_bos = 0
    assert issubclass(type(policy), h2o_jax.Policy) and type(policy).__doc__


def test_defaults_of_the_options():
    for name in ("h2o_sparse_attention", "gqa_h2o_sparse_attention"):
        assert (make(name).w_avg, make(name).w_peak) == (1.0, 1.0)
    for name in TOKEN:
        policy = make(name)
        assert policy.decay == 1 - 2**-6 and policy.scale is None and policy.score_dtype == jnp.float32
        assert policy.resolve_scale(128) == pytest.approx(0.08838834764)
        assert make(name, scale=0.09).resolve_scale(128) == 0.09
        assert make(name, decay=1.0).decay == 1 and make(name, decay=1) == make(name, decay=1.0)
        assert make(name, decay=0).decay == 0
        assert make(name, score_dtype=jnp.bfloat16) == make(name, score_dtype="bfloat16")


def test_budget():
    assert make("h2o_sparse_attention", top_k=5, reserved_bos=0, reserved_eos=1).budget(64) == 6
    assert make("sink_recent_attention", reserved_bos=2).budget(64) == 4
    assert make("dense_attention").budget(64) == 64


def test_for_layer():
    policy = make("h2o_sparse_attention", dense_layers=(0, 3))
    dense = make("dense_attention")
    assert [policy.for_layer(i) == dense for i in range(5)] == [True, False, False, True, False]
    assert policy.for_layer(1) is policy


def test_dense_layers_are_dense(implementation):
    """Layer 0 of the two reads everything and keeps no summaries; layer 1 scores."""
    policy = make("h2o_sparse_attention", top_k=1, dense_layers=(0,))
    config = h2o_jax.CacheConfig(2, 1, 8, 2, 16, 1, 16, jnp.float32)
    state = h2o_jax.init_state(config, policy)
    table, _ = h2o_jax.extend(state.table, jnp.array([15], jnp.int32))
    counts = []
    for i, cache in enumerate(state.layers):
        mine = policy.for_layer(i)
        cache, chosen = h2o_jax.select_pages(cache, table, jnp.ones((1, 1, 8)), policy=mine)
        counts.append(int(chosen.counts[0, 0]))
        assert bool(jnp.isneginf(chosen.scores).all()) == (i == 0)
    assert counts == [8, 4]


@pytest.mark.parametrize("unknown", ["h2o", "", "H2O_sparse_attention", None, 3])
def test_unknown_policy_lists_the_names(unknown):
    with pytest.raises(ValueError) as error:
        h2o_jax.get_policy(unknown, top_k=4)
    assert repr(unknown) in str(error.value)
    assert all(name in str(error.value) for name in BUILT_IN)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n not in NO_SCORES])
def test_top_k_is_required(name):
    with pytest.raises(ValueError, match=f"{name}: option 'top_k' is required"):
        h2o_jax.get_policy(name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_unknown_option(name):
    with pytest.raises(ValueError, match=f"{name}: unknown option 'topk'; its options are .*'top_k', 'reserved_bos'"):
        make(name, topk=3)


WRONG_OPTIONS = [
    *((name, "top_k", bad) for name in BUILT_IN[2:] for bad in (0, -1, 1.0, "4", None, True)),
    ("sink_recent_attention", "top_k", 1),
    ("sink_recent_attention", "top_k", -1),
    ("dense_attention", "top_k", -1),
    *((name, "reserved_bos", bad) for name in BUILT_IN for bad in (-1, 0.5, None)),
    *((name, "reserved_eos", bad) for name in BUILT_IN for bad in (0, -1, 1.5, None)),
    *(("h2o_sparse_attention", "dense_layers", bad) for bad in ((-1,), (0.5,), ("0",), (True,))),
    *(("h2o_sparse_attention", w, bad) for w in ("w_avg", "w_peak") for bad in (np.nan, np.inf, "1", None, True)),
    *((name, "decay", bad) for name in TOKEN for bad in (1.5, -0.5, np.nan, "1", None, True)),
    *((TOKEN[0], "scale", bad) for bad in (0, -0.1, np.nan, np.inf)),
    *((TOKEN[0], "score_dtype", bad) for bad in ("float64", "int8", "bf16", None, jnp.int32)),
]


@pytest.mark.parametrize(("name", "option", "bad"), WRONG_OPTIONS)
def test_wrong_option(name, option, bad):
    with pytest.raises(ValueError, match=f"^{option}: expected") as error:
        make(name, **{option: bad})
    assert "got " in str(error.value)


def test_scale_that_is_no_number():
    with pytest.raises(ValueError, match="^scale: expected None or a positive number, got '0.1'"):
        make(TOKEN[0], scale="0.1")


@pytest.mark.parametrize("bad", [0, None, 1.5])
def test_dense_layers_that_are_no_sequence(bad):
    with pytest.raises(ValueError, match="^dense_layers: expected"):
        make("h2o_sparse_attention", dense_layers=bad)


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("page_size", [2, 16])
def test_token_policies_need_pages_of_one_token(name, page_size):
    config = h2o_jax.CacheConfig(1, 1, 8, page_size, 16, 1, 16)
    with pytest.raises(ValueError, match=f"page_size: .* 1 token, got {page_size}"):
        h2o_jax.init_state(config, make(name))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_policy_is_a_static_argument(name):
    traces = []

    @functools.partial(jax.jit, static_argnames="policy")
    def f(x, policy):
        traces.append(policy)
        return x + policy.budget(8)

    for _ in range(2):
        f(jnp.zeros(()), policy=make(name))
    assert len(traces) == 1
    f(jnp.zeros(()), policy=make(name, reserved_eos=3))
    assert len(traces) == 2


def test_a_taken_name_raises(register):
    with pytest.raises(ValueError, match="the name 'dense_attention' is taken by DensePolicy"):
        register("dense_attention")(h2o_jax.Policy)
    register("mine")(h2o_jax.Policy)
    with pytest.raises(ValueError, match="the name 'mine' is taken by Policy"):
        register("mine")(h2o_jax.Policy)
    assert h2o_jax.list_policies()[-1] == "mine"


@pytest.mark.parametrize("thing", [int, lambda: None, "policy", None])
def test_only_a_policy_can_be_registered(register, thing):
    with pytest.raises(ValueError, match=r"register_policy\('mine'\): expected a subclass of Policy, got"):
        register("mine")(thing)


def test_the_base_has_no_score():
    state = empty(policy := h2o_jax.Policy(top_k=1), pages=8)
    table, _ = h2o_jax.extend(state.table, jnp.array([32], jnp.int32))
    with pytest.raises(NotImplementedError, match=r"Policy does not define score\(\)"):
        h2o_jax.select_pages(state.layers[0], table, jnp.ones((1, 1, 16)), policy=policy)


def run(policy, steps=4, *, implementation=None, page_size=2, start=11):
    """Decodes with random inputs after a prompt of `start` tokens; the state and the selections."""
    rng = np.random.default_rng(0)
    state = empty(policy, pages=12, page_size=page_size, num_kv_heads=2)
    prompt = [jnp.asarray(rng.standard_normal((1, start, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
    options = {"policy": policy, "implementation": implementation}
    state, _ = prefill(state, *prompt, jnp.array([start], jnp.int32), **options)
    chosen, outs = [], []
    for _ in range(steps):
        new = [jnp.asarray(rng.standard_normal((1, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
        state, out, selection = decode(state, *new, **options)
        chosen.append(selection)
        outs.append(out)
    return state, chosen, outs


def test_a_policy_of_ten_lines(register, implementation):
    @register("largest_mean_attention")
    @dataclasses.dataclass(frozen=True)
    class LargestMean(h2o_jax.Policy):
        """Pages whose mean key is longest."""

        summary_kinds = ("mean",)

        def score(self, cache, table, q, window, *, implementation=None):
            means = h2o_jax.page_summaries(cache)["mean"].at[table.pages].get(mode="fill", fill_value=0)
            return cache, jnp.linalg.norm(means, axis=-1).swapaxes(1, 2)

    policy = h2o_jax.get_policy("largest_mean_attention", top_k=2)
    state, chosen, outs = run(policy, implementation=implementation)
    cache, pages = state.layers[0], np.asarray(state.table.pages[0])
    means = np.linalg.norm(np.asarray(h2o_jax.page_summaries(cache)["mean"], np.float64)[pages[:8]], axis=-1)
    for step, selection in enumerate(chosen):
        used = -(-(12 + step) // 2)
        for head in range(2):
            if used <= 5:
                expected = list(range(used))
            else:
                best = np.argsort(-means[1 : used - 2, head], kind="stable")[:2] + 1
                expected = [0, *sorted(best.tolist()), used - 2, used - 1]
            assert selection.pages[0, head, : selection.counts[0, head]].tolist() == expected
    assert all(np.isfinite(out).all() and np.asarray(out).any() for out in outs)


def test_a_policy_with_state_of_its_own(register, implementation):
    """Counts the writes of each page in `on_write`, and its readings in `score`."""

    @register("least_read_attention")
    @dataclasses.dataclass(frozen=True)
    class LeastRead(h2o_jax.Policy):
        def init_aux(self, config):
            zeros = jnp.zeros((config.num_pages,), jnp.int32)
            return super().init_aux(config) | {"writes": zeros, "scored": zeros + 0}

        def on_write(self, cache, table, k, v, num_tokens):
            assert k.ndim == v.ndim == 4
            writes = cache.aux["writes"]
            for token in range(k.shape[1]):
                position = table.seq_lens - num_tokens + token
                page = table.pages[jnp.arange(k.shape[0]), position // table.page_size]
                writes = writes.at[jnp.where(token < num_tokens, page, table.num_pages)].add(1, mode="drop")
            return dataclasses.replace(cache, aux=cache.aux | {"writes": writes})

        def score(self, cache, table, q, window, *, implementation=None):
            logical = jnp.arange(table.pages.shape[1])
            inside = (logical >= window.start[:, None]) & (logical < window.stop[:, None])
            page = jnp.where(inside, table.pages, table.num_pages)
            scored = cache.aux["scored"].at[page].add(1, mode="drop")
            scores = -scored.at[table.pages].get(mode="fill", fill_value=0)
            cache = dataclasses.replace(cache, aux=cache.aux | {"scored": scored})
            return cache, jnp.broadcast_to(scores[:, None], (q.shape[0], cache.k.shape[1], logical.size))

    policy = h2o_jax.get_policy("least_read_attention", top_k=2)
    state, chosen, _ = run(policy, implementation=implementation)
    pages, aux = np.asarray(state.table.pages[0]), state.layers[0].aux
    assert aux["writes"][pages[:8]].tolist() == [2] * 7 + [1]  # 15 tokens
    # Steps of 12, 13, 14 and 15 tokens have 6, 7, 7 and 8 pages: windows [1, 4), [1, 5), [1, 5), [1, 6).
    assert aux["scored"][pages[:8]].tolist() == [0, 4, 4, 4, 3, 1, 0, 0]
    assert np.isneginf(chosen[0].scores[0, :, 4:]).all() and chosen[0].scores.dtype == jnp.float32
    assert [c.pages[0, 0].tolist() for c in chosen] == [
        [0, 1, 2, 4, 5],
        [0, 1, 4, 5, 6],
        [0, 1, 4, 5, 6],
        [0, 4, 5, 6, 7],
    ]
    config = h2o_jax.CacheConfig(1, 2, 16, 2, 12, 1, 12, jnp.float32)
    h2o_jax.check_state(state, config)


@functools.partial(jax.jit, static_argnames="implementation")
def select_by(scores, implementation):
    """A row of 12 tokens, 6 of 12 pages, whose logical pages have the given scores, [12] or [B, Hkv, M]."""

    @dataclasses.dataclass(frozen=True)
    class Fixed(h2o_jax.Policy):
        def score(self, cache, table, q, window, *, implementation=None):
            return cache, jnp.broadcast_to(scores, (1, 2, 12)) if scores.shape == (12,) else scores

    state = empty(policy := Fixed(top_k=2), pages=12, page_size=2, num_kv_heads=2)
    table, _ = h2o_jax.extend(state.table, jnp.array([12], jnp.int32))
    q = jnp.ones((1, 4, 16))
    cache, chosen = h2o_jax.select_pages(state.layers[0], table, q, policy=policy, implementation=implementation)
    return chosen, h2o_jax.attend(cache, table, q, chosen, implementation=implementation)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([np.inf] + [0.0] * 3 + [np.inf] * 8, [1, 2]),  # what lies outside the window does not count
        ([np.nan] * 12, [1, 2]),
        ([0, np.nan, -1, -2, *[np.nan] * 8], [2, 3]),
        ([0, np.nan, -np.inf, np.nan, *[9.0] * 8], [1, 2]),  # NaN ranks below -inf; ties go to the lower
        ([0, -np.inf, -np.inf, -np.inf, *[0] * 8], [1, 2]),
        ([0, np.inf, 5, np.inf, *[0] * 8], [1, 3]),
        ([0, -0.0, 0.0, -0.0, *[0] * 8], [1, 2]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_odd_scores(scores, expected, dtype, implementation):
    chosen, out = select_by(jnp.asarray(scores, dtype), implementation)
    assert chosen.pages[0].tolist() == [[0, *expected, 4, 5]] * 2 and (chosen.counts == 5).all()
    got = np.asarray(chosen.scores[0, 0])
    assert got.dtype == np.float32 and np.isneginf(got[[0, *range(4, 12)]]).all()
    np.testing.assert_array_equal(got[1:4], np.array(scores[1:4], np.float32))
    assert np.isfinite(out).all()


def test_whole_numbers_are_scores(implementation):
    chosen, _ = select_by(jnp.arange(12, dtype=jnp.int32), implementation)
    assert chosen.pages[0].tolist() == [[0, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("shape", [(1, 12), (1, 2, 11), (1, 1, 12), (2, 2, 12), (1, 2, 12, 1)])
def test_scores_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"score\(\) of Fixed: expected shape \[B, Hkv, M\] = \[1, 2, 12\]"):
        jax.eval_shape(functools.partial(select_by, implementation=None), jnp.zeros(shape))


def step_of(**methods):
    """Writes 3 tokens and decodes one, by a policy of these methods and attributes, from an empty state."""
    cls = dataclasses.dataclass(frozen=True)(type("Mine", (h2o_jax.Policy,), methods))
    policy = cls(top_k=1, reserved_eos=1)
    config = h2o_jax.CacheConfig(1, 1, 4, 2, 8, 1, 8, jnp.float32)
    state = h2o_jax.init_state(config, policy)
    table, _ = h2o_jax.extend(state.table, jnp.array([9], jnp.int32))
    cache = h2o_jax.write_tokens(state.layers[0], table, *jnp.ones((2, 1, 9, 1, 4)), np.array([9]), policy=policy)
    return h2o_jax.select_pages(cache, table, jnp.ones((1, 2, 4)), policy=policy)


def zeros(cache, table):
    return jnp.zeros((table.pages.shape[0], cache.k.shape[1], table.pages.shape[1]))


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"summary_kinds": "mean"}, "summary_kinds of Mine: expected a tuple of ('mean', 'max', 'min'), got 'mean'"),
        ({"summary_kinds": ("median",)}, "summary_kinds of Mine: expected a tuple of ('mean', 'max', 'min'), got"),
        ({"init_aux": lambda self, config: None}, "init_aux() of Mine: expected a dict, got a NoneType"),
        (
            {"init_aux": lambda self, config: {"age": jnp.zeros(3)}},
            "init_aux() of Mine: expected 'age' of shape [8, ...], got [3]",
        ),
        ({"init_aux": lambda self, config: {"age": 0}}, "expected 'age' of shape [8, ...], got int"),
        (
            {"summary_kinds": ("mean",), "init_aux": lambda self, config: {}},
            "init_aux() of Mine: expected 'summaries' for summary_kinds",
        ),
        ({"on_write": lambda self, *_: None}, "on_write() of Mine: expected a LayerCache, got a NoneType"),
        (
            {"score": lambda self, cache, table, *_, **__: zeros(cache, table)},
            "score() of Mine: expected (cache, scores), got a ArrayImpl",
        ),
        (
            {"score": lambda self, cache, table, *_, **__: (table, zeros(cache, table))},
            "score() of Mine, cache: expected a LayerCache, got a PageTable",
        ),
        (
            {"score": lambda self, cache, table, *_, **__: (cache, 1j * zeros(cache, table))},
            "score() of Mine: expected real scores, got dtype complex64",
        ),
        ({"budget": lambda self, pages: 7}, "budget() of Mine: expected 3 or M, got 7"),
    ],
)
def test_what_a_policy_of_ones_own_must_keep_to(methods, message):
    good = {"score": lambda self, cache, table, *_, **__: (cache, zeros(cache, table))}
    _, chosen = step_of(**good)
    assert chosen.pages[0, 0].tolist() == [0, 1, 4]
    with pytest.raises(ValueError, match=re.escape(message)):
        step_of(**good | methods)


def test_options_that_can_not_be_hashed():
    @dataclasses.dataclass(frozen=True)
    class Weighted(h2o_jax.Policy):
        weights: list = dataclasses.field(default_factory=list)

    with pytest.raises(ValueError, match="^policy: expected hashable options, got .*Weighted"):
        h2o_jax.init_state(h2o_jax.CacheConfig(1, 1, 4, 2, 8, 1, 8), Weighted(top_k=1))


@pytest.mark.parametrize("name", [3, "", h2o_jax.Policy])
def test_a_policy_is_registered_under_a_name(name):
    before = h2o_jax.list_policies()
    with pytest.raises(ValueError, match="^register_policy: expected a name, .*, got"):
        h2o_jax.register_policy(name)
    assert h2o_jax.list_policies() == before


def test_dense_layers_are_a_set():
    assert make("h2o_sparse_attention", top_k=2, dense_layers=[2, 0, 2]).dense_layers == (0, 2)


def test_what_a_policy_declares_may_depend_on_x64():
    @dataclasses.dataclass(frozen=True)
    class Age(h2o_jax.Policy):
        def init_aux(self, config):
            return {"age": jnp.zeros(config.num_pages)}

        def score(self, cache, table, q, window, *, implementation=None):
            return cache, zeros(cache, table)

    def out():
        policy = Age(top_k=1)
        state = h2o_jax.init_state(h2o_jax.CacheConfig(1, 1, 4, 2, 8, 1, 8, "float32"), policy)
        table, _ = h2o_jax.extend(state.table, jnp.ones(1, jnp.int32))
        one = jnp.ones((1, 1, 4), jnp.float32)
        return h2o_jax.decode_attention(state.layers[0], table, one, one, one, policy=policy)[1]

    np.testing.assert_array_equal(out(), 1)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(out(), 1)


def test_numpy_integers_are_integers():
    policy = make("h2o_sparse_attention", top_k=np.int64(2), dense_layers=np.arange(2))
    assert policy == make("h2o_sparse_attention", top_k=2, dense_layers=(0, 1))
    sizes = [np.int32(size) for size in (1, 1, 8, 2, 16, 1, 16)]
    assert h2o_jax.CacheConfig(*sizes) == h2o_jax.CacheConfig(1, 1, 8, 2, 16, 1, 16)


def test_a_budget_beyond_the_row_is_not_attended_to(monkeypatch):
    """Filler past the row's M pages would cost, though it changes nothing."""
    from h2o_jax import decode as module

    widths = []
    attention = module.paged_attention
    monkeypatch.setattr(
        module, "paged_attention", lambda *args, **kw: widths.append(args[5].shape[2]) or attention(*args, **kw)
    )
    policy = make("h2o_sparse_attention", top_k=10_000)
    state = h2o_jax.init_state(h2o_jax.CacheConfig(1, 1, 8, 2, 16, 1, 16, jnp.float32), policy)
    table, _ = h2o_jax.extend(state.table, jnp.ones(1, jnp.int32))
    x = jnp.ones((1, 1, 8))
    _, out = h2o_jax.decode_attention(state.layers[0], table, x, x, x, policy=policy)
    assert widths == [16]
    np.testing.assert_array_equal(out, x)
