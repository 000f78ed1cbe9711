"""Reference runs: our figures beside those published for the system that this library ports.

Three groups of checks, each through public functions of the library and judged by float64 NumPy:

    oracle run      heavy-hitter scores of a token policy over a fixed cache, 600 decode steps
    recurrence run  `hh <- p + decay * hh` alone, 800 steps
    contract        selection of the four H2O policies, page size, scale, resets

Letters: S steps, T tokens, A tokens of the window, G query heads of a KV head, D head_dim.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from h2o_jax import reference
from h2o_jax.config import CacheConfig
from h2o_jax.decode import attend, select_pages, write_tokens
from h2o_jax.policy import Policy, get_policy
from h2o_jax.pool import extend, release
from h2o_jax.state import LayerCache, PageTable, init_state
from pallas_kernels import decayed_softmax_scores

NUM_TOKENS, HEAD_DIM, GROUP_SIZE = 128, 128, 4
TOP_K, RESERVED_BOS, RESERVED_EOS = 32, 4, 8
NUM_STEPS, RECURRENCE_STEPS = 600, 800
DECAY = 0.984375
GROUP_SIZES = (1, 3, 4, 7, 8)
PAGE_POLICIES = ("h2o_sparse_attention", "gqa_h2o_sparse_attention")
TOKEN_POLICIES = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
DEFAULT_SEED = 3

MAX_REL_ERR, MAX_REL_ERR_FLOAT32, MAX_MASS_ERROR = 0.15, 1e-3, 0.10

_WINDOW = slice(RESERVED_BOS, NUM_TOKENS - RESERVED_EOS)


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        section: "oracle run", "recurrence run" or "contract".
        name: what was run.
        measured: our figures.
        published: those of the ported system; empty where it published none.
        criterion: what passes.
        passed: whether `measured` does.
    """

    section: str
    name: str
    measured: str
    published: str
    criterion: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Scores of one step against the exact ones.

    Attributes:
        rel_err: largest absolute difference / largest exact score.
        largest: largest score.
        overlap: share of the exact top 32 that was chosen.
        gap: between the 32nd and the 33rd exact score, in bfloat16 ulps of the former.
        misranked: how far the best token left out stands above the worst one chosen, in bfloat16 ulps, by
            the scores that arithmetic without error but with rounding at each store gives; 0 if it doesn't.
    """

    rel_err: float
    largest: float
    overlap: float
    gap: float
    misranked: float = 0.0

    def __str__(self) -> str:
        return (
            f"rel. err {_short(self.rel_err)}, max {self.largest:.2f}, "
            f"top-{TOP_K} {self.overlap:.0%}, gap {self.gap:.1f} ulp"
        )

    @property
    def ranked(self) -> bool:
        """Whether the choice is right as far as the stored dtype can tell.

        Rounding at every step moves two tokens apart by a few ulps over hundreds of steps, so `overlap` can
        fall short where `gap` exceeds an ulp, by luck of the inputs. The same rounding in exact arithmetic
        leaves an ulp at most.
        """
        return self.misranked <= 1


# Figures of the ported system, for one draw of the inputs on its GPU: by decay and step.
_PUBLISHED_ORACLE = {
    (DECAY, 1): Accuracy(2.37e-3, 0.02, 1.00, 0.8),
    (DECAY, 151): Accuracy(1.97e-2, 0.88, 1.00, 0.8),
    (DECAY, 301): Accuracy(1.83e-2, 1.00, 0.97, 0.0),
    (DECAY, 600): Accuracy(1.82e-2, 0.97, 1.00, 1.3),
    (1.0, 600): Accuracy(3.19e-1, 8.00, 0.62, 0.5),
}
_PUBLISHED_MASS = {DECAY: (64.50, 64.00), 1.0: (445.83, 600.0)}


def verify(implementation: str | None = None, seed: int = DEFAULT_SEED) -> Iterator[Check]:
    """Runs every check, in the order of the table.

    Args:
        implementation: "xla", "pallas", "pallas_interpret" or None for the best here.
        seed: of the inputs. The figures vary with it (by a third, where they measure rounding), the
            verdicts must not.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: the named implementation can't.
    """
    yield from oracle_checks(implementation, seed)
    yield from recurrence_checks(implementation, seed)
    yield from contract_checks(implementation, seed)


# Oracle run


class OracleInputs(NamedTuple):
    """Inputs of the oracle run.

    Attributes:
        keys: [T, D] bfloat16.
        queries: [S, G, D] bfloat16.
    """

    keys: jax.Array
    queries: jax.Array


class OracleTrace(NamedTuple):
    """What the library did in the oracle run.

    Attributes:
        hh_score: [S, T] float64, the stored scores after each step, in logical order.
        pages: [S, W] the pages selected.
        cache: the layer's cache at the end.
        table: its page table.
    """

    hh_score: np.ndarray
    pages: np.ndarray
    cache: LayerCache
    table: PageTable


def oracle_inputs(seed: int) -> OracleInputs:
    """Keys with a stable set of heavy hitters along one direction, and queries around that direction."""
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(HEAD_DIM)
    direction /= np.linalg.norm(direction)
    affinity = 2 * rng.standard_normal(NUM_TOKENS)
    keys = rng.standard_normal((NUM_TOKENS, HEAD_DIM)) + affinity[:, None] * direction
    queries = direction + 0.3 * rng.standard_normal((NUM_STEPS, GROUP_SIZE, HEAD_DIM))
    return OracleInputs(jnp.asarray(keys, jnp.bfloat16), jnp.asarray(queries, jnp.bfloat16))


def oracle_run(
    inputs: OracleInputs, *, decay: float, score_dtype: str, implementation: str | None = None
) -> OracleTrace:
    """Runs `select_pages` over a fixed cache, once for each step of `inputs`, in one jitted scan."""
    policy = _token_policy(TOKEN_POLICIES[0], decay=decay, score_dtype=score_dtype)
    cache, table = _empty_layer(policy, num_kv_heads=1, head_dim=HEAD_DIM, page_size=1, num_pages=NUM_TOKENS)
    table = _extended(table, [NUM_TOKENS])

    @jax.jit
    def run(cache, table, inputs):
        keys, num_tokens = inputs.keys[None, :, None], np.array([NUM_TOKENS])
        cache = _write(cache, table, keys, num_tokens, policy, implementation)

        def step(cache, q):
            cache, selection = select_pages(
                cache, table, q[None], policy=policy, implementation=implementation
            )
            return cache, (cache.aux["hh_score"][table.pages[0], 0, 0], selection.pages[0, 0])

        return jax.lax.scan(step, cache, inputs.queries)

    cache, (hh_score, pages) = run(cache, table, inputs)
    return OracleTrace(_float64(hh_score), np.asarray(pages), cache, table)


def window_probabilities(inputs: OracleInputs) -> np.ndarray:
    """[S, A] float64: the mean query's softmax over the window, from the rounded inputs."""
    keys, queries = _float64(inputs.keys)[_WINDOW], _float64(inputs.queries).mean(axis=1)
    return _softmax(HEAD_DIM**-0.5 * queries @ keys.T)


