"""Tensors of a Hugging Face directory: model.safetensors, or shards listed in an index."""

import reprlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from h2o_jax.models._optional import require
from h2o_jax.models.files import FileError, errors_name, read_json, require_file, typed
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
        # A path with directories could lead out of this one.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise FileError(
                f"{index}: expected the name of a file beside it for {name}; got {reprlib.repr(shard)}"
            )
        path = directory / shard
        if path not in shards:
            require_file(path, f"this shard, where {_INDEX} places tensor {name}")
            shards[path] = _read_file(path)
        if name not in shards[path]:
            raise FileError(f"{path}: expected tensor {name}, placed there by {_INDEX}; it is missing")
        tensors[name] = shards[path][name]
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    library = require("safetensors")
    require_file(path)
    with path.open("rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if header > _MOST_HEADER:
        raise FileError(
            f"{path}: truncated or corrupt safetensors file: expected a header of at most {_MOST_HEADER} "
            f"bytes; got {header}"
        )
    try:
        file = library.safe_open(path, framework="numpy")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except library.SafetensorError as error:
        raise FileError(f"{path}: truncated or corrupt safetensors file: {error}") from error

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            try:
                return file.get_tensor(name)
            except (library.SafetensorError, TypeError, AttributeError) as error:
                raise FileError(f"{path}: tensor {name} cannot be read: {error}") from error

        return read

    return {name: Tensor(shape, reader(name)) for name, shape in shapes.items()}
