"""Fixtures shared by all tests."""

import numpy as np
import pytest

from tests.kernel_runs import GPU_MARKS


@pytest.fixture(params=["xla", pytest.param("pallas", marks=GPU_MARKS)])
def implementation(request):
    """The implementations that parity tests run."""
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)
