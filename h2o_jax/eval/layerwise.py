"""A model run layer by layer, so that what is compiled for a policy is one layer and not all of them.

Letters: B rows, T new tokens a row, F features, V vocabulary.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from h2o_jax.models import Llama
from h2o_jax.policy import Policy
from h2o_jax.pool import extend
from h2o_jax.state import PagedState


class Layerwise:
    """Runs a model of `h2o_jax.models`; to be called outside of jit.

    Each layer is a call of one jitted function. A deep model costs a fraction of the compilation of a jitted
    loop, and the launch of its layers in each step: right for many policies with few steps each.

    Args:
        model: the model; its parameters are shared, not copied.
    """

    def __init__(self, model: Llama):
        self.config, self.dtype, self.cache_config = model.config, model.dtype, model.cache_config
        self._blocks = [nnx.split(block) for block in model.blocks]
        ends = copy.copy(model)
        ends.blocks = nnx.List([])
        self._ends = nnx.split(ends)  # embedding, last norm and head

    def advance(
        self, state: PagedState, tokens: np.ndarray, num_tokens: np.ndarray, *, policy: Policy
    ) -> tuple[PagedState, jax.Array]:
        """Caches the next tokens of each row: a decode step where T = 1, else prefill.

        Args:
            state: paged state (its pools are donated), with room for the tokens.
            tokens: [B, T] int32, right-padded.
            num_tokens: [B] int32.
            policy: layer i runs `policy.for_layer(i)`.

        Returns:
            The state, and the normed hidden of each row's last token, [B, F]; undefined where there is none.
        """
        graphdef, params = self._ends
        table, x = _enter(params, state.table, tokens, num_tokens, graphdef=graphdef)
        layers = []
        for index, ((block, block_params), cache) in enumerate(zip(self._blocks, state.layers)):
            cache, x = _layer(
                block_params,
                cache,
                table,
                x,
                num_tokens,
                graphdef=block,
                policy=policy.for_layer(index),
            )
            layers.append(cache)
        return PagedState(table, tuple(layers)), _leave(params, x, num_tokens, graphdef=graphdef)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The output head: normed hidden [B, F] to float32 logits [B, V]."""
        graphdef, params = self._ends
        return _logits(params, hidden, graphdef=graphdef)


@functools.partial(jax.jit, static_argnames="graphdef")
def _enter(params, table, tokens, num_tokens, *, graphdef):
    table, _ = extend(table, num_tokens)
    return table, nnx.merge(graphdef, params).embed(tokens)


@functools.partial(jax.jit, static_argnames=("graphdef", "policy"), donate_argnames=("cache", "x"))
def _layer(params, cache, table, x, num_tokens, *, graphdef, policy):
    return nnx.merge(graphdef, params)(cache, table, x, num_tokens, policy=policy)


@functools.partial(jax.jit, static_argnames="graphdef")
def _leave(params, x, num_tokens, *, graphdef):
    last = jnp.maximum(num_tokens - 1, 0)[:, None, None]
    return nnx.merge(graphdef, params).norm(jnp.take_along_axis(x, last, axis=1)[:, 0])


@functools.partial(jax.jit, static_argnames="graphdef")
def _logits(params, hidden, *, graphdef):
    return nnx.merge(graphdef, params).logits(hidden)
