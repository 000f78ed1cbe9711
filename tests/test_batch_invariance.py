"""A row decodes the same bits alone as in a crowd: outputs, scores, selections and what it leaves in the pool.

Letters: L prompt tokens, S steps, B request rows, M pages_per_request, P page_size, Hq/Hkv heads, D head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from tests.kernel_runs import GPU_MARKS, jit
from tests.worlds import filled_with_nan

KV_HEADS, GROUP = 2, 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the row that is looked at; it reads about half of its tokens, in more than one split of the kernels."""

    prompt: int
    steps: int
    page_size: int
    head_dim: int
    dtype: str
    budget: int  # tokens that are read


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the row stands: its index, what else the batch holds, and how far table and pool exceed its needs.

    Attributes:
        row: index of the row.
        others: tokens of each other row, as multiples of the row's; None is an idle row of NaN.
        spare_pages: of the table's rows and, for each row, of the pool.
    """

    row: int
    others: tuple[float | None, ...]
    spare_pages: int


ALONE = Place(0, (), 0)
CROWDS = [Place(3, (1.4, None, 0.1, 2.0), 700), Place(0, (0.5,), 3)]
SMALL = Sizes(prompt=290, steps=6, page_size=4, head_dim=16, dtype="float32", budget=160)
LARGE = Sizes(prompt=8000, steps=32, page_size=16, head_dim=128, dtype="bfloat16", budget=4096)
FLOAT32 = Sizes(prompt=3000, steps=8, page_size=16, head_dim=80, dtype="float32", budget=1504)
INTERPRETED = ["gqa_h2o_sparse_attention", "h2o_token_sparse_attention", "dense_attention"]


def get_policy(name, sizes):
    """The policy that reads `sizes.budget` tokens, and the page size it runs with."""
    page_size = 1 if "token" in name else sizes.page_size
    budget = sizes.budget // page_size
    if name == "dense_attention":
        options = {}
    elif name == "sink_recent_attention":
        options = {"reserved_bos": 2, "reserved_eos": budget - 2}
    else:
        options = {"top_k": budget - 5, "reserved_bos": 2, "reserved_eos": 3}
    return h2o_jax.get_policy(name, **options), page_size


def shuffled(config, policy, rng):
    """An empty state of NaN whose pages are taken in a random order."""
    state = filled_with_nan(h2o_jax.init_state(config, policy))
    order = jnp.asarray(rng.permutation(config.num_pages), jnp.int32)
    return h2o_jax.PagedState(dataclasses.replace(state.table, free_pages=order), state.layers)


def inputs(sizes, lengths, seed):
    """Prompts' k and v [B, L, Hkv, D], then q, k and v of the steps [S, B, heads, D]; NaN in rows of length 0."""
    rng, batch, size = np.random.default_rng(seed), len(lengths), sizes.head_dim
    prompts = rng.standard_normal((2, batch, max(lengths), KV_HEADS, size))
    steps = [rng.standard_normal((sizes.steps, batch, n * KV_HEADS, size)) for n in (GROUP, 1, 1)]
    idle = np.asarray(lengths) == 0
    prompts[:, idle] = np.nan
    for array in steps:
        array[:, idle] = np.nan
    return [*prompts], steps


