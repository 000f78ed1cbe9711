"""How kernel tests run an op: interpreted on a CPU, compiled on a GPU."""

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU"))

# Interpreted kernels are small programs that take long to optimise and no time to run.
_QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def on_gpu(f):
    """Marks a test that only a GPU can run."""
    for mark in GPU_MARKS:
        f = mark(f)
    return f


def over_cases(cases, interpreted):
    """Parametrises `case` and `implementation`: the cases named in `interpreted` on a CPU, all on a GPU."""
    small = [c for c in cases if c.id in interpreted]
    params = [pytest.param(c, "pallas_interpret", id=f"{c.id}-interpret") for c in small]
    assert len(params) == len(interpreted), "a name in `interpreted` is no case"
    params += [pytest.param(c, "pallas", id=f"{c.id}-gpu", marks=GPU_MARKS) for c in cases]
    return pytest.mark.parametrize(("case", "implementation"), params)


def over_implementations(f):
    """Parametrises `implementation`: interpreted, and compiled where there is a GPU."""
    params = ["pallas_interpret", pytest.param("pallas", marks=GPU_MARKS)]
    return pytest.mark.parametrize("implementation", params)(f)


def jit(f, **options):
    """`jax.jit`, compiling quickly on a CPU."""
    return jax.jit(f, compiler_options=None if ON_GPU else _QUICK_COMPILE, **options)
