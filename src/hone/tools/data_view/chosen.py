"""Whose rows are looked at, and how: the recipe, the sources, and the command that would read them.

The command is the one that `--for` names, else the one whose keys the recipe and the flags have.
Where several have them all, the columns of the first rows decide.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hone.config.data_view import VIEWS, ViewConfig
from hone.config.fit import fit_to_context
from hone.config.load import load_noted, resolve_recipe
from hone.config.recipe import read_recipe, recipe_names
from hone.config.schema import locate
from hone.config.sharing import key_paths
from hone.data.columns import choose_column, value_of
from hone.data.settings import SourceBase
from hone.data.sources import SourceRow, iter_source, source_names
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.paths import must_be_local

__all__ = ["HEAD_ROWS", "Viewed", "choose"]

HEAD_ROWS = 256
"""First rows of a source, by whose columns the command is recognised."""
_RECIPES = (".yaml", ".yml")
_UNPAIRED = "--algorithm.loss=kto"


@dataclass(frozen=True, slots=True)
class Viewed:
    """The configuration of the command that would read the rows."""

    cfg: ViewConfig
    command: str
    since: str
    """How the command is known, in words."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def said(self) -> list[str]:
        """How the rows are read, and what else is to be told."""
        return [f"read as `hone {self.command}` would: {self.since}", *self.notes]

    @property
    def sources(self) -> list[tuple[SourceBase, str, str]]:
        """Each source with its unique name, and with its key."""
        data = self.cfg.data
        keys = [f"data.train.{number}" for number in range(len(data.train))]
        keys += [f"data.eval.{number}" for number in range(len(data.eval))]
        sources = [*data.train, *data.eval]
        return list(zip(sources, source_names(sources), keys, strict=True))


def choose(words: Sequence[str], command: str | None) -> Viewed:
    """The configuration of `[RECIPE] [SOURCE ...] [flags]`, for the command that `--for` names
    where it does. Raises UserError."""
    recipe, flags = _split(words)
    if command is not None and command not in VIEWS:
        raise UserError(f"--for takes one of {', '.join(VIEWS)}, got {command!r}")
    if command is not None:
        name, since = command, "--for says so"
        cfg = load_noted(VIEWS[name], recipe, flags)[0]
    else:
        name, since, cfg = _recognised(recipe, flags)
    if not cfg.data.train and not cfg.data.eval:
        raise UserError(
            "no data are named: give a SOURCE (a file, a folder, or a name on the hub such as "
            "openai/gsm8k), a recipe, or --data.train.0.path"
        )
    facts = ModelFacts.known(cfg.model.path, may_fetch=True) if cfg.model.path else None
    cfg, notes = fit_to_context(cfg, None if facts is None else facts.context_length)
    return Viewed(cfg, name, since, notes)


def _recognised(recipe: Path | None, flags: Sequence[str]) -> tuple[str, str, ViewConfig]:
    """The command that keys or columns are for, how that is known, and its configuration. Raises
    UserError."""
    names = _fitting(recipe, flags)
    if len(names) == 1:
        cfg = load_noted(VIEWS[names[0]], recipe, flags)[0]
        return names[0], f"only it has keys such as {_own_key(recipe, flags, names[0])}", cfg
    loaded: dict[str, ViewConfig] = {}
    for name in names:
        with suppress(UserError):
            loaded[name] = load_noted(VIEWS[name], recipe, flags)[0]
    if not loaded:
        load_noted(VIEWS[names[0]], recipe, flags)  # raises
    name, since, extra = _by_columns(next(iter(loaded.values())), list(loaded))
    return name, since, load_noted(VIEWS[name], recipe, [*extra, *flags])[0]