def recurrence(probabilities: np.ndarray, decay: float, score_dtype: str = "float64") -> np.ndarray:
    """[S, A] float64: `hh <- p + decay * hh` in float64, rounded to `score_dtype` after each step."""
    score = np.zeros(probabilities.shape[1])
    history = []
    for probability in probabilities:
        score = reference.round_to(probability + decay * score, score_dtype)
        history.append(score)
    return np.array(history)


def accuracy(scores: np.ndarray, exact: np.ndarray, rounded: np.ndarray, chosen: np.ndarray) -> Accuracy:
    """Judges one step.

    Args:
        scores: [A] the library's.
        exact: [A] of the float64 recurrence.
        rounded: [A] of the float64 recurrence that rounds where the library stores.
        chosen: indices into A, the tokens chosen by score.
    """
    ranking = np.argsort(-exact, kind="stable")
    above, below = exact[ranking[TOP_K - 1]], exact[ranking[TOP_K]]
    ulp = _bfloat16_ulp(above)
    left_out = np.setdiff1d(np.arange(len(exact)), chosen)
    return Accuracy(
        rel_err=float(np.abs(scores - exact).max() / exact.max()),
        largest=float(scores.max()),
        overlap=len(np.intersect1d(chosen, ranking[:TOP_K])) / TOP_K,
        gap=float((above - below) / ulp),
        misranked=max(0.0, float((rounded[left_out].max() - rounded[chosen].min()) / ulp)),
    )


