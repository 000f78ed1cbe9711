"""Tensors of a Hugging Face directory: model.safetensors, or shards listed in an index."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from h2o_jax.models._optional import require
from h2o_jax.models.weights import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not hold a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON; {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object; got {type(values).__name__}")
    return values


def read_directory(directory: Path) -> dict[str, Tensor]:
    """Opens the tensors of a directory; each is read when asked for.

    Raises:
        FileNotFoundError: neither model.safetensors nor its index, or a shard that the index lists, exists.
        ValueError: a file is not valid safetensors, or a shard lacks a tensor that the index places there.
    """
    if (directory / _INDEX).exists():
        return _read_shards(directory)
    if not (directory / _SINGLE).exists():
        raise FileNotFoundError(f"{directory}: expected {_SINGLE} or {_INDEX}; found neither")
    return _read_file(directory / _SINGLE)


def _read_shards(directory: Path) -> dict[str, Tensor]:
    placement = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(placement, dict):
        raise ValueError(f"{directory / _INDEX}: expected an object under 'weight_map'; got {placement!r}")
    shards: dict[Path, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, shard in placement.items():
        path = directory / str(shard)
        if path not in shards:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: expected this shard, where {_INDEX} places tensor {name}; it is missing"
                )
            shards[path] = _read_file(path)
        if name not in shards[path]:
            raise ValueError(f"{path}: expected tensor {name}, placed there by {_INDEX}; it is missing")
        tensors[name] = shards[path][name]
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    library = require("safetensors")
    try:
        file = library.safe_open(path, framework="numpy")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except library.SafetensorError as error:
        raise ValueError(f"{path}: truncated or corrupt safetensors file: {error}") from error

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            try:
                return file.get_tensor(name)
            except (library.SafetensorError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from error

        return read

    return {name: Tensor(shape, reader(name)) for name, shape in shapes.items()}
