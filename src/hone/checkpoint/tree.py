"""State as files: a tree of plain values and tensors becomes JSON beside safetensors.

A tree is made of dicts with string keys, lists, strings, numbers, booleans, None and tensors; what
`state_dict()` methods return. JSON keeps the tree, with `{"$tensor": key}` in place of a tensor, so
that one found at two places (tied weights) is stored once and comes back as one. Values come back
exactly, infinities and NaN included; tuples come back as lists, tensors on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.models.manifest import memory_of

__all__ = ["SplitTree", "Tree", "read_tree", "split_tree", "tree_files", "write_tree"]

Tree: TypeAlias = Mapping[str, "Tree"] | Sequence["Tree"] | Tensor | str | int | float | bool | None

_TENSOR = "$tensor"


@dataclass(frozen=True, slots=True)
class SplitTree:
    """A tree taken apart: what goes into JSON, and the tensors by key."""

    plain: object
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors; about what the tree takes on disk."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def split_tree(tree: Tree, name: str) -> SplitTree:
    """Take the tensors out of a tree, without copying them.

    Raises ValueError, with the path from `name` on, for a value that no tree may hold.
    """
    tensors: dict[str, Tensor] = {}
    return SplitTree(_take_tensors(tree, name, tensors, {}), tensors)


def write_tree(folder: Path, name: str, tree: SplitTree) -> None:
    """Write `<name>.json` and, where there are tensors, `<name>.safetensors`."""
    plain_file, tensor_file = tree_files(name)
    (folder / plain_file).write_text(json.dumps(tree.plain))
    if tree.tensors:
        save_file({key: _dense(t) for key, t in tree.tensors.items()}, folder / tensor_file)


def read_tree(folder: Path, name: str) -> Tree:
    """Read what `write_tree` wrote."""
    plain_file, tensor_file = (folder / file for file in tree_files(name))
    tensors = load_file(tensor_file) if tensor_file.exists() else {}
    return _put_tensors(json.loads(plain_file.read_text()), tensors)


def tree_files(name: str) -> tuple[str, str]:
    """The files of a tree; the second only exists where there are tensors."""
    return f"{name}.json", f"{name}.safetensors"


def _dense(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and alone in its memory, as safetensors wants it."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _take_tensors(
    tree: object, path: str, tensors: dict[str, Tensor], keys: dict[object, str]
) -> object:
    match tree:
        case Tensor():
            key = keys.setdefault(memory_of(tree), path)
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


def _put_tensors(tree: object, tensors: Mapping[str, Tensor]) -> Tree:
    match tree:
        case {"$tensor": str(key)}:
            return tensors[key]
        case dict():
            return {key: _put_tensors(value, tensors) for key, value in tree.items()}
        case list():
            return [_put_tensors(value, tensors) for value in tree]
        case _:
            return tree  # pyright: ignore[reportReturnType]  JSON has no other values