def oracle_checks(implementation: str | None = None, seed: int = DEFAULT_SEED) -> Iterator[Check]:
    """The oracle run with both decays and both score dtypes, and page reuse at its end."""
    inputs = oracle_inputs(seed)
    probabilities = window_probabilities(inputs)
    for score_dtype in ("bfloat16", "float32"):
        for decay in (DECAY, 1.0):
            trace = oracle_run(inputs, decay=decay, score_dtype=score_dtype, implementation=implementation)
            yield from judge_oracle_run(trace, probabilities, decay, score_dtype)
            if (score_dtype, decay) == ("bfloat16", DECAY):
                yield from _reuse_checks(inputs, trace, implementation)


def judge_oracle_run(
    trace: OracleTrace, probabilities: np.ndarray, decay: float, score_dtype: str
) -> Iterator[Check]:
    """The lines of one oracle run.

    Args:
        trace: of the library.
        probabilities: [S, A] float64 of the same inputs.
        decay: of the run.
        score_dtype: of the run.
    """
    exact = recurrence(probabilities, decay)
    rounded = recurrence(probabilities, decay, score_dtype)
    run = f"decay {decay:g}, {score_dtype}"
    narrow = score_dtype == "bfloat16"
    must_fail = narrow and decay == 1

    for step in (1, 151, 301, NUM_STEPS) if narrow and not must_fail else (NUM_STEPS,):
        chosen = np.intersect1d(trace.pages[step - 1], np.arange(NUM_TOKENS)[_WINDOW]) - RESERVED_BOS
        result = accuracy(trace.hh_score[step - 1, _WINDOW], exact[step - 1], rounded[step - 1], chosen)
        published = str(_PUBLISHED_ORACLE[decay, step]) if narrow else ""
        yield _accuracy_check("oracle run", f"{run}, step {step}", result, published, narrow, must_fail)

    mass, expected = trace.hh_score[-1].sum(), exact[-1].sum()
    error = abs(mass - expected) / expected
    lost = 1 - mass / expected
    yield Check(
        "oracle run",
        f"{run}, total mass",
        _mass(mass, expected),
        _mass(*_PUBLISHED_MASS[decay]) if narrow else "",
        f"more than {MAX_MASS_ERROR:.0%} lost to rounding" if must_fail else f"within {MAX_MASS_ERROR:.0%}",
        bool(lost > MAX_MASS_ERROR if must_fail else error <= MAX_MASS_ERROR),
    )
    if narrow:
        stored = trace.hh_score[:, _WINDOW]
        ulps = (np.abs(stored - rounded) / _bfloat16_ulp(np.maximum(stored, rounded))).max()
        yield Check(
            "oracle run",
            f"{run}, all steps",
            f"{ulps:.2g} ulp from a recurrence rounded once a step",
            "",
            "<= 1 ulp",
            bool(ulps <= 1),
        )
    nonzero = np.flatnonzero(trace.hh_score[-1])
    yield Check(
        "oracle run",
        f"{run}, tokens with a score",
        f"{len(nonzero)} of {NUM_TOKENS}",
        "116 of 128" if narrow else "",
        "exactly the 116 of the window",
        np.array_equal(nonzero, np.arange(NUM_TOKENS)[_WINDOW]),
    )


def _accuracy_check(
    section: str, name: str, result: Accuracy, published: str, narrow: bool, must_fail: bool
) -> Check:
    if must_fail:
        criterion, passed = f"rel. err > {MAX_REL_ERR}: it must fail", result.rel_err > MAX_REL_ERR
    elif narrow:
        criterion = f"rel. err < {MAX_REL_ERR}; top-{TOP_K} right but for roundings"
        passed = result.rel_err < MAX_REL_ERR and result.ranked
    else:
        criterion = f"rel. err <= {_short(MAX_REL_ERR_FLOAT32)}; top-{TOP_K} 100%, unless gap <= 1 ulp"
        passed = result.rel_err <= MAX_REL_ERR_FLOAT32 and result.ranked
        passed = passed and (result.overlap == 1 or result.gap <= 1)
    return Check(section, name, str(result), published, criterion, bool(passed))


