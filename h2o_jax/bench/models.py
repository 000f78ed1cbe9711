"""Rows of whole models with random weights: the library's own decode loop, by the host's clock.

A model's check is that of an attention step with its sizes; the loop is the one that `generate` runs.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from h2o_jax.bench.inputs import Sizes, layer_cache, page_table, uniform
from h2o_jax.bench.ops import PAGE_POLICY
from h2o_jax.bench.row import Parity, Row, ratio
from h2o_jax.bench.run import Run
from h2o_jax.bench.steps import DENSE_POLICY, prepare_steps, step_function
from h2o_jax.bench.timing import Calls
from h2o_jax.generate import PAD, Progress, Sampling, decode_loop
from h2o_jax.models import Llama, LlamaConfig
from h2o_jax.policy import Policy, get_policy
from h2o_jax.state import PagedState

LLAMA_8B = LlamaConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    norm_epsilon=1e-5,
    rope_theta=500000.0,
)
SMOLLM2_135M = LlamaConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    norm_epsilon=1e-5,
    rope_theta=100000.0,
    tie_embeddings=True,
)
_TOKENS = 16  # that each row decodes in a call


def model(run: Run) -> Iterator[Row]:
    """Llama-3.1-8B, four long rows: the page-level policy in all layers against the dense one."""
    config, sizes = LLAMA_8B, _sizes(LLAMA_8B, 4, run.tokens, page_size=32)
    needed = _bytes_needed(config, sizes)
    if not run.fits(needed):
        yield run.left_out("Llama-3.1-8B decode", sizes, needed)
        return
    graph_and_weights = random_model(config)
    baseline = None
    for name, targets in ((DENSE_POLICY, ()), (PAGE_POLICY, (ratio(3),))):
        policy = run.policy(name, sizes.page_size)
        row = run.measure(
            f"Llama-3.1-8B {name.removesuffix('_attention')}",
            sizes,
            functools.partial(_prepare, config, *graph_and_weights, sizes, policy, run.implementation),
            steps=_TOKENS,
            host_clock=True,
            baseline=baseline,
            targets=targets,
        )
        baseline = ("dense policy", row.seconds)
        yield _with_rate(row, sizes)


def small_model(run: Run) -> Iterator[Row]:
    """SmolLM2-135M, one short row, where launches take longer than the work."""
    config, sizes = SMOLLM2_135M, _sizes(SMOLLM2_135M, 1, max(run.tokens // 64, 128), page_size=16)
    needed = _bytes_needed(config, sizes)
    if not run.fits(needed):
        yield run.left_out("SmolLM2-135M decode", sizes, needed)
        return
    policy = get_policy(PAGE_POLICY, top_k=max(sizes.pages_per_request // 4 - 3, 1))
    graph_and_weights = random_model(config)
    baseline = None
    for implementation in dict.fromkeys(("xla", run.implementation)):
        row = run.measure(
            "SmolLM2-135M h2o_sparse",
            sizes,
            functools.partial(_prepare, config, *graph_and_weights, sizes, policy, implementation),
            steps=_TOKENS,
            host_clock=True,
            implementation=implementation,
            baseline=baseline,
        )
        baseline = (implementation, row.seconds)
        yield _with_rate(row, sizes)


def _bytes_needed(config: LlamaConfig, sizes: Sizes) -> int:
    """Of the weights, the pools and their summaries.

    XLA on a CPU may hold float32 copies of them all through the loop, which take twice as much again: it does
    in JAX 0.10, and not in later versions.
    """
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(_abstract(config)[1]))
    pools = 2 * sizes.num_pages * sizes.num_kv_heads * sizes.page_size * sizes.vector_bytes
    held = weights + int(1.1 * config.num_layers * pools)
    return held if jax.default_backend() == "gpu" else 3 * held


def random_model(config: LlamaConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """A model in bfloat16 as `nnx.split` gives it, filled on the device, a weight at a time."""
    graph, abstract = _abstract(config)
    leaves, tree = jax.tree.flatten(abstract)
    return graph, jax.tree.unflatten(tree, [_weight(np.uint32(i), leaf) for i, leaf in enumerate(leaves)])


def _weight(seed, leaf):
    if leaf.ndim == 1:  # the scale of a norm
        return jnp.ones(leaf.shape, leaf.dtype)
    return uniform(seed, shape=leaf.shape, dtype=leaf.dtype) * jnp.asarray(leaf.shape[0] ** -0.5, leaf.dtype)


def _abstract(config):
    return nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))


def _sizes(config, batch, tokens, page_size) -> Sizes:
    return Sizes(
        (tokens - _TOKENS,) * batch,
        page_size,
        num_kv_heads=config.num_kv_heads,
        group_size=config.num_heads // config.num_kv_heads,
        head_dim=config.head_dim,
        row_tokens=tokens,
    )


def _prepare(
    config: LlamaConfig, graph, weights, sizes: Sizes, policy: Policy, implementation: str
) -> tuple[Calls, Parity]:
    """Calls that decode `_TOKENS` tokens a row, after the same cached ones each time."""
    _, parity = prepare_steps(sizes, policy, step_function(policy, implementation), layers=1)

    def decode(layers, weights, table):
        progress = Progress(
            tokens=jnp.full((sizes.batch, _TOKENS), PAD, jnp.int32),
            count=jnp.int32(0),
            newest=jnp.arange(sizes.batch, dtype=jnp.int32),
            done=jnp.zeros(sizes.batch, bool),
            finite=jnp.ones(sizes.batch, bool),
        )
        state, progress = decode_loop(
            weights,
            PagedState(table, layers),
            progress,
            jnp.int32(_TOKENS),
            jnp.zeros(0, jnp.int32),  # nothing stops a row
            Sampling(jax.random.key(0), jnp.float32(0), jnp.float32(1), is_greedy=True),
            graphdef=graph,
            policy=policy,
            implementation=implementation,
        )
        return state.layers, progress.tokens

    layers = tuple(layer_cache(sizes, policy, i) for i in range(config.num_layers))
    return Calls(jax.jit(decode, donate_argnums=0), [(weights, page_table(sizes))], layers), parity


def _with_rate(row: Row, sizes: Sizes) -> Row:
    if row.seconds is None:
        return row
    return dataclasses.replace(row, note=f"{sizes.batch / row.seconds:.1f} tokens/s")
