"""State as files: a tree of plain values and tensors is written as JSON and safetensors.

A tree has dicts with string keys, lists, strings, numbers, booleans, None and tensors, as
`state_dict()` methods return. `<name>.json` has the tree with `{"$tensor": key}` in place of each
tensor, so a tensor that occurs twice (tied weights) is stored once and restored as one. Each
process writes its parts of the tensors to `<name>.rank<N>.safetensors`, whose metadata have the
place of each part in its tensor.

Values are restored exactly, including infinities and NaN; tuples become lists, and tensors become
`StoredTensor`s, which are read by region.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hone.checkpoint.atomic import FileRecord, record_file, write_tensors
from hone.checkpoint.sharded import Region, StoredPart, StoredTensor, local_part, region_of
from hone.models.manifest import memory_of

__all__ = ["SplitTree", "Tree", "in_memory", "is_file_of", "read_tree", "split_tree", "write_tree"]

Tree: TypeAlias = (
    Mapping[str, "Tree"]
    | Sequence["Tree"]
    | Tensor
    | StoredTensor
    | str
    | int
    | float
    | bool
    | None
)

_TENSOR = "$tensor"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that one process writes."""

    local: Tensor
    offsets: tuple[int, ...]
    """Offsets of the part in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class SplitTree:
    """A tree split into its JSON and the parts of tensors that this process writes."""

    plain: object
    """The tree for JSON."""
    parts: Mapping[str, TensorPart]
    num_bytes: int
    """Size of the whole tensors, about the size of the tree on disk."""
    is_first: bool
    """Whether this process writes the JSON."""


def split_tree(tree: Tree, name: str, *, is_first: bool = True, copy: bool = False) -> SplitTree:
    """Split the tensors from a tree. With `copy` they are copied to host memory, so that training
    can go on while they are written.

    `is_first` marks the first of the processes that have the tree; it writes everything that is not
    a DTensor. A tensor on the meta device is written by other processes. Raises ValueError, with
    the path from `name` on, for a value that a tree cannot have.
    """
    tensors: dict[str, Tensor] = {}
    plain = _take_tensors(tree, name, tensors, {})
    parts: dict[str, TensorPart] = {}
    for key, tensor in tensors.items():
        if _is_writer(tensor, key, is_first=is_first):
            local = local_part(tensor.detach())
            local = local.to("cpu", copy=True) if copy else local
            parts[key] = TensorPart(local, region_of(tensor).offsets, tuple(tensor.shape))
    num_bytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    return SplitTree(plain, parts, num_bytes, is_first)


def write_tree(folder: Path, name: str, tree: SplitTree, rank: int = 0) -> dict[str, FileRecord]:
    """Write and flush the tensor parts of process `rank`; the first process also writes the JSON.
    Returns the files' records by name. Raises OSError."""
    files: dict[str, FileRecord] = {}
    if tree.is_first:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(tree.plain))
        files[path.name] = record_file(path)
    if tree.parts:
        path = folder / f"{name}.rank{rank}.safetensors"
        places = {
            key: [part.offsets, part.shape, str(part.local.dtype).removeprefix("torch.")]
            for key, part in tree.parts.items()
        }
        local = {key: part.local for key, part in tree.parts.items()}
        files[path.name] = write_tensors(path, local, {"places": json.dumps(places)})
    return files


def read_tree(folder: Path, name: str) -> Tree:
    """The tree that the processes have written. Tensors are read on demand."""
    parts: defaultdict[str, list[StoredPart]] = defaultdict(list)
    wholes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for path in sorted(folder.glob(f"{name}.rank*.safetensors")):
        start, header = _read_header(path)
        places: dict[str, Any] = json.loads(header["__metadata__"]["places"])
        for key, (offsets, shape, dtype) in places.items():
            region = Region(tuple(offsets), tuple(header[key]["shape"]))
            parts[key].append(StoredPart(path, start + header[key]["data_offsets"][0], region))
            wholes[key] = torch.Size(shape), getattr(torch, dtype)
    tensors = {key: StoredTensor(key, *wholes[key], tuple(own)) for key, own in parts.items()}

    def put(node: dict[str, Any]) -> Any:
        return tensors[node[_TENSOR]] if _TENSOR in node else node

    return json.loads((folder / f"{name}.json").read_text(), object_hook=put)


def in_memory(tree: Tree) -> Any:
    """The tree with its stored tensors read into memory."""
    match tree:
        case StoredTensor():
            return tree.full()
        case dict():
            return {key: in_memory(value) for key, value in tree.items()}
        case list():
            return [in_memory(value) for value in tree]
        case _:
            return tree


def is_file_of(name: str, file: str) -> bool:
    """Whether a file of a folder belongs to the tree `name`."""
    return file.partition(".")[0] == name


def _is_writer(tensor: Tensor, key: str, *, is_first: bool) -> bool:
    """Whether this process writes its part of a tensor. Where several processes have equal copies,
    a hash of the key chooses one of them, so that they share the work."""
    if tensor.is_meta:
        return False
    if not isinstance(tensor, DTensor):
        return is_first
    turn = crc32(key.encode())
    place = tensor.device_mesh.get_coordinate()
    if place is None or not tensor.to_local().numel():
        return False
    for dim, (placement, coordinate) in enumerate(zip(tensor.placements, place, strict=True)):
        if isinstance(placement, Replicate):
            turn, chosen = divmod(turn, tensor.device_mesh.size(dim))
            if coordinate != chosen:
                return False
    return True


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset of the data in a safetensors file, and its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def _take_tensors(
    tree: object, path: str, tensors: dict[str, Tensor], keys: dict[object, str]
) -> object:
    match tree:
        case Tensor():
            # Ties are found by memory only for whole tensors: the parts of two different tensors
            # may both be empty and have the same address.
            has_no_memory = isinstance(tree, DTensor) or tree.is_meta
            identity = id(tree) if has_no_memory else memory_of(tree)
            key = keys.setdefault(identity, path)
            tensors[key] = tree
            return {_TENSOR: key}
        case str() | int() | float() | None:
            return tree
        case dict():
            for key in tree:
                if not isinstance(key, str) or key == _TENSOR:
                    raise ValueError(f"{path} has the key {key!r}: keys must be other strings")
            return {k: _take_tensors(v, f"{path}.{k}", tensors, keys) for k, v in tree.items()}
        case list() | tuple():
            return [_take_tensors(v, f"{path}.{i}", tensors, keys) for i, v in enumerate(tree)]
        case _:
            raise ValueError(
                f"{path} is a {type(tree).__name__}: a checkpoint holds dicts, lists, strings, "
                "numbers, None and tensors"
            )
