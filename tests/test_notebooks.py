"""The notebooks run from top to bottom without a warning, and their stored outputs are whole and clean."""

import ast
import base64
import re
import struct

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.run_notebooks import NOTEBOOKS, execute, parameters_cell, read
from tests.test_models_real import require_default_model

# Settings that keep every line of a notebook and little of its work.
SMALL = {
    "01_heavy_hitters": dict(
        NUM_TOKENS=128, SHOWN_LAYERS=(3, 15), RESERVED_BOS=4, TOP_K=8, RESERVED_EOS=8, HALF_LIVES=(4, 44)
    ),
    "02_envelopes": dict(NUM_TOKENS=128, PAGE_SIZES=(4, 16), STRIDE=16),
    "03_decay": dict(SEED=0, NEWCOMER_CASES=3),
    "04_paged_pool": dict(PAGE_SIZE=8, HEAD_DIM=4, NUM_STEPS=60, SEED=1),
    "05_decode_loop": dict(FEATURES=16, PROMPT=40, NUM_STEPS=24, LAYERS=1, NUM_REQUESTS=4, NUM_BUDGETS=2),
    "06_budget": dict(LIVE_CONTEXT=128, LIVE_STEPS=2, LIVE_BUDGETS=(64,)),
}
REAL_MODEL = {"01_heavy_hitters", "02_envelopes", "06_budget"}
MAX_BYTES, MAX_PIXELS = 600_000, 760
UNWANTED = re.compile(
    r"(?<![\w.])/(home|root|tmp|usr|opt|var|mnt|work|Users)/|site-packages|0x[0-9a-f]{6}|Warning"
)

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def test_every_notebook_has_small_settings():
    assert set(SMALL) == set(NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_runs(name):
    if name in REAL_MODEL:
        require_default_model()
    notebook = read(NOTEBOOKS[name])
    try:
        execute(notebook, SMALL[name])
    except CellExecutionError as error:
        pytest.fail(str(error), pytrace=False)  # the cell and its error
    assert_outputs(notebook)


@every_notebook
def test_stored_outputs(name):
    notebook = read(NOTEBOOKS[name])
    assert NOTEBOOKS[name].stat().st_size < MAX_BYTES
    assert_outputs(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not of one run"
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code:
        for png in pngs(cell):
            width, _ = struct.unpack(">II", png[16:24])
            assert 500 < width <= MAX_PIXELS, f"{cell.id}: a plot of {width} pixels"


@every_notebook
def test_source(name):
    notebook = read(NOTEBOOKS[name])
    assert parameters_cell(notebook).source
    for cell in notebook.cells:
        assert not UNWANTED.search(cell.source), cell.source
        if cell.cell_type == "code":
            ast.parse(cell.source)  # so there are no magics or shell lines


def test_a_warning_or_a_wrong_parameter_fails_a_run():
    cells = [
        nbformat.v4.new_code_cell("SIZE = 3", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("import warnings\nif SIZE == 4: warnings.warn('odd')"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(ValueError, match=r"expected names that the notebook sets, got \['OTHER'\]"):
        execute(notebook, dict(OTHER=1))
    with pytest.raises(CellExecutionError, match="odd"):
        execute(notebook, dict(SIZE=4))


def assert_outputs(notebook):
    """A cell that prints or plots has an output of that kind, and none is an error, a warning or a path."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        where = f"cell {cell.id}"
        text = ""
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", f"{where}: {output}"
            text += output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not UNWANTED.search(text), f"{where}: {text}"
        called = calls(cell.source)
        assert "print" not in called or text, f"{where} prints, and has no text"
        assert "plt.subplots" not in called or pngs(cell), f"{where} plots, and has no picture"


def calls(source):
    """Names that a cell calls itself, not within a function or class that it defines."""
    found, nodes = set(), list(ast.parse(source).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        nodes.extend(ast.iter_child_nodes(node))
    return found


def pngs(cell):
    return [
        base64.b64decode(out.data["image/png"]) for out in cell.outputs if "image/png" in out.get("data", {})
    ]
