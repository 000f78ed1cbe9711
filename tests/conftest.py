"""Fixtures shared by all tests."""

import numpy as np
import pytest

from tests.kernel_runs import GPU_MARKS


def pytest_generate_tests(metafunc):
    """Gives parity tests their `implementation`: the plain one and the kernels, in the cases interpreted as well."""
    if "implementation" not in metafunc.fixturenames or "implementation" in _parametrized(metafunc.definition):
        return
    params = ["xla", pytest.param("pallas", marks=GPU_MARKS)]
    if metafunc.module.__name__.split(".")[-1].startswith("test_cases_"):
        params.append(pytest.param("pallas_interpret", marks=pytest.mark.slow))
    metafunc.parametrize("implementation", params)


def _parametrized(item):
    """Names that a test's own `parametrize` marks give."""
    names = (mark.args[0] for mark in item.iter_markers("parametrize"))
    return {name.strip() for each in names for name in (each.split(",") if isinstance(each, str) else each)}


@pytest.fixture
def rng():
    return np.random.default_rng(0)
