"""Any order of extending, writing, decoding and releasing, against a plain model: hypothesis drives both.

`H2O_JAX_EXAMPLES=50000 python -m pytest tests/test_state_machine.py -n 0` is the long run; its seed is printed
with a failure.
"""

import collections
import dataclasses
import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import h2o_jax
from h2o_jax import reference
from tests import tolerance
from tests.worlds import filled_with_nan

EXAMPLES = int(os.environ.get("H2O_JAX_EXAMPLES", 2000))
ROWS, KV_HEADS, GROUP, SIZE, WRITTEN = 3, 2, 2, 4, 6  # SIZE: head_dim; WRITTEN: most tokens of one write


@dataclasses.dataclass(frozen=True)
class World:
    """A policy and the sizes it runs with; the rows together may ask for more pages than there are."""

    policy: str
    page_size: int
    pages_per_request: int = 6
    num_pages: int = 11
    options: tuple = ()

    @property
    def budget(self):
        if self.policy == "dense_attention":
            return {}
        chosen = {} if self.policy == "sink_recent_attention" else {"top_k": 1}
        return chosen | {"reserved_bos": 1, "reserved_eos": 1}

    def get_policy(self):
        return h2o_jax.get_policy(self.policy, **self.budget, **dict(self.options))

    def request(self):
        sizes = {"num_kv_heads": KV_HEADS, "page_size": self.page_size}
        return reference.Request(self.policy, **sizes, **self.budget, **dict(self.options))


WORLDS = (
    World("h2o_sparse_attention", 2),
    World("gqa_h2o_sparse_attention", 1, 8, 17),
    World("gqa_h2o_sparse_attention", 4, options=(("w_avg", 0.5),)),
    World("block_sparse_attention", 2),
    World("gqa_quest_sparse_attention", 3),
    World("sink_recent_attention", 2),
    World("dense_attention", 4),
    World("h2o_token_sparse_attention", 1, 10, 19),
    World("gqa_h2o_token_sparse_attention", 1, 10, 19, options=(("decay", 0.5),)),
)


@functools.cache
def compiled(world):
    """The empty state, every array of the pool NaN, and the jitted operations on a state."""
    policy = world.get_policy()
    config = h2o_jax.CacheConfig(
        1, KV_HEADS, SIZE, world.page_size, world.num_pages, ROWS, world.pages_per_request, dtype=jnp.float32
    )
    state = filled_with_nan(h2o_jax.init_state(config, policy))

    def advance(state, num_tokens):
        table, ok = h2o_jax.extend(state.table, num_tokens)
        return table, ok, num_tokens * ok, state.layers[0]

    @jax.jit
    def write(state, k, v, num_tokens):
        table, ok, num_tokens, cache = advance(state, num_tokens)
        cache = h2o_jax.write_tokens(cache, table, k, v, num_tokens, policy=policy)
        return h2o_jax.PagedState(table, (cache,)), ok

    @jax.jit
    def decode(state, q, k, v, num_tokens):
        table, ok, num_tokens, cache = advance(state, num_tokens)
        active = num_tokens > 0
        written = h2o_jax.write_tokens(cache, table, k[:, None], v[:, None], num_tokens, policy=policy)
        _, selection = h2o_jax.select_pages(written, table, q, policy=policy, active=active)
        cache, out = h2o_jax.decode_attention(cache, table, q, k, v, policy=policy, active=active)
        return h2o_jax.PagedState(table, (cache,)), ok, selection, out

    @jax.jit
    def release(state, done):
        return dataclasses.replace(state, table=h2o_jax.release(state.table, done))

    return config, state, write, decode, release


