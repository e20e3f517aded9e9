"""Safetensors files read by memory map: a tensor costs memory when it is used, not when its file is opened.

``safetensors.safe_open`` reads most types the same way but has no numpy type for FP8 (0.8.0).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

_DTYPES = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": jnp.dtype(jnp.bfloat16),
        "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
        "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
        "I64": np.dtype(np.int64),
        "I32": np.dtype(np.int32),
        "I16": np.dtype(np.int16),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "BOOL": np.dtype(np.bool_),
    }
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFile(Mapping[str, np.ndarray]):
    """The tensors of one file by name, as read-only views of the mapped file.

    Args:
        path: the file.

    Raises:
        ValueError: for a file that is not in the safetensors format, or a type numpy has no name for (on access).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(self._data[:8].tobytes(), "little")
        if start > self._data.size:
            raise ValueError(f"{path} is not a safetensors file: its header would end at byte {start} of {self._data.size}")
        self._body = self._data[start:]
        self._entries = json.loads(self._data[8:start].tobytes())
        self._entries.pop("__metadata__", None)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{self._path}: {name} has the unsupported type {entry['dtype']}")
        start, stop = entry["data_offsets"]
        # The header's length sets the alignment, so the bytes are viewed rather than mapped as numbers at an offset.
        return self._body[start:stop].view(dtype).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_checkpoint(folder: str | Path) -> Mapping[str, np.ndarray]:
    """The tensors of a checkpoint folder: the shards that its index names, else its single file.

    Raises:
        FileNotFoundError: if there is neither, or a shard is missing.
        ValueError: if the index places a tensor in a shard that does not hold it.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise FileNotFoundError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
        return SafetensorsFile(folder / SINGLE_NAME)
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    absent = [f"{tensor} ({name})" for tensor, name in weight_map.items() if tensor not in files[name]]
    if absent:
        raise ValueError(f"{index}: tensors are not in the shards that it names: {', '.join(absent[:8])}")
    return _Sharded(weight_map, files)


class _Sharded(Mapping[str, np.ndarray]):
    def __init__(self, weight_map: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
        self._weight_map = weight_map
        self._files = files

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[self._weight_map[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weight_map)

    def __len__(self) -> int:
        return len(self._weight_map)
