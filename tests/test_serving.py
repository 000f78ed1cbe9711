"""The server: requests of mixed length through few rows and a small pool, each as if it were alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
from h2o_jax import generate as generate_module
from h2o_jax.serving import Server, forward
from tests.test_generate import VOCAB, tiny_model
from tests.test_loops import POLICIES, cache_config, compilations
from tests.worlds import filled_with_nan

ROWS, NUM_REQUESTS, MAX_PROMPT, MAX_NEW = 8, 50, 60, 40
CHUNK = 16
POOL_TOKENS = 400  # four of the longest requests


def requests():
    """[(prompt, max_new_tokens)], both of mixed length."""
    rng = np.random.default_rng(0)
    prompt_lengths = rng.permutation(np.linspace(1, MAX_PROMPT, NUM_REQUESTS).astype(int))
    new = rng.permutation(np.linspace(1, MAX_NEW, NUM_REQUESTS).astype(int))
    return [(rng.integers(0, VOCAB, n).tolist(), int(m)) for n, m in zip(prompt_lengths, new)]


def new_server(model, policy, **options):
    num_pages = POOL_TOKENS // (policy.page_size or 4)
    config = cache_config(model, policy, ROWS, max_tokens=100, num_pages=num_pages)
    return Server(model, policy=policy, config=config, prefill_chunk=CHUNK, **options)


def serve(server, requests=()):
    """{request: tokens}, in order of first tokens, and the steps that began with a free row and one waiting.

    Of `requests`, [(prompt, max_new_tokens)], 20 are submitted at once and 2 more before each step.
    """
    out, finished, short_of_pages, arriving = {}, set(), 0, 20
    while requests or server.num_running:
        for prompt, max_new_tokens in requests[:arriving]:
            server.submit(prompt, max_new_tokens=max_new_tokens)
        requests, arriving = requests[arriving:], 2
        short_of_pages += server.num_waiting > 0 and server.num_running < server.config.max_requests
        for request, token, is_last in server.step():
            assert request not in finished
            finished |= {request} if is_last else set()
            out.setdefault(request, []).append(token)
        h2o_jax.check_state(server._state, server.config)
    assert out.keys() == finished and server.num_waiting == 0
    return out, short_of_pages


class Case:
    """A policy and the solo run of each request."""

    def __init__(self, policy):
        self.policy = policy
        self.model = tiny_model()
        self.requests = requests()
        config = cache_config(self.model, policy, 1, max_tokens=100)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generate_module, "PREFILL_CHUNK", 2)  # one size, so one compilation
            options = dict(policy=policy, max_new_tokens=MAX_NEW, config=config)
            self.alone = [
                h2o_jax.generate(self.model, [prompt], **options)[0] for prompt, _ in self.requests
            ]

    def expected(self, i):
        """Greedy: a request of fewer tokens gets the first of them."""
        return self.alone[i][: self.requests[i][1]]


new_case = functools.cache(lambda name: Case(POLICIES[name]))


@pytest.fixture(scope="module", params=POLICIES)
def case(request):
    return new_case(request.param)


@pytest.fixture(scope="module")
def page_case():
    return new_case("page")


def test_50_requests_through_8_rows_with_two_compilations(case):
    server = new_server(case.model, case.policy)
    server._state = filled_with_nan(server._state)
    programs = forward._cache_size()
    with compilations() as compiled:
        tokens, short_of_pages = serve(server, case.requests)
    assert len(compiled) == 2 and forward._cache_size() - programs == 2
    assert short_of_pages > 0
    assert tokens == {i: case.expected(i) for i in range(NUM_REQUESTS)}


def test_stop_tokens_and_limits_are_each_request_s_own(page_case):
    server = new_server(page_case.model, page_case.policy)
    expected = {}
    for i, (prompt, _) in enumerate(page_case.requests[:12]):
        alone = page_case.alone[i]
        never = next(token for token in range(VOCAB) if token not in alone)
        stop = alone[i] if i % 2 else never
        request = server.submit(prompt, max_new_tokens=MAX_NEW, stop_tokens=jnp.array([stop, never]))
        expected[request] = alone[: alone.index(stop) + 1] if i % 2 else alone
    assert serve(server)[0] == expected
    assert server.step() == []


def nearly_full(page_case):
    """A server with 4 of 8 rows and 95 of 100 pages taken, by requests of 40, 40, 40 and 21 new tokens."""
    server = new_server(page_case.model, page_case.policy)
    for max_new_tokens in np.array([40, 40, 40, 21], np.int8):  # sums may pass 127
        assert server.submit([1] * MAX_PROMPT, max_new_tokens=max_new_tokens, wait=False) is not None
    return server


def test_a_request_that_may_not_wait_is_refused(page_case):
    server = nearly_full(page_case)
    longest = max(range(NUM_REQUESTS), key=lambda i: len(page_case.requests[i][0]))
    prompt, expected = page_case.requests[longest][0], page_case.alone[longest]
    assert server.submit(prompt, max_new_tokens=MAX_NEW, wait=False) is None  # a row is free, pages are not
    assert (server.num_running, server.num_waiting) == (4, 0)
    request = server.submit(prompt, max_new_tokens=MAX_NEW)
    assert request == 4 and server.num_waiting == 1
    out, _ = serve(server)
    assert [len(out[i]) for i in range(5)] == [40, 40, 40, 21, 40] and out[request] == expected
    again = server.submit(prompt, max_new_tokens=MAX_NEW, wait=False)  # all pages are back
    assert again == 5 and serve(server)[0] == {again: expected}


def test_no_request_overtakes_another(page_case):
    server = nearly_full(page_case)
    server.submit([1] * 20, max_new_tokens=2)
    assert server.num_waiting == 1
    assert server.submit([1], max_new_tokens=2, wait=False) is None
    server.submit([1], max_new_tokens=2)  # would find the one page that it needs
    while not any(event.finished for event in server.step()):
        assert (server.num_running, server.num_waiting) == (4, 2)
    assert (server.num_running, server.num_waiting) == (5, 0)  # the row that one left, and a free one


def test_rows_are_given_in_order_of_arrival(page_case):
    server = new_server(page_case.model, page_case.policy)
    for max_new_tokens in range(1, ROWS + 1):
        server.submit([1], max_new_tokens=max_new_tokens)
    assert server.submit([1], max_new_tokens=2, wait=False) is None  # pages are there, rows are not
    for _ in range(3):
        server.submit([1], max_new_tokens=2)
    out, _ = serve(server)
    assert list(out) == list(range(ROWS + 3)), "first tokens come in order of arrival"
    assert [len(tokens) for tokens in out.values()] == [*range(1, ROWS + 1), 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompt=[]), "prompt: expected at least one token id"),
        (dict(prompt=[1, VOCAB]), r"prompt: expected token ids in \[0, 61\), got \[1, 61\]"),
        (dict(prompt=[0.5]), "prompt: expected token ids"),
        (dict(stop_tokens="</s>"), r"stop_tokens: expected a sequence of integers in \[0, 61\), got '</s>'"),
        (dict(max_new_tokens=0), "max_new_tokens: expected a positive integer, got 0"),
        (dict(max_new_tokens=True), "max_new_tokens: expected a positive integer, got True"),
        (dict(max_new_tokens=128), "prompt: 1 tokens and 128 new ones exceed the model's context of 128"),
        (dict(max_new_tokens=101), "1 tokens and 101 new ones need 26 pages; .*pages_per_request = 25"),
        (dict(max_new_tokens=80), "prompt: 20 pages needed; the pool has num_pages = 19"),
    ],
)
def test_a_request_that_can_never_run_is_an_error_and_changes_nothing(page_case, change, message):
    config = cache_config(page_case.model, page_case.policy, ROWS, max_tokens=100, num_pages=19)
    server = Server(page_case.model, policy=page_case.policy, config=config, prefill_chunk=CHUNK)
    for wait in (True, False):
        with pytest.raises(ValueError, match=message):
            server.submit(**(dict(prompt=[1], max_new_tokens=4, wait=wait) | change))
    assert (server.num_running, server.num_waiting) == (0, 0) and server.step() == []
    assert server.submit([1], max_new_tokens=4) == 0


@pytest.mark.parametrize("prefill_chunk", [1, 0, 2.5])
def test_a_bad_chunk_is_refused(page_case, prefill_chunk):
    config = cache_config(page_case.model, page_case.policy, 1)
    with pytest.raises(ValueError, match=f"prefill_chunk: expected an integer >= 2, got {prefill_chunk}"):
        Server(page_case.model, policy=page_case.policy, config=config, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(policy="dense_attention"), ValueError, "policy: expected a Policy, .*, got 'dense_attention'"),
        (dict(config=None), ValueError, "config: expected a CacheConfig, got None"),
        (dict(num_layers=3), ValueError, "config: expected num_layers = 2 as in the model, got 3"),
        (dict(num_kv_heads=6), ValueError, "config: expected num_kv_heads = 2 as in the model, got 6"),
        (dict(head_dim=4), ValueError, "config: expected head_dim = 8 as in the model, got 4"),
        (dict(implementation="cuda"), ValueError, "implementation: expected None or one of"),
        pytest.param(
            dict(implementation="pallas"),
            NotImplementedError,
            "implementation: 'pallas' needs a CUDA GPU, and the backend is cpu",
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks"),
        ),
    ],
    ids=str,
)
def test_what_can_not_run_is_refused_by_both_loops(page_case, change, error, message):
    config = cache_config(page_case.model, page_case.policy, 1)
    sizes = {name: value for name, value in change.items() if hasattr(config, name)}
    options = dict(policy=page_case.policy, config=dataclasses.replace(config, **sizes))
    options |= {name: value for name, value in change.items() if name not in sizes}
    with pytest.raises(error, match=message):
        Server(page_case.model, **options)
    if options["config"] is not None:  # which `generate` fits to the prompts
        with pytest.raises(error, match=message):
            h2o_jax.generate(page_case.model, [[1]], max_new_tokens=1, **options)


def test_a_server_whose_step_was_interrupted_says_so(page_case, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    server = new_server(page_case.model, page_case.policy)
    server.submit([1, 2], max_new_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.step()
    for call in (server.step, lambda: server.submit([1], max_new_tokens=1)):
        with pytest.raises(RuntimeError, match="an exception ended an earlier step, .*; make a new server"):
            call()


def test_server_is_a_name_of_the_package():
    assert h2o_jax.Server is Server and "Server" in h2o_jax.__all__
