"""The README's examples run as they stand there."""

import re
from pathlib import Path

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


def test_every_policy_is_described():
    for name in h2o_jax.list_policies():
        assert f"`{name}`" in README
