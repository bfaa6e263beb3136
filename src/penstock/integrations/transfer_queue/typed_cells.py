"""Convert values of a TensorDict to typed cells and back: tensors as bytes, others as msgpack. Never pickles.

A value that is not a tensor may be None, a bool, a number, text, bytes, or a list, tuple or dict of them, which may
also contain tensors and numpy arrays. Anything else is an error that names its position:
`multi_modal_inputs[3]['image']: a PngImageFile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from penstock.arrays import offsets_of
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import Buffer

VALUE = "value"
"""The kind of a cell that is not a tensor."""
_TENSOR, _TUPLE, _ARRAY, _SCALAR, _OBJECTS = range(1, 6)
_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
)  # fmt: skip
_NUMBERS = "biufc"
_MAX_DEPTH = 32


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """Describes one encoded value."""

    kind: str
    """Dtype of a tensor, or `VALUE`."""
    shape: tuple[int, ...]
    size: int
    checksum: int
    """XXH3 of its bytes."""
    is_ragged: bool = False
    """Whether it is a row of a nested tensor."""


def cells_of(name: str, values: Any, rows: int) -> tuple[list[Cell], list[Buffer]]:
    """Encode a column of a TensorDict: a tensor [rows, ...], a nested tensor, a list of one value per row, or one value
    that all rows share. Returns a description and the bytes of each row.
    """
    import torch

    is_ragged = isinstance(values, torch.Tensor) and values.is_nested
    if isinstance(values, torch.Tensor):
        items: Sequence[Any] = values.unbind()
    else:
        is_list = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim > 0)
        items = list(values) if is_list and len(values) == rows else [values] * rows
    cells, pieces = [], []
    for i, value in enumerate(items):
        is_tensor = isinstance(value, torch.Tensor) and not value.is_nested
        data = _bytes_of(value) if is_tensor else encode_value(value, f"{name}[{i}]")
        kind, shape = (_kind(value), tuple(value.shape)) if is_tensor else (VALUE, ())
        cells.append(Cell(kind, shape, len(data), xxhash.xxh3_64_intdigest(data), is_ragged))
        pieces.append(data)
    return cells, pieces


def values_of(cells: Sequence[Cell], data: Any) -> Any:
    """Decode a column whose bytes are concatenated in a numpy array of uint8, in the form of TransferQueue's own
    backend: numbers stacked, tensors nested. Tensors are views of `data`.
    """
    import torch
    from tensordict.tensorclass import NonTensorStack

    ends = offsets_of([cell.size for cell in cells]).tolist()
    for i, cell in enumerate(cells):
        if xxhash.xxh3_64_intdigest(data[ends[i] : ends[i + 1]]) != cell.checksum:
            raise CorruptFrame(
                f"row {i}: its checksum differs; the row was cleared meanwhile, or its bytes are damaged"
            )
    if len({cell.kind for cell in cells}) == 1 and cells[0].kind != VALUE:
        return _tensors([cell.shape for cell in cells], _flat(data, cells[0].kind))
    out = []
    for i, cell in enumerate(cells):
        piece = data[ends[i] : ends[i + 1]]
        out.append(decode_value(piece) if cell.kind == VALUE else _flat(piece.copy(), cell.kind).reshape(cell.shape))
    if all(isinstance(value, torch.Tensor) for value in out):
        return _packed(out)
    return NonTensorStack(*out)


def _tensors(shapes: Sequence[tuple[int, ...]], flat: Any) -> Any:
    """Return rows of one dtype as views of their concatenated values."""
    import torch

    if not any(shapes):
        return flat
    if all(shape and shape[1:] == shapes[0][1:] for shape in shapes) and flat.numel():
        offsets = torch.from_numpy(offsets_of([shape[0] for shape in shapes]))
        return torch.nested.nested_tensor_from_jagged(flat.reshape(-1, *shapes[0][1:]), offsets)
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    return _packed([piece.reshape(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)])


def _packed(rows: list[Any]) -> Any:
    """Combine rows of different shapes in the first form that can hold them."""
    import torch
    from tensordict.tensorclass import NonTensorStack

    if all(row.dim() == 0 for row in rows):
        return torch.stack(rows)
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(rows, layout=layout)
        except (RuntimeError, TypeError):
            continue
    return NonTensorStack(*rows)


# ------------------------------------------------------------------ tensors


def _kind(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidInput(f"tensor of {name}: must be one of {', '.join(_DTYPES)}")
    return name


def _bytes_of(tensor: Any) -> Buffer:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    return memoryview(flat.view(torch.uint8).numpy())


def _flat(data: Any, kind: str) -> Any:
    """Return bytes, as a numpy array of uint8, as a tensor [n]: a view of them."""
    import torch

    if kind not in _DTYPES:
        raise CorruptFrame(f"cell of {kind[:40]!r}: not a dtype")
    dtype: torch.dtype = getattr(torch, kind)
    if len(data) % dtype.itemsize:
        raise CorruptFrame(f"cell of {kind}: {len(data)} bytes")
    if not len(data):
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(data).view(dtype)


# ------------------------------------------------------------------ other values


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Convert a value to msgpack's types. Other types become extension types (`_mark`)."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if isinstance(value, str):  # numpy's, or an enum: kept as the text it is
        return "".join(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidInput(f"{where}: {value}; must fit 64 bits")
        return int(value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value)
    if depth > _MAX_DEPTH:
        raise InvalidInput(f"{where}: nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return _mark(_TUPLE, [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)])
    return _array(value, where, depth)


def _array(value: Any, where: str, depth: int) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and not value.is_nested:
        return _mark(_TENSOR, [_kind(value), list(value.shape), bytes(_bytes_of(value))])
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _NUMBERS:
        code = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
        return _mark(code, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        items = [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value.ravel().tolist())]
        return _mark(_OBJECTS, [list(value.shape), items])
    kind = f"{type(value).__module__}.{type(value).__name__}"
    raise InvalidInput(f"{where}: a {kind}; give tensors, arrays, numbers, text, bytes, lists, tuples or dicts of them")


def _key(key: Any, where: str) -> str | int:
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise InvalidInput(f"{where}: key {key!r:.40}; must be text or a whole number")
    return "".join(key) if isinstance(key, str) else int(key)


def _mark(code: int, content: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def encode_value(value: Any, where: str) -> bytes:
    """Encode a value that is not a tensor. `where` names it in errors."""
    return msgspec.msgpack.encode(_plain(value, where))


def decode_value(data: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unmark)
    except CorruptFrame:
        raise
    except (msgspec.DecodeError, ValueError, TypeError, RuntimeError) as error:  # from msgpack, numpy or torch
        raise CorruptFrame(f"value: {error}") from None


def _unmark(code: int, data: memoryview) -> Any:
    content = msgspec.msgpack.decode(data, ext_hook=_unmark)
    if code == _TUPLE:
        return tuple(content)
    if code == _TENSOR:
        kind, shape, raw = content
        return _flat(np.frombuffer(raw, np.uint8).copy(), kind).reshape(shape)
    if code in (_ARRAY, _SCALAR):
        dtype, shape, raw = content
        if np.dtype(dtype).kind not in _NUMBERS:
            raise CorruptFrame(f"value: an array of {dtype!r:.40}")
        found = np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()
        return found[()] if code == _SCALAR else found
    if code == _OBJECTS:
        shape, items = content
        objects = np.empty(len(items), object)
        for i, item in enumerate(items):  # np.array(items) would turn lists of equal length into dimensions
            objects[i] = item
        return objects.reshape(shape)
    raise CorruptFrame(f"value: unknown extension type {code}")
