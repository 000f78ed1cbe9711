"""`h2o-jax generate` on a tiny model: text, report, comparison, and every refusal."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from h2o_jax.cli import generate as command
from h2o_jax.cli import main, verify
from tests import tiny_llama

PROMPT = "hello world " * 8  # 32 tokens or more


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    values = tiny_llama.config()
    return tiny_llama.write_directory(tmp_path_factory.mktemp("model"), values, tiny_llama.tensors(values))


def test_text_report_and_comparison(directory, capsys):
    options = ["--raw", "--page-size", "4", "--top-k", "3", "--reserved-bos", "1", "--reserved-eos", "2"]
    args = ["generate", "--model", str(directory), "--prompt", PROMPT, "--max-new-tokens", "9", "--compare", *options]
    assert main(args) == 0
    text, out = capsys.readouterr()
    prompt = re.search(r"prefill  (\d+) tokens, [\d.]+ tokens/s", out)
    length = int(prompt.group(1))
    new = int(re.search(r"decode   (\d+) tokens, [\d.]+ tokens/s", out).group(1))
    steps = range(length + 1, length + new)
    cached = 2 * sum(-(-n // 4) for n in steps)  # two layers
    read = 2 * sum(min(-(-n // 4), 6) for n in steps)
    assert 0 < read < cached
    assert f"read     {read} pages of {cached} cached" in out
    assert "budget   6 pages of 4 = 24 tokens a step" in out
    assert re.search(r"common prefix +\d+ of \d+ tokens", out)
    assert re.search(r"top-1 agreement +[\d.]+%", out)
    assert 0 < len(text.strip()) and "tokens/s" not in text, "the text alone is on standard output"
    phases = ["loading the model", "compiling", f"prefill of {length} tokens"]
    dense = ["compiling", f"prefill of {length} tokens", "decoding with dense attention"]
    lines = out.splitlines()
    assert lines[:3] == phases and lines[8:11] == dense and lines[11] == "comparing the two, token by token"
    assert float(re.search(r"mean KL\(dense, this\) +([\d.]+)", out).group(1)) > 0


def test_a_budget_that_covers_all_is_not_compared(directory, monkeypatch, capsys):
    monkeypatch.setattr(command, "teacher_forced_logits", None)
    args = ["generate", "--model", str(directory), "--prompt", PROMPT]
    assert main([*args, "--max-new-tokens", "3", "--compare"]) == 0
    err = capsys.readouterr().err
    assert "100.0% of pages cached" in err and err.count("compiling") == 1
    assert err.endswith("not compared with dense attention: each step read all cached pages, as that does\n")


def test_a_model_that_is_not_finite_gives_no_text(directory, monkeypatch, capsys):
    def broken(*args, **options):
        model, tokenizer = load(*args, **options)
        model.norm.scale[...] *= jnp.nan
        return model, tokenizer

    load = command.load
    monkeypatch.setattr(command, "load", broken)
    assert main(["generate", "--model", str(directory), "--prompt", PROMPT, "--max-new-tokens", "3"]) == 2
    out, err = capsys.readouterr()
    assert "error: logits: expected finite numbers, got NaN or infinity for prompts [0]" in err and out == ""


def test_prompt_file_comes_before_the_prompt(directory, tmp_path, monkeypatch, capsys):
    seen = []
    encode = command._encode
    monkeypatch.setattr(command, "_encode", lambda *args: seen.append(args[1]) or encode(*args))
    file = tmp_path / "text.txt"
    file.write_text("A text.", encoding="utf-8")
    args = ["generate", "--model", str(directory), "--prompt-file", str(file), "--prompt", "A question?"]
    assert main([*args, "--max-new-tokens", "1", "--policy", "gqa_h2o_token_sparse_attention"]) == 0
    assert seen == ["A text.\n\nA question?"]
    assert "budget   512 pages of 1 = 512 tokens a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "nope"], "unknown policy 'nope'; registered are sink_recent_attention, "),
        (["--policy", "h2o_token_sparse_attention", "--page-size", "16"], "--page-size: expected 1 for h2o"),
        (["--page-size", "0"], "error: --page-size: expected a positive integer, got 0"),
        (["--top-k", "0"], "error: --top-k: expected an integer >= 1, got 0"),
        (["--reserved-eos", "0"], "error: --reserved-eos: expected an integer >= 1, got 0"),
        (["--dense-layers", "7"], "error: --dense-layers: expected layers below num_layers = 2, got [7]"),
        (["--max-new-tokens", "0"], "error: --max-new-tokens: expected a positive integer, got 0"),
        (["--max-new-tokens", "600"], " and 600 new ones exceed the model's context of 512 tokens"),
        (["--max-new-tokens", "9" * 20], f"{'9' * 20} new ones exceed the model's context of 512"),
        (["--seed", str(2**63)], f"error: --seed: expected an integer in [0, 2**32), got {2**63}"),
        *(
            (["--temperature", t], f"--temperature: expected 0 or a positive number in float32, got {t}")
            for t in ("-1", "inf", "nan", "1e+308", "1e+39", "1e-50")
        ),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt-file", "missing.txt"], "error: missing.txt: no such file or directory\n"),
        (["--prompt-file", "/"], "error: /: is a directory\n"),
        (["--model", "missing.gguf"], "error: missing.gguf: no such file or directory\n"),
        (["--model", __file__], "error: --model: expected a Hugging Face directory or a .gguf file; got"),
        (["--implementation", "pallas_interpret", "--top-p", "2"], "error: --top-p: expected a number in"),
        pytest.param(
            ["--implementation", "pallas"],
            "error: --implementation: 'pallas' needs a CUDA GPU, and the backend is cpu; ",
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks"),
        ),
    ],
)
def test_bad_input(directory, args, message, capsys):
    assert main(["generate", "--model", str(directory), "--prompt", PROMPT, *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_prompt_file_that_is_not_text(directory, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xff\xfe\xff")
    assert main(["generate", "--model", str(directory), "--prompt-file", str(file)]) == 2
    assert "expected UTF-8 text" in capsys.readouterr().err


def test_prompt_file_has_a_limit_and_may_be_a_pipe(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("h2o_jax.cli.files.MOST_TEXT", 1000)
    args = ["generate", "--model", str(directory), "--prompt-file"]
    assert main([*args, "/dev/zero"]) == 2
    message = "error: --prompt-file /dev/zero: expected at most 1000 characters, got more\n"
    assert capsys.readouterr().err.endswith(message)
    monkeypatch.setattr(command, "_encode", lambda tokenizer, text, raw: pytest.fail(f"read {text}"))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=["\ufeffA text.".encode()])
    writer.start()
    with pytest.raises(pytest.fail.Exception, match="^read A text.$"):
        main([*args, str(tmp_path / "pipe")])
    writer.join()


@pytest.mark.parametrize(
    ("name", "option"),
    [("generate", "--model"), ("generate", "--prompt-file"), ("bench", "--output")]
    + [("eval", option) for option in ("--model", "--text", "--output", "--csv", "--plot")],
)
def test_no_path_is_not_the_current_directory(name, option, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([name, option, ""])
    assert exit_info.value.code == 2
    assert f"argument {option}: expected a path, got ''" in capsys.readouterr().err


def test_a_full_disk_behind_standard_output(monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(command, "run", lambda args: 0)
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "h2o-jax: error: standard output: no space left on device\n"


def test_memory_errors_say_something(monkeypatch, capsys):
    def fill(args):
        raise MemoryError

    monkeypatch.setattr(command, "run", fill)
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "h2o-jax: error: out of memory\n"


def test_unreadable_options_end_with_usage(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--dense-layers", "first"])
    assert exit_info.value.code == 2
    assert "expected layers such as 0,1" in capsys.readouterr().err


def test_one_new_token_is_printed(directory, capsys):
    args = ["generate", "--model", str(directory), "--raw", "--prompt", PROMPT, "--policy", "dense_attention"]
    texts = []
    for count in ("1", "3"):
        assert main([*args, "--max-new-tokens", count]) == 0
        texts.append(capsys.readouterr().out.rstrip("\n"))
    assert texts[0] and texts[1].startswith(texts[0])


def test_interrupt_ends_the_process_at_once():
    code = (
        "import time; from h2o_jax import cli; cli.main = lambda: time.sleep(60); "
        "print('ready', flush=True); cli.script()"
    )
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == "\nh2o-jax: interrupted\n"


def test_a_reader_that_leaves_is_no_error(monkeypatch, capfd):
    def leave(args):
        raise BrokenPipeError

    monkeypatch.setattr(command, "run", leave)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert main(["generate", "--prompt", "x"]) == 0
    assert "error" not in capfd.readouterr().err


def test_only_commands_that_draw_need_rich(monkeypatch, capsys):
    for module in (command, verify):
        assert not [x for x in vars(module).values() if getattr(x, "__module__", "").startswith("rich")]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["bench", "--list"]) == 0
    assert main(["generate", "--prompt", "x"]) == 2
    assert "this command needs: pip install 'h2o-jax[cli]'" in capsys.readouterr().err


def test_interrupt(directory, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_generate", interrupted)
    assert main(["generate", "--model", str(directory), "--prompt", PROMPT]) == 130
    assert "interrupted" in capsys.readouterr().err
