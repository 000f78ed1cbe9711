"""`python -m h2o_jax` is the command `h2o-jax`."""

from h2o_jax.cli import script

script()
