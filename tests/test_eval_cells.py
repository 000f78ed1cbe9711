"""Cells, budgets, and the files in which results are kept; nothing is run."""

import contextlib
import csv
import json
import os
import re
import resource
import sys
from fractions import Fraction

import pytest

import h2o_jax
from h2o_jax.eval import PolicySpec, Store, budget_tokens, grid, policy_at, policy_names
from h2o_jax.eval.plot import check_plot, write_plot
from h2o_jax.eval.report import table, write_csv

GQA, TOKEN, RECENT = "gqa_h2o_sparse_attention", "gqa_h2o_token_sparse_attention", "sink_recent_attention"


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_reads_its_budget(name, page_size):
    """As many tokens at every page size, sinks and the recent ones included."""
    if name == "dense_attention" or "token" in name and page_size > 1:
        return
    policy = policy_at(name, {}, page_size, 128)
    assert policy.budget(1000) * page_size == 128
    assert policy.reserved_bos == -(-16 // page_size)
    recent = -(-32 // page_size)
    assert policy.reserved_eos == (recent if name != RECENT else 128 // page_size - policy.reserved_bos)


def test_options_reach_the_policy():
    assert policy_at(TOKEN, {"decay": 0}, 1, 128).decay == 0
    assert policy_at("random", {"seed": 3}, 16, 128).seed == 3
    assert policy_at("dense_attention", {}, 16, 4096) == h2o_jax.get_policy("dense_attention")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", {}, 16, 128), "unknown policy 'nope'"),
        ((GQA, {"w": 1}, 16, 128), "unknown option 'w'"),
        ((GQA, {"top_k": 1}, 16, 128), "option 'top_k' is set by the budget"),
        (("oracle", {"seed": 1}, 16, 128), "oracle: unknown option among seed"),
        ((TOKEN, {"decay": 2}, 1, 128), r"decay: expected a number in \[0, 1\], got 2"),
        ((GQA, {}, 16, 48), "expected at least 64 tokens with pages of 16, of which 48 are reserved; got 48"),
    ],
)
def test_wrong_policies(arguments, message):
    with pytest.raises(ValueError, match=message):
        policy_at(*arguments)


def test_fractions_are_rounded_to_whole_pages_of_every_size():
    assert budget_tokens([Fraction(1, 16), Fraction(1, 2), 64], 4000, [1, 16, 32]) == [224, 1984, 64]
    assert budget_tokens([Fraction(1, 16)], 4000, [1]) == [250]


@pytest.mark.parametrize("budget", [Fraction(1, 1), Fraction(1, 500), 100, 0, 4000, -32])
def test_wrong_budgets(budget):
    message = f"below the context of 4000 that are multiples of 32, for page sizes 1, 32; got {budget}"
    with pytest.raises(ValueError, match=re.escape(message)):
        budget_tokens([budget], 4000, [1, 32])


def test_wrong_page_sizes():
    with pytest.raises(ValueError, match="page_sizes: expected positive integers, got -4"):
        budget_tokens([64], 4000, [16, -4])


@pytest.mark.parametrize(
    "text", [GQA, f"{TOKEN}:decay=0.984375", f"{TOKEN}:decay=0,score_dtype=bfloat16", "random:seed=7"]
)
def test_specs_are_read_as_they_are_written(text):
    assert str(PolicySpec.parse(text)) == text


def test_options_are_numbers_where_they_can_be():
    spec = PolicySpec.parse(f"{TOKEN}:score_dtype=bfloat16,decay=1,scale=0.5")
    assert spec.options == (("decay", 1), ("scale", 0.5), ("score_dtype", "bfloat16"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope:decay=1", "policies: expected some of sink_recent_attention, .*, random, oracle, got 'nope'"),
        (f"{TOKEN}:decay", "expected a form like gqa_h2o_token_sparse_attention:option=value"),
        (f"{TOKEN}:decay=", "expected a form like"),
    ],
)
def test_wrong_specs(text, message):
    with pytest.raises(ValueError, match=message):
        PolicySpec.parse(text)


def test_grid():
    policies = [PolicySpec(name) for name in ("dense_attention", TOKEN, GQA, GQA)]
    cells = grid(["passkey", "coverage"], policies, [1, 16], [64, 128], 512)
    assert [(cell.task, cell.policy.name, cell.page_size, cell.budget) for cell in cells] == [
        ("coverage", TOKEN, 1, 64),
        ("coverage", GQA, 1, 64),
        ("coverage", TOKEN, 1, 128),
        ("coverage", GQA, 1, 128),
        ("coverage", GQA, 16, 64),
        ("coverage", GQA, 16, 128),
        ("passkey", "dense_attention", 16, 512),
        *(("passkey", name, 1, budget) for budget in (64, 128) for name in (TOKEN, GQA)),
        ("passkey", GQA, 16, 64),
        ("passkey", GQA, 16, 128),
    ]
    with pytest.raises(ValueError, match="TASK: expected some of perplexity, coverage, passkey, got 'speed'"):
        grid(["speed"], policies, [16], [64], 512)
    with pytest.raises(ValueError, match="unknown option 'w'"):
        grid(["passkey"], [PolicySpec(GQA, (("w", 1),))], [16], [64], 512)


def record(task="perplexity", policy=GQA, page_size=16, budget=128, **results):
    around = dict(
        context=512, steps=8, rows=2, model="tiny", dtype="float32", device="cpu", date="2026-11-30"
    )
    return dict(task=task, policy=policy, options={}, page_size=page_size, budget=budget, **around, **results)


def stored(file, *keys):
    """Adds a record of each key, in a store of its own; what that says it dropped."""
    with Store(file) as store:
        for key in keys:
            store.append(key, {})
        return store.note


def test_store_gives_back_what_it_holds(tmp_path):
    file = tmp_path / "cells.jsonl"
    key = {"task": "coverage", "policy": TOKEN, "options": {"decay": 0.99609375}}
    with Store(file) as store:
        store.append(key | {"date": "2026-11-29"}, {"kl": 1 / 3, "by_step": [float("nan"), 2.0]})
    with Store(file) as store:
        store.append(key | {"date": "2026-11-30"}, {"kl": 2 / 3})
    with Store(file) as store:
        assert store.note == "" and store.find(key)["kl"] == 0.666667
        assert store.find(key | {"date": "2026-11-29"})["by_step"] == [None, 2.0]
        for other in ({"options": {"decay": 0.9}}, {"other": 1}):
            assert store.find(key | other) is None
    assert [json.loads(line)["date"] for line in file.read_text().splitlines()] == [
        "2026-11-29",
        "2026-11-30",
    ]


@pytest.mark.parametrize("tail", ["{", '{"ta', '{"task": 2, "k'])
def test_a_torn_last_line_is_dropped(tmp_path, tail):
    file = tmp_path / "cells.jsonl"
    stored(file, {"task": 1})
    whole = file.read_text()
    file.write_text(whole + tail)
    with Store(file) as store:
        assert store.note == f"{file}: dropped a torn last line" and file.read_text() == whole
        assert store.find({"task": 1}) and store.find({"task": 2}) is None
        store.append({"task": 2}, {})
    with Store(file) as store:
        assert store.find({"task": 2}) and store.note == ""


def test_a_last_line_without_its_end_is_kept(tmp_path):
    file = tmp_path / "cells.jsonl"
    file.write_text('{"task": 1}')
    stored(file, {"task": 2})
    with Store(file) as store:
        assert store.find({"task": 1}) and store.find({"task": 2})


@pytest.mark.parametrize(
    "line",
    [
        "not JSON\n",
        '{"task": 3, "torn\n',
        "notes without an end",
        "\x00\x00",
        "12",
        '{"name": "no cell"}\n',
        '{"name": "no cell", ',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_any_other_wrong_line_is_refused(tmp_path, line):
    file = tmp_path / "cells.jsonl"
    file.write_text('{"task": 1}\n' + line)
    for after in ("", '{"task": 3}\n'):
        with file.open("a") as end:
            end.write(after)
        before = file.read_text()
        with pytest.raises(ValueError, match="cells.jsonl, line 2: expected a record of an eval"):
            Store(file)
        assert file.read_text() == before


def test_a_store_needs_a_file_of_limited_size(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"path: expected a file or none yet at {path}; it is a "):
            Store(path)
    stored(tmp_path / "cells.jsonl", {"task": 1})
    monkeypatch.setattr("h2o_jax.eval.store.MOST_BYTES", 10)
    with pytest.raises(ValueError, match="cells.jsonl: expected at most 10 bytes of records, got more"):
        Store(tmp_path / "cells.jsonl")


def test_two_stores_can_not_have_one_file(tmp_path):
    file, link = tmp_path / "cells.jsonl", tmp_path / "link"
    link.symlink_to(file)
    with Store(file) as store:
        with pytest.raises(BlockingIOError, match="link: in use by another evaluation"):
            Store(link)
        store.append({"task": 1}, {})
    stored(link, {"task": 2})
    assert len(file.read_text().splitlines()) == 2


@contextlib.contextmanager
def disk_full_after(size):
    """As if no file could have more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_with_the_file(tmp_path):
    file = tmp_path / "cells.jsonl"
    stored(file, {"task": 1})
    with pytest.raises(OSError) as raised, disk_full_after(20), Store(file) as store:
        store.append({"task": 2}, {})
    assert str(raised.value.filename) == str(file)
    assert stored(file) == f"{file}: dropped a torn last line"
    with pytest.raises(OSError) as raised, disk_full_after(20):
        write_csv(tmp_path / "table.csv", [record(perplexity=9.5)])
    assert raised.value.filename == tmp_path / "table.csv"


def test_csv(tmp_path):
    file = tmp_path / "table.csv"
    records = [
        record(perplexity=9.5, kl=0.25, top1=0.5, kl_by_step=[0.25]),
        record("coverage", TOKEN, 1, mass=0.5, recall=0.75) | {"options": {"decay": 0}},
    ]
    write_csv(file, records)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["kl"] for row in rows] == ["0.25", ""] and [row["mass"] for row in rows] == ["", "0.5"]
    assert rows[1]["options"] == "decay=0" and rows[1]["model"] == "tiny"
    before = file.read_text()
    with pytest.raises(KeyError):
        write_csv(file, [records[1], {"task": "coverage"}])
    assert file.read_text() == before


def test_csv_is_written_through_links(tmp_path):
    file, soft, hard = (tmp_path / name for name in ("table.csv", "soft", "hard"))
    soft.symlink_to(file)
    for path in (soft, hard):
        write_csv(path, [record(perplexity=9.5)])
        assert len(file.read_text().splitlines()) == 2
        if path is soft:
            file.chmod(0o600)
            hard.hardlink_to(file)
            file.write_text("old")
    assert soft.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hard", "soft", "table.csv"]


def test_table():
    header, rows = table(
        "perplexity", [record(perplexity=9.5, kl=None, top1=0.5), record("coverage", mass=1, recall=1)]
    )
    assert header == ["policy", "page size", "budget", "perplexity", "kl", "top1"]
    assert rows == [[GQA, "16", "128", "9.500", "not finite", "50.0%"]]
    dense = record("passkey", "dense_attention", accuracy=0.5, accuracy_by_depth={"0": 1.0, "100": 0.0})
    header, rows = table("passkey", [dense])
    assert header[3:] == ["accuracy", "at 0%", "at 100%"] and rows[0][2:] == ["all", "50.0%", "100%", "0%"]


def test_plot_has_a_line_for_each_policy_and_page_size(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    records = [
        record(policy=policy, page_size=page_size, budget=budget, perplexity=9.0, kl=8 / budget, top1=0.5)
        for policy, page_size in (("dense_attention", 16), (GQA, 16), (GQA, 32), ("random", 16))
        for budget in (64, 128)
    ]
    file = tmp_path / "quality.png"
    write_plot(file, records)
    assert file.read_bytes().startswith(b"\x89PNG")
    divergence, agreement = drawn[0].axes
    assert [line.get_ydata().tolist() for line in divergence.lines] == [[8 / 64, 8 / 128]] * 3
    assert {line.get_ydata()[0] for line in agreement.lines} == {50}
    assert divergence.get_xlabel() == "budget [tokens read in a step]"
    assert divergence.get_ylabel() == "KL(dense || policy) [nats]"
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == [f"{GQA}, pages of 16", f"{GQA}, pages of 32", "random, pages of 16"]
    with pytest.raises(ValueError, match="--plot: expected a policy with a budget"):
        write_plot(file, [records[0]])
    check_plot(file)
    with pytest.raises(
        ValueError, match="--plot: expected a file ending such as .png or .svg, got 'quality.txt'"
    ):
        check_plot(tmp_path / "quality.txt")


def test_plot_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"--plot: .*; it needs: pip install 'h2o-jax\[notebooks\]'"):
        check_plot(tmp_path / "quality.png")
