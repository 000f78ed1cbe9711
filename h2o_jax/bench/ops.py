"""Rows of single ops, each against its definition, and of the bandwidth that all are held against."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.bench import floors, parity
from h2o_jax.bench.inputs import LARGEST, layer_cache, new_tokens, page_table, selections, uniform
from h2o_jax.bench.row import Row, at_most, percent, ratio
from h2o_jax.bench.run import Run
from h2o_jax.bench.timing import Calls, rotated
from h2o_jax.policies.page import SummaryPolicy
from h2o_jax.policies.token import H2OTokenPolicy
from h2o_jax.pool import extend as extend_table
from h2o_jax.state import PagedState, check_state, init_state
from pallas_kernels import (
    decayed_softmax_scores,
    envelope_scores,
    paged_attention,
    top_k_pages,
    write_pages,
)

PAGE_POLICY = "gqa_h2o_sparse_attention"
TOKEN_POLICY = "gqa_h2o_token_sparse_attention"


def bandwidth(run: Run) -> Iterator[Row]:
    """R: a sum over 2 GiB of float32."""
    shape = (run.tokens * 4, 1024)
    num_bytes = 4 * shape[0] * shape[1]

    def prepare():
        values = jax.jit(lambda: uniform(np.uint32(0), shape=shape, dtype=jnp.float32) + LARGEST)()
        calls = Calls(jax.jit(jnp.sum), [(values,)])
        calls()
        # Independent values of mean LARGEST and variance 1.
        return calls, parity.compare("sum", calls.out, LARGEST * values.size, 6 * values.size**0.5)

    row = run.measure("read bandwidth R", f"{num_bytes >> 20} MiB", prepare, floor_bytes=num_bytes)
    if row.seconds:
        run.bandwidth = num_bytes / row.seconds
    yield row


def envelope(run: Run) -> Iterator[Row]:
    """`envelope_scores` of a page-level step."""
    sizes = run.sizes(8, 16)
    policy = run.policy(PAGE_POLICY, sizes.page_size)
    assert isinstance(policy, SummaryPolicy)
    pages, summaries = page_table(sizes).pages, layer_cache(sizes, policy, 0).aux["summaries"]
    window = _window(sizes, policy)
    news = new_tokens(np.uint32(0), sizes=sizes, number=4)
    arguments = [(q, summaries, pages, *window) for q, _, _ in news]

    op = functools.partial(envelope_scores, kinds=policy.summary_kinds, group=policy.group)

    def check(calls):
        definition = parity.jit_definition(functools.partial(op, implementation="xla"))
        want = parity.row_by_row(definition, arguments[0], batched=(0, 2, 3, 4))
        return parity.compare("score", calls.out, want, parity.score_tolerance(sizes, arguments[0][0]))

    def make(implementation):
        return Calls(jax.jit(functools.partial(op, implementation=implementation)), arguments)

    floor_bytes = floors.envelope(sizes, policy)
    yield from run.against_xla(
        "envelope_scores", sizes, make, check, floor_bytes=floor_bytes, targets=(percent(90),)
    )


def softmax(run: Run) -> Iterator[Row]:
    """`decayed_softmax_scores` of a token-level step; it updates the stored scores in place."""
    sizes = run.sizes(8, 1)
    policy = run.policy(TOKEN_POLICY, sizes.page_size)
    assert isinstance(policy, H2OTokenPolicy)
    table, cache = page_table(sizes), layer_cache(sizes, policy, 0)
    k, first = cache.k, cache.aux["hh_score"]
    del cache  # and with it the values
    scale = policy.resolve_scale(sizes.head_dim)
    window = _window(sizes, policy)
    arguments = [(q, k, table.pages, *window) for q, _, _ in new_tokens(np.uint32(0), sizes=sizes, number=4)]

    def op(scores, q, k, pages, start, stop, *, implementation):
        options = dict(decay=policy.decay, scale=scale, group=policy.group, implementation=implementation)
        return decayed_softmax_scores(q, k, scores, pages, start, stop, **options)

    def make(implementation):
        function = jax.jit(functools.partial(op, implementation=implementation), donate_argnums=0)
        return Calls(function, arguments, state=first + 0)  # a copy, to donate

    def check(calls):
        definition = parity.jit_definition(functools.partial(op, implementation="xla"))
        want = parity.row_by_row(lambda *row: definition(first, *row)[1], arguments[0], batched=(0, 2, 3, 4))
        tolerance = np.abs(want) * parity.probability_tolerance(sizes, arguments[0][0], scale)
        score = parity.compare("score", calls.out, want, tolerance)
        return parity.worst([score, parity.check_stored(calls.state, table, calls.out)])

    floor_bytes = floors.softmax(sizes, policy)
    yield from run.against_xla("decayed_softmax_scores", sizes, make, check, floor_bytes=floor_bytes)


def top_k(run: Run) -> Iterator[Row]:
    """`top_k_pages` of 64 rows and heads against `jax.lax.top_k`."""
    for page_size, least_ratio in ((16, 5), (1, 24)):
        yield from _top_k(run, run.tokens // page_size, run.budget(page_size), ratio(least_ratio))


def _top_k(run, m, k, target):
    shape, floor_bytes = f"[64, {m}] k={k}", floors.top_k(64, m, k)
    seeds = np.arange(rotated(floor_bytes, most=128), dtype=np.uint32)
    scores = [uniform(seed, shape=(8, 8, m), dtype=jnp.float32) for seed in seeds]
    start, stop = jax.device_put((np.zeros(8, np.int32), np.full(8, m, np.int32)))

    def baseline():
        return Calls(jax.jit(lambda x: jax.lax.top_k(x, k)), [(x.reshape(64, m),) for x in scores]), None

    def prepare():
        op = jax.jit(functools.partial(top_k_pages, k=k, implementation=run.implementation))
        calls = Calls(op, [(x, start, stop) for x in scores])
        calls()
        return calls, parity.equal("page", calls.out, jnp.sort(jax.lax.top_k(scores[0], k)[1], axis=-1))

    plain = run.measure("lax.top_k", shape, baseline, floor_bytes=floor_bytes, implementation="lax")
    yield plain
    against = ("lax.top_k", plain.seconds)
    yield run.measure(
        "top_k_pages", shape, prepare, floor_bytes=floor_bytes, baseline=against, targets=(target,)
    )


def attention(run: Run) -> Iterator[Row]:
    """`paged_attention` over a selection."""
    for page_size in (16, 64, 1):
        yield from _attention(run, page_size)


def _attention(run, page_size):
    sizes, policy = run.sizes(8, page_size), run.policy(PAGE_POLICY, page_size)
    table, cache = page_table(sizes), layer_cache(sizes, run.policy("dense_attention", page_size), 0)
    chosen = [selections(np.uint32(i), sizes=sizes, policy=policy) for i in range(4)]
    counts = jax.device_put(np.full(chosen[0].shape[:2], chosen[0].shape[2], np.int32))
    queries = [q for q, _, _ in new_tokens(np.uint32(0), sizes=sizes, number=len(chosen))]
    arguments = [
        (q, cache.k, cache.v, table.pages, table.seq_lens, pages, counts) for q, pages in zip(queries, chosen)
    ]

    def make(implementation):
        op = functools.partial(paged_attention, scale=sizes.head_dim**-0.5, implementation=implementation)
        return Calls(jax.jit(op), arguments)

    def check(calls):
        return parity.check_output(sizes, table, cache, queries[0], chosen[0], calls.out[0])

    floor_bytes = floors.attention(sizes, policy)
    yield from run.against_xla(
        "paged_attention", sizes, make, check, floor_bytes=floor_bytes, targets=(percent(80),)
    )


def write(run: Run) -> Iterator[Row]:
    """`write_pages` of one token a row, each of which completes a page."""
    sizes = run.sizes(8, 16)
    policy = run.policy(PAGE_POLICY, sizes.page_size)
    table = page_table(sizes)
    ones = jnp.ones(sizes.batch, jnp.int32)
    news = [(k[:, None], v[:, None]) for _, k, v in new_tokens(np.uint32(0), sizes=sizes, number=4)]
    last = table.pages[:, -1]
    before: list[jax.Array] = []

    def op(pools, k, v, pages, *, implementation):
        k_pool, v_pool, summaries = pools
        options = dict(summaries=summaries, summary_kinds=policy.summary_kinds, implementation=implementation)
        return write_pages(k_pool, v_pool, k, v, pages, table.seq_lens, ones, **options)[:3], None

    def make(implementation):
        cache = layer_cache(sizes, policy, 0)
        pools = (cache.k, cache.v, cache.aux["summaries"])
        before[:] = [pool[last] for pool in pools]
        function = jax.jit(functools.partial(op, implementation=implementation), donate_argnums=0)
        return Calls(function, [(*new, table.pages) for new in news], state=pools)

    def check(calls):
        # The definition, on a pool of the pages that are written alone.
        pages = np.full(table.pages.shape, sizes.batch, np.int32)
        pages[:, -1] = np.arange(sizes.batch)
        want, _ = jax.jit(functools.partial(op, implementation="xla"))(tuple(before), *news[0], pages)
        got = [pool[last] for pool in calls.state]
        names = ("key", "value", "summary")
        ulp = np.abs(np.asarray(want[2], np.float32)) * float(jnp.finfo(sizes.dtype).eps)
        checks = [parity.equal(name, x, y) for name, x, y in zip(names[:2], got, want)]
        return parity.worst([*checks, parity.compare(names[2], got[2], want[2], ulp)])

    yield from run.against_xla("write_pages", sizes, make, check, floor_bytes=floors.write(sizes, policy))


def extend(run: Run) -> Iterator[Row]:
    """`extend` of 64 rows by one token: the page-table bookkeeping of a step."""
    room = 128  # more than the calls of a timing
    sizes = run.sizes(64, 16, run.tokens - room, row_tokens=run.tokens)

    def prepare():
        function = jax.jit(extend_table, donate_argnums=0)
        calls = Calls(function, [(jax.device_put(np.ones(sizes.batch, np.int32)),)], state=page_table(sizes))
        calls()
        config = sizes.config()
        layers = jax.eval_shape(lambda: init_state(config, run.policy("dense_attention", 16))).layers
        check_state(PagedState(calls.state, layers), config)
        return calls, parity.equal("length", calls.state.seq_lens, np.array(sizes.lengths) + 1)

    floor_bytes = 2 * sizes.batch * sizes.pages_per_request * 4  # the page table, read and written
    yield run.measure(
        "extend", sizes, prepare, floor_bytes=floor_bytes, implementation="xla", targets=(at_most(15e-6),)
    )


def _window(sizes, policy):
    """Start and stop of the window of each row, [B] int32."""
    start = np.full(sizes.batch, policy.reserved_bos, np.int32)
    stop = np.array([n - policy.reserved_eos for n in sizes.pages_in_use], np.int32)
    return jax.device_put((start, stop))
