"""Chat templates: Jinja source that comes with the weights, and so is other people's code.

Jinja's sandbox keeps a template from Python's objects, and not from looping for ever or filling the memory.
So a template is rendered in a process of its own, with little time and memory: this file, run as a script.
"""

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

MOST_SECONDS = 2  # of processor time
MOST_BYTES = 1 << 29  # of address space
MOST_CHARACTERS = 1 << 22  # of the text: a million tokens of four


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template gives.

    Args:
        source: Jinja.
        variables: JSON values by name.

    Raises:
        ValueError: variables that are not JSON, or a template that does not compile, fails, refuses them,
            reaches for what the sandbox forbids, takes more than MOST_SECONDS or MOST_BYTES, or gives more than
            MOST_CHARACTERS.
    """
    from h2o_jax.models.files import one_line  # here, since the script needs nothing of the package

    try:
        task = json.dumps([source, variables])
    except (TypeError, RecursionError) as error:
        raise ValueError(f"messages: expected JSON values; {error}") from error
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(command, input=task.encode(), capture_output=True)
    if done.returncode:
        raise ValueError(
            "messages: the model's chat template was stopped: it takes more than "
            f"{MOST_SECONDS} s of processor time or {MOST_BYTES >> 20} MiB"
        )
    text, failure = json.loads(done.stdout)
    if failure:
        raise ValueError(f"messages: the model's chat template refuses them: {one_line(failure)}")
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"messages: the model's chat template makes a text of more than {MOST_CHARACTERS} characters of them"
        )
    return text


def _render_here(source: str, variables: Mapping[str, Any]) -> str:
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source).render(variables)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _main() -> None:
    import resource

    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        # A character more tells that there are too many.
        result: tuple[str | None, str | None] = _render_here(*task)[: MOST_CHARACTERS + 1], None
    except Exception as error:
        result = None, f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    _main()
