"""Long decode loops with random admissions and releases: exact to the end, in constant memory, compiled once.

On a GPU 100,000 steps, all policies together; on a CPU two short loops.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import reference
from tests import tolerance
from tests.kernel_runs import ON_GPU, on_gpu

ROWS, KV_HEADS, GROUP, SIZE, PROMPT = 8, 2, 4, 64, 48  # SIZE: head_dim; PROMPT: most tokens of one
STEPS_A_CALL = 50
BUDGET = {"top_k": 5, "reserved_bos": 1, "reserved_eos": 2}
TOKEN_BUDGET = {"top_k": 40, "reserved_bos": 4, "reserved_eos": 12}


class Loop:
    """A decode loop of one layer, with its compiled steps. Rows together may want more pages than there are."""

    def __init__(self, name):
        self.name = name
        token_level = name in reference.TOKEN_POLICIES
        self.budget = TOKEN_BUDGET if token_level else BUDGET
        page_size, row_pages = (1, 320) if token_level else (16, 20)
        if name == "dense_attention":
            self.budget = {}
        elif name == "sink_recent_attention":
            self.budget = {"reserved_bos": 1, "reserved_eos": 7}
        self.policy = h2o_jax.get_policy(name, **self.budget)
        self.config = h2o_jax.CacheConfig(
            1, KV_HEADS, SIZE, page_size, row_pages * ROWS // 2, ROWS, row_pages, jnp.float32
        )
        self.state = h2o_jax.init_state(self.config, self.policy)
        self.one = jax.jit(self._step)
        self.many = jax.jit(self._steps, donate_argnums=0)

    def _step(self, state, key):
        """Releases and admits at random, then decodes in each row: the state, and the step's ins and outs."""
        keys = iter(jax.random.split(key, 8))
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)
        cache = state.layers[0]
        table = h2o_jax.release(state.table, jax.random.bernoulli(next(keys), 1 / 150, (ROWS,)))
        prompt = jax.random.randint(next(keys), (ROWS,), 1, PROMPT + 1, jnp.int32)
        admitted = (table.seq_lens == 0) & jax.random.bernoulli(next(keys), 1 / 4, (ROWS,))
        table, ok = h2o_jax.extend(table, jnp.where(admitted, prompt, 0))
        k, v = normal(next(keys), (2, ROWS, PROMPT, KV_HEADS, SIZE))
        new = jnp.where(admitted & ok, prompt, 0)
        cache = h2o_jax.write_tokens(cache, table, k, v, new, policy=self.policy)

        live = table.seq_lens > 0
        table, ok = h2o_jax.extend(table, live.astype(jnp.int32))
        active = live & ok
        q = normal(next(keys), (ROWS, KV_HEADS * GROUP, SIZE))
        k, v = normal(next(keys), (2, ROWS, KV_HEADS, SIZE))
        before = cache.aux
        use = {"policy": self.policy, "active": active}
        one = active.astype(jnp.int32)
        cache = h2o_jax.write_tokens(cache, table, k[:, None], v[:, None], one, policy=self.policy)
        cache, selection = h2o_jax.select_pages(cache, table, q, **use)
        out = h2o_jax.attend(cache, table, q, selection, active=active)
        return h2o_jax.PagedState(table, (cache,)), (q, active, before, selection, out)

    def _steps(self, state, key):
        def step(state, key):
            state, (_, active, *_) = self._step(state, key)
            return state, active.sum()

        state, decoded = jax.lax.scan(step, state, jax.random.split(key, STEPS_A_CALL))
        return state, decoded.sum()

    def run(self, key):
        self.state, decoded = self.many(self.state, key)
        return int(decoded)

    def spot_check(self, key, rng):
        """One more step, compared in one of its rows with float64; what is cached is taken as it is."""
        self.state, results = self.one(self.state, key)
        h2o_jax.check_state(self.state, self.config)
        q, active, before, selection, out = jax.tree.map(np.asarray, results)
        assert np.isfinite(out).all() and not out[~active].any()
        if not active.any():
            return
        row = rng.choice(np.flatnonzero(active))
        request, after = self._request(row, before)
        pages, scores = request.select(q[row])
        if after is not None:
            np.testing.assert_allclose(after, request.hh_score, rtol=2e-5, atol=1e-12)
        chosen = [selection.pages[row, head, : selection.counts[row, head]].tolist() for head in range(KV_HEADS)]
        for head, mine in enumerate(chosen):
            name = f"row {row}, KV head {head}"
            if request.over_budget:
                error = functools.partial(self._score_error, request, q[row], head, scores)
                budget = {"top_k": 0} | self.budget
                tolerance.assert_selection(mine, scores[head], error, request.num_pages, **budget, name=name)
            else:
                assert mine == pages[head], name
        # A float32 product of 64 terms, and of at most 320 weights: what no order of summation exceeds.
        bound = (SIZE + 320) * tolerance.FLOAT32_HALF_ULP * 5
        np.testing.assert_allclose(out[row], request.attend(q[row], chosen), rtol=0, atol=bound)

    def _score_error(self, request, q, head, scores, page):
        if self.name in reference.TOKEN_POLICIES:
            return 2e-5 * scores[head, page]
        kept = [summaries[head][page] for summaries in (request.means, request.maxima, request.minima)]
        return tolerance.page_score_error(self.name, q[head * GROUP : (head + 1) * GROUP], *kept)

    def _request(self, row, before):
        """The oracle of a row, from the cache: its score state before the step, and those after."""
        table, cache = self.state.table, self.state.layers[0]
        length = int(table.seq_lens[row])
        mine = np.asarray(table.pages)[row, : -(-length // self.config.page_size)]
        request = reference.Request(
            self.name, num_kv_heads=KV_HEADS, page_size=self.config.page_size, **self.budget, score_dtype="float64"
        )

        def tokens(pool):
            pool = np.asarray(pool)[mine].swapaxes(1, 2)
            return pool.reshape(-1, KV_HEADS, SIZE)[:length].astype(np.float64)

        for k, v in zip(tokens(cache.k), tokens(cache.v)):
            request.write(k, v)
        if "hh_score" not in before:
            return request, None
        old, new = (np.asarray(x["hh_score"])[mine, :, 0].T for x in (before, cache.aux))
        request.hh_score = old.tolist()
        for head in request.hh_score:
            head[-1] = 0.0  # reset by the write of this step
        return request, new


def soak(name, steps):
    loop, rng = Loop(name), np.random.default_rng(0)
    device = jax.devices()[0]
    decoded, used = 0, []
    for call in range(steps // STEPS_A_CALL):
        key = jax.random.key(call)
        decoded += loop.run(jax.random.fold_in(key, 0))
        loop.spot_check(jax.random.fold_in(key, 1), rng)
        used.append((device.memory_stats() or {}).get("bytes_in_use", 0))
    # It varies with what Python has not let go of yet.
    assert min(used[-20:]) <= max(used[2:22]), "the loop's memory grew"
    assert loop.many._cache_size() == loop.one._cache_size() == 1
    assert decoded > steps  # more than a row on average


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="a GPU runs the long loops")
@pytest.mark.parametrize("name", ["gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_soak(name):
    soak(name, 250)


@on_gpu
@pytest.mark.parametrize("name", h2o_jax.list_policies())
def test_100000_steps_in_all(name):
    soak(name, 100_000 // len(h2o_jax.list_policies()))
