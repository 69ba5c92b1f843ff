"""State as files: a tree of plain values and tensors becomes JSON beside safetensors.

A tree is made of dicts with string keys, lists, strings, numbers, booleans, None and tensors; what
`state_dict()` methods return. JSON keeps the tree, with `{"$tensor": key}` in place of a tensor, so
that one found at two places (tied weights) is stored once and comes back as one. Values come back
exactly, infinities and NaN included; tuples come back as lists, tensors on the CPU. Where several
processes wrote the tensors, an index beside them says who holds what, and they come back as
`StoredTensor`s, to be read by region.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from hone.checkpoint.sharded import Part, Piece, Region, StoredTensor, part_of
from hone.models.manifest import memory_of

__all__ = [
    "Shards",
    "SplitTree",
    "Tree",
    "is_file_of",
    "read_tree",
    "split_tree",
    "write_index",
    "write_shards",
    "write_tree",
]

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

Shards = Mapping[str, Region]
"""What one process wrote of the tensors of a tree, by key."""

_TENSOR = "$tensor"


@dataclass(frozen=True, slots=True)
class SplitTree:
    """A tree taken apart: what goes into JSON, and this process's parts of the tensors, by key."""

    plain: object
    parts: Mapping[str, Part]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensors; about what the tree takes on disk."""
        return sum(part.num_bytes for part in self.parts.values())


def split_tree(tree: Tree, name: str, *, is_first: bool = True, copy: bool = False) -> SplitTree:
    """Take the tensors out of a tree, copying them to host memory only with `copy`.

    `is_first` says whether this is the first of all processes. Raises ValueError, with the path
    from `name` on, for a value that no tree may hold.
    """
    tensors: dict[str, Tensor] = {}
    plain = _take_tensors(tree, name, tensors, {})
    parts = {key: part_of(t, is_first=is_first, copy=copy) for key, t in tensors.items()}
    return SplitTree(plain, parts)


def write_tree(folder: Path, name: str, tree: SplitTree) -> None:
    """Write `<name>.json` and, where there are tensors, `<name>.safetensors`."""
    _plain_file(folder, name).write_text(json.dumps(tree.plain))
    if tree.parts:
        tensors = {key: _dense(part.local) for key, part in tree.parts.items()}
        save_file(tensors, _tensor_file(folder, name))


def write_shards(folder: Path, name: str, tree: SplitTree, rank: int) -> tuple[Path | None, Shards]:
    """Write what process `rank` has to write of a tree's tensors.

    Returns the file, None where there is nothing to write, and what is in it.
    """
    shards = {k: part.region for k, part in tree.parts.items() if part.region is not None}
    if not shards:
        return None, shards
    path = _shard_file(folder, name, rank)
    save_file({key: _dense(tree.parts[key].local) for key in shards}, path)
    return path, shards


def write_index(folder: Path, name: str, tree: SplitTree, shards: Sequence[Shards]) -> None:
    """Write `<name>.json`, and what each process has written, by rank, as `<name>.shards.json`."""
    _plain_file(folder, name).write_text(json.dumps(tree.plain))
    index = {
        key: {
            "shape": part.shape,
            "dtype": str(part.local.dtype).removeprefix("torch."),
            "pieces": [
                [rank, own[key].offsets, own[key].shape]
                for rank, own in enumerate(shards)
                if key in own
            ],
        }
        for key, part in tree.parts.items()
    }
    _index_file(folder, name).write_text(json.dumps(index))


def read_tree(folder: Path, name: str) -> Tree:
    """Read what `write_tree`, or several processes, wrote. The tensors of the latter are read when
    they are asked for."""
    tensors: Mapping[str, Tensor | StoredTensor] = {}
    if _index_file(folder, name).exists():
        tensors = _read_index(folder, name)
    elif _tensor_file(folder, name).exists():
        tensors = load_file(_tensor_file(folder, name))
    return _put_tensors(json.loads(_plain_file(folder, name).read_text()), tensors)


def is_file_of(name: str, file: str) -> bool:
    """Whether a file of a folder belongs to the tree `name`."""
    return file.partition(".")[0] == name


def _read_index(folder: Path, name: str) -> dict[str, StoredTensor]:
    index: dict[str, Any] = json.loads(_index_file(folder, name).read_text())
    return {
        key: StoredTensor(
            name=key,
            shape=torch.Size(entry["shape"]),
            dtype=getattr(torch, entry["dtype"]),
            pieces=tuple(
                Piece(_shard_file(folder, name, rank), key, Region(tuple(offsets), tuple(shape)))
                for rank, offsets, shape in entry["pieces"]
            ),
        )
        for key, entry in index.items()
    }


def _plain_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _tensor_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _index_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.shards.json"


def _shard_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.safetensors"


def _dense(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and alone in its memory, as safetensors wants it."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _take_tensors(
    tree: object, path: str, tensors: dict[str, Tensor], keys: dict[object, str]
) -> object:
    match tree:
        case Tensor():
            # Parts of different tensors may both be empty: only whole ones are told by memory.
            identity = id(tree) if isinstance(tree, DTensor) else memory_of(tree)
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


def _put_tensors(tree: object, tensors: Mapping[str, Tensor | StoredTensor]) -> Tree:
    match tree:
        case {"$tensor": str(key)}:
            return tensors[key]
        case dict():
            return {key: _put_tensors(value, tensors) for key, value in tree.items()}
        case list():
            return [_put_tensors(value, tensors) for value in tree]
        case _:
            return tree  # pyright: ignore[reportReturnType]  JSON has no other values
