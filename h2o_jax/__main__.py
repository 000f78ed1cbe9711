"""`python -m h2o_jax` is the command `h2o-jax`."""

import sys

from h2o_jax.cli import main

sys.exit(main())
