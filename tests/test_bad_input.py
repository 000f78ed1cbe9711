"""Bad input is refused while tracing, by a ValueError that names the argument, what was expected and what came.

All public functions are called under `jax.eval_shape`, so that nothing can have run.
Letters: B request rows, M pages_per_request, P page_size, T new tokens, W budget, Hq/Hkv heads, D head_dim.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
import pallas_kernels

CONFIG = h2o_jax.CacheConfig(
    num_layers=1,
    num_kv_heads=2,
    head_dim=8,
    page_size=4,
    num_pages=16,
    max_requests=3,
    pages_per_request=8,
    dtype=jnp.float32,
)
TOKEN_CONFIG = dataclasses.replace(CONFIG, page_size=1)
POLICY = h2o_jax.get_policy("h2o_sparse_attention", top_k=2)
TOKEN_POLICY = h2o_jax.get_policy("h2o_token_sparse_attention", top_k=2)
DENSE = h2o_jax.get_policy("dense_attention")


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape):
    return array(*shape, dtype="int32")


def state_of(config=CONFIG, policy=POLICY):
    return jax.eval_shape(lambda: h2o_jax.init_state(config, policy))


STATE = state_of()
CACHE, TABLE = STATE.layers[0], STATE.table
SELECTION = h2o_jax.Selection(pages=ints(3, 2, 5), counts=ints(3, 2), scores=array(3, 2, 8))
GOOD = {
    "extend": {"table": TABLE, "num_tokens": ints(3)},
    "release": {"table": TABLE, "done": array(3, dtype="bool")},
    "write_tokens": {
        "cache": CACHE,
        "table": TABLE,
        "k": array(3, 5, 2, 8),
        "v": array(3, 5, 2, 8),
        "num_tokens": ints(3),
        "policy": POLICY,
    },
    "select_pages": {"cache": CACHE, "table": TABLE, "q": array(3, 4, 8), "policy": POLICY},
    "attend": {"cache": CACHE, "table": TABLE, "q": array(3, 4, 8), "selection": SELECTION},
    "decode_attention": {
        "cache": CACHE,
        "table": TABLE,
        "q": array(3, 4, 8),
        "k": array(3, 2, 8),
        "v": array(3, 2, 8),
        "policy": POLICY,
    },
    "prefill_attention": {
        "cache": CACHE,
        "table": TABLE,
        "q": array(3, 5, 4, 8),
        "k": array(3, 5, 2, 8),
        "v": array(3, 5, 2, 8),
        "num_tokens": ints(3),
        "policy": POLICY,
    },
    "write_pages": {
        "k_pool": array(16, 2, 4, 8),
        "v_pool": array(16, 2, 4, 8),
        "k": array(3, 5, 2, 8),
        "v": array(3, 5, 2, 8),
        "pages": ints(3, 8),
        "seq_lens": ints(3),
        "num_tokens": ints(3),
        "summaries": array(16, 2, 3, 8),
        "summary_kinds": ("mean", "max", "min"),
        "scores": array(16, 2, 4),
    },
    "envelope_scores": {
        "q": array(3, 4, 8),
        "summaries": array(16, 2, 3, 8),
        "pages": ints(3, 8),
        "start": ints(3),
        "stop": ints(3),
        "kinds": ("mean", "max", "min"),
        "group": "max",
    },
    "decayed_softmax_scores": {
        "q": array(3, 4, 8),
        "k_pool": array(16, 2, 1, 8),
        "scores": array(16, 2, 1),
        "pages": ints(3, 8),
        "start": ints(3),
        "stop": ints(3),
        "decay": 0.5,
        "scale": 1.0,
        "group": "mean",
    },
    "top_k_pages": {"scores": array(3, 2, 8), "start": ints(3), "stop": ints(3), "in_use": ints(3), "k": 2},
    "paged_attention": {
        "q": array(3, 4, 8),
        "k_pool": array(16, 2, 4, 8),
        "v_pool": array(16, 2, 4, 8),
        "pages": ints(3, 8),
        "seq_lens": ints(3),
        "selected": ints(3, 2, 5),
        "counts": ints(3, 2),
        "scale": 1.0,
    },
}


def call(name, **changes):
    """Traces a public function with GOOD arguments, some of them changed."""
    module = h2o_jax if hasattr(h2o_jax, name) else pallas_kernels
    arguments = GOOD[name] | changes
    traced = {k: x for k, x in arguments.items() if jax.tree.leaves(x) and not isinstance(x, (str, int, float, tuple))}
    traced = {k: x for k, x in traced.items() if not isinstance(x, h2o_jax.Policy)}
    static = {k: x for k, x in arguments.items() if k not in traced}
    return jax.eval_shape(lambda traced: getattr(module, name)(**traced, **static), traced)


@pytest.mark.parametrize("name", GOOD)
def test_the_good_arguments_are_good(name):
    call(name)


def wrong_arrays():
    """(function, argument, wrong array, name in the message) for shape and dtype of every array argument."""
    shapes = {
        "num_tokens": [(4,), (), (3, 1)],
        "done": [(2,), (3, 1)],
        "active": [(4,), ()],
        "seq_lens": [(2,), (3, 1)],
        "start": [(2,), ()],
        "stop": [(2,), (1, 3)],
        "pages": [(3,), (3, 8, 1)],
        "selected": [(3, 5), (3, 1, 5), (2, 2, 5)],
        "counts": [(3,), (3, 1), (3, 2, 5)],
    }
    for name, arguments in GOOD.items():
        arguments = dict(arguments)
        if name in ("select_pages", "attend", "decode_attention"):
            arguments["active"] = array(3, dtype="bool")
        for argument, good in arguments.items():
            if not isinstance(good, jax.ShapeDtypeStruct):
                continue
            size = list(good.shape)
            bad = shapes.get(argument) or [
                size[:-1],
                [*size, 1],
                [*size[:-1], size[-1] + 1] if argument != "scores" or name != "top_k_pages" else [],
            ]
            for shape in bad:
                yield name, argument, array(*shape, dtype=good.dtype)
            kind = "float32" if good.dtype != jnp.float32 else "int32"
            yield name, argument, array(*size, dtype=kind)


def str_of(x):
    return x if isinstance(x, str) else f"{x.dtype}{list(x.shape)}".replace(" ", "")


@pytest.mark.parametrize(("name", "argument", "bad"), list(wrong_arrays()), ids=str_of)
def test_wrong_shapes_and_dtypes(name, argument, bad):
    if (name, argument, bad.ndim) in {("prefill_attention", "k", 1)}:
        pytest.skip("see test_k_of_no_tokens")
    with pytest.raises(ValueError) as error:
        call(name, **{argument: bad})
    message = str(error.value)
    # A wrong k makes q's or v's expected shape wrong as well, and the other way round.
    twins = {"k": {"q", "v"}, "v": {"k"}, "k_pool": {"q", "v_pool", "k", "scores"}, "v_pool": {"k_pool"}}
    twins |= {"pages": {"q", "k", "v"}, "summaries": {"q"}, "scores": {"k_pool", "start"}, "q": set()}
    named = {argument} | twins.get(argument, set())
    assert message.split(":")[0] in named, message
    got = str(list(bad.shape)) in message or f"got {bad.dtype}" in message or "got [" in message
    assert "expected" in message and got, message


DECODING = ["select_pages", "attend", "decode_attention"]


@pytest.mark.parametrize(
    "name", [*DECODING, "prefill_attention", "envelope_scores", "decayed_softmax_scores", "paged_attention"]
)
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_query_heads_that_do_not_divide(name, heads):
    shape = (3, 5, heads, 8) if name == "prefill_attention" else (3, heads, 8)
    with pytest.raises(ValueError, match=f"^q: expected a multiple of num_kv_heads = 2 query heads, got {heads}"):
        call(name, q=array(*shape))


@pytest.mark.parametrize("name", [n for n in GOOD if n not in ("extend", "release")])
@pytest.mark.parametrize("implementation", ["cuda", "XLA", "", "triton", 3])
def test_unknown_implementation(name, implementation):
    with pytest.raises(ValueError) as error:
        call(name, implementation=implementation)
    message = str(error.value)
    assert message.startswith("implementation: expected None or one of ('xla', 'pallas', 'pallas_interpret')")
    assert message.endswith(f"got {implementation!r}")


@pytest.mark.parametrize("policy", ["dense_attention", "sink_recent_attention"])
def test_unknown_implementation_where_nothing_is_scored(policy):
    policy = h2o_jax.get_policy(policy)
    with pytest.raises(ValueError, match="^implementation: expected None or one of"):
        call("select_pages", cache=state_of(policy=policy).layers[0], policy=policy, implementation="cuda")


@pytest.mark.parametrize("other", ["float16", "bfloat16"])
@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize("name", ["write_tokens", "decode_attention", "prefill_attention", "write_pages"])
def test_keys_and_values_have_the_dtype_of_the_pool(name, argument, other):
    bad = array(*GOOD[name][argument].shape, dtype=other)
    with pytest.raises(ValueError, match=f"^{argument}: expected dtype float32, got {other}"):
        call(name, **{argument: bad})


@pytest.mark.parametrize("name", [*DECODING, "prefill_attention"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_queries_may_have_another_dtype(name, dtype):
    q = array(*GOOD[name]["q"].shape, dtype=dtype)
    out = call(name, q=q)
    out = out if name == "attend" else out[1]
    assert name == "select_pages" or (out.shape, out.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize("name", ["write_tokens", "select_pages", "decode_attention", "prefill_attention"])
@pytest.mark.parametrize("other", ["block_sparse_attention", "gqa_quest_sparse_attention", "dense_attention"])
def test_a_cache_made_for_another_policy(name, other):
    policy = h2o_jax.get_policy(other, **({} if other == "dense_attention" else {"top_k": 2}))
    message = re.escape(f"cache: expected the summaries of {type(policy).__name__}, {policy.summary_kinds}, got")
    with pytest.raises(ValueError, match=f"^{message}"):
        call(name, policy=policy)
    cache = state_of(policy=policy).layers[0]
    with pytest.raises(ValueError, match=r"^cache: expected the summaries of H2OPolicy, \('mean', 'max', 'min'\)"):
        call(name, cache=cache)


@pytest.mark.parametrize("name", ["select_pages", "decode_attention"])
def test_a_cache_without_the_scores_that_the_policy_needs(name):
    state = state_of(TOKEN_CONFIG, DENSE)
    with pytest.raises(ValueError, match="^cache: .*hh_score"):
        call(name, cache=state.layers[0], table=state.table, policy=TOKEN_POLICY)


@pytest.mark.parametrize("change", [{"page_size": 8}, {"page_size": 2}, {"num_pages": 12}, {"num_pages": 20}])
@pytest.mark.parametrize("name", ["write_tokens", *DECODING, "prefill_attention"])
def test_a_table_of_another_cache(name, change):
    table = state_of(dataclasses.replace(CONFIG, **change)).table
    (field,) = change
    with pytest.raises(ValueError, match=f"^table.*{field}|^cache.*{field}"):
        call(name, table=table)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", [n for n in pallas_kernels.__all__ if n != "top_k_pages"])
def test_a_pool_with_an_empty_axis(name, axis):
    argument = "summaries" if name == "envelope_scores" else "k_pool"
    shape = list(GOOD[name][argument].shape)
    shape[axis] = 0
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got {re.escape(str(shape))}"):
        call(name, **{argument: array(*shape)})
    if name == "write_pages":
        with pytest.raises(ValueError, match=r"^summaries: expected .* at least 1 each, got \[16, 2, 0, 8\]"):
            call(name, summaries=array(16, 2, 0, 8), summary_kinds=())


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", ["write_tokens", *DECODING, "prefill_attention"])
def test_a_cache_with_an_empty_axis(name, axis):
    shape = list(CACHE.k.shape)
    shape[axis] = 0
    pool = array(*shape)
    message = rf"^cache.k: expected \[num_pages, Hkv, P, D\] of at least 1 each, got {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        call(name, cache=dataclasses.replace(CACHE, k=pool, v=pool))


@pytest.mark.parametrize("name", ["extend", "release"])
def test_a_table_of_no_pages(name):
    with pytest.raises(ValueError, match="^table: expected num_pages of at least 1, got 0"):
        call(name, table=dataclasses.replace(TABLE, free_pages=ints(0)))
    with pytest.raises(ValueError, match="^table: expected page_size of at least 1, got 0"):
        call(name, table=dataclasses.replace(TABLE, page_size=0))


EMPTY = {
    "rows": lambda shape: (0, *shape[1:]) if shape[:1] == (3,) else shape,
    "new tokens": lambda shape: (3, 0, *shape[2:]) if shape[:2] == (3, 5) else shape,
    "logical pages": lambda shape: (3, 0) if shape == (3, 8) else shape,
    "chosen pages": lambda shape: (3, 2, 0) if shape == (3, 2, 5) else shape,
}


def emptied(name, empty):
    """The GOOD arguments with one of the sizes 0."""

    def shrink(x):
        return array(*EMPTY[empty](x.shape), dtype=x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    return jax.tree.map(shrink, GOOD[name])


EMPTIED = [(name, empty) for name in GOOD for empty in EMPTY if emptied(name, empty) != GOOD[name]]


@pytest.mark.parametrize(("name", "empty"), EMPTIED)
def test_empty_batches_and_rows_give_empty_results(name, empty):
    """No row, no new token, no logical page or none chosen: shapes as ever."""
    got = call(name, **emptied(name, empty))
    if name == "select_pages" and empty == "logical pages":
        assert got[1].scores.shape == (3, 2, 0)
    elif name in ("envelope_scores", "decayed_softmax_scores") and empty == "logical pages":
        assert jax.tree.leaves(got)[-1].shape == (3, 2, 0)
    else:
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(lambda x: EMPTY[empty](x.shape), call(name))


def test_nothing_chosen_is_nothing_read():
    arrays = emptied("paged_attention", "chosen pages")
    arrays = {name: jnp.ones(x.shape, x.dtype) for name, x in arrays.items() if name != "scale"}
    out, lse = jax.jit(functools.partial(pallas_kernels.paged_attention, scale=1.0))(**arrays)
    assert (out == 0).all() and jnp.isneginf(lse).all()


def test_k_of_no_tokens():
    with pytest.raises(ValueError, match="^k: expected shape"):
        call("prefill_attention", k=array(3))


def test_a_selection_of_another_batch():
    other = h2o_jax.Selection(pages=ints(4, 2, 5), counts=ints(4, 2), scores=array(4, 2, 8))
    with pytest.raises(ValueError, match="selection|counts"):
        call("attend", selection=other)


@pytest.mark.parametrize("field", ["pages", "counts"])
def test_a_selection_of_other_heads(field):
    good = GOOD["attend"]["selection"]
    bad = dataclasses.replace(good, **{field: ints(3, 3, *getattr(good, field).shape[2:])})
    with pytest.raises(ValueError):
        call("attend", selection=bad)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e40, 10**400, "1", "x"])
@pytest.mark.parametrize("name", ["attend", "decode_attention", "prefill_attention"])
def test_scale_that_is_no_number(name, scale):
    with pytest.raises(ValueError, match="^scale: expected"):
        call(name, scale=scale)


@pytest.mark.parametrize("name", ["unknown", "h2o_sparse", "", ["h2o_sparse_attention"], None])
def test_unknown_policy(name):
    message = re.escape(f"unknown policy {name!r}; registered are ")
    with pytest.raises(ValueError, match=f"^{message}.*h2o_sparse_attention"):
        h2o_jax.get_policy(name, top_k=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k: expected an integer >= 1, got 0"),
        ({"reserved_eos": 0}, "reserved_eos: expected an integer >= 1, got 0"),
        ({"reserved_bos": -1}, "reserved_bos: expected an integer >= 0, got -1"),
        ({"top_k": 2**31 - 2}, "top_k: expected at most 2147483647 pages with the reserved ones, got 2147483646"),
        ({"reserved_bos": 10**30}, "top_k: expected at most 2147483647 pages with the reserved ones, got 2"),
        ({"decay": 10**400}, r"decay: expected a number in \[0, 1\], got 10*"),
        ({"scale": 10**400}, "scale: expected None or a positive number, got 10*"),
        ({"decay": -0.5}, r"decay: expected a number in \[0, 1\], got -0.5"),
        ({"decay": 1.5}, r"decay: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_policy_options(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        h2o_jax.get_policy("h2o_token_sparse_attention", **({"top_k": 2} | options))


@pytest.mark.parametrize("name", ["write_tokens", "select_pages", "decode_attention", "prefill_attention"])
def test_a_policy_that_is_none(name):
    with pytest.raises(ValueError, match="^policy: expected a Policy, .*, got None"):
        call(name, policy=None)
    with pytest.raises(ValueError, match="^policy: expected a Policy, .*, got 'dense_attention'"):
        h2o_jax.init_state(CONFIG, "dense_attention")


@pytest.mark.parametrize("policy", ["h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_page_size_16_for_a_token_policy(policy):
    with pytest.raises(ValueError, match="^page_size: .* got 16"):
        state_of(dataclasses.replace(CONFIG, page_size=16), h2o_jax.get_policy(policy, top_k=2))


SIZES = [field.name for field in dataclasses.fields(h2o_jax.CacheConfig) if field.name != "dtype"]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("bad", [0, -1, 1.0, "4", None, True], ids=repr)
def test_wrong_size(field, bad):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(CONFIG, **{field: bad})
    assert str(error.value) == f"CacheConfig.{field}: expected a positive integer, got {bad!r}"


@pytest.mark.parametrize("bad", ["float64", "int8", "bf16", "float8_e4m3fn", None, int, object(), "", jnp.int32])
def test_wrong_dtype(bad):
    with pytest.raises(ValueError, match=r"^CacheConfig.dtype: expected one of \('bfloat16', 'float16', 'float32'\)"):
        dataclasses.replace(CONFIG, dtype=bad)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_pages": 2**31}, "num_pages"),
        ({"page_size": 2**16, "pages_per_request": 2**15}, r"pages_per_request \* page_size"),
        ({"max_requests": 2**16, "pages_per_request": 2**15}, r"max_requests \* pages_per_request"),
    ],
)
def test_sizes_that_int32_can_not_count(sizes, name):
    with pytest.raises(ValueError, match=f"^CacheConfig: {name} must fit in int32"):
        dataclasses.replace(CONFIG, **sizes)


def test_a_config_is_a_static_argument():
    same = dataclasses.replace(CONFIG, dtype="float32")
    assert same == CONFIG and hash(same) == hash(CONFIG)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.page_size = 8
    assert CONFIG.max_tokens == 32 and CONFIG.pool_shape == (16, 2, 4, 8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("top_k_pages", {"k": 0}, "k: expected a positive integer, got 0"),
        ("top_k_pages", {"k": True}, "k: expected a positive integer, got True"),
        ("top_k_pages", {"k": 2.0}, "k: expected a positive integer, got 2.0"),
        ("top_k_pages", {"reserved": -1}, "reserved: expected an integer >= 0, got -1"),
        ("top_k_pages", {"reserved": 3, "in_use": None}, "reserved: expected 0 without in_use, got 3"),
        ("envelope_scores", {"group": "sum"}, r"group: expected one of \('mean', 'max'\), got 'sum'"),
        ("decayed_softmax_scores", {"group": None}, r"group: expected one of \('mean', 'max'\), got None"),
        ("envelope_scores", {"kinds": ("max", "mean")}, "kinds: expected one of"),
        ("envelope_scores", {"kinds": ()}, "kinds: expected one of"),
        ("envelope_scores", {"kinds": ("mean",)}, r"summaries: expected shape .*, got \[16, 2, 3, 8\]"),
        ("write_pages", {"summary_kinds": ("median", "max", "min")}, "summary_kinds: expected one of .* 'median'"),
        ("write_pages", {"summary_kinds": ("mean",)}, r"summaries: expected shape .*, got \[16, 2, 3, 8\]"),
        ("decayed_softmax_scores", {"decay": -0.5}, "decay: expected a number in .* got -0.5"),
        ("decayed_softmax_scores", {"decay": 1.5}, "decay: expected a number in .* got 1.5"),
        ("decayed_softmax_scores", {"decay": float("nan")}, "decay: expected a number in .* got nan"),
        (
            "decayed_softmax_scores",
            {"k_pool": array(16, 2, 4, 8), "scores": array(16, 2, 4)},
            r"k_pool: expected shape .*, got \[16, 2, 4, 8\]",
        ),
    ],
)
def test_wrong_options_of_the_ops(name, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(name, **change)


@pytest.mark.parametrize("name", [n for n in GOOD if "implementation" in n or n in DECODING])
def test_values_are_never_looked_at(name):
    """What only a run can know is not an error: lengths past the row trace like any other."""
    call(name)
    with pytest.raises(ValueError):
        call(name, table=dataclasses.replace(TABLE, pages=ints(4, 8)))


@pytest.mark.parametrize("name", ["extend", "release", "write_tokens", "prefill_attention"])
def test_a_list_is_no_array(name):
    argument = "done" if name == "release" else "num_tokens"
    with pytest.raises(ValueError, match=rf"^{argument}: expected an array \[B\], got a list"):
        getattr(h2o_jax, name)(**(GOOD[name] | {argument: [1, 0, 1]}))


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_num_tokens_of_a_wrong_dtype_in_x64(dtype):
    with jax.enable_x64(True):
        for name in ("extend", "write_tokens", "prefill_attention"):
            with pytest.raises(ValueError, match=f"^num_tokens: expected dtype int32, got {np.dtype(dtype).name}"):
                call(name, num_tokens=array(3, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "kinds"),
    [
        ("extend", "table", STATE, "PageTable, got a PagedState"),
        ("extend", "table", (TABLE, ints(3)), "PageTable, got a tuple"),
        ("release", "table", CACHE, "PageTable, got a LayerCache"),
        ("write_tokens", "cache", STATE, "LayerCache, got a PagedState"),
        ("select_pages", "cache", (CACHE, CACHE), "LayerCache, got a tuple"),
        ("decode_attention", "cache", TABLE, "LayerCache, got a PageTable"),
        ("decode_attention", "table", STATE, "PageTable, got a PagedState"),
        ("prefill_attention", "cache", TABLE, "LayerCache, got a PageTable"),
        ("attend", "selection", (CACHE, SELECTION), "Selection, got a tuple"),
    ],
)
def test_an_argument_of_another_kind(name, argument, wrong, kinds):
    with pytest.raises(ValueError, match=f"^{argument}: expected a {kinds}"):
        call(name, **{argument: wrong})


def test_a_state_or_config_of_another_kind():
    for arguments, message in (
        ((CONFIG, STATE), "state: expected a PagedState, got a CacheConfig"),
        ((STATE, POLICY), "config: expected a CacheConfig, got a H2OPolicy"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            h2o_jax.check_state(*arguments)
    with pytest.raises(ValueError, match="^config: expected a CacheConfig, got a dict$"):
        h2o_jax.init_state({}, POLICY)
    with pytest.raises(ValueError, match="^cache: expected a LayerCache, got a PagedState$"):
        h2o_jax.page_summaries(STATE)


@pytest.mark.parametrize("name", ["extend", "release", "select_pages", "decode_attention"])
def test_a_table_with_too_few_lengths(name):
    with pytest.raises(ValueError, match=r"^table.seq_lens: expected shape \[B\] = \[3\], got \[1\]"):
        call(name, table=dataclasses.replace(TABLE, seq_lens=ints(1)))


def test_a_cache_whose_values_differ_from_its_keys():
    wrong = (array(16, 2, 4, 9), r"shape .* = \[16, 2, 4, 8\]"), (array(16, 2, 4, 8, dtype="int8"), "dtype float32")
    for v, message in wrong:
        with pytest.raises(ValueError, match=f"^cache.v: expected {message}"):
            call("attend", cache=dataclasses.replace(CACHE, v=v))


@pytest.mark.parametrize("tokens", [2**31 + 5, 2**32 + 1, -(2**31) - 1])
def test_numpy_integers_that_int32_does_not_hold(tokens):
    state = h2o_jax.init_state(CONFIG, POLICY)
    with pytest.raises(ValueError, match=f"^num_tokens: expected values that int32 holds, got .*{tokens}"):
        h2o_jax.extend(state.table, np.array([1, tokens, 1]))
    _, ok = h2o_jax.extend(state.table, np.array([1, 2, 1]))
    assert ok.all()


@pytest.mark.parametrize("name", [name for name in GOOD if name not in ("extend", "release")])
def test_compiled_kernels_need_a_gpu(name):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(NotImplementedError, match="^implementation: 'pallas' needs a CUDA GPU, .* backend is cpu"):
        call(name, implementation="pallas")


def test_a_token_policy_with_a_cache_of_larger_pages():
    with pytest.raises(ValueError, match="^page_size: H2OTokenPolicy needs pages of 1 token, got 4"):
        call("select_pages", policy=TOKEN_POLICY)


def test_numpy_integers_of_the_ops():
    shapes = jax.eval_shape(
        functools.partial(pallas_kernels.top_k_pages, k=np.int64(2), reserved=np.int32(3), filler=np.int64(9)),
        *(array(3, 2, 8), ints(3), ints(3)),
        in_use=ints(3),
    )
    assert shapes.shape == (3, 2, 5)
