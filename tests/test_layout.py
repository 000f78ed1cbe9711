"""How the repository is laid out: which way imports go, what an import needs, what is documented."""

import ast
import inspect
import pathlib
import pickle
import subprocess
import sys

import pytest

import h2o_jax
import pallas_kernels

ROOT = pathlib.Path(__file__).parent.parent
# What is neither core nor command line lies between: Flax modules, models, generation.
CORE = {"_checks", "config", "debug", "memory", "state", "pool", "policy", "policies", "decode", "prefill", "reference"}
TOP = {"cli", "bench", "eval", "__main__", "verification"}
LEVELS = ("pallas_kernels", "core", "wrappers", "command line")
HEAVY = ("flax", "gguf", "tokenizers", "matplotlib", "safetensors", "rich", "jinja2", "transformers", "torch")


def level(module):
    """Index into LEVELS of a dotted module name, None for a module of others."""
    first, *rest = module.split(".")
    if first == "pallas_kernels":
        return 0
    if first != "h2o_jax":
        return None
    if not rest:
        return 1
    if rest[0] in CORE or hasattr(h2o_jax, rest[0]) and not inspect.ismodule(getattr(h2o_jax, rest[0])):
        return 1
    return 3 if rest[0] in TOP else 2


def imports(path):
    """Dotted names of all that a source file imports, wherever in it, and whether only for type checking."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources("pallas_kernels", "h2o_jax"), ids=module_of)
def test_imports_go_one_way(path):
    if path == ROOT / "h2o_jax" / "__init__.py":
        return  # re-exports; what it may not load is tested below
    mine = level(module_of(path))
    for name in imports(path):
        theirs = level(name)
        assert theirs is None or theirs <= mine, (
            f"{module_of(path)} ({LEVELS[mine]}) imports {name} ({LEVELS[theirs]})"
        )
        assert name.split(".")[0] not in ("tests", "notebooks")


def test_the_levels_name_modules_that_exist():
    assert CORE <= {path.stem for path in (ROOT / "h2o_jax").iterdir()}
    assert level("pallas_kernels.write_pages") == 0 and level("numpy") is None
    assert level("h2o_jax.nnx.H2OAttention") == 2 and level("h2o_jax.decode") == 1 and level("h2o_jax.cli") == 3


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=module_of)
def test_kernels_know_nothing_of_policies_or_flax(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"h2o_jax", "flax"}


def test_every_op_has_its_files():
    folders = [path for path in (ROOT / "pallas_kernels").iterdir() if (path / "__init__.py").exists()]
    assert {path.name for path in folders} == set(pallas_kernels.__all__)
    for folder in folders:
        files = {path.name for path in folder.glob("*.py")}
        assert {"__init__.py", "api.py", "xla.py"} <= files, folder.name
        assert "triton.py" not in files or "cases.py" in files, folder.name


def test_the_oracle_imports_only_numpy():
    names = {name.split(".")[0] for name in imports(ROOT / "h2o_jax" / "reference.py")}
    assert names - sys.stdlib_module_names == {"numpy"}


def loaded_by(statement):
    code = f"{statement}; import sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_needs_only_jax_and_numpy():
    loaded = loaded_by("import h2o_jax, pallas_kernels")
    assert "jax" in loaded and not loaded & set(HEAVY)


@pytest.mark.parametrize("module", [h2o_jax, pallas_kernels], ids=lambda m: m.__name__)
def test_public_names_are_documented(module):
    assert module.__doc__ and module.__all__ == sorted(module.__all__)
    public = {name for name in vars(module) if not name.startswith("_") and not inspect.ismodule(vars(module)[name])}
    assert public <= set(module.__all__)
    for name in module.__all__:
        doc = inspect.getdoc(getattr(module, name))
        assert doc, f"{name} has no docstring"
        # A dataclass without one is given its signature.
        assert not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


FUNCTIONS = [n for n in h2o_jax.__all__ if callable(f := getattr(h2o_jax, n)) and not inspect.isclass(f)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_say_what_they_take_return_and_raise(name):
    function = getattr(h2o_jax, name)
    doc = inspect.getdoc(function)
    assert pickle.loads(pickle.dumps(function)) is function
    for parameter in inspect.signature(function).parameters:
        assert parameter in doc, f"{name}: {parameter} is not described"
    if name not in ("list_policies", "page_summaries"):
        assert "Raises:" in doc, f"{name}: its errors are not described"


def test_generate_is_a_function_as_well_as_a_file():
    assert "generate" in FUNCTIONS and list(inspect.signature(h2o_jax.generate).parameters)[:2] == ["model", "prompts"]


def test_what_flax_is_needed_for_comes_on_first_use():
    """Listed by `dir` before, and there without an import of its own."""
    code = """
import h2o_jax
assert {*h2o_jax.__all__, "linen", "models", "nnx", "reference", "viz"} <= {*dir(h2o_jax)}
print(h2o_jax.models.load, h2o_jax.linen.H2OAttention, h2o_jax.nnx.H2OAttention, h2o_jax.reference.Request)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_public_surface():
    """What the design names, and no less."""
    assert set(h2o_jax.__all__) >= {
        "CacheConfig",
        "LayerCache",
        "PageTable",
        "PagedState",
        "Policy",
        "attend",
        "check_state",
        "decode_attention",
        "extend",
        "get_policy",
        "init_state",
        "list_policies",
        "page_summaries",
        "prefill_attention",
        "register_policy",
        "release",
        "select_pages",
        "write_tokens",
    }
    assert set(pallas_kernels.__all__) == {
        "decayed_softmax_scores",
        "envelope_scores",
        "paged_attention",
        "top_k_pages",
        "write_pages",
    }


def test_the_top_level_holds_nothing_else():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in listed.stdout.split()}
    top = {name for name in top if not name.startswith(".") and not name.upper().startswith("LICEN")}
    assert top <= {"h2o_jax", "pallas_kernels", "tests", "notebooks", "pyproject.toml", "README.md"}
