"""Fixtures shared by all tests."""

import numpy as np
import pytest


@pytest.fixture(params=["xla"])
def implementation(request):
    """The implementations that parity tests run."""
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)