def _reuse_checks(
    inputs: OracleInputs, trace: OracleTrace, implementation: str | None
) -> Iterator[Check]:
    policy = _token_policy(TOKEN_POLICIES[0], score_dtype="bfloat16")
    write = jax.jit(functools.partial(_write, policy=policy, implementation=implementation))
    before = np.count_nonzero(_float64(trace.cache.aux["hh_score"]))
    table = _extended(_release(trace.table, jnp.ones((1,), bool)), [NUM_TOKENS])
    cache = write(trace.cache, table, inputs.keys[None, :, None], np.array([NUM_TOKENS], np.int32))
    after = np.count_nonzero(_float64(cache.aux["hh_score"]))
    yield Check(
        "oracle run",
        "page reuse, nonzero scores",
        f"{before} before, {after} after",
        "some before, 0 after",
        "some before, 0 after",
        bool(before > 0 and after == 0),
    )


# Recurrence run


def recurrence_inputs(seed: int) -> np.ndarray:
    """[S, T] float32 logits: stable affinities and some fresh noise; the last step is uniform."""
    rng = np.random.default_rng(seed)
    affinity = 1.5 * rng.standard_normal(NUM_TOKENS)
    logits = affinity + 0.5 * rng.standard_normal((RECURRENCE_STEPS, NUM_TOKENS))
    return np.concatenate([logits, np.zeros((1, NUM_TOKENS))]).astype(np.float32)


def recurrence_run(logits: np.ndarray, *, decay: float, implementation: str | None = None) -> np.ndarray:
    """[S, T] float64: bfloat16 scores that `decayed_softmax_scores` stores, given logits [S, T]."""
    num_tokens = logits.shape[1]
    # The query is the logits: key i is the i-th unit vector, so q.k_i is logit i.
    keys = jnp.eye(num_tokens, dtype=jnp.float32)[:, None, None]
    pages = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    start, stop = jnp.zeros((1,), jnp.int32), jnp.full((1,), num_tokens, jnp.int32)

    @jax.jit
    def run(scores, logits):
        def step(scores, q):
            scores, _ = decayed_softmax_scores(
                q[None, None],
                keys,
                scores,
                pages,
                start,
                stop,
                decay=decay,
                scale=1.0,
                group="mean",
                implementation=implementation,
            )
            return scores, scores[:, 0, 0]

        return jax.lax.scan(step, scores, logits)[1]

    return _float64(run(jnp.zeros((num_tokens, 1, 1), jnp.bfloat16), jnp.asarray(logits)))


def recurrence_checks(implementation: str | None = None, seed: int = DEFAULT_SEED) -> Iterator[Check]:
    """The recurrence run with both decays."""
    logits = recurrence_inputs(seed)
    for decay in (DECAY, 1.0):
        history = recurrence_run(logits, decay=decay, implementation=implementation)
        yield from judge_recurrence_run(history, logits, decay)


def judge_recurrence_run(history: np.ndarray, logits: np.ndarray, decay: float) -> Iterator[Check]:
    """The lines of one recurrence run; its last step is the uniform one."""
    probabilities = _softmax(logits.astype(np.float64))
    exact, rounded = recurrence(probabilities, decay)[-2], recurrence(probabilities, decay, "bfloat16")[-2]
    before, after = history[-2], history[-1]
    chosen = np.argsort(-before, kind="stable")[:TOP_K]
    decayed = decay < 1
    result = accuracy(before, exact, rounded, chosen)
    published = (
        f"rel. err 8.40e-3, max 18.2, top-{TOP_K} 100%" if decayed else f"rel. err 4.17e-1, top-{TOP_K} 97%"
    )
    run = f"decay {decay:g}, bfloat16, step {len(history) - 1}"
    yield _accuracy_check("recurrence run", run, result, published, narrow=True, must_fail=not decayed)

    highest = before.argmax()
    move = np.abs(after - before).max() if decayed else abs(after[highest] - before[highest])
    yield Check(
        "recurrence run",
        f"decay {decay:g}, bfloat16, a uniform last step",
        f"moves {'a' if decayed else 'the highest'} score by {move:.2g}",
        "moves a score by 0.16" if decayed else "",
        "> 0: not frozen" if decayed else "0: it must freeze",
        bool(move > 0 if decayed else move == 0),
    )


