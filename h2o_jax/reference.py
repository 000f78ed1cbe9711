"""The float64 oracle: every equation of the algorithm as a scalar loop, in NumPy alone.

Nothing here is shared with the code it judges, and nothing here knows of paging in memory: a request is a
sequence that grows, and "page p" merely means its tokens `p * P .. p * P + P - 1`.

Letters: T tokens, P `page_size`, N pages in use, Hq/Hkv query/KV heads, G = Hq // Hkv, D `head_dim`.
All arithmetic is float64. What the library stores is rounded once, where it is stored: page summaries to the
pool's dtype, `hh_score` to `score_dtype`. Queries, keys and values are taken as handed in, so they must
already hold values of the pool's dtype if they are to be compared with it.

Source: H2O, arXiv:2306.14048, section 4 (heavy hitters); Quest, arXiv:2406.10774, section 3.3 (envelopes).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

POLICIES = (
    "h2o_sparse_attention",
    "gqa_h2o_sparse_attention",
    "h2o_token_sparse_attention",
    "gqa_h2o_token_sparse_attention",
    "block_sparse_attention",
    "gqa_quest_sparse_attention",
    "sink_recent_attention",
    "dense_attention",
)
Vectors = np.ndarray | Sequence[np.ndarray]  # [n, D]
TOKEN_POLICIES = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")


class Step(NamedTuple):
    """What one decode step read and returned.

    Attributes:
        pages: for each KV head, the logical pages attended, ascending.
        scores: [Hkv, N] float64, page scores; -inf outside the window and where nothing was scored.
        out: [Hq, D] float64.
    """

    pages: list[list[int]]
    scores: np.ndarray
    out: np.ndarray


def round_bfloat16(x: ArrayLike) -> np.ndarray:
    """Rounds float64 to the nearest bfloat16, ties to even, straight from float64 (no step through float32).

    Args:
        x: array or scalar, any shape.

    Returns:
        float64 array of the same shape, each element a value that bfloat16 can hold (or inf, NaN).
    """
    x = np.asarray(x, np.float64)
    bits = np.atleast_1d(x).view(np.uint64)
    # float64 keeps 52 fraction bits and bfloat16 keeps 7: 45 go. Adding just under half a unit, and one more
    # when the last kept bit is odd, carries exactly when rounding to nearest even goes up.
    last_kept = (bits >> np.uint64(45)) & np.uint64(1)
    rounded = bits + np.uint64((1 << 44) - 1) + last_kept
    rounded = (rounded & ~np.uint64((1 << 45) - 1)).view(np.float64).reshape(x.shape)
    # Below the smallest normal number the spacing is constant, 2^-133.
    with np.errstate(over="ignore", invalid="ignore"):
        subnormal = np.rint(x * 2.0**133) * 2.0**-133
    rounded = np.where(np.abs(x) < 2.0**-126, subnormal, rounded)
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, x), rounded)
    return np.where(np.isfinite(x), rounded, x)


def round_to(x: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """Rounds float64 once to `dtype` (round half to even) and returns it as float64.

    Args:
        x: array or scalar.
        dtype: "bfloat16", "float16", "float32" or "float64" (no rounding), or a NumPy dtype so named.

    Raises:
        ValueError: another dtype.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name == "bfloat16":
        return round_bfloat16(x)
    if name not in ("float16", "float32", "float64"):
        raise ValueError(f"dtype: expected bfloat16, float16, float32 or float64, got {name}")
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(name).astype(np.float64)


def group_mean(queries: Vectors) -> np.ndarray:
    """The mean query of a group, qbar. `queries` [G, D] -> [D]."""
    total = np.zeros(len(queries[0]))
    for query in queries:
        total = total + query
    return total / len(queries)


def page_mean(keys: Vectors) -> np.ndarray:
    """mu_p: the mean of a page's keys. `keys` [P, D] -> [D]."""
    total = np.zeros(len(keys[0]))
    for key in keys:
        total = total + key
    return total / len(keys)


def page_max(keys: Vectors) -> np.ndarray:
    """M_p: the element-wise largest of a page's keys. `keys` [P, D] -> [D]."""
    return np.array([max(float(key[d]) for key in keys) for d in range(len(keys[0]))])


def page_min(keys: Vectors) -> np.ndarray:
    """m_p: the element-wise smallest of a page's keys. `keys` [P, D] -> [D]."""
    return np.array([min(float(key[d]) for key in keys) for d in range(len(keys[0]))])


