"""The command line: `h2o-jax COMMAND`. Each command is a module with `add_parser(subparsers)` and `run(args)`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from h2o_jax import __version__
from h2o_jax.cli.errors import describe

BAD_INPUT = 2
INTERRUPTED = 130


def script() -> None:
    """The command as a process: `main`, and an interrupt ends it at once.

    An interrupt raised as an exception is lost where it meets a callback of XLA's, and may crash while
    XLA's threads are torn down.
    """
    signal.signal(signal.SIGINT, _interrupted)
    sys.exit(main())


def _interrupted(*_) -> None:
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
    os.write(2, show_cursor + b"\nh2o-jax: interrupted\n")  # a print might be what was interrupted
    os._exit(INTERRUPTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        The exit code: 0, 1 where a check failed, 2 for bad input, 130 when interrupted.
    """
    from h2o_jax.cli import bench, eval, generate, info, verify

    parser = argparse.ArgumentParser(prog="h2o-jax", description="H2O sparse attention for LLM decoding in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (generate, verify, bench, eval, info):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()  # what it raises can't be said any more once the process ends
        return code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _refuse(f"{error}; this command needs: pip install 'h2o-jax[cli]'")
    except (ValueError, OSError, ImportError, NotImplementedError, MemoryError, FloatingPointError) as error:
        return _refuse(describe(error, args))
    except KeyboardInterrupt:
        print("\nh2o-jax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _refuse(message: str) -> int:
    print(f"h2o-jax: error: {message}", file=sys.stderr)
    return BAD_INPUT
