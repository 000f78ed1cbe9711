"""Ragged, permuted, poisoned paged worlds, and the record of a decode loop run in one.

Letters: S steps, B request rows, M pages_per_request, P page_size, Hq/Hkv heads, G group, D head_dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import h2o_jax
from h2o_jax import reference

STALE = 1e3  # size of what an earlier owner left behind: finite, and ruinous where it is read


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Sizes and inputs of one decode loop.

    Attributes:
        policy: registered name.
        options: the policy's options, as keyword pairs of `get_policy`.
        dtype: of pool and queries.
        prompts: tokens each row starts with; a row that would outgrow its pages stops growing.
        readmit: None, or (row, step, tokens): before that step the row is released and given a new prompt.
        idle: of every so many steps of a row, one is inactive; 0 for none.
        scale: of the attention; None is its default.
        grid: inputs are small multiples of 1/4, so that page scores are exact in every dtype and ties abound.
    """

    policy: str
    options: tuple[tuple[str, Any], ...]
    dtype: str = "float32"
    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 4
    pages_per_request: int = 52
    prompts: tuple[int, ...] = (0, 1, 3, 4, 5, 205)
    readmit: tuple[int, int, int] | None = (5, 70, 5)
    steps: int = 200
    idle: int = 11
    scale: float | None = None
    grid: bool = False
    seed: int = 0

    @property
    def config(self):
        batch = len(self.prompts)
        return h2o_jax.CacheConfig(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            num_pages=batch * self.pages_per_request + 5,
            max_requests=batch,
            pages_per_request=self.pages_per_request,
            dtype=jnp.dtype(self.dtype),
        )

    def get_policy(self):
        return h2o_jax.get_policy(self.policy, **dict(self.options))

    def request(self, **overrides):
        """The oracle of one row, empty."""
        options = dict(self.options)
        if "scale" in options:
            options["score_scale"] = options.pop("scale")
        if "score_dtype" in options:
            options["score_dtype"] = jnp.dtype(options["score_dtype"]).name
        fields = ("num_kv_heads", "page_size", "dtype", "scale")
        fixed = {name: getattr(self, name) for name in fields}
        return reference.Request(self.policy, **(fixed | options | overrides))


def draw(scenario, rng, shape, queries=False):
    """Random float64 values that the scenario's dtype holds exactly: [..., heads, D]."""
    if not scenario.grid:
        return reference.round_to(rng.standard_normal(shape), scenario.dtype)
    quarters = rng.integers(-4, 5, shape)
    if queries:
        # The mean over a group is exact only where its sum is a multiple of G.
        groups = quarters.reshape(*shape[:-2], scenario.num_kv_heads, scenario.group, shape[-1])
        groups[..., -1, :] -= groups.sum(axis=-2) % scenario.group
    return quarters / 4


def filled_with_nan(state):
    """The state with NaN in every page: what a row reads, it must have written."""
    return h2o_jax.PagedState(state.table, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.layers))


