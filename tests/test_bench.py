"""`h2o-jax bench`: rows of every group, checks that fail, formulas and clocks."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import h2o_jax
import pallas_kernels
from h2o_jax import bench
from h2o_jax.bench import floors, inputs, models, ops, parity, steps, timing
from h2o_jax.bench.inputs import Sizes
from h2o_jax.bench.row import HEADER, Parity, Row, at_most, percent, ratio, share_of_bandwidth
from h2o_jax.bench.timing import Calls, Timing
from h2o_jax.cli import bench as command
from h2o_jax.cli import main
from h2o_jax.models import LlamaConfig
from pallas_kernels import _dispatch
from tests.lowering import KERNEL_TARGET, lower_for_cuda

pytestmark = pytest.mark.slow

PAGE, TOKEN, DENSE = ops.PAGE_POLICY, ops.TOKEN_POLICY, steps.DENSE_POLICY
LLAMA_8B = models.LLAMA_8B
TINY = LlamaConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Tiny models, few cases and calls, one layer; and "pallas" names the definitions too, to be broken."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is what takes the time here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SECONDS_A_LOOP", 0)
        patch.setattr(timing, "ROTATED_BYTES", 1)
        patch.setattr(models, "LLAMA_8B", TINY)
        patch.setattr(models, "SMOLLM2_135M", dataclasses.replace(TINY, tie_embeddings=True))
        patch.setattr(steps, "list_policies", lambda: (PAGE, TOKEN, DENSE, "sink_recent_attention"))
        patch.setattr(steps, "_RAGGED_LAYERS", 1)
        cases = steps._cases
        patch.setattr(steps, "_cases", lambda run: cases(run)[::3] + cases(run)[4:5])
        for op in pallas_kernels.__all__:
            patch.setitem(implementations(op), "pallas", implementations(op)["xla"])
        patch.setattr(command, "candidates", lambda _: ("pallas", "xla"))
        patch.setattr(_dispatch, "_platform", lambda: "cuda")
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def implementations(op):
    return importlib.import_module(f"pallas_kernels.{op}.api")._IMPLEMENTATIONS


def new_run(**options):
    return bench.Run("pallas", **{"memory": 2**33, "tokens": 512, "heads": (2, 2, 16), **options})


def equal_rows(batch, tokens, page_size, **options):
    return new_run().sizes(batch, page_size, tokens, **options)


@pytest.fixture(scope="module")
def rows():
    return list(bench.run_groups(new_run(), bench.GROUPS))


def test_every_group_gives_rows_that_are_checked_and_timed(rows):
    assert list(dict.fromkeys(row.group for row in rows)) == list(bench.GROUPS)
    for row in rows:
        assert row.failure == "" and row.seconds > 0, row
        if row.parity is None:
            assert row.implementation in ("xla", "lax")
        else:
            assert row.parity.passed
    baselines = {(row.group, row.baseline[0]) for row in rows if row.baseline}
    assert baselines == {
        ("envelope", "xla"),
        ("top-k", "lax.top_k"),
        ("softmax", "xla"),
        ("attention", "xla"),
        ("write", "xla"),
        ("step", "dense"),
        ("dense", "dense"),
        ("ragged", "its parts"),
        ("pool-size", "pool x1"),
        ("policies", "dense"),
        ("model", "dense policy"),
        ("small-model", "xla"),
    }


def test_each_dense_baseline_is_measured_once(rows):
    shapes = [row.shape for row in rows if row.name == "dense, contiguous"]
    assert len(shapes) == 2 and len(set(shapes)) == 2


def test_rows_render_as_json_lines_and_as_a_table(rows):
    for row in rows:
        values = json.loads(row.to_json({"device": "this one"}))
        assert values["device"] == "this one" and values["group"] == row.group
        assert values["seconds"] == row.seconds and values["host_seconds"] > 0
        line = row.to_line()
        assert "\n" not in line and f"{row.seconds * 1e6:.1f}" in line
        if row.gb_per_s:
            assert values["gb_per_s"] == pytest.approx(row.floor_bytes / row.seconds / 1e9)
        if row.group != "bandwidth" and row.floor_bytes:
            assert values["percent_of_bandwidth"] == pytest.approx(
                100 * row.floor_bytes / row.seconds / (values["bandwidth_gb_per_s"] * 1e9)
            )
    decode = [row.to_line() for row in rows if row.group in ("model", "small-model")]
    assert len(decode) == 4 and all("tokens/s" in line for line in decode)


def broken(op, change, monkeypatch):
    """Makes "pallas" of an op return `change(its arguments, its results)`."""
    right = implementations(op)["xla"]

    def wrong(*args, **options):
        return change(args, right(*args, **options))

    monkeypatch.setitem(implementations(op), "pallas", wrong)


def one_wrong_page(args, pages):
    return pages.at[0, 0, 0].set(pages[0, 0, 0] ^ 1)


def one_page_unread(args, results):
    q, k, v, pages, seq_lens, selected, counts = args
    return implementations("paged_attention")["xla"](
        q, k, v, pages, seq_lens, selected, counts.at[-1, -1].add(-1), scale=q.shape[-1] ** -0.5
    )


MUTANTS = {
    "envelope": ("envelope_scores", lambda args, scores: jnp.zeros_like(scores), "score"),
    "top-k": ("top_k_pages", one_wrong_page, "page"),
    "softmax": ("decayed_softmax_scores", lambda args, results: (args[2], results[1]), "stored score"),
    "attention": ("paged_attention", one_page_unread, "output"),
    "write": ("write_pages", lambda args, results: (results[0], args[1], *results[2:]), "value"),
}


@pytest.mark.parametrize("group", MUTANTS)
def test_a_wrong_op_is_reported_and_not_timed(group, monkeypatch):
    op, change, what = MUTANTS[group]
    broken(op, change, monkeypatch)
    run = new_run()
    right, wrong, *_ = bench.GROUPS[group](run)
    assert right.seconds > 0 and not right.failure
    assert wrong.failure.startswith(what) and wrong.timing is None and wrong.met is None
    assert "FAILED" in wrong.to_line() and " us" not in wrong.to_line()
    assert json.loads(wrong.to_json({}))["seconds"] is None


STEP_MUTANTS = {
    "written": ("write_pages", lambda args, results: (args[0], *results[1:]), PAGE, "written key"),
    "scored": ("envelope_scores", lambda args, scores: scores * 1.01, PAGE, "score"),
    "chosen": ("top_k_pages", one_wrong_page, PAGE, "chosen page"),
    "attended": ("paged_attention", one_page_unread, PAGE, "output"),
    "stored": ("decayed_softmax_scores", lambda args, new: (new[0] * 1.01, new[1]), TOKEN, "stored score"),
    "accumulated": ("decayed_softmax_scores", lambda args, new: (new[0] * 2, new[1] * 2), TOKEN, "score"),
}


@pytest.mark.parametrize("mutant", STEP_MUTANTS)
def test_a_wrong_part_of_a_step_is_reported(mutant, monkeypatch):
    op, change, policy, what = STEP_MUTANTS[mutant]
    broken(op, change, monkeypatch)
    row = steps.step_row(new_run(), policy, equal_rows(2, 512, 1 if policy == TOKEN else 16))
    assert row.failure.startswith(what) and row.timing is None


def test_a_wrong_extend_is_reported(monkeypatch):
    def leaky(table, num_tokens):
        table, ok = h2o_jax.extend(table, num_tokens)
        return dataclasses.replace(table, num_free=table.num_free - 1), ok

    monkeypatch.setattr(ops, "extend_table", leaky)
    (row,) = ops.extend(new_run())
    assert "leaked" in row.failure and row.timing is None


def test_without_a_dense_time_there_is_no_ratio(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, implementation: jnp.zeros_like(q))
    run = new_run()
    sizes = equal_rows(1, 512, 16)
    generator = steps.contiguous_dense(run, sizes)
    assert next(generator).failure.startswith("output")
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == ("dense", None)
    calls = Calls(jax.jit(jnp.sin), [(jnp.ones(3),)])
    row = run.measure("sine", sizes, lambda: (calls, None), baseline=stop.value.value)
    assert row.seconds > 0 and row.ratio is None


def test_what_raises_is_a_failed_row_and_the_rest_goes_on(monkeypatch, caplog):
    def no_room(*args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(ops, "layer_cache", no_room)
    monkeypatch.setattr(ops, "extend_table", no_room)
    rows = list(bench.run_groups(new_run(), ["envelope", "extend", "top-k"]))
    assert [row.group for row in rows] == ["bandwidth", "envelope", "extend", *["top-k"] * 4]
    assert [bool(row.failure) for row in rows] == [False, True, True, *[False] * 4]
    assert rows[1].to_line().endswith("FAILED: RuntimeError: RESOURCE_EXHAUSTED: out of memory")
    assert "no_room" in caplog.text  # with its traceback


def test_what_does_not_fit_is_left_out():
    run = new_run(memory=2000)
    for group in ("model", "small-model", "pool-size", "write"):
        row = next(bench.GROUPS[group](run))
        assert row.timing is None and not row.failure
        assert "left out: needs" in row.to_line()


def test_a_large_model_does_not_fit_a_cpu_of_24_gib(monkeypatch):
    """Its weights would, in 15 GiB, but for their float32 copies."""
    monkeypatch.setattr(models, "LLAMA_8B", LLAMA_8B)
    monkeypatch.setattr(models, "random_model", lambda config: pytest.fail("16 GB of weights"))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    (row,) = models.model(new_run(memory=24 * 2**30))
    assert row.note == "left out: needs 45.7 of 24.0 GiB"


def test_an_output_that_can_not_be_written_costs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_groups", lambda *_: pytest.fail("measured"))
    output = tmp_path / "none" / "rows.jsonl"
    assert main(["bench", "--tokens", "512", "--output", str(output)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"h2o-jax: error: {output}: no such file or directory\n"


def test_the_command_prints_writes_and_succeeds(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    output.write_text('{"group": "of an earlier run"}\n')
    assert main(["bench", "top-k", "--tokens", "512", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(HEADER)
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["read", "lax.top_k", "top_k_pages"]
    assert lines[-1] == "5 rows, 0 failed"
    values = [json.loads(line) for line in output.read_text().splitlines()]
    assert [x["group"] for x in values] == ["of an earlier run", "bandwidth", *["top-k"] * 4]
    assert all(x["device"] and x["date"] and x["jax"] == jax.__version__ for x in values[1:])


def test_a_failed_check_is_the_exit_code(monkeypatch, capsys):
    broken("top_k_pages", one_wrong_page, monkeypatch)
    assert main(["bench", "top-k", "--tokens", "512"]) == command.FAILED
    out = capsys.readouterr().out
    assert out.count("FAILED: page wrong by 1") == 2 and "5 rows, 2 failed" in out


def test_the_groups_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == list(bench.GROUPS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps"], "NAME: expected some of bandwidth, envelope, "),
        ([], "--tokens: expected a number, such as 512, where there is no GPU (the backend is cpu)"),
        (["--tokens", "100"], "--tokens: expected a positive multiple of 512, got 100"),
        (["--tokens", "0"], "--tokens: expected a positive multiple of 512, got 0"),
    ],
)
def test_bad_input_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_summary_names_the_targets_missed(capsys):
    timed = Timing(2e-6, 2e-6, "host")
    good = Row("quick", "xla", "[1]", timing=timed, targets=(at_most(3e-6),))
    bad = Row("slow", "xla", "[2]", timing=timed, targets=(at_most(1e-6),))
    assert command._summary([good, bad, Row("none", "xla", "[3]", timing=timed)]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 rows with a target reach it" in out and "missed: slow ([2])" in out


def test_targets():
    row = Row(
        "a",
        "xla",
        "[1]",
        floor_bytes=1000,
        bandwidth=1e9,
        timing=Timing(2e-6, 3e-6, "cupti"),
        baseline=("b", 5e-6),
    )
    assert row.gb_per_s == pytest.approx(0.5) and row.percent_of_bandwidth == pytest.approx(50)
    assert row.ratio == pytest.approx(2.5)
    for target, met in (
        (ratio(2.49), True),
        (ratio(2.51), False),
        (percent(49), True),
        (percent(51), False),
        (at_most(2.1e-6), True),
        (at_most(1.9e-6), False),
        (share_of_bandwidth(24, 500, "on half"), True),
        (share_of_bandwidth(26, 500, "on half"), False),
    ):
        assert dataclasses.replace(row, targets=(target,)).met is met, target.text
    both = dataclasses.replace(row, targets=(ratio(2), percent(51)))
    assert not both.met and "2x, 51% of R MISSED" in both.to_line()
    assert not dataclasses.replace(row, baseline=None, targets=(ratio(1),)).met
    assert row.met is None
    calls = Calls(jax.jit(jnp.sin), [(jnp.ones(3),)])
    for judged in (False, True):
        row = new_run(judged=judged).measure("a", "[1]", lambda: (calls, None), targets=(at_most(9.0),))
        assert row.met is (True if judged else None)


def test_comparisons():
    inf, nan = np.inf, np.nan
    assert parity.compare("x", [1.0, -inf], [1.5, -inf], 0.5) == Parity("x", 0.5, 0.5)
    # The error that is largest for its tolerance, not the largest.
    assert parity.compare("x", [10.0, 2.0], [11.0, 2.5], [4.0, 0.1]) == Parity("x", 0.5, 0.1)
    narrow = parity.compare("x", [-inf, 3.0], [-inf, 2.0], np.array([inf, 0.5], np.float32))
    assert narrow == Parity("x", 1.0, 0.5)
    for got in ([1.0, 0.0], [nan, -inf], [1.0, inf], [-inf, -inf]):
        failing = parity.compare("x", got, [1.0, -inf], [9.0, inf])
        assert not failing.passed and failing.error == inf
    row = Row("a", "xla", "[1]", parity=failing, failure=str(failing))
    assert json.loads(row.to_json({}))["parity"]["error"] == "inf"
    assert not Parity("x", nan, 1.0).passed
    assert parity.equal("x", [1, 2, 3], [1, 5, 6]) == Parity("x", 2, 0)
    good, close, bad = Parity("a", 1, 9), Parity("b", 1, 2), Parity("c", 1, 0)
    assert parity.worst([close, good]) is close and parity.worst([close, bad, good]) is bad
    # bfloat16 has 8 bits of precision: an ulp of 3 is 2^(1 - 7).
    assert parity.output_tolerance(np.array([0.1, -3.0]), jnp.bfloat16) == 2 * 2.0**-6


def test_floors_by_hand():
    """Eight rows of 131,072 tokens and a budget of 2,048, in bfloat16, 8 KV heads of 4 and 128."""
    run = bench.Run("pallas", 0)
    sizes, policy = run.sizes(8, 16), run.policy(PAGE, 16)
    assert policy.budget(8192) == 128
    window = 8 * (8192 - 3)
    assert floors.pages_scored(sizes, policy) == window
    assert floors.tokens_attended(sizes, policy) == 8 * 2048
    envelope = window * 8 * (3 * 128 * 2 + 4)
    attention = 8 * 8 * 2048 * 2 * 256 + 2 * 8 * 32 * 256
    top_k = 64 * 4 * (8192 - 3 + 125)
    write = 8 * 8 * 256 * 4 + 8 * 8 * 256 * (16 + 3)
    assert floors.envelope(sizes, policy) == envelope == 404_602_112
    assert floors.attention(sizes, policy) == attention == 67_239_936
    assert floors.top_k(64, 8192 - 3, 125) == top_k
    assert floors.write(sizes, policy) == write == 376_832
    assert floors.step(sizes, policy) == envelope + top_k + attention + write

    sizes, policy = run.sizes(8, 1), run.policy(TOKEN, 1)
    softmax = 8 * (131072 - 3) * 8 * (256 + 12)
    assert floors.softmax(sizes, policy) == softmax
    write = 8 * 8 * 256 * 4
    assert floors.write(sizes, policy) == write
    step = softmax + 64 * 4 * (131072 - 3 + 2045) + attention + write
    assert floors.step(sizes, policy) == step
    dense = run.policy(DENSE, 1)
    assert floors.attention(sizes, dense) == floors.step(sizes, dense) - write == 4_295_098_368


def test_floors_of_rows_that_are_short_empty_or_partly_filled():
    policy = new_run().policy(PAGE, 16)  # 4 pages
    sizes = Sizes((0, 40, 64, 100), 16, 2, 2, 16)
    assert sizes.pages_in_use == (0, 3, 4, 7) and sizes.rows_in_use == 3
    assert floors.pages_scored(sizes, policy) == 7 - 3
    # Of the last row the first page, one between, and of the trailing pages 16 and 4 tokens.
    assert floors.tokens_attended(sizes, policy) == 40 + 64 + 16 + 16 + 20
    assert floors.write(sizes, policy) == 2 * 32 * (3 * 4 + 1 * (16 + 3))


def test_the_step_is_decode_attention():
    sizes, policy = equal_rows(2, 512, 16), new_run().policy(PAGE, 16)
    table, cache = inputs.page_table(sizes), inputs.layer_cache(sizes, policy, 0)
    ((q, k, v),) = inputs.new_tokens(np.uint32(0), sizes=sizes, number=1)
    decode = functools.partial(h2o_jax.decode_attention, policy=policy, implementation="xla")
    want, out = jax.jit(decode)(cache, table, q, k, v)
    (got,), ((_, same),) = steps.step_function(policy, "xla")((cache,), table, [(q, k, v)], keep_scores=False)
    np.testing.assert_array_equal(same, out)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_inputs_are_what_they_say():
    sizes = Sizes((100, 0, 33), 16, 2, 2, 16, row_tokens=160)
    policy = new_run().policy(PAGE, 16)
    table, cache = inputs.page_table(sizes), inputs.layer_cache(sizes, policy, 3)
    h2o_jax.check_state(h2o_jax.PagedState(table, (cache,)), sizes.config())
    assert table.pages.shape == (3, 10) and list(table.pages[0, :7]) != sorted(table.pages[0, :7])
    keys = np.asarray(cache.k, np.float32)
    summaries = h2o_jax.page_summaries(cache)
    np.testing.assert_array_equal(summaries["max"], keys.max(axis=2))
    np.testing.assert_array_equal(summaries["min"], keys.min(axis=2))
    np.testing.assert_allclose(np.asarray(summaries["mean"], np.float32), keys.mean(axis=2), rtol=2**-8)
    assert keys.mean() == pytest.approx(0, abs=0.05) and keys.std() == pytest.approx(1, abs=0.05)
    flat = keys.reshape(-1)
    for step in (1, 16, 256, 512):  # neighbours along each axis
        assert abs(np.mean(flat[step:] * flat[:-step])) < 0.06
    assert not np.array_equal(cache.k, cache.v)

    sizes = equal_rows(2, 512, 16)
    chosen = np.asarray(inputs.selections(np.uint32(1), sizes=sizes, policy=policy))
    assert chosen.shape == (2, 2, 4) and (np.diff(chosen) > 0).all()
    assert (chosen[..., 0] == 0).all() and (chosen[..., -2:] == [30, 31]).all()
    rows = np.asarray(inputs.contiguous(cache.k, table.pages[:1, :6]), np.float32)
    np.testing.assert_array_equal(rows[0, 37], keys[int(table.pages[0, 2]), :, 5])


def test_calls_take_turns_and_carry_a_donated_state():
    add = jax.jit(lambda state, x: (state + x, x), donate_argnums=0)
    calls = Calls(add, [(jnp.float32(1),), (jnp.float32(10),)], state=jnp.zeros(()))
    outs = [float(calls().out) for _ in range(3)]
    assert outs == [1, 10, 1] and float(calls.state) == 12
    assert isinstance(calls, jax.stages.Wrapped)  # or the profiler would trace it


class FakeCupti:
    """Reports two kernels a call, `times` milliseconds each, and counts the calls between start and stop."""

    def __init__(self, times):
        self.times = times
        self._mosaic_gpu_ext = self

    def _cupti_init(self):
        pass

    def _cupti_get_timings(self, finalize):
        return [(name, ms / 2) for ms in self.times for name in ("split", "merge")]


def test_device_time_is_that_of_the_median_call(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    calls = Calls(jax.jit(lambda state: (state + 1, None), donate_argnums=0), [()], state=jnp.zeros(()))
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", FakeCupti([9.0, 4.0, 2.0]))
    kernels = timing.kernel_times(calls, 3)
    assert kernels == (("split", pytest.approx(2e-3)), ("merge", pytest.approx(2e-3)))
    assert float(calls.state) == 4  # one to warm up
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", FakeCupti([]))
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.kernel_times(calls, 3)


def test_which_clock(monkeypatch):
    calls = Calls(jax.jit(jnp.sin), [(jnp.ones(3),)])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert timing.time_calls(calls).clock == "host"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "kernel_times", lambda *_: (("a", 1.0), ("b", 2.0)))
    timed = timing.time_calls(calls, steps=2)
    assert (timed.clock, timed.seconds, len(timed.kernels)) == ("cupti", 1.5, 2) and timed.host_seconds < 1
    assert timing.time_calls(calls, host_clock=True).clock == "host"

    def refuse(*_):
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr(timing, "kernel_times", refuse)
    assert timing.time_calls(calls).note == "no CUPTI: CUPTI is busy"


def test_inputs_exceed_the_cache(monkeypatch):
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1000)
    assert [timing.rotated(n, most=8) for n in (2000, 1000, 999, 300, 10)] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize(("name", "page_size"), [(PAGE, 16), (TOKEN, 1)])
def test_the_step_lowers_for_cuda_at_full_size(name, page_size, monkeypatch):
    for op in pallas_kernels.__all__:
        triton = importlib.import_module(f"pallas_kernels.{op}.triton")
        kernel = getattr(triton, op)
        monkeypatch.setitem(implementations(op), "pallas", functools.partial(kernel, interpret=False))
    run = bench.Run("pallas", 0)
    sizes, policy = run.sizes(8, page_size), run.policy(name, page_size)
    abstract = jax.eval_shape(lambda: h2o_jax.init_state(sizes.config(), policy))
    news = jax.eval_shape(lambda: inputs.new_tokens(np.uint32(0), sizes=sizes, number=1))
    step = functools.partial(steps.step_function(policy, "pallas"), keep_scores=False)
    text = lower_for_cuda(step, abstract.layers, abstract.table, news)
    assert text.count(KERNEL_TARGET) >= 5
