"""The allocator: who gets pages, in which order, and that none is lost.

Letters: B request rows, M pages_per_request, P page_size.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax

INT32 = np.iinfo(np.int32)
JITTED = {"extend": jax.jit(h2o_jax.extend), "release": jax.jit(h2o_jax.release)}


def make(batch=4, num_pages=8, pages_per_request=4, page_size=4):
    config = h2o_jax.CacheConfig(1, 1, 2, page_size, num_pages, batch, pages_per_request, jnp.float32)
    state = h2o_jax.init_state(config, h2o_jax.get_policy("dense_attention"))
    return state.table, functools.partial(check, state, config)


def check(state, config, table):
    h2o_jax.check_state(dataclasses.replace(state, table=table), config)


def extend(table, *num_tokens):
    table, ok = JITTED["extend"](table, jnp.array(num_tokens, jnp.int32))
    return table, ok.tolist()


def release(table, *done):
    return JITTED["release"](table, jnp.array(done, bool))


def owned(table):
    pages = np.asarray(table.pages)
    return [[page for page in row if page < table.num_pages] for row in pages.tolist()]


def assert_row_equal(before, after, row):
    np.testing.assert_array_equal(after.pages[row], before.pages[row])
    assert int(after.seq_lens[row]) == int(before.seq_lens[row])


def test_extend_gives_distinct_pages_and_adds_lengths():
    table, check = make()
    table, ok = extend(table, 1, 4, 5, 0)
    check(table)
    assert ok == [True] * 4
    assert table.seq_lens.tolist() == [1, 4, 5, 0]
    assert [len(row) for row in owned(table)] == [1, 1, 2, 0]
    assert table.pages_in_use.tolist() == [1, 1, 2, 0]
    assert int(table.num_free) == 4
    assert {x.dtype.name for x in jax.tree.leaves(table)} == {"int32"}


def test_extend_fills_the_last_page_before_it_takes_another():
    table, check = make()
    for length in range(1, 17):
        earlier = owned(table)[0]
        table, ok = extend(table, 1, 0, 0, 0)
        check(table)
        assert ok[0] and len(owned(table)[0]) == -(-length // 4)
        assert owned(table)[0][: len(earlier)] == earlier, "pages that a row has stay where they are"


def test_extend_by_zero_changes_nothing():
    table, _ = make()
    table, _ = extend(table, 3, 9, 0, 16)
    after, ok = extend(table, 0, 0, 0, 0)
    assert ok == [True] * 4
    jax.tree.map(np.testing.assert_array_equal, after, table)


def test_a_row_longer_than_its_pages_is_refused_by_itself():
    table, check = make()
    after, ok = extend(table, 17, 1, 10**9, 4)
    check(after)
    assert ok == [False, True, False, True]
    assert after.seq_lens.tolist() == [0, 1, 0, 4]
    full, ok = extend(after, 0, 15, 0, 0)  # to the brim
    assert ok == [True] * 4
    for tokens in (1, 17):
        again, ok = extend(full, 0, tokens, 0, 1)
        assert ok == [True, False, True, True]
        assert_row_equal(full, again, 1)


def test_the_first_misfit_refuses_later_rows_that_need_pages():
    table, check = make(batch=5, num_pages=5)
    table, ok = extend(table, 6, 0, 0, 0, 1)
    assert ok == [True] * 5 and int(table.num_free) == 2
    # Row 1 takes one page. Row 2 does not fit. Row 3 would, but comes after it; row 4 needs none.
    after, ok = extend(table, 2, 4, 8, 4, 3)
    check(after)
    assert ok == [True, True, False, False, True]
    assert after.seq_lens.tolist() == [8, 4, 0, 0, 4]
    assert int(after.num_free) == 1


def test_all_or_nothing_for_a_row():
    table, check = make(batch=2, num_pages=3)
    after, ok = extend(table, 16, 0)
    check(after)
    assert ok == [False, True]
    jax.tree.map(np.testing.assert_array_equal, after, table)


def test_a_full_pool_still_serves_rows_that_need_no_page():
    table, check = make(batch=3, num_pages=2)
    table, ok = extend(table, 1, 1, 0)
    assert int(table.num_free) == 0
    after, ok = extend(table, 3, 4, 1)
    check(after)
    assert ok == [True, False, False] and after.seq_lens.tolist() == [4, 1, 0]


@pytest.mark.parametrize("tokens", [-1, -4, INT32.min, INT32.min + 1, INT32.max, INT32.max - 1, 10**9])
def test_impossible_numbers_of_tokens(tokens):
    table, check = make()
    table, _ = extend(table, 5, 3, 1, 0)
    after, ok = extend(table, 1, tokens, 1, tokens)
    check(after)
    assert ok == [True, False, True, False]
    assert_row_equal(table, after, 1)
    assert_row_equal(table, after, 3)
    assert after.seq_lens.tolist() == [6, 3, 2, 0]


def test_rows_of_the_greatest_length():
    """A row may hold up to 2^31 - 1 tokens; no sum on the way there may wrap."""
    table, _ = make(batch=2, num_pages=2, pages_per_request=1)
    table = dataclasses.replace(table, page_size=int(INT32.max))
    table, ok = jax.jit(h2o_jax.extend)(table, jnp.array([INT32.max, INT32.max - 1], jnp.int32))
    assert ok.all() and table.seq_lens.tolist() == [INT32.max, INT32.max - 1]
    assert table.pages_in_use.tolist() == [1, 1]
    table, ok = jax.jit(h2o_jax.extend)(table, jnp.array([1, 1], jnp.int32))
    assert ok.tolist() == [False, True]
    table = jax.jit(h2o_jax.release)(table, jnp.array([True, True]))
    assert int(table.num_free) == 2 and table.seq_lens.tolist() == [0, 0]


def test_release_gives_all_pages_back_and_empties_the_row():
    table, check = make()
    table, _ = extend(table, 16, 3, 5, 0)
    before = owned(table)
    table = release(table, True, False, True, True)
    check(table)
    assert table.seq_lens.tolist() == [0, 3, 0, 0] and owned(table) == [[], before[1], [], []]
    assert int(table.num_free) == 7
    free = table.free_pages[:7].tolist()
    assert set(free) == set(range(8)) - set(before[1])


def test_release_is_idempotent():
    table, check = make()
    table, _ = extend(table, 16, 3, 5, 0)
    once = release(table, True, True, False, False)
    twice = release(once, True, True, False, False)
    check(twice)
    jax.tree.map(np.testing.assert_array_equal, twice, once)
    jax.tree.map(np.testing.assert_array_equal, release(once, *[False] * 4), once)


class Model:
    """The allocator as plain Python: which row holds how many tokens, and how many pages are free."""

    def __init__(self, batch, num_pages, pages_per_request, page_size):
        self.lengths, self.free = [0] * batch, num_pages
        self.room, self.page_size = pages_per_request * page_size, page_size

    def extend(self, num_tokens):
        ok, full = [], False
        for row, tokens in enumerate(num_tokens):
            length = self.lengths[row] + tokens
            if tokens < 0 or length > self.room:
                ok.append(False)
                continue
            need = -(-length // self.page_size) - -(-self.lengths[row] // self.page_size)
            full = full or need > self.free
            ok.append(need == 0 or not full)
            if ok[-1]:
                self.lengths[row], self.free = length, self.free - need
        return ok

    def release(self, done):
        for row, yes in enumerate(done):
            if yes:
                self.free += -(-self.lengths[row] // self.page_size)
                self.lengths[row] = 0


SIZES = [(4, 8, 4, 4), (3, 5, 6, 1), (5, 20, 3, 2)]  # compiled once each
TOKENS = st.one_of(st.integers(0, 5), st.integers(-2, 30), st.sampled_from([INT32.min, INT32.max]))


@pytest.mark.parametrize("sizes", SIZES, ids=["oversubscribed", "one-token pages", "roomy"])
@hypothesis.settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(data=st.data())
def test_any_sequence_agrees_with_the_model(sizes, data):
    table, check = make(*sizes)
    model, batch = Model(*sizes), sizes[0]
    for _ in range(data.draw(st.integers(1, 12))):
        before, pages = table, owned(table)
        if data.draw(st.integers(0, 3)):
            num_tokens = data.draw(st.lists(TOKENS, min_size=batch, max_size=batch))
            table, ok = extend(table, *num_tokens)
            assert ok == model.extend(num_tokens)
            for row in range(batch):
                if not ok[row]:
                    assert_row_equal(before, table, row)
                assert owned(table)[row][: len(pages[row])] == pages[row]
        else:
            done = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
            table = release(table, *done)
            model.release(done)
        check(table)
        assert table.seq_lens.tolist() == model.lengths and int(table.num_free) == model.free


def primitives(jaxpr):
    """Names of all primitives of a jaxpr, those of inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


