"""The judge of a recorded decode loop: everything in it against the float64 oracle.

Where the library rounds something that it stores, a value near half way may rightly go either way, and what
is computed from it follows. So each stored value is first proven to be a right rounding of the oracle's,
given the state before the step, and then taken over by the oracle; by induction over the steps nothing
drifts, and every comparison can be as tight as one step's arithmetic.
"""

import jax.numpy as jnp
import numpy as np

from h2o_jax import reference
from tests import plain, tolerance

KINDS = {
    "h2o_sparse_attention": ("mean", "max", "min"),
    "gqa_h2o_sparse_attention": ("mean", "max", "min"),
    "block_sparse_attention": ("mean",),
    "gqa_quest_sparse_attention": ("max", "min"),
}


class Table:
    """Rows of named arrays, gathered over all request rows and steps, read by column."""

    def __init__(self):
        self.columns = {}

    def add(self, **values):
        for name, value in values.items():
            self.columns.setdefault(name, []).append(np.array(value))

    def __getitem__(self, name):
        return np.stack(self.columns[name])

    def __bool__(self):
        return bool(self.columns)


def check_trace(scenario, trace):
    """Asserts that a trace is what the oracle says: outputs, pages, scores, state, and nothing else written.

    Raises:
        AssertionError: names what differs, with the step, row and KV head where that is known.
    """
    assert trace.compiled == 1, f"the step was traced {trace.compiled} times"
    tables = {"prefill": Table(), "output": Table(), "scores": Table()}
    requests = [None] * len(scenario.prompts)
    for at in range(scenario.steps):
        for when, q, k, v, num_tokens, out in trace.prefills:
            if when == at:
                _admit(scenario, trace, requests, tables["prefill"], at, q, k, v, num_tokens, out)
        for row, request in enumerate(requests):
            _check_step(scenario, trace, at, row, request, tables)
    for name in ("prefill", "output"):
        _check_attention(scenario, name, tables[name])
    if tables["scores"]:
        _check_scores(scenario, tables["scores"])
    _check_pools(scenario, trace, requests)


def _admit(scenario, trace, requests, table, at, q, k, v, num_tokens, out):
    for row, tokens in enumerate(num_tokens.tolist()):
        where = f"prefill before step {at}, row {row}"
        assert (out[row, tokens:] == 0).all(), f"{where}: output of padding is not 0"
        if at > 0 and tokens == 0:
            continue
        # Scores are left unrounded here, to be compared with what the library rounded.
        requests[row] = request = scenario.request(score_dtype="float64")
        for token in range(tokens):
            request.write(k[row, token], v[row, token])
            if token % 16 == 0 or token == tokens - 1:
                pages = [list(range(request.num_pages))] * scenario.num_kv_heads
                _add_attention(scenario, table, request, q[row, token], pages, out[row, token])
        _check_summaries(trace, scenario, (at, 0, row), request, 0, where)
        if trace.hh_score is not None:
            assert (trace.hh_score[at, 0, row, :tokens] == 0).all(), f"{where}: hh_score is not 0"


