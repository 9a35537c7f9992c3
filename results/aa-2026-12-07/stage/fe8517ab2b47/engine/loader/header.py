"""The safetensors format's header, read and checked by itself: where each tensor's bytes lie, before one of them is read.

Format (safetensors specification): eight bytes little-endian N, N bytes of JSON, then the data.  The JSON maps a name to dtype, shape
and data_offsets [begin, end) into the data; the tensors cover the data without hole or overlap.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_HEADER = 100_000_000
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: `offset` and `nbytes` are bytes from the file's start."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stamp: tuple[int, ...]
    """What :func:`stamp_of` said of the file when its header was read."""


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is written, cut or replaced: inode, size, time of change (ns).  Raises OSError."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def read_headers(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint folder by name, from one file or from the shards its index names.

    Raises :class:`CheckpointError` naming the file, and the tensor where there is one.
    """
    if not (folder / INDEX).exists():
        return read_header(folder / SINGLE)
    try:
        placed: dict[str, str] = json.loads((folder / INDEX).read_bytes(), object_pairs_hook=_no_duplicates)["weight_map"]
        shards = sorted(set(placed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX}: no readable weight_map ({error!r})") from None
    if any(not isinstance(shard, str) or Path(shard).name != shard for shard in shards):
        raise CheckpointError(f"{folder / INDEX}: a shard is no file of the folder: {shards}")
    found: dict[str, Entry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if placed.get(name) != shard:
                raise CheckpointError(f"{folder / shard}: holds {name}, which the index places in {placed.get(name)}")
            found[name] = entry
    if missing := sorted(placed.keys() - found.keys()):
        raise CheckpointError(f"{folder / placed[missing[0]]}: tensor {missing[0]} is missing, though the index places it there "
                              f"({len(missing)} missing in all)")
    return found


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file by name; raises :class:`CheckpointError` when the file breaks the format."""
    try:
        stamp = stamp_of(path)
        size = stamp[1]
        with path.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if size < 8 or length > min(LARGEST_HEADER, size - 8):
                raise CheckpointError(f"{path}: {size} bytes with a header of {length}; truncated or not a safetensors file")
            raw = json.loads(source.read(length), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no object)")
    raw.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + length, stamp) for name, value in raw.items()]
    end = 8 + length
    for entry in sorted(entries, key=lambda one: (one.offset, one.nbytes)):
        if entry.offset != end:
            raise CheckpointError(f"{path}: tensor {entry.name} begins at byte {entry.offset}, {end} was expected (hole or overlap)")
        end += entry.nbytes
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes, its tensors end at {end}; the file is truncated or has bytes too many")
    return {entry.name: entry for entry in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice")
    return made


def _entry(path: Path, name: str, value: Any, data: int, stamp: tuple[int, ...]) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sane = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise CheckpointError(f"{path}: tensor {name} has a malformed entry {value!r}")
    if dtype not in BYTES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype!r}; known are {', '.join(BYTES)}")
    if end - begin != math.prod(shape) * BYTES[dtype]:
        raise CheckpointError(f"{path}: tensor {name} is {dtype} {list(shape)} but spans {end - begin} bytes")
    return Entry(path, name, dtype, shape, data + begin, end - begin, stamp)