def _split(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe, if one is named, and the flags, with those of the sources before them."""
    recipe: Path | None = None
    sources: list[str] = []
    rest = list(words)
    while rest and not rest[0].startswith("-") and ("=" not in rest[0] or Path(rest[0]).exists()):
        word = rest.pop(0)
        if not _is_recipe(word):
            sources.append(word)
        elif recipe is not None:
            raise UserError(f"two recipes are named, '{recipe}' and '{word}'; name one")
        else:
            recipe = resolve_recipe(word)
    if not sources:
        return recipe, rest
    # Those of a recipe are replaced; so that answer_pattern and columns follow as flags.
    train = json.dumps([{"path": path} for path in sources])
    return recipe, [f"--data.train={train}", "--data.eval=[]", *rest]


def _is_recipe(word: str) -> bool:
    path = Path(word).expanduser()
    if path.suffix in _RECIPES:
        return True
    if path.exists() or must_be_local(word) or "/" in word:
        return False
    # One word that is nothing here: a name of a recipe, or a mistake that the message explains.
    return word in recipe_names() or not any(sign in word for sign in "*?[:")


def _paths(recipe: Path | None, flags: Sequence[str]) -> list[tuple[str, ...]]:
    values = {} if recipe is None else read_recipe(recipe).values
    named = [word.removeprefix("--").partition("=")[0] for word in flags if word.startswith("--")]
    in_flags = (tuple(name.replace("-", "_").split(".")) for name in named)
    return [*key_paths(values, into_lists=True), *in_flags]


def _fitting(recipe: Path | None, flags: Sequence[str]) -> list[str]:
    """The commands that know the most of the keys."""
    paths = _paths(recipe, flags)
    known = {
        name: sum(locate(tree, path) is not None for path in paths) for name, tree in VIEWS.items()
    }
    return [name for name, number in known.items() if number == max(known.values())]


def _own_key(recipe: Path | None, flags: Sequence[str], name: str) -> str:
    """A key that this command has, and another one lacks."""
    found = (
        path
        for path in _paths(recipe, flags)
        if any(locate(tree, path) is None for tree in VIEWS.values())
        and locate(VIEWS[name], path) is not None
    )
    return ".".join(next(found, ("data",)))


def _by_columns(cfg: ViewConfig, names: Sequence[str]) -> tuple[str, str, list[str]]:
    """The command of `names` that the columns of the first source are for, how that is known, and
    flags that it needs. What is wrong with the source is reported by who reads it."""
    sources = [*cfg.data.train, *cfg.data.eval]
    rows: list[SourceRow] = []
    with suppress(UserError):
        for source in sources[:1]:
            rows += islice(iter_source(source), HEAD_ROWS)
    if not rows:
        return names[0], "no row says otherwise", []
    name, since, extra = _guess(rows, sources[0])
    if name in names:
        return name, since, extra
    if name == "dpo" and "reward-model" in names:
        return "reward-model", since, []
    return names[0], f"of those that have all keys ({', '.join(names)}) it is the first", []


def _guess(rows: Sequence[SourceRow], source: SourceBase) -> tuple[str, str, list[str]]:
    def column(role: str) -> str | None:
        with suppress(UserError):
            return choose_column(rows, source, role, required=False)
        return None

    if "chosen" in rows[0].columns and "rejected" in rows[0].columns:
        return "dpo", "the rows have `chosen` and `rejected`", []
    completion, answer, prompt = column("completion"), column("answer"), column("prompt")
    labels = {value_of(row.columns, "label") for row in rows if _is_plain(row, "label")}
    # True and False are 1 and 0.
    if completion is not None and labels - {None} and labels <= {None, True, False}:
        since = f"the rows have `{completion}` and a `label` that is true or false"
        return "dpo", f"{since}, as KTO's", [_UNPAIRED]
    if completion is not None and answer is None:
        return "sft", f"the rows have `{completion}` and no answer", []
    if prompt is None:
        return "rl", "the rows have no demonstration and no pair", []
    turns = next((v for row in rows if (v := value_of(row.columns, prompt)) is not None), None)
    last = turns[-1] if isinstance(turns, list) and turns else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return "sft", f"the dialogues in `{prompt}` end with the assistant", []
    if completion is not None:
        since = f"the rows have `{answer}` besides `{completion}`; --for sft learns the latter"
        return "rl", since, []
    return "rl", "the rows have no demonstration and no pair", []


def _is_plain(row: SourceRow, column: str) -> bool:
    return isinstance(value_of(row.columns, column), bool | int | str | float)
