"""How an interrupt ends the command `h2o-jax`: at once, with a line and no traceback.

Importing JAX takes seconds, and the package does so before any module of the command can run. So the package
imports this first, which sets the handler where the process is the command, and nothing in any other.
"""

import os
import signal
import sys

INTERRUPTED = 130


def install() -> None:
    """Makes an interrupt end the process.

    An interrupt raised as an exception is lost where it meets a callback of XLA's, and may crash while XLA's
    threads are torn down.
    """
    signal.signal(signal.SIGINT, _end)


def _end(*_) -> None:
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
    os.write(2, show_cursor + b"\nh2o-jax: interrupted\n")  # a print might be what was interrupted
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether the process is `h2o-jax`, or `python -m h2o_jax` on its way to the module."""
    program, *arguments = getattr(sys, "argv", None) or [""]
    module = sys.orig_argv[-len(arguments) - 1 :][:1]
    return os.path.basename(program) == "h2o-jax" or (program == "-m" and module == ["h2o_jax"])


if _is_command():
    install()
