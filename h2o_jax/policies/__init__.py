"""The built-in policies; importing this package registers them."""

from h2o_jax.policies import baseline, page, token

__all__ = ["baseline", "page", "token"]