# Contract


def contract_checks(implementation: str | None = None, seed: int = DEFAULT_SEED) -> Iterator[Check]:
    """Selection of the four H2O policies at several group sizes; page size; scale; what a write resets."""
    yield from _selection_checks(implementation, seed)
    for name in TOKEN_POLICIES:
        yield _page_size_check(name)
    for name in TOKEN_POLICIES:
        for scale in (None, 0.09):
            yield _scale_check(name, scale, implementation, seed)
    yield _write_check(implementation, seed)


_KV_HEADS, _SMALL_DIM = 2, 16
_PROMPTS = (23, 14)  # tokens of the rows: one over the budget, one that outgrows it
_DECODE_STEPS = 4
_SMALL_POLICIES = {
    **{name: (dict(top_k=2, reserved_bos=1, reserved_eos=1), 4) for name in PAGE_POLICIES},
    **{name: (dict(top_k=8, reserved_bos=3, reserved_eos=3), 1) for name in TOKEN_POLICIES},
}


class SmallInputs(NamedTuple):
    """Inputs of a few decode steps. Letters: S steps, B rows, Hq query heads, Hkv KV heads.

    Attributes:
        queries: [S, B, Hq, D] bfloat16.
        keys: [B, T, Hkv, D] bfloat16; the values are their negatives.
    """

    queries: jax.Array
    keys: jax.Array


class SmallStep(NamedTuple):
    """What the library did in one decode step.

    Attributes:
        pages: [B, Hkv, W].
        counts: [B, Hkv].
        out: [B, Hq, D].
    """

    pages: np.ndarray
    counts: np.ndarray
    out: np.ndarray


def _selection_checks(implementation: str | None, seed: int) -> Iterator[Check]:
    # Compiled once for all policies of a page size.
    attend_ = jax.jit(functools.partial(attend, implementation=implementation))
    for name, (options, page_size) in _SMALL_POLICIES.items():
        policy = get_policy(name, **options)
        write = jax.jit(functools.partial(_write, policy=policy, implementation=implementation))
        select = jax.jit(functools.partial(select_pages, policy=policy, implementation=implementation))
        cache, table = _small_prompts(policy, page_size, small_inputs(1, seed).keys, write)
        right = []
        for group_size in GROUP_SIZES:
            inputs = small_inputs(group_size, seed)
            steps = _small_steps(cache, table, inputs, write, select, attend_)
            if steps_agree(steps, inputs, name, options, page_size):
                right.append(group_size)
        yield Check(
            "contract",
            f"{name}, G = {', '.join(map(str, GROUP_SIZES))}",
            f"selection and output of the oracle at G = {', '.join(map(str, right)) or 'none'}",
            "runs at each G",
            "all G",
            right == list(GROUP_SIZES),
        )


