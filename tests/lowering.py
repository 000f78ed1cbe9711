"""Lowering for CUDA on a machine that need not have a GPU."""

import functools

import jax
from jax import export

KERNEL_TARGET = "__gpu$xla.gpu.triton"  # custom call of a kernel in the StableHLO text


def lower_for_cuda(f, *args) -> str:
    """Lowers `jax.jit(f)(*args)` for an H100, kernels included, and returns the StableHLO text.

    Finds what interpret mode can't: sizes that are no powers of two, primitives without a lowering. Nothing
    is compiled to machine code and nothing runs.

    Args:
        f: function of arrays; what it calls must name its implementation, "pallas".
        args: arrays or `jax.ShapeDtypeStruct`s.
    """
    allowed = [export.DisabledSafetyCheck.custom_call(KERNEL_TARGET)]
    with jax.sharding.use_abstract_mesh(_mesh()):
        return export.export(jax.jit(f), platforms=["cuda"], disabled_checks=allowed)(*args).mlir_module()


@functools.cache
def _mesh():
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)
