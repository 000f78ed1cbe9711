"""Continuous batching: requests come and go between the steps of one batch.

Letters: B request rows, T tokens of a call.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from h2o_jax.config import CacheConfig
from h2o_jax.generate import (
    PREFILL_CHUNK,
    advance,
    check_fit,
    check_max_new_tokens,
    check_prompt,
    check_room,
    check_stop_tokens,
)
from h2o_jax.models import Llama
from h2o_jax.policy import Policy, is_integer
from h2o_jax.pool import release
from h2o_jax.sampling import greedy
from h2o_jax.state import PagedState, init_state
from pallas_kernels._dispatch import require_runnable


class Event(NamedTuple):
    """A new token of a request.

    Attributes:
        request_id: what `Server.submit` returned.
        token: the token's id.
        finished: whether it is the request's last: a stop token, or the last of `max_new_tokens`.
    """

    request_id: int
    token: int
    finished: bool


class Server:
    """Serves requests that arrive at any time, in the rows of one batch, with greedy decoding.

    A request gets a free row, prefills in chunks beside the rows that decode, and with its last token leaves
    its row and pages to others. It gets the row only once the pool can hold its prompt and all new tokens it
    may have, on top of all that the requests in other rows may have: so the pool is never full in the middle
    of a request, and none is ever cut short or started over. Until then it waits, in order of arrival. Its
    tokens are those that `generate` gives for its prompt alone, whatever else is in the batch: up to rounding,
    since a prompt prefilled in chunks of another size goes through products of another shape, which in a
    bfloat16 model can decide between two tokens that are nearly as likely.

    Nothing is compiled twice: a chunk of prefill and a decode step, for all rows each, are all that runs.

        server = h2o_jax.Server(model, policy=policy, config=model.cache_config(8, 64, 16))
        server.submit(prompt, max_new_tokens=100, stop_tokens=tokenizer.eos_ids)
        while server.num_running:
            for request_id, token, finished in server.step():
                ...

    Args:
        model: a model of `h2o_jax.models`.
        policy: chooses which pages each new token reads.
        config: sizes of the cache: `max_requests` rows, `num_pages` that they share.
        prefill_chunk: prompt tokens that a row caches in one step. Decoding rows wait for a chunk at most.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Attributes:
        config: sizes of the cache.

    Raises:
        ValueError: not a policy, one that can't run with this config, a config of another model's sizes, or
            `prefill_chunk` below 2.
        NotImplementedError: the named implementation can't run here.
    """

    def __init__(
        self,
        model: Llama,
        *,
        policy: Policy,
        config: CacheConfig,
        prefill_chunk: int = PREFILL_CHUNK,
        implementation: str | None = None,
    ):
        if not is_integer(prefill_chunk, 2):  # one token would be a decode step
            raise ValueError(f"prefill_chunk: expected an integer >= 2, got {prefill_chunk!r}")
        check_fit(model, config)
        require_runnable(implementation)
        self.config = config
        self._prefill_chunk = int(prefill_chunk)  # a narrow NumPy integer would wrap in sums
        self._vocab_size = model.config.vocab_size
        self._context = model.config.max_position_embeddings
        graphdef, self._params = nnx.split(model)
        self._static = dict(graphdef=graphdef, policy=policy, implementation=implementation)
        self._state = init_state(config, policy)
        self._rows: list[_Request | None] = [None] * config.max_requests
        self._waiting: collections.deque[_Request] = collections.deque()
        self._num_submitted = 0
        self._leaving = np.zeros(config.max_requests, bool)  # rows to release on the device
        self._is_whole = True  # False from a step's begin to its end

    @property
    def num_running(self) -> int:
        """Requests that hold a row. Where it is 0, no request is waiting either."""
        return sum(request is not None for request in self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row or for pages."""
        return len(self._waiting)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        wait: bool = True,
    ) -> int | None:
        """Takes a request, at any time between two steps.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to generate. Pages for all of them are kept for this request.
            stop_tokens: ids that end the request, in any iterable or array; the id itself is its last token.
            wait: whether the request may wait for its turn, where rows or pages are short now.

        Returns:
            The request's id; None, and nothing has changed, where it would have to wait and may not.

        Raises:
            ValueError: a wrong prompt, or one that with its new tokens exceeds the model's context, a row or
                the whole pool, so that it could never run; a stop token out of the vocabulary. Nothing has
                changed then.
            RuntimeError: an earlier step did not end; see `step`.
        """
        self._require_whole()
        check_max_new_tokens(max_new_tokens)
        max_new_tokens = int(max_new_tokens)
        tokens = check_prompt("prompt", prompt, self._vocab_size).tolist()
        stops = check_stop_tokens(stop_tokens, self._vocab_size)
        pages = check_room("prompt", len(tokens), max_new_tokens, self._context, self.config)
        if pages > self.config.num_pages:
            raise ValueError(
                f"prompt: {pages} pages needed; the pool has num_pages = {self.config.num_pages}"
            )
        request = _Request(
            id=self._num_submitted,
            tokens=tokens,
            prompt_length=len(tokens),
            max_length=len(tokens) + max_new_tokens,
            stop_tokens=stops,
            pages=pages,
        )
        self._waiting.append(request)
        self._admit()
        if self._waiting and not wait:
            self._waiting.pop()
            return None
        self._num_submitted += 1
        return request.id

    def step(self) -> list[Event]:
        """Caches a chunk of each prompt that is not cached yet, and decodes a token in each other row.

        Waits for the device once, for B tokens or twice that. A server whose step an exception has ended is
        of no use any more: its state was donated.

        Returns:
            The new tokens: one of each row that decoded or came to the end of its prompt.

        Raises:
            RuntimeError: an earlier step did not end; make a new server, and submit its requests there.
        """
        self._require_whole()
        self._is_whole = False
        running = [(row, request) for row, request in enumerate(self._rows) if request is not None]
        prefilling = [(row, request) for row, request in running if request.cached < request.prompt_length]
        decoding = [(row, request) for row, request in running if request.cached >= request.prompt_length]
        calls = [(rows, width) for rows, width in ((prefilling, self._prefill_chunk), (decoding, 1)) if rows]
        results = jax.device_get([self._run(rows, width) for rows, width in calls])
        events = []
        for (rows, width), next_tokens in zip(calls, results):
            for row, request in rows:
                request.cached = min(request.cached + width, len(request.tokens))
                if request.cached < len(request.tokens):
                    continue  # there is more of the prompt
                token = int(next_tokens[row])
                request.tokens.append(token)
                finished = token in request.stop_tokens or len(request.tokens) == request.max_length
                events.append(Event(request.id, token, finished))
                if finished:
                    self._rows[row] = None
                    self._leaving[row] = True
        self._admit()
        self._is_whole = True
        return events

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise RuntimeError(
                "Server: an exception ended an earlier step, whose state was donated; make a new server"
            )

    def _run(self, rows: list[tuple[int, "_Request"]], width: int) -> jax.Array:
        """Starts one call on the device, for up to `width` tokens of each of these rows."""
        tokens = np.zeros((self.config.max_requests, width), np.int32)
        num_tokens = np.zeros(self.config.max_requests, np.int32)
        for row, request in rows:
            new = request.tokens[request.cached : request.cached + width]
            tokens[row, : len(new)] = new
            num_tokens[row] = len(new)
        self._state, next_tokens = forward(
            self._params, self._state, self._leaving, tokens, num_tokens, **self._static
        )
        self._leaving = np.zeros_like(self._leaving)  # a new one: the call may still read the last
        return next_tokens

    def _admit(self) -> None:
        """Gives free rows to waiting requests, in order, while every one admitted is sure of its pages."""
        free_pages = self.config.num_pages - sum(request.pages for request in self._rows if request)
        for row, request in enumerate(self._rows):
            if request is None and self._waiting and self._waiting[0].pages <= free_pages:
                self._rows[row] = admitted = self._waiting.popleft()
                free_pages -= admitted.pages


