"""Tensors of a Hugging Face directory: model.safetensors, or shards listed in an index."""

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from h2o_jax.models._optional import require
from h2o_jax.models.files import errors_name, file_error, one_line, read_json, require_file, typed
from h2o_jax.models.weights import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# In bytes; a hundred for each tensor. What is built from a header takes 20 times its size.
_MOST_HEADER = 16 << 20


def read_directory(directory: Path) -> dict[str, Tensor]:
    """Opens the tensors of a directory; each is read when asked for.

    Raises:
        FileNotFoundError: neither model.safetensors nor its index, or a shard that the index lists, exists.
        ValueError: a file is not valid safetensors, or the index places a tensor where it is not, or outside
            of the directory.
    """
    if (directory / _INDEX).exists():
        return _read_shards(directory)
    if not (directory / _SINGLE).exists():
        raise FileNotFoundError(f"{directory}: expected {_SINGLE} or {_INDEX}; found neither")
    return _read_file(directory / _SINGLE)


def _read_shards(directory: Path) -> dict[str, Tensor]:
    index = directory / _INDEX
    with errors_name(index):
        placement = typed(read_json(index), "weight_map", dict)
        if placement is None:
            raise ValueError("expected an object under 'weight_map'; it is missing")
    shards: dict[Path, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, shard in placement.items():
        if not _is_name(shard):
            raise file_error(
                index,
                f"expected the name of a file beside it for {one_line(name)}; got {reprlib.repr(shard)}",
            )
        path = directory / shard
        if path not in shards:
            require_file(path, f"this shard, where {_INDEX} places tensor {one_line(name)}")
            shards[path] = _read_file(path)
        if name not in shards[path]:
            raise file_error(path, f"expected tensor {name}, placed there by {_INDEX}; it is missing")
        tensors[name] = shards[path][name]
    return tensors


def _is_name(shard: Any) -> bool:
    """Whether it names a file that a message can tell. A path with directories could lead out of this one."""
    return isinstance(shard, str) and shard.isprintable() and 0 < len(shard) < 256 and Path(shard).name == shard


def _read_file(path: Path) -> dict[str, Tensor]:
    library = require("safetensors")
    require_file(path)
    with path.open("rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if header > _MOST_HEADER:
        raise file_error(
            path,
            f"truncated or corrupt safetensors file: expected a header of at most {_MOST_HEADER} bytes; "
            f"got {header}",
        )
    try:
        file = library.safe_open(path, framework="numpy")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except library.SafetensorError as error:
        raise file_error(path, f"truncated or corrupt safetensors file: {error}") from error

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            try:
                return file.get_tensor(name)
            # The file was checked when it was opened: what NumPy lacks is the dtype.
            except (library.SafetensorError, TypeError, AttributeError) as error:
                dtype = file.get_slice(name).get_dtype()
                raise file_error(
                    path, f"{name}: expected a floating point tensor of 16 bits or more; got {dtype}"
                ) from error

        return read

    return {name: Tensor(shape, reader(name)) for name, shape in shapes.items()}