@pytest.mark.parametrize("function", ["extend", "release"])
def test_nothing_is_sorted_looped_over_or_sent_to_the_host(function):
    table, _ = make(batch=64, num_pages=4096, pages_per_request=64)
    argument = {"extend": jnp.ones(64, jnp.int32), "release": jnp.ones(64, bool)}[function]
    jaxpr = jax.make_jaxpr(getattr(h2o_jax, function))(table, argument)
    used = set(primitives(jaxpr.jaxpr))
    assert "cumsum" in used, "the walk finds nothing"
    forbidden = {"sort", "top_k", "while", "scan", "pure_callback", "io_callback", "debug_callback", "device_put"}
    assert not used & forbidden
    pool_sized = [
        eqn.primitive.name for eqn in jaxpr.jaxpr.eqns for out in eqn.outvars if out.aval.shape == (4096,)
    ]
    assert pool_sized in ([], ["scatter"]), "work that grows with the pool"


def test_no_transfer_to_the_host():
    table, _ = make()
    num_tokens, done = jnp.array([1, 2, 3, 4], jnp.int32), jnp.array([True, False, True, False])
    extend(table, 1, 2, 3, 4), release(table, True, False, True, False)  # compile
    with jax.transfer_guard("disallow"):
        after, ok = JITTED["extend"](table, num_tokens)
        after = JITTED["release"](after, done)
    assert after.seq_lens.tolist() == [0, 2, 0, 4]
