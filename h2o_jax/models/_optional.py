"""Imports of what only the `models` extra installs."""

import importlib
from typing import Any


def require(module: str) -> Any:
    """Imports `module`.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"h2o_jax.models needs the module {module!r} for this: pip install 'h2o-jax[models]'"
        ) from error
