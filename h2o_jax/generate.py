"""Text generation: chunked prefill, then the whole decode loop in one jitted `while_loop`.

Letters: B request rows, T tokens of a chunk, V vocabulary, P page size.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from h2o_jax.config import CacheConfig
from h2o_jax.models import Llama
from h2o_jax.policy import Policy, is_integer, require_policy
from h2o_jax.pool import extend
from h2o_jax.sampling import greedy, sample_top_p
from h2o_jax.state import PagedState, init_state
from pallas_kernels._dispatch import require_runnable

DEFAULT_PAGE_SIZE = 16
PREFILL_CHUNK = 256
PAD = -1  # in the token buffer: not generated

_Lengths = TypeVar("_Lengths", int, np.ndarray)


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy,
    max_new_tokens: int,
    stop_tokens: Iterable[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    page_size: int | None = None,
    config: CacheConfig | None = None,
    implementation: str | None = None,
) -> list[list[int]]:
    """Generates a continuation of each prompt; prompts may differ in length.

    Args:
        model: a model of `h2o_jax.models`.
        prompts: token ids of each request, at least one token each.
        policy: chooses which pages each new token reads.
        max_new_tokens: most tokens to generate for each prompt.
        stop_tokens: ids that end a request, in any iterable or array; the id itself is its last token.
        temperature: 0 takes the most likely token; above 0 samples with this temperature.
        top_p: sample from the smallest set of tokens with this probability, in (0, 1].
        seed: of the sampling, in [0, 2**32).
        page_size: tokens a page; None is the policy's own where it has one, else 16.
        config: sizes of the cache, to keep one compilation over many calls; None fits them to the
            prompts. With it, `page_size` must be left None.
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.

    Returns:
        The new tokens of each prompt, without the prompt.

    Raises:
        ValueError: an empty prompt, a token id out of the vocabulary, a prompt that with its new tokens
            exceeds the model's context, the row or the pool, a stop token out of the vocabulary, a config
            of another model's sizes, or a wrong option. Nothing has run then.
        NotImplementedError: the named implementation can't run here.
        FloatingPointError: logits that are not finite, so that no token is the next one.
    """
    loop = GenerationLoop(
        model,
        prompts,
        policy=policy,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        page_size=page_size,
        config=config,
        implementation=implementation,
    )
    for _ in loop.prefill():
        pass
    loop.decode()
    return loop.tokens


class GenerationLoop:
    """One batch of prompts on its way through prefill and decode, for callers that stream or time it.

    Arguments are those of `generate`. Call `prefill()` to its end, then `decode(n)` until `finished`;
    `compile()` before that separates compilation from running. Where an exception has ended a call, the state
    was donated and is gone: later calls are a RuntimeError.

    Attributes:
        config: sizes of the cache.
        lengths: tokens of each prompt.
    """

    def __init__(
        self,
        model: Llama,
        prompts: Sequence[Sequence[int]],
        *,
        policy: Policy,
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        page_size: int | None = None,
        config: CacheConfig | None = None,
        implementation: str | None = None,
    ):
        check_options(max_new_tokens, temperature, top_p, seed)
        require_policy(policy)
        require_runnable(implementation)
        max_new_tokens = int(max_new_tokens)  # a narrow NumPy integer would wrap in sums
        if config is not None and page_size is not None:
            raise ValueError("page_size: expected None beside config, which has its own")
        if config is not None:
            check_fit(model, config)
        stop_tokens = check_stop_tokens(stop_tokens, model.config.vocab_size)
        checked = _check_prompts(prompts, model.config.vocab_size)
        self.lengths = np.array([len(prompt) for prompt in checked], np.int32)
        context = model.config.max_position_embeddings
        self.config = config or _fit_config(
            model, self.lengths, policy, min(max_new_tokens, context), page_size  # more is refused next
        )
        _check_room(self.lengths, max_new_tokens, context, self.config)

        self._policy = policy
        self._chunk = min(PREFILL_CHUNK, _next_power_of_two(int(self.lengths.max())))
        num_chunks = -(-int(self.lengths.max()) // self._chunk)
        self._prompts = np.zeros((self.config.max_requests, num_chunks * self._chunk), np.int32)
        self._prompt_lengths = np.zeros(self.config.max_requests, np.int32)
        for row, prompt in enumerate(checked):
            self._prompts[row, : len(prompt)] = prompt
            self._prompt_lengths[row] = len(prompt)
        self._max_new_tokens = max_new_tokens
        self._graphdef, self._params = nnx.split(model)
        self._sampling = Sampling(
            jax.random.key(seed), jnp.float32(temperature), jnp.float32(top_p), is_greedy=temperature == 0
        )
        self._static: dict[str, Any] = dict(
            graphdef=self._graphdef, policy=policy, implementation=implementation
        )
        self._stop_tokens = jnp.array(sorted(stop_tokens), jnp.int32)
        self._state: PagedState | None = init_state(self.config, policy)
        self._hidden = jnp.zeros((self.config.max_requests, model.config.hidden_size), model.dtype)
        self._progress: Progress | None = None
        self._returned = 0  # columns of the token buffer that decode() has returned

    def compile(self) -> None:
        """Compiles prefill and decode, by running both on no tokens."""
        no_tokens = np.zeros((self.config.max_requests, self._chunk), np.int32)
        self._run_chunk(no_tokens, np.zeros(self.config.max_requests, np.int32))
        progress = self._start_decode()
        self._state, _ = self._run_decode(progress, 0)

    def prefill(self) -> Iterator[int]:
        """Prefills chunk by chunk; yields the number of prompt tokens done after each, all rows together."""
        for begin in range(0, self._prompts.shape[1], self._chunk):
            num_tokens = np.clip(self._prompt_lengths - begin, 0, self._chunk)
            self._run_chunk(self._prompts[:, begin : begin + self._chunk], num_tokens)
            jax.block_until_ready(self._hidden)
            yield int(np.minimum(self._prompt_lengths, begin + self._chunk).sum())
        self._progress = self._start_decode()

    def decode(self, num_tokens: int | None = None) -> list[list[int]]:
        """Generates up to `num_tokens` more tokens a row (None: to the end); returns those new ones.

        Raises:
            ValueError: before the end of `prefill()`, or no positive number.
            FloatingPointError: logits that are not finite; the message says of which prompts.
        """
        if self._progress is None:
            raise ValueError("decode: expected prefill() to have run to its end")
        if not (num_tokens is None or is_integer(num_tokens, 1)):
            raise ValueError(f"num_tokens: expected None or a positive integer, got {num_tokens!r}")
        begin = self._returned
        limit = self._max_new_tokens if num_tokens is None else begin + int(num_tokens)
        self._state, self._progress = self._run_decode(self._progress, min(limit, self._max_new_tokens))
        self._returned = int(self._progress.count)
        rows = np.flatnonzero(~np.asarray(self._progress.finite))
        if rows.size:
            raise FloatingPointError(
                f"logits: expected finite numbers, got NaN or infinity for prompts {rows.tolist()}, "
                f"computing in {self._hidden.dtype.name}"
            )
        return self._tokens(begin, self._returned)

    @property
    def finished(self) -> bool:
        """Whether every row has met a stop token or has all its tokens."""
        progress = self._progress
        return progress is not None and (
            int(progress.count) >= self._max_new_tokens or bool(progress.done.all())
        )

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens generated so far, of each prompt."""
        return self._tokens(0, self._max_new_tokens)

    def hand_over(self) -> tuple[PagedState, jax.Array]:
        """The state after prefill and the last hidden of each row, [B, features]; the loop ends with it."""
        return self._take_state(), self._hidden

    def _take_state(self) -> PagedState:
        """The state, to be donated: what comes of it takes its place, unless an exception comes instead."""
        state, self._state = self._state, None
        if state is None:
            raise RuntimeError(
                "GenerationLoop: the state was handed over, or donated to a call that an exception ended; "
                "make a new loop"
            )
        return state

    def _tokens(self, begin: int, end: int) -> list[list[int]]:
        if self._progress is None:
            return [[] for _ in self.lengths]
        buffer = np.asarray(self._progress.tokens)[: len(self.lengths), begin:end]
        return [[int(token) for token in row if token != PAD] for row in buffer]

    def _run_chunk(self, tokens: np.ndarray, num_tokens: np.ndarray) -> None:
        self._state, self._hidden = prefill_chunk(
            self._params, self._take_state(), self._hidden, tokens, num_tokens, **self._static
        )

    def _start_decode(self) -> "Progress":
        return start_decode(
            self._params,
            self._hidden,
            self._prompt_lengths,
            self._stop_tokens,
            self._sampling,
            graphdef=self._graphdef,
            columns=_next_power_of_two(self._max_new_tokens),  # few sizes, so few compilations
        )

    def _run_decode(self, progress: "Progress", limit: int) -> tuple[PagedState, "Progress"]:
        return decode_loop(
            self._params,
            self._take_state(),
            progress,
            jnp.int32(limit),
            self._stop_tokens,
            self._sampling,
            **self._static,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        key: random key of the run; row b's token at step i is drawn with `fold_in(fold_in(key, b), i)`.
        temperature, top_p: float32 scalars; see `sample_top_p`.
        is_greedy: take the most likely token instead (static).
    """

    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    is_greedy: bool = dataclasses.field(metadata=dict(static=True))

    def next_token(self, logits: jax.Array, step: jax.Array) -> jax.Array:
        """[B] int32: the token after `logits` [B, V] at `step` of the run."""
        if self.is_greedy:
            return greedy(logits)
        rows = jnp.arange(logits.shape[0])
        keys = jax.vmap(lambda b: jax.random.fold_in(jax.random.fold_in(self.key, b), step))(rows)
        return sample_top_p(logits, keys, self.temperature, self.top_p)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """What a decode loop has generated.

    Attributes:
        tokens: [B, columns] int32, PAD where nothing was generated.
        count: int32 scalar, columns of `tokens` that are filled.
        newest: [B] int32, each row's newest token, not cached yet.
        done: [B] bool, rows that are empty or have met a stop token.
        finite: [B] bool, whether all logits were finite that tokens were drawn from.
    """

    tokens: jax.Array
    count: jax.Array
    newest: jax.Array
    done: jax.Array
    finite: jax.Array


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "policy", "implementation"),
    donate_argnames=("state", "last_hidden"),
)
def prefill_chunk(
    params: nnx.State,
    state: PagedState,
    last_hidden: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    graphdef: nnx.GraphDef[Llama],
    policy: Policy,
    implementation: str | None,
) -> tuple[PagedState, jax.Array]:
    """Prefills the next chunk of each row.

    Args:
        params: parameters of the model.
        state: paged state (donated), with room for the tokens.
        last_hidden: [B, features] hidden of each row's last token so far (donated).
        tokens: [B, T] int32, right-padded.
        num_tokens: [B] int32.
        graphdef, policy, implementation: static.

    Returns:
        The state, and `last_hidden` after the chunk.
    """
    model = nnx.merge(graphdef, params)
    state, last = advance(model, state, tokens, num_tokens, policy=policy, implementation=implementation)
    return state, jnp.where(num_tokens[:, None] > 0, last, last_hidden)


@functools.partial(jax.jit, static_argnames=("graphdef", "columns"))
def start_decode(
    params: nnx.State,
    last_hidden: jax.Array,
    lengths: jax.Array,
    stop_tokens: jax.Array,
    sampling: Sampling,
    *,
    graphdef: nnx.GraphDef[Llama],
    columns: int,
) -> Progress:
    """Draws each row's first new token from the hidden of its prompt's last token.

    Args:
        params: parameters of the model.
        last_hidden: [B, features].
        lengths: [B] int32 prompt lengths; 0 for an empty row.
        stop_tokens: [S] int32.
        sampling: how tokens are drawn.
        graphdef: static.
        columns: of the token buffer, at least the number of tokens to generate (static).

    Returns:
        The `Progress` after one token.
    """
    logits = nnx.merge(graphdef, params).logits(last_hidden)
    newest = sampling.next_token(logits, jnp.int32(0))
    empty = lengths == 0
    tokens = jnp.full((lengths.shape[0], columns), PAD, jnp.int32)
    return Progress(
        tokens=tokens.at[:, 0].set(jnp.where(empty, PAD, newest)),
        count=jnp.int32(1),
        newest=newest,
        done=empty | jnp.isin(newest, stop_tokens),
        finite=empty | jnp.isfinite(logits).all(axis=-1),
    )


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "policy", "implementation"),
    donate_argnames=("state", "progress"),
)
def decode_loop(
    params: nnx.State,
    state: PagedState,
    progress: Progress,
    limit: jax.Array,
    stop_tokens: jax.Array,
    sampling: Sampling,
    *,
    graphdef: nnx.GraphDef[Llama],
    policy: Policy,
    implementation: str | None,
) -> tuple[PagedState, Progress]:
    """Decodes until `limit` tokens a row are there or all rows are done.

    Args:
        params: parameters of the model.
        state: paged state (donated), with room for the tokens.
        progress: what has been generated (donated).
        limit: int32 scalar, at most the columns of `progress.tokens`.
        stop_tokens: [S] int32.
        sampling: how tokens are drawn.
        graphdef, policy, implementation: static.

    Returns:
        The state and the progress.
    """
    model = nnx.merge(graphdef, params)

    def unfinished(carry: tuple[PagedState, Progress]) -> jax.Array:
        _, progress = carry
        return (progress.count < limit) & ~progress.done.all()

    def step(carry: tuple[PagedState, Progress]) -> tuple[PagedState, Progress]:
        state, progress = carry
        num_tokens = (~progress.done).astype(jnp.int32)
        tokens = progress.newest[:, None]
        state, last = advance(model, state, tokens, num_tokens, policy=policy, implementation=implementation)
        logits = model.logits(last)
        newest = sampling.next_token(logits, progress.count)
        column = jnp.where(progress.done, PAD, newest)
        return state, Progress(
            tokens=jax.lax.dynamic_update_slice(
                progress.tokens, column[:, None], (jnp.int32(0), progress.count)
            ),
            count=progress.count + 1,
            newest=newest,
            done=progress.done | jnp.isin(newest, stop_tokens),
            finite=progress.finite & (progress.done | jnp.isfinite(logits).all(axis=-1)),
        )

    return jax.lax.while_loop(unfinished, step, (state, progress))


def advance(
    model: Llama,
    state: PagedState,
    tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    policy: Policy,
    implementation: str | None,
) -> tuple[PagedState, jax.Array]:
    """Caches the next tokens of each row.

    Args:
        model: a model of `h2o_jax.models`.
        state: paged state, with room for the tokens.
        tokens: [B, T] int32, right-padded.
        num_tokens: [B] int32.
        policy, implementation: as in `generate`.

    Returns:
        The state, and the hidden of each row's last token, [B, features]; not defined where a row has none.
    """
    table, _ = extend(state.table, num_tokens)
    state, hidden = model.hidden(
        PagedState(table, state.layers), tokens, num_tokens, policy=policy, implementation=implementation
    )
    last = jnp.maximum(num_tokens - 1, 0)[:, None, None]
    return state, jnp.take_along_axis(hidden, last, axis=1)[:, 0]


def check_options(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> None:
    """Raises ValueError unless these options of `generate` are in range."""
    check_max_new_tokens(max_new_tokens)
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if temperature != 0 and not least <= temperature <= most:
        raise ValueError(f"temperature: expected 0 or a positive number in float32, got {temperature!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p!r}")
    check_seed(seed)


def check_seed(seed: int) -> None:
    """Raises ValueError unless it is a seed that JAX can tell from all others."""
    if not is_integer(seed, 0) or seed >= 2**32:
        raise ValueError(f"seed: expected an integer in [0, 2**32), got {seed!r}")


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raises ValueError unless it is a positive integer."""
    if not is_integer(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens: expected a positive integer, got {max_new_tokens!r}")


def check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> frozenset[int]:
    """The stop tokens; ValueError unless they are integers of the vocabulary, in any iterable or array."""
    try:
        ids: list[Any] = [x.item() if isinstance(x, jax.Array) and not x.ndim else x for x in stop_tokens]
    except TypeError:  # nothing to iterate over
        ids = [None]
    if isinstance(stop_tokens, bytes) or not all(is_integer(x, 0) and x < vocab_size for x in ids):
        raise ValueError(f"stop_tokens: expected a sequence of integers in [0, {vocab_size}), got {stop_tokens!r:.80}")
    return frozenset(map(int, ids))


def check_fit(model: Llama, config: CacheConfig) -> None:
    """Raises ValueError unless the cache has the layers, KV heads and head_dim of the model."""
    if not isinstance(config, CacheConfig):
        raise ValueError(f"config: expected a CacheConfig, got {config!r:.80}")
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        expected, got = getattr(model.config, name), getattr(config, name)
        if got != expected:
            raise ValueError(f"config: expected {name} = {expected} as in the model, got {got}")


def check_prompt(name: str, prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    """The prompt as int32; ValueError that says `name` unless it is at least one token of the vocabulary."""
    ids = np.asarray(prompt)
    if ids.ndim != 1:
        raise ValueError(f"{name}: expected a sequence of token ids, got {prompt!r:.80}")
    if not ids.size:
        raise ValueError(f"{name}: expected at least one token id, got {prompt!r:.80}")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{name}: expected token ids in [0, {vocab_size}), got {prompt!r:.80}")
    return ids.astype(np.int32)


def check_room(name: str, length: int, max_new_tokens: int, context: int, config: CacheConfig) -> int:
    """The pages a prompt may come to need; ValueError that says `name` if context or row is too short."""
    need = f"{name}: {length} tokens and {max_new_tokens} new ones"
    if length + max_new_tokens > context:
        raise ValueError(f"{need} exceed the model's context of {context} tokens")
    pages = _pages_needed(length, max_new_tokens, config.page_size)
    if pages > config.pages_per_request:
        raise ValueError(
            f"{need} need {pages} pages; a row has pages_per_request = {config.pages_per_request}"
        )
    return pages


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[np.ndarray]:
    if not len(prompts):
        raise ValueError("prompts: expected at least one prompt, got none")
    return [check_prompt(f"prompts[{i}]", prompt, vocab_size) for i, prompt in enumerate(prompts)]


def _fit_config(
    model: Llama, lengths: np.ndarray, policy: Policy, max_new_tokens: int, page_size: int | None
) -> CacheConfig:
    if page_size is None:
        page_size = policy.page_size or DEFAULT_PAGE_SIZE
    if not is_integer(page_size, 1):
        raise ValueError(f"page_size: expected a positive integer, got {page_size!r}")
    pages = _pages_needed(lengths.astype(np.int64), max_new_tokens, page_size)
    return model.cache_config(len(lengths), int(pages.max()), page_size, num_pages=int(pages.sum()))


def _pages_needed(lengths: _Lengths, max_new_tokens: int, page_size: int) -> _Lengths:
    return -(-(lengths + max_new_tokens - 1) // page_size)  # the last new token is not cached


def _check_room(lengths: np.ndarray, max_new_tokens: int, context: int, config: CacheConfig) -> None:
    if len(lengths) > config.max_requests:
        raise ValueError(f"prompts: expected at most max_requests = {config.max_requests}, got {len(lengths)}")
    pages = [
        check_room(f"prompts[{i}]", int(length), max_new_tokens, context, config)
        for i, length in enumerate(lengths)
    ]
    if sum(pages) > config.num_pages:
        raise ValueError(
            f"prompts: {sum(pages)} pages needed in all; the pool has num_pages = {config.num_pages}"
        )


def _next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()  # at least 2: a chunk of one token would be a decode step


class _CallableModule(types.ModuleType):
    """`h2o_jax.generate` is this file and, as a public name of the package, the function in it."""

    __call__ = staticmethod(generate)
    __signature__ = inspect.signature(generate)

    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return importlib.import_module, (__name__,)


__doc__ = generate.__doc__ or ""
sys.modules[__name__].__class__ = _CallableModule