def _check_step(scenario, trace, at, row, request, tables):
    where = f"step {at}, row {row}"
    full = request.seq_len // scenario.page_size
    if trace.summaries is not None:
        before, after = trace.summaries[at, :, row, :full]
        np.testing.assert_array_equal(after, before, f"{where}: summaries of an earlier page moved")
    if not trace.live[at, row]:
        assert (trace.out[at, row] == 0).all(), f"{where}: output of an idle row is not 0"
        assert (trace.counts[at, row] == 0).all(), f"{where}: an idle row counts pages"
        if trace.hh_score is not None:
            before, after = trace.hh_score[at, :, row, : request.num_pages]
            np.testing.assert_array_equal(after, before, f"{where}: hh_score of an idle row moved")
        return

    q = trace.q[at, row]
    request.write(trace.k[at, row], trace.v[at, row])
    _check_summaries(trace, scenario, (at, 1, row), request, full, where)
    stored = np.array(request.hh_score)
    expected, exact = request.select(q)
    pages = [
        trace.pages[at, row, head, : trace.counts[at, row, head]].tolist()
        for head in range(scenario.num_kv_heads)
    ]
    for head, chosen in enumerate(pages):
        assert len(chosen) == len(expected[head]), f"{where}, KV head {head}: {len(chosen)} pages"
    assert (trace.pages[at, row, :, len(pages[0]) :] == scenario.config.num_pages).all(), f"{where}: filler"

    scores = trace.scores[at, row]
    inside = np.isfinite(exact[0])
    assert np.isneginf(scores[:, request.num_pages :]).all(), f"{where}: scores past the last page"
    scores = scores[:, : request.num_pages]
    assert np.isneginf(scores[:, ~inside]).all(), f"{where}: scores outside the window"
    if request.policy in reference.TOKEN_POLICIES:
        exact = _check_hh_score(trace, at, row, request, stored, inside, tables["scores"], where)
        own = scores[:, inside]
        np.testing.assert_array_equal(own, exact[:, inside], f"{where}: score is not the stored one")
    elif inside.any():
        _add_page_scores(scenario, tables["scores"], request, q, scores, exact, inside)
    _check_selection(scenario, request, q, pages, scores, exact, where)
    _add_attention(scenario, tables["output"], request, q, pages, trace.out[at, row])