def decode(name, implementation, sizes, place):
    """What the row gets in each step, and its keys, values and aux arrays at the end, by logical page."""
    policy, page_size = get_policy(name, sizes)
    row_tokens = [sizes.prompt, *(int(sizes.prompt * (part or 0)) for part in place.others)]
    needs = [-(-(tokens + sizes.steps) // page_size) for tokens in row_tokens]
    config = h2o_jax.CacheConfig(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=sizes.head_dim,
        page_size=page_size,
        num_pages=sum(needs) + len(needs) * place.spare_pages,
        max_requests=len(needs),
        pages_per_request=max(needs) + place.spare_pages,
        dtype=sizes.dtype,
    )
    lengths = [*row_tokens[1 : place.row + 1], row_tokens[0], *row_tokens[place.row + 1 :]]
    prompts, steps = inputs(sizes, lengths, seed=1)
    mine_prompts, mine_steps = inputs(sizes, [sizes.prompt], seed=0)  # whatever the place
    for array, mine in zip(prompts, mine_prompts):
        array[place.row, : sizes.prompt] = mine[0]
    for array, mine in zip(steps, mine_steps):
        array[:, place.row] = mine[:, 0]
    use = {"policy": policy, "implementation": implementation}

    def write(state, k, v):
        table, ok = h2o_jax.extend(state.table, jnp.asarray(lengths, jnp.int32))
        cache = h2o_jax.write_tokens(state.layers[0], table, k, v, jnp.asarray(lengths) * ok, **use)
        return h2o_jax.PagedState(table, (cache,))

    def step(state, new):
        q, k, v = new
        active = state.table.seq_lens > 0
        one = active.astype(jnp.int32)
        table, _ = h2o_jax.extend(state.table, one)
        cache = h2o_jax.write_tokens(state.layers[0], table, k[:, None], v[:, None], one, **use)
        cache, selection = h2o_jax.select_pages(cache, table, q, active=active, **use)
        out = h2o_jax.attend(cache, table, q, selection, active=active, implementation=implementation)
        return h2o_jax.PagedState(table, (cache,)), (out, selection)

    @functools.partial(jit, donate_argnums=0)
    def loop(state, prompts, steps):
        return jax.lax.scan(step, write(state, *prompts), steps)

    state = shuffled(config, policy, np.random.default_rng(place.row))
    prompts, steps = ([x.astype(sizes.dtype) for x in arrays] for arrays in (prompts, steps))
    state, (out, selection) = loop(state, prompts, steps)
    h2o_jax.check_state(state, config)
    assert not np.isnan(out).any(), "idle rows get 0"

    owned = np.asarray(state.table.pages)[place.row, : needs[0]]
    mine = jax.tree.map(lambda x: np.asarray(x)[:, place.row], (out, selection))
    return mine, jax.tree.map(lambda x: np.asarray(x)[owned], state.layers[0])


def assert_same_bits(got, expected):
    """Of `decode` in two places."""
    (out, selection), kept = got
    (expected_out, expected_selection), expected_kept = expected
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(selection.counts, expected_selection.counts)
    width = expected_selection.scores.shape[-1]  # M, alone
    np.testing.assert_array_equal(selection.scores[..., :width], expected_selection.scores)
    assert np.isneginf(selection.scores[..., width:]).all()
    budget = min(selection.pages.shape[-1], expected_selection.pages.shape[-1])  # M of the table, where dense
    chosen = np.arange(budget) < selection.counts[..., None]
    pages = (np.where(chosen, each.pages[..., :budget], -1) for each in (selection, expected_selection))
    np.testing.assert_array_equal(*pages)
    assert (selection.counts <= budget).all()
    for ours, theirs in zip(jax.tree.leaves(kept), jax.tree.leaves(expected_kept), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # NaN in slots without a token, and in their summaries


RUNS = [
    *(pytest.param(n, "pallas_interpret", SMALL, id=f"{n}-interpret", marks=pytest.mark.slow) for n in INTERPRETED),
    *(
        pytest.param(n, "pallas", sizes, id=f"{n}-{sizes.dtype}-gpu", marks=GPU_MARKS)
        for n in h2o_jax.list_policies()
        for sizes in (LARGE, FLOAT32)
    ),
]


@pytest.mark.parametrize(("name", "implementation", "sizes"), RUNS)
def test_a_row_decodes_the_same_bits_in_any_batch(name, implementation, sizes):
    alone = decode(name, implementation, sizes, ALONE)
    for place in CROWDS:
        assert_same_bits(decode(name, implementation, sizes, place), alone)
