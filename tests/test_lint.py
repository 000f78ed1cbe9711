"""The checks of the code as text: what pyproject.toml asks of ruff and mypy."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def assert_clean(*command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_ruff_finds_nothing():
    assert_clean("ruff", "check", "--no-cache")


@pytest.mark.slow
def test_mypy_finds_nothing(tmp_path):
    assert_clean("mypy", "--cache-dir", str(tmp_path))