def _check_summaries(trace, scenario, index, request, first, where):
    """Proves the summaries of full pages from `first` on, then takes them over."""
    if trace.summaries is None:
        return
    size = scenario.page_size
    for head in range(scenario.num_kv_heads):
        for page in range(first, request.seq_len // size):
            keys = request.keys[head][page * size : (page + 1) * size]
            for kind, got in zip(KINDS[request.policy], trace.summaries[*index, page, head], strict=True):
                name = f"{where}, KV head {head}: {kind} of page {page}"
                if kind == "mean":
                    exact, error = reference.page_mean(keys), tolerance.mean_error(keys)
                    tolerance.assert_rounding_of(got, exact, error, scenario.dtype, name=name)
                    request.means[head][page] = got
                else:
                    exact = reference.page_max(keys) if kind == "max" else reference.page_min(keys)
                    np.testing.assert_array_equal(got, exact, name)


def _check_hh_score(trace, at, row, request, stored, inside, table, where):
    """Compares the scores of one step, given those before it; takes them over and returns them, [Hkv, N]."""
    exact = np.array(request.hh_score)
    got = trace.hh_score[at, 1, row, : request.num_pages, :, 0].T
    outside = f"{where}: hh_score outside the window moved"
    np.testing.assert_array_equal(got[:, ~inside], stored[:, ~inside], outside)
    if inside.any():
        length = trace.hh_score.shape[3]
        table.add(
            q=trace.q[at, row],
            keys=_padded(request.keys, length),
            old=_widened(stored, length, 0),
            inside=_widened(inside, length, False),
            got=_widened(got, length, 0),
            exact=_widened(exact, length, 0),
        )
    request.hh_score = got.tolist()
    return got


def _add_page_scores(scenario, table, request, q, scores, exact, inside):
    length = scenario.pages_per_request
    table.add(
        q=q,
        inside=_widened(inside, length, False),
        got=_widened(scores, length, 0),
        exact=_widened(exact, length, 0),
        mean=_padded(request.means, length),
        largest=_padded(request.maxima, length),
        smallest=_padded(request.minima, length),
    )


def _check_selection(scenario, request, q, pages, scores, exact, where):
    budget = {name: getattr(request, name) for name in ("top_k", "reserved_bos", "reserved_eos")}
    for head, chosen in enumerate(pages):
        name = f"{where}, KV head {head}"
        if not request.over_budget:
            assert chosen == list(range(request.num_pages)), f"{name}: not all pages within the budget"
            continue
        own = reference.select(scores[head], request.num_pages, **budget)
        assert chosen == own, f"{name}: pages {chosen} are not the best of the scores returned, {own}"

        def error(page):
            if request.policy not in KINDS or scenario.grid:
                return 0.0
            group = q[head * scenario.group : (head + 1) * scenario.group]
            kept = [summaries[head][page] for summaries in (request.means, request.maxima, request.minima)]
            weights = {"w_avg": request.w_avg, "w_peak": request.w_peak}
            return tolerance.page_score_error(request.policy, group, *kept, **weights)

        tolerance.assert_selection(chosen, exact[head], error, request.num_pages, name=name, **budget)


def _add_attention(scenario, table, request, q, pages, got):
    length, size = scenario.pages_per_request * scenario.page_size, scenario.page_size
    chosen = np.zeros((scenario.num_kv_heads, length), bool)
    for head, mine in enumerate(pages):
        for page in mine:
            chosen[head, page * size : min((page + 1) * size, request.seq_len)] = True
    table.add(
        q=q,
        keys=_padded(request.keys, length),
        values=_padded(request.values, length),
        chosen=chosen,
        got=got,
        exact=request.attend(q, pages),
    )


def _check_attention(scenario, name, table):
    dtype = jnp.dtype(scenario.dtype)
    q, keys, values = (table[x].astype(dtype) for x in ("q", "keys", "values"))
    scale = scenario.head_dim**-0.5 if scenario.scale is None else scenario.scale
    by_plain = plain.attention(q, keys, values, table["chosen"], scale)
    tolerance.assert_as_good_as_plain(table["got"], table["exact"], by_plain, scenario.dtype, name=name)


def _check_scores(scenario, table):
    options, stored = dict(scenario.options), jnp.dtype(scenario.dtype)
    q, inside, got, exact = table["q"].astype(stored), table["inside"], table["got"], table["exact"]
    if scenario.policy in reference.TOKEN_POLICIES:
        dtype = options.get("score_dtype", jnp.float32)
        scale = options.get("scale") or scenario.head_dim**-0.5
        keys, old = table["keys"].astype(stored), table["old"].astype(dtype)
        decay = options.get("decay", 0.984375)
        by_plain = plain.token_scores(q, keys, old, inside, scenario.policy, decay, scale)
    else:
        dtype, weights = jnp.float32, [options.get(name, 1.0) for name in ("w_avg", "w_peak")]
        summaries = [table[name].astype(stored) for name in ("mean", "largest", "smallest")]
        by_plain = plain.page_scores(q, *summaries, scenario.policy, *weights)
    mask = np.broadcast_to(inside[:, None], got.shape)
    got, exact, by_plain = got[mask], exact[mask], np.asarray(by_plain)[mask]
    if scenario.grid:
        np.testing.assert_array_equal(got, exact, "scores of exact inputs")
    # hh_score is a sum of positive terms, small beside large: each counts at its own size.
    relative = scenario.policy in reference.TOKEN_POLICIES
    tolerance.assert_as_good_as_plain(got, exact, by_plain, dtype, name="scores", relative=relative)


def _check_pools(scenario, trace, requests):
    for row, request in enumerate(requests):
        for name, pool, mine in (("k", trace.keys, request.keys), ("v", trace.values, request.values)):
            cached = pool[row].swapaxes(1, 2).reshape(-1, scenario.num_kv_heads, scenario.head_dim)
            expected = _padded(mine, len(cached))[: request.seq_len]
            np.testing.assert_array_equal(cached[: request.seq_len], expected, f"row {row}: cached {name}")
    assert not trace.owned.all()
    for before, after in zip(trace.before, trace.after, strict=True):
        before, after = (x[~trace.owned].astype(np.float32) for x in (before, after))
        np.testing.assert_array_equal(after, before, "an unowned page moved")


def _padded(heads, length):
    """Lists of vectors per KV head -> [length, Hkv, D], zeros past the end."""
    out = np.zeros((length, len(heads), _size(heads)))
    for head, vectors in enumerate(heads):
        if vectors:
            out[: len(vectors), head] = vectors
    return out


def _size(heads):
    return len(heads[0][0]) if heads[0] else 1


def _widened(x, length, fill):
    """[..., N] -> [..., length]."""
    return np.concatenate([x, np.full((*x.shape[:-1], length - x.shape[-1]), fill, x.dtype)], axis=-1)
