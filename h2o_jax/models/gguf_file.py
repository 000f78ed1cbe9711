"""The GGUF container: metadata and tensors, as the file has them.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here rather than by the
`gguf` package's reader, which takes 500 bytes and 20 microseconds for each number or text in it.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from h2o_jax.models._optional import require
from h2o_jax.models.files import errors_name, require_file
from h2o_jax.models.weights import Tensor

# Most of a header is the vocabulary: 35 bytes a token.
_MOST_HEADER = 64 << 20
_MOST_ENTRIES = 1 << 16
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Value types that are numbers, as `struct` and NumPy both spell them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: of the file.
        metadata: its key-value pairs: numbers, texts, lists of texts, NumPy arrays of numbers.
        tensors: its tensors by GGUF name, shapes as in NumPy (the file lists them reversed).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file; tensors are read and dequantised when asked for.

    Raises:
        OSError: there is no such file, or the system refuses it.
        ValueError: the file is truncated, corrupt or not GGUF.
    """
    library = require("gguf")
    require_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _Header(file.read(min(size, _MOST_HEADER)))
    with errors_name(path):
        try:
            metadata, infos, start = _read_header(header, library)
            _check_places(infos, start, size)
        except ValueError as error:
            raise ValueError(f"truncated or corrupt GGUF file: {error}") from error
    content = np.memmap(path, np.uint8, mode="r")

    def reader(info: _TensorInfo) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            with errors_name(path):
                data = content[start + info.offset : start + info.end]
                return _dequantised(library, info, data)

        return read

    return GGUFFile(path, metadata, {info.name: Tensor(info.shape, reader(info)) for info in infos})


class _Header:
    """The bytes of a header, taken one value after another."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0

    def take(self, size: int) -> int:
        """Steps over `size` bytes; their offset."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.content):
            raise ValueError(f"byte {self.at} is referred to, and the header may end at {len(self.content)}")
        return start

    def number(self, form: str) -> Any:
        form = "<" + form
        return struct.unpack_from(form, self.content, self.take(struct.calcsize(form)))[0]

    def numbers(self, form: str, count: int) -> np.ndarray:
        dtype = np.dtype("<" + form)
        return np.frombuffer(self.content, dtype, count, self.take(dtype.itemsize * count))

    def string(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        return self.content[start : start + size].decode("utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind != _ARRAY:
            return self.string() if kind == _STRING else self.number(_number_form(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind != _STRING:
            return self.numbers(_number_form(kind), count)
        return [self.string() for _ in range(count)]


def _number_form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"value type {kind} is none of a number, a text, or a list of either")
    return _NUMBERS[kind]


@dataclasses.dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    offset: int  # in bytes from the end of the header, as is `end`
    end: int


def _read_header(header: _Header, library: Any) -> tuple[dict[str, Any], list[_TensorInfo], int]:
    """Metadata, tensor infos and the offset of the tensors' data."""
    if header.number("I") != library.GGUF_MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = header.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is neither 2 nor 3")
    num_tensors, num_values = header.number("Q"), header.number("Q")
    if max(num_tensors, num_values) > _MOST_ENTRIES:
        raise ValueError(
            f"{num_tensors} tensors and {num_values} values are announced, more than {_MOST_ENTRIES} of one"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.string()
        if key in metadata:
            raise ValueError(f"the key {key} comes twice")
        metadata[key] = header.value()
    infos = [_read_tensor_info(header, library) for _ in range(num_tensors)]
    if len({info.name for info in infos}) < len(infos):
        raise ValueError("two tensors have the same name")
    alignment = metadata.get("general.alignment", library.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment < 2**32 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two; got {alignment!r}")
    return metadata, infos, -(-header.at // alignment) * alignment


def _read_tensor_info(header: _Header, library: Any) -> _TensorInfo:
    name = header.string()
    num_dimensions = header.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(header.number("Q") for _ in range(num_dimensions))[::-1]
    kind = library.GGMLQuantizationType(header.number("I"))
    offset = header.number("Q")
    block, block_bytes = library.GGML_QUANT_SIZES[kind]
    # A row is a whole number of the type's blocks.
    row = shape[-1] if shape else 1
    if row % block:
        raise ValueError(f"tensor {name} has rows of {row} numbers, not a multiple of {block}")
    return _TensorInfo(name, shape, kind, offset, offset + math.prod(shape) // block * block_bytes)


def _check_places(infos: Iterable[_TensorInfo], start: int, size: int) -> None:
    """Checks that the tensors lie in the file, each in bytes of its own: else a small file could hold a
    model of any size."""
    free = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset < free:
            raise ValueError(f"tensor {info.name} overlaps another")
        free = info.end
        if start + info.end > size:
            raise ValueError(f"tensor {info.name} ends at byte {start + info.end} of {size}")


def _dequantised(library: Any, info: _TensorInfo, data: np.ndarray) -> np.ndarray:
    try:
        rows = data.reshape(*info.shape[:-1], -1) if info.shape else data
        # Damaged blocks may have scales that are not finite.
        with np.errstate(all="ignore"):
            return library.quants.dequantize(rows, info.kind).reshape(info.shape)
    except NotImplementedError as error:
        raise ValueError(f"tensor {info.name} has the unsupported type {info.kind.name}") from error