def small_inputs(group_size: int, seed: int) -> SmallInputs:
    """Random inputs; the keys are the same for each group size."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((len(_PROMPTS), max(_PROMPTS) + _DECODE_STEPS, _KV_HEADS, _SMALL_DIM))
    queries = 2 * rng.standard_normal((_DECODE_STEPS, len(_PROMPTS), group_size * _KV_HEADS, _SMALL_DIM))
    return SmallInputs(jnp.asarray(queries, jnp.bfloat16), jnp.asarray(keys, jnp.bfloat16))


def _small_prompts(policy, page_size, keys, write) -> tuple[LayerCache, PageTable]:
    rows, tokens = keys.shape[:2]
    cache, table = _empty_layer(
        policy,
        num_kv_heads=_KV_HEADS,
        head_dim=_SMALL_DIM,
        page_size=page_size,
        num_pages=rows * tokens // page_size + 3,
        max_requests=rows,
        pages_per_request=-(-tokens // page_size),
    )
    for token in range(max(_PROMPTS)):
        num_tokens = np.array([token < prompt for prompt in _PROMPTS], np.int32)
        table = _extended(table, num_tokens)
        cache = write(cache, table, keys[:, token : token + 1], num_tokens)
    return cache, table


def _small_steps(cache, table, inputs, write, select, attend_) -> list[SmallStep]:
    steps, rows = [], np.arange(len(_PROMPTS))
    for q in inputs.queries:
        table = _extended(table, np.ones_like(rows))
        newest = inputs.keys[rows, table.seq_lens - 1][:, None]
        cache = write(cache, table, newest, np.ones_like(rows, np.int32))
        cache, selection = select(cache, table, q)
        out = attend_(cache, table, q, selection)
        steps.append(SmallStep(np.asarray(selection.pages), np.asarray(selection.counts), _float64(out)))
    return steps


def steps_agree(
    steps: list[SmallStep], inputs: SmallInputs, name: str, options: dict[str, Any], page_size: int
) -> bool:
    """Whether every selection is the float64 oracle's, and every output within 1/128 of the largest value."""
    queries, keys = (_float64(x) for x in inputs)
    for row, prompt in enumerate(_PROMPTS):
        request = reference.Request(
            name, num_kv_heads=_KV_HEADS, page_size=page_size, dtype="bfloat16", **options
        )
        for k in keys[row, :prompt]:
            request.write(k, -k)
        for step, q, k in zip(steps, queries[:, row], keys[row, prompt:]):
            expected = request.decode(q, k, -k)
            got = [pages[:count].tolist() for pages, count in zip(step.pages[row], step.counts[row])]
            if not all(map(_same_selection, got, expected.pages, expected.scores)):
                return False
            if np.abs(step.out[row] - request.attend(q, got)).max() > np.abs(keys).max() / 128:
                return False
    return True


def _same_selection(got: list[int], expected: list[int], scores: np.ndarray) -> bool:
    if got == expected:
        return True
    swapped = scores[sorted(set(got) ^ set(expected))]
    if got != sorted(set(got)) or len(got) != len(expected) or not np.isfinite(swapped).all():
        return False
    # Float32 can't rank scores as close as this.
    return bool(np.ptp(swapped) <= 1e-5 * np.abs(scores[np.isfinite(scores)]).max())


def _page_size_check(name: str) -> Check:
    policy = _token_policy(name)
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=_SMALL_DIM,
        page_size=16,
        num_pages=4,
        max_requests=1,
        pages_per_request=4,
    )
    measured = "accepted"
    try:
        init_state(config, policy)
    except ValueError as error:
        measured = f"rejected: {error}"
    passed = measured.startswith("rejected: page_size")
    criterion = "ValueError that names page_size"
    return Check("contract", f"{name}, page_size 16", measured, "rejected", criterion, passed)


def _scale_check(name: str, scale: float | None, implementation: str | None, seed: int) -> Check:
    policy = _token_policy(name, scale=scale)
    expected = HEAD_DIM**-0.5 if scale is None else scale
    measured = measured_scale(policy, implementation, seed)
    return Check(
        "contract",
        f"{name}, scale={scale}, D = {HEAD_DIM}",
        f"{measured:.6f}",
        f"{expected:.6f}" if scale is None else f"{expected} honoured",
        f"{expected:.6f}",
        bool(abs(measured - expected) < 5e-7),
    )


def measured_scale(policy: Policy, implementation: str | None = None, seed: int = DEFAULT_SEED) -> float:
    """The factor on the logits, found from the scores of a first step.

    They are a softmax over the window, so the logarithm of a score grows by `scale` per unit of q.k.
    """
    keys = oracle_inputs(seed).keys
    q = keys[:1] + keys[1:2]
    cache, table = _empty_layer(policy, num_kv_heads=1, head_dim=HEAD_DIM, page_size=1, num_pages=NUM_TOKENS)
    table = _extended(table, [NUM_TOKENS])

    @jax.jit
    def run(cache, table, keys, q):
        cache = _write(cache, table, keys[None, :, None], np.array([NUM_TOKENS]), policy, implementation)
        return select_pages(cache, table, q, policy=policy, implementation=implementation)[1].scores

    scores = _float64(run(cache, table, keys, q[None]))[0, 0, _WINDOW]
    dots = _float64(keys)[_WINDOW] @ _float64(q)[0]
    return float(np.polyfit(dots, np.log(scores), 1)[0])


