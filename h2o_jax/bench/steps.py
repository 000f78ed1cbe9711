"""Rows of the whole attention step of a layer, and of the dense attention it stands against."""

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.bench import floors, parity
from h2o_jax.bench.inputs import Sizes, contiguous, layer_cache, new_tokens, page_table
from h2o_jax.bench.ops import PAGE_POLICY, TOKEN_POLICY
from h2o_jax.bench.row import Parity, Row, percent, ratio, share_of_bandwidth
from h2o_jax.bench.run import Run
from h2o_jax.bench.timing import Calls, rotated
from h2o_jax.decode import attend, select_pages, write_tokens
from h2o_jax.policy import Policy, list_policies, policy_class

DENSE_POLICY = "dense_attention"
_MAX_LAYERS = 8
_RAGGED_LAYERS = 4
_SETS = 4  # of new tokens, taken in turn


def steps(run: Run) -> Iterator[Row]:
    """The step of a page-level and of a token-level policy, at several batches and lengths."""
    for name, sizes, targets in _cases(run):
        baseline = yield from contiguous_dense(run, sizes)
        yield step_row(run, name, sizes, baseline=baseline, targets=targets)


def _cases(run):
    """Policy, sizes and targets."""
    token_sizes = run.sizes(8, 1)
    keys = sum(token_sizes.lengths) * token_sizes.num_kv_heads * token_sizes.vector_bytes
    return [
        (PAGE_POLICY, run.sizes(8, 16), (ratio(7.5),)),
        (PAGE_POLICY, run.sizes(8, 64), (ratio(18),)),
        (PAGE_POLICY, run.sizes(1, 16), (ratio(4.5),)),
        (TOKEN_POLICY, token_sizes, (ratio(1.7), share_of_bandwidth(85, keys, "of R on K"))),
        (PAGE_POLICY, run.sizes(64, 16, run.tokens // 16), ()),
        (PAGE_POLICY, run.sizes(1, 16, run.tokens * 8), ()),
    ]


def policies(run: Run) -> Iterator[Row]:
    """The step of the other policies, and of the page-level one in plain `jax.numpy`."""
    for name in list_policies():
        if name not in (PAGE_POLICY, TOKEN_POLICY, DENSE_POLICY):
            sizes = run.sizes(8, policy_class(name).page_size or 16)
            baseline = yield from contiguous_dense(run, sizes)
            yield step_row(run, name, sizes, baseline=baseline)
    if run.implementation != "xla":
        sizes = run.sizes(8, 16)
        baseline = yield from contiguous_dense(run, sizes)
        yield step_row(run, PAGE_POLICY, sizes, baseline=baseline, implementation="xla")


def dense(run: Run) -> Iterator[Row]:
    """The dense policy, over permuted pages."""
    for page_size in (16, 64):
        sizes = run.sizes(8, page_size)
        baseline = yield from contiguous_dense(run, sizes)
        yield step_row(run, DENSE_POLICY, sizes, baseline=baseline, targets=(ratio(0.95),))


def pool_size(run: Run) -> Iterator[Row]:
    """The same step in larger pools, of which the rows own the same share each time."""
    baseline = None
    for times in (1, 2, 8):
        sizes = run.sizes(8, 16, pool_times=times)
        pools = 4 * sizes.num_pages * sizes.num_kv_heads * sizes.page_size * sizes.vector_bytes
        if not run.fits(pools):  # keys, values, summaries, and as much again to make these
            yield run.left_out(f"step {PAGE_POLICY}", sizes, pools)
            continue
        row = step_row(run, PAGE_POLICY, sizes, baseline=baseline, targets=(ratio(0.97),) if baseline else ())
        baseline = baseline or ("pool x1", row.seconds)
        yield row


def ragged(run: Run) -> Iterator[Row]:
    """Seven short rows and a long one, after each part of it among empty rows: one program for all three."""
    short, long = run.tokens // 32, run.tokens
    step = functools.partial(step_row, run, PAGE_POLICY, layers=_RAGGED_LAYERS)
    one = step(run.ragged_sizes((0,) * 7 + (long,), 16), label="ragged: the long row")
    yield one
    sizes = run.ragged_sizes((short,) * 7 + (0,), 16, row_tokens=long)
    seven = step(sizes, label="ragged: the short rows")
    yield seven
    parts = one.seconds + seven.seconds if one.seconds and seven.seconds else None
    yield step(
        run.ragged_sizes((short,) * 7 + (long,), 16),
        label="ragged: all",
        baseline=("its parts", parts),
        targets=(percent(80),),
    )


def step_row(
    run: Run,
    name: str,
    sizes: Sizes,
    *,
    label: str | None = None,
    implementation: str | None = None,
    layers: int | None = None,
    **options,
) -> Row:
    """The row of a policy's step.

    Args:
        run: the run.
        name: of the policy.
        sizes: of the layer.
        label: name of the row; default "step" and the policy's.
        implementation: what runs; default the run's.
        layers: stepped by each call; default as many as read more than the L2 cache holds.
        options: further options of `Run.measure`.
    """
    policy, implementation = run.policy(name, sizes.page_size), implementation or run.implementation
    floor_bytes = floors.step(sizes, policy)
    layers = layers or rotated(floor_bytes, _MAX_LAYERS)
    function = run.functions.setdefault((policy, implementation), step_function(policy, implementation))
    return run.measure(
        label or f"step {name}",
        sizes,
        lambda: prepare_steps(sizes, policy, function, layers),
        floor_bytes=floor_bytes,
        steps=layers,
        implementation=implementation,
        **options,
    )


def step_function(policy: Policy, implementation: str) -> Callable:
    """A jitted step of some layers, donated: `(layers, table, news, *, keep_scores) -> (layers, results)`.

    It is `decode_attention` in its three parts, so that the selection can be checked. The results are pairs of
    selection and output. Where `keep_scores` is False the selection is its pages and counts alone: scores as an
    output take a pass of their own that a decode loop does without.
    """
    use: dict[str, Any] = dict(policy=policy, implementation=implementation)

    def step(layers, table, news, *, keep_scores):
        active = table.seq_lens > 0
        stepped, results = [], []
        for cache, (q, k, v) in zip(layers, news, strict=True):
            cache = write_tokens(cache, table, k[:, None], v[:, None], active.astype(jnp.int32), **use)
            cache, selection = select_pages(cache, table, q, active=active, **use)
            out = attend(cache, table, q, selection, active=active, implementation=implementation)
            stepped.append(cache)
            chosen = selection if keep_scores else (selection.pages, selection.counts)
            results.append((chosen, out))
        return tuple(stepped), results

    return jax.jit(step, donate_argnums=0, static_argnames="keep_scores")


def prepare_steps(sizes: Sizes, policy: Policy, function: Callable, layers: int) -> tuple[Calls, Parity]:
    """Calls of a `step_function` on `layers` layers of their own, and the check of the first."""
    table = page_table(sizes)
    news = [new_tokens(np.uint32(i), sizes=sizes, number=layers) for i in range(_SETS)]
    state = tuple(layer_cache(sizes, policy, i) for i in range(layers))
    before = state[0].aux.get("hh_score")
    before = None if before is None else before + 0  # the layers are donated
    stepped, ((selection, out),) = function(state[:1], table, news[0][:1], keep_scores=True)
    check = parity.check_step(sizes, policy, table, news[0][0], stepped[0], before, selection, out)
    timed = functools.partial(function, keep_scores=False)
    calls = Calls(timed, [(table, new) for new in news], (*stepped, *state[1:]))
    del state, stepped
    calls()
    if before is None:  # else the second step's scores are others
        check = parity.worst([check, parity.equal("repeated output", calls.out[0][1], out)])
    return calls, check


def contiguous_dense(run: Run, sizes: Sizes) -> Generator[Row, None, tuple[str, float | None]]:
    """What users would pick instead: `jax.nn.dot_product_attention` over contiguous keys and values, through
    cuDNN where there is a GPU. Yields its row the first time, and returns it as a baseline."""
    key = (sizes.batch, max(sizes.lengths))
    if key not in run.dense:
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        op = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        policy = run.policy(DENSE_POLICY, sizes.page_size)

        def prepare():
            table, cache = page_table(sizes), layer_cache(sizes, policy, 0)
            k, v = (contiguous(pool, table.pages) for pool in (cache.k, cache.v))
            queries = [q for q, _, _ in new_tokens(np.uint32(0), sizes=sizes, number=_SETS)]
            calls = Calls(jax.jit(op), [(q[:, None], k, v) for q in queries])
            calls()
            pages = jnp.arange(sizes.pages_per_request, dtype=jnp.int32)
            pages = jnp.broadcast_to(pages, (sizes.batch, sizes.num_kv_heads, len(pages)))
            return calls, parity.check_output(sizes, table, cache, queries[0], pages, calls.out[:, 0])

        row = run.measure(
            "dense, contiguous",
            sizes,
            prepare,
            floor_bytes=floors.attention(sizes, policy),
            implementation=implementation,
        )
        run.dense[key] = row.seconds
        yield row
    return "dense", run.dense[key]