def peak(query: np.ndarray, largest: np.ndarray, smallest: np.ndarray) -> float:
    """sum_d max(q_d M_d, q_d m_d): an upper bound of q.k over the page's keys. All [D] -> float."""
    total = 0.0
    for q, high, low in zip(query.tolist(), largest.tolist(), smallest.tolist()):
        total += max(q * high, q * low)
    return total


def page_score(
    policy: str,
    queries: Vectors,
    mean: np.ndarray,
    largest: np.ndarray,
    smallest: np.ndarray,
    *,
    w_avg: float = 1.0,
    w_peak: float = 1.0,
) -> float:
    """The score of one page under a page-level policy.

    Args:
        policy: registered name.
        queries: [G, D], the queries of the group.
        mean, largest, smallest: [D], the page's summaries.
        w_avg, w_peak: weights of the two terms, for the policies that have both.

    Raises:
        ValueError: `policy` is not a page-level policy.
    """
    if policy == "h2o_sparse_attention":
        query = group_mean(queries)
        return w_avg * float(np.dot(query, mean)) + w_peak * peak(query, largest, smallest)
    if policy == "gqa_h2o_sparse_attention":
        # Two maxima, each over the group by itself: the head that wins one need not win the other.
        best_mean = max(float(np.dot(query, mean)) for query in queries)
        best_peak = max(peak(query, largest, smallest) for query in queries)
        return w_avg * best_mean + w_peak * best_peak
    if policy == "block_sparse_attention":
        return float(np.dot(group_mean(queries), mean))
    if policy == "gqa_quest_sparse_attention":
        return max(peak(query, largest, smallest) for query in queries)
    raise ValueError(f"policy: expected a page-level policy, got {policy!r}")


def softmax(logits: Sequence[float]) -> list[float]:
    """exp(x_i) / sum_j exp(x_j) of a list of floats; an empty list gives an empty list."""
    if not logits:
        return []
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def token_probabilities(policy: str, queries: Vectors, keys: Vectors, scale: float) -> list[float]:
    """a_i of the token policies: attention probability over the window alone.

    Args:
        policy: registered name of a token policy.
        queries: [G, D].
        keys: list of [D], the keys of the window, one per token.
        scale: factor of the logits.

    Returns:
        A list of floats, one per key: the softmax of the mean query, or for the gqa policy the largest over
        the group of each head's own softmax.

    Raises:
        ValueError: `policy` is not a token policy.
    """
    if policy == "h2o_token_sparse_attention":
        query = group_mean(queries)
        return softmax([scale * float(np.dot(query, key)) for key in keys])
    if policy == "gqa_h2o_token_sparse_attention":
        heads = [softmax([scale * float(np.dot(query, key)) for key in keys]) for query in queries]
        return [max(head[i] for head in heads) for i in range(len(keys))]
    raise ValueError(f"policy: expected a token policy, got {policy!r}")


def decayed_update(
    score: float, probability: float, decay: float, score_dtype: DTypeLike = "float64"
) -> float:
    """hh <- a + decay * hh, rounded once to `score_dtype`; for decay 0 just a. Floats in, float out."""
    old = decay * score if decay else 0.0  # 0 * inf is NaN
    return float(round_to(probability + old, score_dtype))


def window(num_pages: int, reserved_bos: int, reserved_eos: int) -> range:
    """The logical pages that may be scored: `range(reserved_bos, N - reserved_eos)`, perhaps empty."""
    return range(reserved_bos, max(reserved_bos, num_pages - reserved_eos))


def top_pages(scores: np.ndarray | Sequence[float], candidates: Iterable[int], top_k: int) -> list[int]:
    """The `top_k` best of `candidates` (all, if fewer), ascending.

    Equal scores go to the lower page. NaN ranks below everything, -inf included.

    Args:
        scores: indexable by logical page.
        candidates: iterable of logical pages.
        top_k: how many.
    """

    def rank(page: int) -> tuple[int, float, int]:
        score = float(scores[page])
        return (1, 0.0, page) if math.isnan(score) else (0, -score, page)

    return sorted(sorted(candidates, key=rank)[:top_k])


def select(
    scores: np.ndarray | Sequence[float], num_pages: int, *, top_k: int, reserved_bos: int, reserved_eos: int
) -> list[int]:
    """The pages that one KV head attends to, ascending.

    Args:
        scores: indexable by logical page; read inside the window, and only if N exceeds the budget.
        num_pages: N.
        top_k, reserved_bos, reserved_eos: the budget's three parts.
    """
    if num_pages <= top_k + reserved_bos + reserved_eos:
        return list(range(num_pages))
    chosen = top_pages(scores, window(num_pages, reserved_bos, reserved_eos), top_k)
    return list(range(reserved_bos)) + chosen + list(range(num_pages - reserved_eos, num_pages))