def _write_check(implementation: str | None, seed: int) -> Check:
    scores, written = write_resets(implementation, seed)
    zeroed = (scores == 0).all(axis=1)
    changed = (scores != 1).any(axis=1)
    return Check(
        "contract",
        "pages whose scores a write zeroes",
        f"{(zeroed & written).sum()} of {written.sum()} written, {(changed & ~written).sum()} of the others",
        "exactly those written",
        "exactly those written",
        bool((zeroed == written).all() and (changed == written).all()),
    )


def write_resets(
    implementation: str | None = None, seed: int = DEFAULT_SEED
) -> tuple[np.ndarray, np.ndarray]:
    """Writes a few tokens into a pool whose every score is 1.

    Returns:
        The scores afterwards, [num_pages, Hkv], and which pages were written, [num_pages] bool.
    """
    policy = _token_policy(TOKEN_POLICIES[0])
    num_pages, num_tokens = 40, np.array([5, 0, 1], np.int32)
    cache, table = _empty_layer(
        policy,
        num_kv_heads=_KV_HEADS,
        head_dim=_SMALL_DIM,
        page_size=1,
        num_pages=num_pages,
        max_requests=3,
        pages_per_request=12,
        seed=seed,
    )
    table = _extended(_extended(table, [6, 4, 3]), num_tokens)
    ones = jnp.ones_like(cache.aux["hh_score"])
    cache = dataclasses.replace(cache, aux=cache.aux | {"hh_score": ones})
    k = jnp.ones((3, num_tokens.max(), _KV_HEADS, _SMALL_DIM), cache.k.dtype)
    write = jax.jit(functools.partial(_write, policy=policy, implementation=implementation))
    cache = write(cache, table, k, num_tokens)

    written = np.zeros(num_pages, bool)
    for pages, length, count in zip(np.asarray(table.pages), np.asarray(table.seq_lens), num_tokens):
        written[pages[length - count : length]] = True
    return _float64(cache.aux["hh_score"])[..., 0], written


def _token_policy(name: str, **options) -> Policy:
    return get_policy(name, top_k=TOP_K, reserved_bos=RESERVED_BOS, reserved_eos=RESERVED_EOS, **options)


# Shared

_extend, _release = jax.jit(extend), jax.jit(release)


def _empty_layer(
    policy: Policy,
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_pages: int,
    max_requests: int = 1,
    pages_per_request: int | None = None,
    seed: int = 0,
) -> tuple[LayerCache, PageTable]:
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_requests=max_requests,
        pages_per_request=num_pages if pages_per_request is None else pages_per_request,
    )
    state = init_state(config, policy)
    # Physical pages in random order, so that confusing them with logical ones shows.
    order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    return state.layers[0], dataclasses.replace(state.table, free_pages=jnp.asarray(order))


def _extended(table: PageTable, num_tokens: Sequence[int] | np.ndarray) -> PageTable:
    table, ok = _extend(table, jnp.asarray(num_tokens, jnp.int32))
    if not bool(ok.all()):
        raise AssertionError(f"the pool is too small for {num_tokens} more tokens")
    return table


def _write(cache, table, k, num_tokens, policy, implementation) -> LayerCache:
    """Writes `k` [B, T, Hkv, D], its negatives as values."""
    num_tokens = jnp.asarray(num_tokens, jnp.int32)
    return write_tokens(cache, table, k, -k, num_tokens, policy=policy, implementation=implementation)


def _float64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _bfloat16_ulp(size):
    return 2.0 ** (np.floor(np.log2(np.maximum(size, 2.0**-126))) - 7)


def _short(x: float) -> str:
    """Scientific notation without the zero that pads the exponent."""
    return f"{x:.2e}".replace("e-0", "e-").replace("e+00", "")


def _mass(mass: float, expected: float) -> str:
    return f"{mass:.2f} of {expected:.2f}"
