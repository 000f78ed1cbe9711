"""Decode loops written around a model: a scan, a jitted step that streams, one saved and gone on with.

Letters: B request rows.
"""

import contextlib
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax
from tests.test_generate import tiny_model

PROMPTS = ([5, 9, 33], [7] * 21, [1])
STEPS = 40
POLICIES = {
    "page": h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=2, reserved_eos=1),
    "token": h2o_jax.get_policy("h2o_token_sparse_attention", top_k=6),
}


def cache_config(model, policy, rows, max_tokens=128, num_pages=None):
    page_size = policy.page_size or 4
    return model.cache_config(rows, max_tokens // page_size, page_size, num_pages)


@contextlib.contextmanager
def compilations():
    """A list with an entry for each program that XLA compiles meanwhile."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def prefill(model, state, policy):
    """State and [B] first new tokens of PROMPTS."""
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    tokens = np.zeros((len(PROMPTS), lengths.max()), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    table, _ = h2o_jax.extend(state.table, lengths)
    state, logits = jax.jit(functools.partial(model, policy=policy))(
        h2o_jax.PagedState(table, state.layers), tokens, lengths
    )
    return state, logits[np.arange(len(PROMPTS)), lengths - 1].argmax(-1).astype(jnp.int32)


def decode_step(model, state, tokens, *, policy):
    """State and [B] tokens, after one more token in each row."""
    table, ok = h2o_jax.extend(state.table, jnp.ones_like(tokens))
    state = h2o_jax.PagedState(table, state.layers)
    state, logits = model(state, tokens[:, None], ok.astype(jnp.int32), policy=policy)
    return state, logits[:, 0].argmax(-1).astype(jnp.int32)


class Case:
    """A policy, a prefilled state, and the tokens that `generate` gives, [STEPS + 1, B]."""

    def __init__(self, name):
        self.name = name
        self.policy = POLICIES[name]
        self.model = tiny_model()
        self.config = cache_config(self.model, self.policy, len(PROMPTS))
        empty = h2o_jax.init_state(self.config, self.policy)
        self.state, self.first = prefill(self.model, empty, self.policy)
        self.expected = np.transpose(
            h2o_jax.generate(
                self.model, PROMPTS, policy=self.policy, max_new_tokens=STEPS + 1, config=self.config
            )
        )
        assert self.first.tolist() == self.expected[0].tolist()

    def start(self):
        return jax.tree.map(jnp.copy, (self.state, self.first))


@pytest.fixture(scope="module", params=POLICIES)
def case(request):
    return Case(request.param)


def test_a_scan_with_donated_state(case):
    traces = []

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(model, state, tokens):
        def step(carry, _):
            traces.append(1)
            state, tokens = decode_step(model, *carry, policy=case.policy)
            return (state, tokens), tokens

        return jax.lax.scan(step, (state, tokens), length=STEPS // 2)

    state, tokens = case.start()
    given = state
    with compilations() as compiled:
        (state, tokens), first_half = decode(case.model, state, tokens)
        (state, tokens), second_half = decode(case.model, state, tokens)
    assert len(compiled) == len(traces) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    np.testing.assert_array_equal(np.concatenate([first_half, second_half]), case.expected[1:])
    h2o_jax.check_state(state, case.config)


def test_a_jitted_step_that_streams(case):
    traces = []

    @functools.partial(nnx.jit, donate_argnums=1)
    def step(model, state, tokens):
        traces.append(1)
        return decode_step(model, state, tokens, policy=case.policy)

    def stream(state, tokens):
        for _ in range(STEPS):
            state, tokens = step(case.model, state, tokens)
            yield tokens.tolist()

    with compilations() as compiled:
        streamed = stream(*case.start())
        assert next(streamed) == case.expected[1].tolist()  # there before the next step has begun
        rest = list(streamed)
    assert len(compiled) == len(traces) == 1
    np.testing.assert_array_equal(rest, case.expected[2:])


def run_from(path, name):
    """Goes on, in this process, from what `test_a_loop_saved_and_restored` saved, and prints the tokens."""
    import orbax.checkpoint as ocp

    model, policy = tiny_model(), POLICIES[name]
    config = cache_config(model, policy, len(PROMPTS))
    # The template says what is stored: shapes and dtypes, and the static fields, which no file holds.
    state = jax.eval_shape(lambda: h2o_jax.init_state(config, policy))
    tokens = jax.ShapeDtypeStruct((len(PROMPTS),), jnp.int32)
    with ocp.StandardCheckpointer() as checkpointer:
        state, tokens = checkpointer.restore(path, (state, tokens))
    h2o_jax.check_state(state, config)
    step = jax.jit(functools.partial(decode_step, policy=policy), donate_argnums=1)
    for _ in range(STEPS // 2):
        state, tokens = step(model, state, tokens)
        print(*tokens.tolist())


def test_a_loop_saved_and_restored(case, tmp_path):
    import orbax.checkpoint as ocp  # here, since other tests that use this file need no Orbax

    step = jax.jit(functools.partial(decode_step, policy=case.policy), donate_argnums=1)
    state, tokens = case.start()
    rows = []
    for _ in range(STEPS // 2):
        state, tokens = step(case.model, state, tokens)
        rows.append(tokens.tolist())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "loop", (state, tokens))

    code = f"from tests.test_loops import run_from; run_from({str(tmp_path / 'loop')!r}, {case.name!r})"
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    rows += [[int(token) for token in line.split()] for line in done.stdout.splitlines()]
    np.testing.assert_array_equal(rows, case.expected[1:])

    # In this process too: the same arrays, and the same types and static fields around them.
    template = jax.eval_shape(lambda: h2o_jax.init_state(case.config, case.policy))
    with ocp.StandardCheckpointer() as checkpointer:
        restored, _ = checkpointer.restore(tmp_path / "loop", (template, tokens))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert [x.dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(state)]
