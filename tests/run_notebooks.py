"""Runs notebooks: `python -m tests.run_notebooks` stores the outputs of all anew, or of those it is given."""

import ast
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# Only while a cell runs: ipykernel warns of itself when it starts and when it shuts down.
_WARNINGS_ARE_ERRORS = """
import warnings
get_ipython().events.register("pre_run_cell", lambda _: warnings.simplefilter("error"))
get_ipython().events.register("post_run_cell", lambda _: warnings.simplefilter("ignore"))
"""


def read(path):
    """The notebook at `path`."""
    return nbformat.read(path, as_version=4)


def execute(notebook, parameters=None):
    """Runs all cells in a fresh kernel on the CPU, warnings as errors, and fills in their outputs.

    Args:
        notebook: to run; changed in place.
        parameters: {name: value} set after the cell tagged "parameters", which must set the same names.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message shows the cell and the error.
        ValueError: a name that the parameters cell does not set.
    """
    if parameters:
        cell = parameters_cell(notebook)
        names = (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name))
        unknown = sorted(set(parameters) - {name.id for name in names if isinstance(name.ctx, ast.Store)})
        if unknown:
            raise ValueError(f"parameters: expected names that the notebook sets, got {unknown}")
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    metadata = notebook.metadata.copy()
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=[f"--IPKernelApp.exec_lines={_WARNINGS_ARE_ERRORS}", "--log-level=ERROR"],
        resources={"metadata": {"path": str(ROOT)}},
    ).execute(env=os.environ | {"JAX_PLATFORMS": "cpu"})
    notebook.metadata = metadata  # without the version of the Python that ran it


def parameters_cell(notebook):
    """The one cell tagged "parameters"."""
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    return cell


if __name__ == "__main__":
    for path in [Path(argument) for argument in sys.argv[1:]] or NOTEBOOKS.values():
        notebook = read(path)
        execute(notebook)
        nbformat.write(notebook, path)
