"""Record of the recipe to which a run folder belongs: two recipes of one name must not share a
folder."""

from __future__ import annotations

import json
from pathlib import Path

from hone.config.recipe import RECIPES
from hone.errors import UserError
from hone.observe.run_folder import CONFIG
from hone.observe.whole_file import write_whole

__all__ = ["record_recipe", "require_same_recipe"]

_RECORD = "recipe.json"
"""File next to `model.json` with the recipe's absolute path, or the name of a built-in one."""


def require_same_recipe(folder: Path, recipe: Path) -> None:
    """Raise UserError if the run folder that is named after `recipe` holds a run of another recipe.
    Folders with other names were chosen by the user and are not checked."""
    record = folder / _RECORD
    if not _is_named_after(folder, recipe) or not (folder / CONFIG).is_file():
        return
    try:
        before = json.loads(record.read_text(encoding="utf-8"))["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no record, or a damaged one: the run can be resumed
    if before != _identity(recipe):
        raise UserError(
            f"run.dir={str(folder)!r}, the folder of recipes named {recipe.stem!r}, holds a run of "
            f"recipe {before!r}, and this one is {_identity(recipe)!r}. Name another folder with "
            f"--run.dir. Where it is the same recipe, which was moved for example, remove "
            f"{str(record)!r}: the run then goes on from its checkpoint."
        )


def record_recipe(folder: Path, recipe: Path) -> None:
    """Record that the run folder named after `recipe` belongs to it."""
    if _is_named_after(folder, recipe):
        text = json.dumps({"recipe": _identity(recipe)}, indent=2)
        write_whole(folder / _RECORD, text, "run.dir")


def _is_named_after(folder: Path, recipe: Path) -> bool:
    return folder == Path("runs") / recipe.stem


def _identity(recipe: Path) -> str:
    return recipe.stem if recipe.parent == RECIPES else str(recipe.resolve())