def attend(query: np.ndarray, keys: Vectors, values: Vectors, scale: float) -> tuple[np.ndarray, float]:
    """Softmax attention of one query over a list of tokens.

    Args:
        query: [D].
        keys, values: lists of [D].
        scale: factor of the logits.

    Returns:
        `out` [D] and `lse`, the natural log of the sum of exponentials; zeros and -inf for no tokens.
    """
    if len(keys) == 0:
        return np.zeros(len(query)), -math.inf
    logits = [scale * float(np.dot(query, key)) for key in keys]
    largest = max(logits)
    lse = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    out = np.zeros(len(values[0]))
    for probability, value in zip(softmax(logits), values):
        out = out + probability * value
    return out, lse


def rope(x: ArrayLike, position: int, theta: float = 10000.0) -> np.ndarray:
    """Rotary embedding of one head's vector, in the half-split layout: dimension i turns with i + D / 2.

    Args:
        x: [D], D even.
        position: token position, from 0.
        theta: base of the frequencies; pair i turns by `position * theta ** (-2 i / D)` radians.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    x = np.asarray(x, np.float64)
    half = len(x) // 2
    out = np.zeros(len(x))
    for i in range(half):
        angle = position * theta ** (-2.0 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[half + i] * sin
        out[half + i] = x[half + i] * cos + x[i] * sin
    return out


class Request:
    """One request in one layer: its tokens, the summaries of its full pages, its heavy-hitter scores.

    Args:
        policy: registered name, one of `POLICIES`.
        num_kv_heads: Hkv.
        page_size: P.
        top_k, reserved_bos, reserved_eos: the budget.
        w_avg, w_peak: weights of the page-level h2o scores.
        decay: factor of the older score in the token policies.
        score_scale: factor of the token policies' logits; None is `D ** -0.5`.
        score_dtype: what `hh_score` is stored in; "float64" leaves it unrounded.
        dtype: the pool's dtype, which summaries are stored in; "float64" leaves them unrounded.
        scale: factor of the attention logits; None is `D ** -0.5`.

    Attributes:
        keys, values: for each KV head, a list of [D].
        means, maxima, minima: for each KV head, a list of [D], one per full page.
        hh_score: for each KV head, a list of floats, one per token.

    Raises:
        ValueError: unknown policy, a token policy whose page_size is not 1, or `reserved_eos` < 1.
    """

    def __init__(
        self,
        policy: str,
        *,
        num_kv_heads: int,
        page_size: int,
        top_k: int = 0,
        reserved_bos: int = 1,
        reserved_eos: int = 2,
        w_avg: float = 1.0,
        w_peak: float = 1.0,
        decay: float = 0.984375,
        score_scale: float | None = None,
        score_dtype: DTypeLike = "float32",
        dtype: DTypeLike = "float32",
        scale: float | None = None,
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
        if policy in TOKEN_POLICIES and page_size != 1:
            raise ValueError(f"page_size: {policy} expects 1, got {page_size}")
        if reserved_eos < 1:
            raise ValueError(f"reserved_eos: expected at least 1, got {reserved_eos}")
        self.policy = policy
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.top_k = 0 if policy == "sink_recent_attention" else top_k
        self.reserved_bos = reserved_bos
        self.reserved_eos = reserved_eos
        self.w_avg = w_avg
        self.w_peak = w_peak
        self.decay = decay
        self.score_scale = score_scale
        self.score_dtype = score_dtype
        self.dtype = dtype
        self.scale = scale
        self.keys: list[list[np.ndarray]] = [[] for _ in range(num_kv_heads)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(num_kv_heads)]
        self.means: list[list[np.ndarray]] = [[] for _ in range(num_kv_heads)]
        self.maxima: list[list[np.ndarray]] = [[] for _ in range(num_kv_heads)]
        self.minima: list[list[np.ndarray]] = [[] for _ in range(num_kv_heads)]
        self.hh_score: list[list[float]] = [[] for _ in range(num_kv_heads)]

    @property
    def seq_len(self) -> int:
        """Tokens cached."""
        return len(self.keys[0])

    @property
    def num_pages(self) -> int:
        """N = ceil(seq_len / P)."""
        return -(-self.seq_len // self.page_size)

    @property
    def over_budget(self) -> bool:
        """Whether a step reads less than everything, N > W. Only then is anything scored."""
        if self.policy == "dense_attention":
            return False
        return self.num_pages > self.top_k + self.reserved_bos + self.reserved_eos

    def write(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends one token: `k`, `v` [Hkv, D]. A page that it completes gets summaries; its score is 0."""
        for head in range(self.num_kv_heads):
            self.keys[head].append(np.asarray(k[head], np.float64))
            self.values[head].append(np.asarray(v[head], np.float64))
            self.hh_score[head].append(0.0)
            if len(self.keys[head]) % self.page_size == 0:
                page = self.keys[head][-self.page_size :]
                self.means[head].append(round_to(page_mean(page), self.dtype))
                self.maxima[head].append(round_to(page_max(page), self.dtype))
                self.minima[head].append(round_to(page_min(page), self.dtype))

    def select(self, q: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
        """Chooses the pages of one step, the token being decoded already written.

        Args:
            q: [Hq, D].

        Returns:
            `pages`, a list per KV head, and `scores` [Hkv, N] as in `Step`. Token policies move `hh_score`.
        """
        q = np.asarray(q, np.float64)
        scores = np.full((self.num_kv_heads, self.num_pages), -math.inf)
        if not self.over_budget:
            return [list(range(self.num_pages)) for _ in range(self.num_kv_heads)], scores
        candidates = window(self.num_pages, self.reserved_bos, self.reserved_eos)
        pages = []
        for head in range(self.num_kv_heads):
            queries = self._group(q, head)
            if self.policy in TOKEN_POLICIES:
                self._accumulate(head, queries, candidates)
                for page in candidates:
                    scores[head, page] = self.hh_score[head][page]
            elif self.policy != "sink_recent_attention":
                for page in candidates:
                    scores[head, page] = page_score(
                        self.policy,
                        queries,
                        self.means[head][page],
                        self.maxima[head][page],
                        self.minima[head][page],
                        w_avg=self.w_avg,
                        w_peak=self.w_peak,
                    )
            pages.append(
                select(
                    scores[head],
                    self.num_pages,
                    top_k=self.top_k,
                    reserved_bos=self.reserved_bos,
                    reserved_eos=self.reserved_eos,
                )
            )
        return pages, scores

    def attend(self, q: np.ndarray, pages: Sequence[Sequence[int]]) -> np.ndarray:
        """Attention of `q` [Hq, D] over the cached tokens of `pages` (a list per KV head): `out` [Hq, D]."""
        q = np.asarray(q, np.float64)
        scale = q.shape[1] ** -0.5 if self.scale is None else self.scale
        out = np.zeros(q.shape)
        for index in range(q.shape[0]):
            head = index // (q.shape[0] // self.num_kv_heads)
            tokens = [
                token
                for page in pages[head]
                for token in range(page * self.page_size, min((page + 1) * self.page_size, self.seq_len))
            ]
            keys = [self.keys[head][token] for token in tokens]
            values = [self.values[head][token] for token in tokens]
            out[index], _ = attend(q[index], keys, values, scale)
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Step:
        """One decode step: write, select, attend. `q` [Hq, D]; `k`, `v` [Hkv, D]; returns a `Step`."""
        self.write(k, v)
        pages, scores = self.select(q)
        return Step(pages, scores, self.attend(q, pages))

    def prefill(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Dense causal attention of T new tokens over themselves and what is cached; nothing is scored.

        Args:
            q: [T, Hq, D].
            k, v: [T, Hkv, D].

        Returns:
            `out` [T, Hq, D].
        """
        out = np.zeros(np.shape(q))
        for token in range(len(q)):
            self.write(k[token], v[token])
            everything = [list(range(self.num_pages)) for _ in range(self.num_kv_heads)]
            out[token] = self.attend(q[token], everything)
        return out

    def _group(self, q: np.ndarray, head: int) -> list[np.ndarray]:
        group_size = q.shape[0] // self.num_kv_heads
        return [q[head * group_size + g] for g in range(group_size)]

    def _accumulate(self, head: int, queries: Vectors, tokens: Iterable[int]) -> None:
        scale = len(queries[0]) ** -0.5 if self.score_scale is None else self.score_scale
        keys = [self.keys[head][token] for token in tokens]
        probabilities = token_probabilities(self.policy, queries, keys, scale)
        for token, probability in zip(tokens, probabilities):
            self.hh_score[head][token] = decayed_update(
                self.hh_score[head][token], probability, self.decay, self.score_dtype
            )
