"""Message about an unknown key, the same for flags, recipes and Python."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from hone.config.aliases import alias_hint, of_other_command
from hone.config.base import Section
from hone.config.schema import is_section, locate, nearest

__all__ = ["unknown_key"]

_OF_CHECK = (["gpu"], ["json"])
"""Flags of `hone check` that are no keys."""


def unknown_key(tree: type[Section], path: Sequence[str], *, dashes: str = "") -> str:
    """The sentence about the unknown key `path` of a tree: which key is meant, as far as another
    framework's name, the spelling or the help texts say, else which keys are allowed there. Keys
    have `dashes` before them, where they are written as flags."""
    path = list(path)
    if dashes and path in _OF_CHECK:
        return "it is a flag of `hone check` alone"
    if path[-1] == "<<":
        return "recipes have no merge keys: write out the keys that `<<` would bring"
    if path == ["prompt"]:
        return (
            f'prompts are rows of a file, such as {{"prompt": "Hi"}}, which '
            f"{dashes}data.train.0.path names"
        )
    hint = of_other_command(tree, path) or alias_hint(tree, path, dashes=dashes)
    if hint and path == ["model", "shape"]:
        hint += (
            f". Name the model in {dashes}model.path; `hone check` also takes the flag "
            "--model.shape"
        )
    near = [] if hint else [key for key in nearest(tree, path) if _is_meant(tree, path, key)]
    if near:
        hint = f"did you mean {' or '.join(dashes + key for key in near)}?"
    if len(path) == 1 and locate(tree, ["rollout"]) is not None:  # what is sampled is meant first
        in_rollout = alias_hint(tree, ["rollout", *path], dashes=dashes)
        if in_rollout and in_rollout.removesuffix("?") not in (hint or ""):
            hint = "; ".join(filter(None, (in_rollout, hint)))
    return hint or _allowed(tree, path[:-1])


def _is_meant(tree: type[Section], path: Sequence[str], key: str) -> bool:
    """Whether a near key is one that is set; a section is hardly, unless it is misspelt."""
    target = locate(tree, key.split("."))
    assert target is not None, f"{key=}"
    is_misspelt = bool(get_close_matches(".".join(path), [key], 1, 0.75))
    return not is_section(target.annotation) or is_misspelt


def _allowed(tree: type[Section], above: Sequence[str]) -> str:
    target = locate(tree, above) if above else None
    section = tree if target is None else target.annotation
    if not is_section(section):
        return "no key has this name"
    return f"allowed here: {', '.join(section.model_fields)}"
