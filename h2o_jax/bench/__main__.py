"""`python -m h2o_jax.bench` is `h2o-jax bench`."""

import sys

from h2o_jax.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
