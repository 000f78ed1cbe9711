"""`h2o-jax eval` on a tiny model: what it says and writes, going on after an interrupt, and every refusal."""

import json
import os
import sys

import pytest

from h2o_jax.cli import eval as command
from h2o_jax.cli import main
from tests import tiny_llama


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a small run: model, text and sizes."""
    path = tmp_path_factory.mktemp("model")
    values = tiny_llama.config(num_hidden_layers=1)
    tiny_llama.write_directory(path / "tiny", values, tiny_llama.tensors(values))
    (path / "text.txt").write_text("It is said that hello worlds come in pairs. " * 60, encoding="utf-8")
    sizes = {"--context": 200, "--steps": 3, "--rows": 1, "--budgets": "64", "--page-sizes": 16}
    paths = {"--model": path / "tiny", "--text": path / "text.txt"}
    return [str(part) for pair in (paths | sizes).items() for part in pair]


def test_a_run_and_what_is_left_of_an_interrupted_one(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("h2o_jax.eval.passkey.QUESTION_TOKENS", 80)  # of a vocabulary of bytes
    monkeypatch.setattr("h2o_jax.eval.run.QUESTION_TOKENS", 80)
    file, table = tmp_path / "cells.jsonl", tmp_path / "cells.csv"
    policies = ["--policies", "dense_attention", "gqa_h2o_sparse_attention:w_avg=0.5"]
    args = ["eval", *options, *policies, "--output", str(file), "--csv", str(table)]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert out.startswith("5 cells (perplexity 2, coverage 1, passkey 2)\ntiny in float32 on ")
    assert (
        "context 200 tokens, 3 steps, 1 rows\npage sizes 16; budgets 64 tokens\npolicies dense_attention, "
        in out
    )
    assert "[5/5] passkey gqa_h2o_sparse_attention:w_avg=0.5 P=16 64 tokens, about 0:00:" in err
    for title in ("perplexity", "coverage", "passkey"):
        assert f"\n{title} " in out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["task"] for record in records] == ["perplexity"] * 2 + ["coverage"] + ["passkey"] * 2
    dense, sparse = records[:2]
    assert (dense["kl"], dense["budget"], sparse["options"]) == (0, 200, {"w_avg": 0.5}) and sparse["kl"] > 0
    assert {"date", "jax", "device", "model", "dtype", "text", "context", "rows"} <= set(sparse)
    assert set(records[3]["accuracy_by_depth"]) == {"0", "25", "50", "75", "100"}
    assert len(table.read_text().splitlines()) == 6

    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:], '{"task": "cov']))
    ran = []
    evaluate = command.evaluate
    monkeypatch.setattr(
        command, "evaluate", lambda *args: ((ran.append(cell), (cell, r))[1] for cell, r in evaluate(*args))
    )
    monkeypatch.chdir(options[options.index("--model") + 1])
    assert main([*args, "--model", "."]) == 0
    again, err = capsys.readouterr()
    assert (
        "dropped a torn last line" in err
        and "5 cells (perplexity 2, coverage 1, passkey 2), 4 of them finished before" in again
    )
    assert [cell.task for cell in ran] == ["coverage"]
    assert again[again.index("\nperplexity ") :] == out[out.index("\nperplexity ") :]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--policies", "random", "--", "speed"],
            "TASK: expected some of perplexity, coverage, passkey, got 'speed'",
        ),
        (["--policies", "nope"], "policies: expected some of sink_recent_attention"),
        (["--policies", "random:seed"], "policies: expected a form like random:option=value"),
        (["--page-sizes", "0"], "--page-sizes: expected positive integers, got 0"),
        (["--budgets", "200"], "budgets: expected fractions below 1"),
        (["--budgets", "32"], "budgets: expected at least 64 tokens with pages of 16"),
        (["--steps", "0"], "steps: expected a positive integer, got 0"),
        (["--context", "500"], "context + steps: expected at most 512 tokens, the model's context, got 500 + 64 "),
        (["--steps", "9" * 20], f"expected at most 512 tokens, the model's context, got 200 + {'9' * 20}\n"),
        (["--rows", "100"], "text: expected at least"),
        (["--rows", "9" * 20, "--", "perplexity"], "text: expected at least"),
        (["--rows", "9" * 20, "--", "passkey"], "text: expected at least"),
        (["--policies", f"random:seed={2**63}"], f"seed: expected an integer in [0, 2**32), got {2**63}"),
        (["--policies", "random:seed=0.5"], "seed: expected an integer in [0, 2**32), got 0.5"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--model", "missing.gguf"], "missing.gguf"),
    ],
)
def test_bad_input(options, args, message, capsys):
    assert main(["eval", *options, *args]) == 2  # an option given twice counts as it is given last
    assert message in capsys.readouterr().err


def test_a_text_that_is_none(options, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xff\xfe\xff")
    assert main(["eval", *options, "--text", str(file)]) == 2
    assert "expected UTF-8 text" in capsys.readouterr().err


def test_unreadable_budgets_end_with_usage(capsys):
    for text in ("half", "1/0"):
        with pytest.raises(SystemExit) as exit_info:
            main(["eval", "--budgets", text])
        assert exit_info.value.code == 2
        assert f"expected budgets such as 1/16,1/4 or 256,512, got '{text}'" in capsys.readouterr().err


def test_files_are_refused_before_anything_runs(options, tmp_path, capsys):
    missing = str(tmp_path / "missing" / "file.png")
    for option in ("--output", "--csv", "--plot"):
        assert main(["eval", *options, option, missing]) == 2
        out, err = capsys.readouterr()
        assert str(tmp_path / "missing") in err and "no such" in err.lower() and out == ""


@pytest.mark.parametrize("option", ["--output", "--csv", "--plot"])
def test_what_is_no_file_is_refused_before_anything_runs(options, option, tmp_path, capsys):
    pipe, loop, link = tmp_path / "pipe", tmp_path / "loop", tmp_path / "link"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    link.symlink_to(pipe)
    for path in (pipe, loop, link, tmp_path):
        assert main(["eval", *options, option, str(path)]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"h2o-jax: error: {option}: expected a file or none yet at {path}; it is a")
        assert out == ""
        assert path.is_symlink() or path in (pipe, tmp_path)


@pytest.mark.parametrize("option", ["--output", "--csv", "--plot"])
def test_what_can_not_be_written_is_refused_at_once(options, option, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file.png"
    for refused in (tmp_path, file):  # as if by the system, which lets root do all
        monkeypatch.setattr(os, "access", lambda path, mode, refused=refused: path != refused)
        assert main(["eval", *options, option, str(file)]) == 2
        out, err = capsys.readouterr()
        assert err == f"h2o-jax: error: {option}: {file}: permission denied\n" and out == ""
        file.touch()


@pytest.mark.parametrize("pair", [("--output", "--csv"), ("--output", "--plot"), ("--csv", "--plot")])
def test_no_two_options_name_one_file(options, pair, tmp_path, capsys):
    file, soft, hard = (tmp_path / name for name in ("a.png", "soft.png", "hard.png"))
    soft.symlink_to(file)  # of what is not there yet
    for other in (file, soft, hard):
        assert main(["eval", *options, pair[0], str(file), pair[1], str(other)]) == 2
        out, err = capsys.readouterr()
        assert f"{pair[1]}: expected another file than that of {pair[0][2:]}; got {other} for both" in err
        assert out == "" and (other is hard or not file.exists())
        if other is soft:
            file.touch()
            hard.hardlink_to(file)


def test_plot_is_refused_before_anything_runs(options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["eval", *options, "--plot", "out.png"]) == 2
    out, err = capsys.readouterr()
    assert "--plot: " in err and "h2o-jax[notebooks]" in err and out == ""
