"""A dense prefill that serves every policy and page size.

Letters: R rows, T tokens of the longest prompt, M pages a row, P page size, Hkv KV heads, D head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax.decode import write_tokens
from h2o_jax.eval.layerwise import Layerwise
from h2o_jax.generate import PREFILL_CHUNK
from h2o_jax.policy import Policy, get_policy
from h2o_jax.pool import extend
from h2o_jax.state import LayerCache, PagedState, init_state

_PAGE_SIZE = 16  # of the prefill itself; keys and values do not depend on it


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Keys and values of R prompts after dense prefill.

    Attributes:
        state: the state that the prefill left, of the dense policy.
        lengths: [R] int32, tokens of each prompt.
        cache_config: makes a `CacheConfig` that fits the model.
    """

    state: PagedState
    lengths: np.ndarray
    cache_config: Callable = dataclasses.field(repr=False)

    def state_for(self, policy: Policy, page_size: int, new_tokens: int) -> PagedState:
        """A state as `policy` would have it after the same prefill, with room for more tokens.

        Args:
            policy: of the decode steps to come.
            page_size: tokens of a page.
            new_tokens: how many more each row must be able to hold.
        """
        rows, pages = len(self.lengths), -(-(int(self.lengths.max()) + new_tokens) // page_size)
        config = self.cache_config(rows, pages, page_size)
        state = init_state(dataclasses.replace(config, num_layers=len(self.state.layers)), policy)
        table, _ = extend(state.table, jnp.asarray(self.lengths))
        layers = tuple(
            _rewrite(old, self.state.table, cache, table, policy=policy.for_layer(i))
            for i, (old, cache) in enumerate(zip(self.state.layers, state.layers))
        )
        return PagedState(table, layers)

    def compile(self, model: Layerwise, policy: Policy, page_size: int, new_tokens: int) -> None:
        """Compiles what such a state and a decode step from it take, by a run of the first layer on no tokens."""
        first = dataclasses.replace(self, state=PagedState(self.state.table, self.state.layers[:1]))
        none = np.zeros(len(self.lengths), np.int32)
        model.advance(first.state_for(policy, page_size, new_tokens), none[:, None], none, policy=policy)


@functools.partial(jax.jit, static_argnames="policy", donate_argnames="cache")
def _rewrite(old: LayerCache, old_table, cache: LayerCache, table, *, policy) -> LayerCache:
    """Writes all tokens of `old` into `cache`, whose pages may have another size."""
    rows, num_logical = old_table.pages.shape
    num_kv_heads, head_dim = old.k.shape[1], old.k.shape[3]

    def contiguous(pool):  # [R, M * P, Hkv, D]; 0 where there is no page
        tokens = pool.at[old_table.pages].get(mode="fill", fill_value=0).swapaxes(2, 3)
        return tokens.reshape(rows, num_logical * old_table.page_size, num_kv_heads, head_dim)

    return write_tokens(cache, table, contiguous(old.k), contiguous(old.v), table.seq_lens, policy=policy)


def prefill(
    model: Layerwise, prompts: Sequence[Sequence[int]] | np.ndarray, progress: Callable[[int], None]
) -> Prefix:
    """Runs dense attention over R prompts, which may differ in length.

    Args:
        model: the model.
        prompts: token ids, at least one token each.
        progress: called with the number of tokens of a row done, after each chunk.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), -(-int(lengths.max()) // PREFILL_CHUNK) * PREFILL_CHUNK), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    policy = get_policy("dense_attention")
    state = init_state(
        model.cache_config(len(prompts), -(-padded.shape[1] // _PAGE_SIZE), _PAGE_SIZE), policy
    )
    for begin in range(0, padded.shape[1], PREFILL_CHUNK):
        num_tokens = np.clip(lengths - begin, 0, PREFILL_CHUNK)
        state, hidden = model.advance(
            state, padded[:, begin : begin + PREFILL_CHUNK], num_tokens, policy=policy
        )
        jax.block_until_ready(hidden)
        progress(begin + PREFILL_CHUNK)
    return Prefix(state, lengths, model.cache_config)
