"""The README's examples run as they stand there."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import h2o_jax
from h2o_jax import policy as policy_module

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def example(name):
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL).group(1)


def test_decode_loop(capsys):
    code = example("decode loop")
    assert len(code.strip().splitlines()) <= 20
    exec(code, {})
    assert capsys.readouterr().out == "(200, 4, 6, 64) [200 200 200   0] 25\n"


def test_own_policy():
    names = {}
    try:
        exec(example("own policy"), names)
        assert names["policy"] == h2o_jax.get_policy("key_norm", top_k=8)
    finally:
        policy_module._REGISTRY.pop("key_norm", None)


@pytest.fixture(scope="module")
def loops():
    """The names that the first of the loops with a model leaves, and the tokens that `generate` gives."""
    code = example("scan")
    assert len(code.strip().splitlines()) <= 40
    names = {}
    exec(code, names)
    prompts = [[5, 9, 33, 2, 7], [7, 1]]
    names["expected"] = np.transpose(
        h2o_jax.generate(
            names["model"], prompts, policy=names["policy"], config=names["config"], max_new_tokens=41
        )
    )
    return names


def test_scan(loops):
    np.testing.assert_array_equal(loops["first"], loops["expected"][0])
    np.testing.assert_array_equal(loops["generated"], loops["expected"][1:])
    assert loops["state"].table.seq_lens.tolist() == [45, 42]


def test_stream(loops, capsys):
    exec(example("stream"), dict(loops))
    printed = [[int(token) for token in line.split()] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_array_equal(printed, loops["expected"][1:])


def test_serve(loops):
    names = dict(loops)
    exec(example("serve"), names)
    model, policy = loops["model"], loops["policy"]
    for i, tokens in names["texts"].items():
        options = dict(policy=policy, max_new_tokens=24, stop_tokens=[3], config=loops["config"])
        assert tokens == h2o_jax.generate(model, [[i, i + 1]], **options)[0][: 5 + i]


def test_save(loops, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(loops)
    exec(example("save"), names)
    jax.tree.map(np.testing.assert_array_equal, (names["state"], names["tokens"]), (loops["state"], loops["tokens"]))


def test_flax_module(capsys):
    code = example("flax module")
    assert len(code.strip().splitlines()) <= 40
    exec(code, {})
    assert capsys.readouterr().out == "[90 77] 5\n"


def test_every_policy_is_described():
    for name in h2o_jax.list_policies():
        assert f"`{name}`" in README