@dataclasses.dataclass(eq=False)
class _Request:
    id: int
    tokens: list[int]  # those of the prompt, then the new ones
    prompt_length: int
    max_length: int  # most tokens there may be
    stop_tokens: frozenset[int]
    pages: int  # most pages it may come to need
    cached: int = 0  # how many of `tokens` are in the cache


@functools.partial(
    jax.jit, static_argnames=("graphdef", "policy", "implementation"), donate_argnames="state"
)
def forward(
    params: nnx.State,
    state: PagedState,
    leaving: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    graphdef: nnx.GraphDef[Llama],
    policy: Policy,
    implementation: str | None,
) -> tuple[PagedState, jax.Array]:
    """Releases rows, then caches the next tokens of each row.

    Args:
        params: parameters of the model.
        state: paged state (donated), with room for the tokens once the rows are released.
        leaving: [B] bool, rows to release; they may have new tokens, of a new request.
        tokens: [B, T] int32, right-padded.
        num_tokens: [B] int32.
        graphdef, policy, implementation: static.

    Returns:
        The state, and the most likely token after each row's last one, [B] int32; not defined where a row has
        no new tokens.
    """
    model = nnx.merge(graphdef, params)
    state = PagedState(release(state.table, leaving), state.layers)
    state, last = advance(model, state, tokens, num_tokens, policy=policy, implementation=implementation)
    return state, greedy(model.logits(last))
