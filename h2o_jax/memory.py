"""What a state takes of a device's memory."""

from typing import Any

import jax


def parts(state: Any) -> dict[str, int]:
    """Bytes of a `PagedState`, of arrays or of their shapes, by part: page table, keys and values, each aux array."""
    found = {"page table": _bytes(state.table), "keys and values": 0}
    for layer in state.layers:
        found["keys and values"] += _bytes((layer.k, layer.v))
        for name, array in layer.aux.items():
            found[name] = found.get(name, 0) + _bytes(array)
    return found


def shown(num_bytes: int) -> str:
    """A number of bytes in the unit that suits it, such as "1.50 GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} bytes"


def free(device: jax.Device) -> int | None:
    """Bytes of a device that JAX has left to give, where it counts them."""
    stats = counted(device)
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def counted(device: jax.Device) -> dict[str, int]:
    """What JAX counts of a device's memory, such as "bytes_limit"; empty where a backend counts nothing."""
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


def out_of_memory(state: Any, num_pages: int, left: int | None) -> MemoryError:
    """The error that says what a state asks for, and how many pages would fit in the bytes `left`."""
    asked = parts(state)
    message = f"init_state: no room for {shown(sum(asked.values()))}: " + ", ".join(
        f"{name} {shown(size)}" for name, size in asked.items()
    )
    if left is not None:
        table = asked.pop("page table")
        fits = max(0, (left - table) * num_pages // sum(asked.values()))
        message += f"; {shown(left)} are free, enough for about num_pages={fits} instead of {num_pages}"
    return MemoryError(message)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