def poisoned_state(scenario, *, value=np.nan, earlier_owners=True):
    """An empty state whose every page is poison, in a random order, some of it an earlier owner's data.

    Args:
        scenario: sizes.
        value: what fills the pools, the summaries and the scores.
        earlier_owners: whether rows first took pages, left tokens and scores of size `STALE` there, and were
            released out of order.
    """
    config, rng = scenario.config, np.random.default_rng(scenario.seed + 1)
    state = h2o_jax.init_state(config, scenario.get_policy())
    order = jnp.asarray(rng.permutation(config.num_pages), jnp.int32)
    table = dataclasses.replace(state.table, free_pages=order)
    owned = np.zeros(0, np.int32)
    if earlier_owners:
        batch, capacity = config.max_requests, config.pages_per_request * config.page_size
        lengths = jnp.asarray(rng.integers(1, capacity // 2, batch), jnp.int32)
        table, ok = h2o_jax.extend(table, lengths)
        assert bool(ok.all())
        owned = np.asarray(table.pages)
        owned = owned[owned < config.num_pages]
        for done in rng.permutation(batch):
            table = h2o_jax.release(table, jnp.asarray(np.arange(batch) == done))

    def left_behind(x):
        out = np.full(x.shape, value, np.float64)
        out[owned] = STALE * rng.standard_normal((len(owned), *x.shape[1:]))
        return jnp.asarray(out.astype(x.dtype))

    cache = jax.tree.map(left_behind, state.layers[0])
    state = h2o_jax.PagedState(table, (cache,))
    h2o_jax.check_state(state, config)
    return state


@dataclasses.dataclass
class Trace:
    """What a decode loop was given and what it returned, as NumPy arrays.

    Attributes:
        live: [S, B] bool, rows that took part.
        q, k, v: [S, B, heads, D] float64; NaN where a row took no part.
        out: [S, B, Hq, D] float64; pages, counts, scores: as `Selection`, with a leading S.
        hh_score: [S, 2, B, M, Hkv, P] float64 or None: state before and after each step, by logical page.
        summaries: [S, 2, B, M, Hkv, kinds, D] float64 or None, likewise.
        prefills: (step, q, k, v, num_tokens, out) of each prefill.
        keys, values: [B, M, Hkv, P, D] float64, the pools after the last step, by logical page.
        before, after: pools and aux arrays at both ends, by physical page.
        owned: [num_pages] bool, pages that any row ever owned in the loop.
        compiled: how often the step was traced.
    """

    live: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    pages: np.ndarray
    counts: np.ndarray
    scores: np.ndarray
    hh_score: np.ndarray | None
    summaries: np.ndarray | None
    prefills: list
    keys: np.ndarray
    values: np.ndarray
    before: list
    after: list
    owned: np.ndarray
    compiled: int


def float64(x):
    return np.asarray(x).astype(np.float64)


def _by_row(table, cache):
    """The aux arrays by logical page, [B, M, ...], NaN where a row has none."""
    return {name: x.at[table.pages].get(mode="fill", fill_value=jnp.nan) for name, x in cache.aux.items()}


@functools.partial(jax.jit, static_argnames=("policy", "scale", "implementation"), donate_argnums=0)
def _prefill(state, q, k, v, num_tokens, **options):
    table, ok = h2o_jax.extend(state.table, num_tokens)
    cache, out = h2o_jax.prefill_attention(state.layers[0], table, q, k, v, num_tokens, **options)
    return h2o_jax.PagedState(table, (cache,)), (ok, out, _by_row(table, cache))


def _gather(pool, pages):
    pool = np.concatenate([float64(pool), np.full((1, *pool.shape[1:]), np.nan)])  # NO_PAGE reads the last
    return pool[pages]


def run(
    scenario,
    *,
    implementation=None,
    policy=None,
    write=h2o_jax.write_tokens,
    select=h2o_jax.select_pages,
    attend=h2o_jax.attend,
    poison=np.nan,
):
    """Runs the scenario's decode loop, the step jitted and its state donated, and records it.

    Args:
        scenario: sizes and inputs.
        implementation: of the library's ops.
        policy: of the library; None is the scenario's.
        write, select, attend: the three parts of a step, so that a wrong one can be put in.
        poison: fills what nobody owns.
    """
    config, rng = scenario.config, np.random.default_rng(scenario.seed)
    policy = scenario.get_policy() if policy is None else policy
    batch, size = config.max_requests, scenario.head_dim
    heads, kv_heads = scenario.num_kv_heads * scenario.group, scenario.num_kv_heads
    traced = 0

    def step(state, q, k, v, grow):
        nonlocal traced
        traced += 1
        table, ok = h2o_jax.extend(state.table, grow)
        live, cache = ok & (grow > 0), state.layers[0]
        options = {"policy": policy, "implementation": implementation}
        cache = write(cache, table, k[:, None], v[:, None], live.astype(jnp.int32), **options)
        cache, chosen = select(cache, table, q, active=live, **options)
        options = {"scale": scenario.scale, "active": live, "implementation": implementation}
        out = attend(cache, table, q, chosen, **options)
        return h2o_jax.PagedState(table, (cache,)), (live, out, chosen, _by_row(table, cache))

    step = jax.jit(step, donate_argnums=0)
    state = poisoned_state(scenario, value=poison)
    before = [np.asarray(x) for x in jax.tree.leaves(state.layers[0])]
    owned = np.zeros(config.num_pages, bool)
    prefills, records, history = [], [], []
    longest = max(scenario.prompts)

    def admit(state, at, tokens):
        shapes = [(batch, longest, n, size) for n in (heads, kv_heads, kv_heads)]
        arrays = [draw(scenario, rng, shape, queries=i == 0) for i, shape in enumerate(shapes)]
        for array in arrays:
            array[np.arange(longest) >= np.asarray(tokens)[:, None]] = poison
        inputs = [x.astype(config.dtype) for x in arrays]
        tokens = np.asarray(tokens, np.int32)
        options = {"policy": policy, "scale": scenario.scale, "implementation": implementation}
        state, (ok, out, found) = _prefill(state, *inputs, tokens, **options)
        assert bool(ok.all())
        prefills.append((at, *arrays, tokens, float64(out)))
        return state, {name: float64(x) for name, x in found.items()}

    state, found = admit(state, 0, scenario.prompts)
    for at in range(scenario.steps):
        if scenario.readmit is not None and at == scenario.readmit[1]:
            row, _, tokens = scenario.readmit
            table = h2o_jax.release(state.table, jnp.asarray(np.arange(batch) == row))
            state = dataclasses.replace(state, table=table)
            state, found = admit(state, at, np.where(np.arange(batch) == row, tokens, 0))
        grow = np.ones(batch, np.int32)
        if scenario.idle:
            grow[(at + np.arange(batch)) % scenario.idle == scenario.idle - 1] = 0
        lengths = np.asarray(state.table.seq_lens)
        live = (grow > 0) & (lengths < scenario.pages_per_request * scenario.page_size)
        shapes = [(batch, n, size) for n in (heads, kv_heads, kv_heads)]
        arrays = [draw(scenario, rng, shape, queries=i == 0) for i, shape in enumerate(shapes)]
        for array in arrays:
            array[~live] = poison
        inputs = [x.astype(config.dtype) for x in arrays]
        earlier = found
        state, (did, out, chosen, found) = step(state, *inputs, grow)
        found = {name: float64(x) for name, x in found.items()}
        np.testing.assert_array_equal(did, live)
        records.append((live, *arrays, float64(out), chosen.pages, chosen.counts, float64(chosen.scores)))
        history.append({name: np.stack([earlier[name], found[name]]) for name in found})
        pages = np.asarray(state.table.pages)
        owned[pages[pages < config.num_pages]] = True
    h2o_jax.check_state(state, config)

    cache = state.layers[0]
    logical = [_gather(pool, np.asarray(state.table.pages)) for pool in (cache.k, cache.v)]
    stacked = [np.stack([np.asarray(record[i]) for record in records]) for i in range(8)]
    states = {name: np.stack([both[name] for both in history]) for name in history[0]}
    return Trace(
        *stacked,
        hh_score=states.get("hh_score"),
        summaries=states.get("summaries"),
        prefills=prefills,
        keys=logical[0],
        values=logical[1],
        before=before,
        after=[np.asarray(x) for x in jax.tree.leaves(cache)],
        owned=owned,
        compiled=traced,
    )