def draw(seed, *shape):
    """Multiples of 1/4, so that products and page scores are exact and ties abound."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32) / 4


NUM_TOKENS = st.lists(st.sampled_from([0, 1, 1, 2, 3, WRITTEN, -1, 1000]), min_size=ROWS, max_size=ROWS)
SOME_ROWS = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
SEEDS = st.integers(0, 2**32 - 1)


class PagedLoop(RuleBasedStateMachine):
    """The library's state beside one `reference.Request` a row and the set of pages that each row owns."""

    @initialize(world=st.sampled_from(WORLDS))
    def start(self, world):
        self.world = world
        self.config, self.state, *operations = compiled(world)
        self.write_op, self.decode_op, self.release_op = operations
        self.requests = [world.request() for _ in range(ROWS)]

    def serve(self, num_tokens):
        """Which rows get their pages."""
        free = self.world.num_pages - sum(request.num_pages for request in self.requests)
        served, starved = [], False
        for request, tokens in zip(self.requests, num_tokens):
            length = request.seq_len + tokens
            need = -(-length // self.world.page_size) - request.num_pages
            fits = 0 <= tokens and length <= self.config.max_tokens
            starved |= fits and need > free
            served.append(fits and not (starved and need > 0))
            free -= need if served[-1] else 0
        return served

    def step(self, operation, *arguments):
        """Runs an operation; pages that no row owns before or after it keep what they hold."""
        before, (self.state, *results) = self.state, operation(self.state, *arguments)
        unowned = list(set(range(self.world.num_pages)) - owned(before).keys() - owned(self.state).keys())
        for old, new in zip(jax.tree.leaves(before.layers), jax.tree.leaves(self.state.layers)):
            np.testing.assert_array_equal(np.asarray(new)[unowned], np.asarray(old)[unowned])
        return [jax.tree.map(np.asarray, result) for result in results]

    @rule(num_tokens=NUM_TOKENS, seed=SEEDS)
    def write(self, num_tokens, seed):
        k, v = draw(seed, 2, ROWS, WRITTEN, KV_HEADS, SIZE)
        served = self.serve(num_tokens)
        (ok,) = self.step(self.write_op, k, v, np.array(num_tokens, np.int32))
        assert ok.tolist() == served
        for row, request in enumerate(self.requests):
            for token in range(num_tokens[row] if ok[row] else 0):
                request.write(k[row, token], v[row, token])

    @rule(rows=SOME_ROWS, seed=SEEDS)
    def decode(self, rows, seed):
        queries, new = draw(seed, ROWS, KV_HEADS * GROUP, SIZE), draw(seed + 1, 2, ROWS, KV_HEADS, SIZE)
        served = self.serve(rows)
        ok, selection, out = self.step(self.decode_op, queries, *new, np.array(rows, np.int32))
        assert ok.tolist() == served
        for row, request in enumerate(self.requests):
            if rows[row] and ok[row]:
                request.write(new[0, row], new[1, row])
                self.check_step(request, row, queries[row], selection, out[row])
            else:
                assert not out[row].any() and not selection.counts[row].any()

    def check_step(self, request, row, q, selection, out):
        pages, scores = request.select(q)
        token_level = self.world.policy in reference.TOKEN_POLICIES
        chosen = [
            selection.pages[row, head, : selection.counts[row, head]].tolist() for head in range(KV_HEADS)
        ]
        np.testing.assert_allclose(
            selection.scores[row, :, : request.num_pages], scores, rtol=1e-5 if token_level else 0
        )
        for head in range(KV_HEADS):
            if not request.over_budget:
                assert chosen[head] == pages[head]
                continue
            tolerance.assert_selection(
                chosen[head],
                scores[head],
                (lambda page: 1e-5 * scores[head][page]) if token_level else (lambda page: 0.0),
                request.num_pages,
                **{"top_k": 0} | self.world.budget,
                name=f"row {row}, KV head {head}",
            )
        if token_level:  # what was stored is right; taken over, so that its roundings do not add up
            mine = np.asarray(self.state.table.pages)[row, : request.num_pages]
            stored = np.asarray(self.state.layers[0].aux["hh_score"])[mine, :, 0].T
            np.testing.assert_allclose(stored, request.hh_score, rtol=1e-5)
            request.hh_score = stored.tolist()
        np.testing.assert_allclose(out, request.attend(q, chosen), rtol=0, atol=1e-6)

    @rule(rows=SOME_ROWS)
    def release(self, rows):
        self.state = self.release_op(self.state, np.array(rows))
        for row in np.flatnonzero(rows):
            self.requests[row] = self.world.request()

    @invariant()
    def the_table_is_that_of_the_model(self):
        table = self.state.table
        assert table.seq_lens.tolist() == [request.seq_len for request in self.requests]
        assert collections.Counter(owned(self.state).values()) == {
            row: request.num_pages for row, request in enumerate(self.requests) if request.num_pages
        }
        assert int(table.num_free) == self.world.num_pages - sum(request.num_pages for request in self.requests)
        h2o_jax.check_state(self.state, self.config)


def owned(state):
    """Row by physical page."""
    pages = np.asarray(state.table.pages)
    rows, entries = np.nonzero(pages < state.table.num_pages)
    return dict(zip(pages[rows, entries].tolist(), rows.tolist()))


@pytest.mark.slow
def test_any_order_of_operations():
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=10,
        deadline=None,
        database=None,
        derandomize=EXAMPLES <= 2000,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(PagedLoop, settings=settings)
