"""`python -m h2o_jax.bench` is `h2o-jax bench`, without the packages that other commands need."""

import argparse
import sys

from h2o_jax.cli import bench

parser = argparse.ArgumentParser(prog="python -m h2o_jax.bench")
bench.add_arguments(parser)
args = parser.parse_args()
try:
    sys.exit(args.run(args))
except ValueError as error:
    parser.error(str(error))
