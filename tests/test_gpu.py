"""What only a GPU can tell of the whole: the kernels inside the decode step, the loop and the model."""

import functools
import os
import subprocess
import sys
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import h2o_jax
from h2o_jax import generate as generate_module
from h2o_jax import verification
from h2o_jax.generate import generate
from h2o_jax.models import Llama, LlamaConfig
from h2o_jax.serving import Server, forward
from tests import test_jit
from tests.kernel_runs import on_gpu
from tests.lowering import KERNEL_TARGET
from tests.test_models_real import smollm  # noqa: F401 (a fixture)
from tests.test_serving import serve

POLICIES = ["h2o_sparse_attention", "h2o_token_sparse_attention", "dense_attention"]


@on_gpu
@pytest.mark.parametrize("scanned", [False, True], ids=["step", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_kernels_update_the_pool_in_place(name, dtype, scanned):
    """Nothing as large as a pool is made beside it. (The default implementation here is "pallas".)"""
    executable, _, shapes = test_jit.compiled(name, 65536, dtype, scanned)
    assert KERNEL_TARGET in executable.as_text()
    memory = executable.memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.layers)]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < sizes[0] / 2


@on_gpu
@pytest.mark.parametrize("name", POLICIES)
def test_x64_mode_changes_no_bit(name):
    loop = test_jit.Loop(name)
    news = loop.inputs(24)
    outs = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            _, out = jax.jit(loop.scan)(loop.start(), news)
            outs.append(np.asarray(out))
    assert outs[0].dtype == outs[1].dtype == np.float32
    np.testing.assert_array_equal(*outs)


@on_gpu
@pytest.mark.parametrize("name", POLICIES)
def test_20_repeats_are_bit_equal(name):
    loop = test_jit.Loop(name)
    news, scan = loop.inputs(24), jax.jit(loop.scan)
    first = jax.tree.map(np.asarray, scan(loop.start(), news))
    for _ in range(19):
        jax.tree.map(np.testing.assert_array_equal, scan(loop.start(), news), first)


@on_gpu
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_does_not_depend_on_the_batch(name):
    """Rows in another order, among idle rows and in a larger pool: the same bits."""
    few, many = test_jit.Loop(name), test_jit.Loop(name, num_pages=1000, pages_per_request=100)
    order = np.array([2, 0, 3, 1])
    news = few.inputs(24)
    _, outs = jax.jit(few.scan)(few.start((20, 9, 1, 3)), news)
    lengths = tuple(np.array((20, 9, 1, 3))[order])
    _, moved = jax.jit(many.scan)(many.start(lengths), tuple(x[:, order] for x in news))
    np.testing.assert_array_equal(np.asarray(outs)[:, order], moved)


@on_gpu
@pytest.mark.parametrize("name", ["gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_the_model_says_the_same_with_either_implementation(name):
    config = LlamaConfig(
        architecture="llama",
        vocab_size=256,
        hidden_size=192,
        intermediate_size=256,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (150, 3, 90)]
    policy = h2o_jax.get_policy(name, top_k=8)
    run = functools.partial(generate, model, prompts, policy=policy, max_new_tokens=100)
    assert run(implementation="pallas") == run(implementation="xla")


@on_gpu
def test_a_server_of_smollm_says_what_each_request_says_alone(smollm, monkeypatch):  # noqa: F811
    """50 requests through 8 rows and 64 pages: with the kernels, without, and one by one."""
    model, tokenizer, _ = smollm
    text = tokenizer.encode(topics["comparisons"])
    rng = np.random.default_rng(0)
    lengths, news = rng.integers(9, 250, 50), rng.integers(1, 41, 50)
    requests = [(text[30 * i : 30 * i + n], int(new)) for i, (n, new) in enumerate(zip(lengths, news))]
    policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=4)
    config = model.cache_config(8, 19, 16, num_pages=64)
    served = []
    for implementation in ("pallas", "xla"):
        server = Server(model, policy=policy, config=config, prefill_chunk=64, implementation=implementation)
        programs = forward._cache_size()
        tokens, short_of_pages = serve(server, requests)
        assert forward._cache_size() - programs == 2 and short_of_pages > 0
        served.append([tokens[i] for i in range(50)])
    assert served[0] == served[1]
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", 16)  # the same for all, so one compilation
    options = dict(policy=policy, max_new_tokens=40, config=config)
    alone = [generate(model, [prompt], **options)[0] for prompt, _ in requests]
    assert served[0] == [tokens[:new] for tokens, (_, new) in zip(alone, requests)]


@on_gpu
def test_verify_passes_with_the_kernels():
    failed = [check for check in verification.verify("pallas") if not check.passed]
    assert not failed


TOO_MUCH = """
import re, h2o_jax

policy = h2o_jax.get_policy("gqa_h2o_sparse_attention", top_k=8)

def init(num_pages):
    return h2o_jax.init_state(h2o_jax.CacheConfig(4, 8, 128, 16, num_pages, 8, 1000), policy)

messages = []
for _ in range(3):
    try:
        init(200_000)
    except MemoryError as error:
        messages.append(str(error))
assert len(messages) == 3 and len(set(messages)) == 1, messages  # what was made before the refusal is let go
print(messages[0])
fits = int(re.search("num_pages=([0-9]+) instead of 200000", messages[0])[1])
state = init(int(0.95 * fits))
try:
    init(int(0.95 * fits))
except MemoryError as error:
    print(error)
assert int(h2o_jax.extend(state.table, state.table.seq_lens + 1)[0].num_free) == int(0.95 * fits) - 8
"""


@on_gpu
def test_a_state_too_large_for_the_gpu_says_what_fits():
    """In a process that may take 4% of the memory: 5.6 GB of an H200's."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.04", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    done = subprocess.run([sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    asked = "init_state: no room for 53.41 GiB: page table 812.54 KiB, keys and values 48.83 GiB, summaries 4.58 GiB; "
    first, second = done.stdout.splitlines()
    assert first.startswith(asked) and second.startswith("init_state: no room for ")
