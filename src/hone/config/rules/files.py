"""Rules on files: models, data, outputs. Nothing of the user's is imported or run."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hone.config.roles import MODEL_KEYS
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused, warning, with_facts
from hone.config.rules.view import Details, Fact, NotKnownError, differs, required
from hone.config.tree import RECIPE_COMMANDS, SUPERVISED
from hone.data.settings import SourceBase, template_fields
from hone.extras import missing_extra
from hone.families.config_values import impossible_values
from hone.families.model_facts import ModelFacts
from hone.families.registry import SERVED, SPECS, VALUE_FAMILIES
from hone.families.tokens import (
    OTHER_TOKENS,
    difference,
    lacking_room,
    tokens_beyond,
    tokens_of,
)
from hone.paths import (
    DATA_SUFFIXES,
    data_suffix,
    files_that_match,
    has_wildcards,
    is_saved_dataset,
    is_url,
    local_path,
    must_be_local,
    package_for,
)

__all__ = ["RULES", "UNREAD_OF_SOURCES", "unwritable"]

Found = Iterator[Details]

_QUICKSTART = "runs/quickstart/"
"""Where `hone quickstart` leaves what its recipes start from."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class FileFacts(Facts):
    """The facts that rules on models, data and outputs compare."""

    @cached_property
    def hub_problems(self) -> Sequence[Details]:
        """Models that the hub does not have."""
        return required(self.known.get("hub_problems"), "hub_problems")

    @cached_property
    def data_problems(self) -> Sequence[Details]:
        """Sources whose first rows cannot be read or lack a column."""
        return required(self.known.get("data_problems"), "data_problems")

    @cached_property
    def weak_pairs(self) -> Sequence[Details]:
        """Sources of pairs among whose first rows some teach nothing."""
        return required(self.known.get("weak_pairs"), "weak_pairs")

    @cached_property
    def num_train_rows(self) -> Fact[int]:
        """Rows to train on, where they are known not to fill a step."""
        number = required(self.known.get("num_train_rows"), "num_train_rows")
        return Fact(number, "the number of rows of data.train, before some are held out or dropped")

    @cached_property
    def unread_arrays(self) -> Sequence[Details]:
        """Sources that are JSON arrays too large to be read before the run."""
        return required(self.known.get("unread_arrays"), "unread_arrays")

    @cached_property
    def held_out(self) -> bool:
        """Whether rows of `data.train` are held out."""
        return bool(self["data.train"]) and self["data.eval_fraction"] > 0

    @cached_property
    def model_folder(self) -> Path:
        """The model's folder, where `model.path` names one that is here."""
        path: str | None = self["model.path"]
        return Path(required(path if path and Path(path).is_dir() else None, "model_folder"))

    @cached_property
    def is_model_file(self) -> bool:
        """Whether `model.path` names a file."""
        return Path(self["model.path"] or "").is_file()

    @cached_property
    def has_config(self) -> bool:
        """Whether the model's folder is here and has its `config.json`."""
        return (self.model_folder / "config.json").is_file()

    @cached_property
    def has_weights(self) -> bool:
        """Whether the model's folder holds weights."""
        folder = self.model_folder
        return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the model's folder holds a tokenizer."""
        return any((self.model_folder / name).is_file() for name in _TOKENIZER_FILES)

    @cached_property
    def unserved(self) -> tuple[str, ...]:
        """Features of the model that hone does not compute, as `field=value`."""
        return self.model.unserved

    @cached_property
    def lacks_template(self) -> bool:
        """Whether the chat template is no file."""
        template = self["model.chat_template"]
        return template is not None and not template.is_file()

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer, where its folder is here, has a chat template."""
        if self["model.chat_template"] is not None:
            return True
        folder = Path(self["model.tokenizer"] or self["model.path"] or "")
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise NotKnownError("has_chat_template")
        if any((folder / name).exists() for name in _TEMPLATE_FILES):
            return True
        return bool(_settings(folder).get("chat_template"))

    @cached_property
    def has_constant_prompts(self) -> bool:
        """Whether the template names no column."""
        return not template_fields(self["data.prompt_template"])


# -- places --------------------------------------------------------------------------------------


def unwritable(path: Path) -> str | None:
    """Why nothing can be written at a path that is a folder or not there yet; None where it can."""
    places = (path.absolute(), *path.absolute().parents)
    place = next(place for place in places if os.path.exists(place))
    verb = "is" if place == path.absolute() else f"lies in '{place}', which is"
    if not place.is_dir():
        return f"{verb} no folder"
    try:
        # A file without a name: what may be written says neither the user's rights, as of root,
        # nor those of the folder, as in /proc.
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as problem:
        return f"{verb} a folder where nothing can be written ({problem.strerror})"


def _bad_run_dir(view: FileFacts) -> Found:
    folder: Path = view["run.dir"]
    problem = "is a file" if folder.is_file() else unwritable(folder)
    yield from [] if problem is None else [{"problem": problem}]


def _bad_output(view: FileFacts) -> Found:
    output: Path = view["output"]
    if output.is_dir():
        yield {"problem": "is a folder"}
    elif (problem := unwritable(output.parent)) is not None:
        yield {"problem": f"cannot be written: its folder {problem}"}


def _read_and_written(view: FileFacts) -> Found:
    for index, source in enumerate(view["data.train"]):
        if source.path == str(view["output"]):
            yield {"index": index}


# -- the model -----------------------------------------------------------------------------------


def _missing_kernels(view: FileFacts) -> Found:
    """That the kernels of recurrent layers are not installed here."""
    text = missing_extra("fla", needed_by=f"gated linear attention of {view.the_model}")
    if text is not None and not view.known.get("can_install", False):
        yield {"missing": text}


def _no_config(view: FileFacts) -> Found:
    folder = view.model_folder
    if not (folder / "config.json").is_file():
        yield {"fix": _instead_of(folder)}


def _bad_config(view: FileFacts) -> Found:
    """Problems of a `config.json` with impossible values."""
    file = view.model_folder / "config.json"
    if not file.is_file():
        return
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        yield {"problem": f"is not valid JSON ({problem})"}
        return
    if not isinstance(held, dict):
        yield {"problem": f"is a {type(held).__name__} and not an object"}
        return
    yield from ({"problem": problem} for problem in impossible_values(held))


def _instead_of(folder: Path) -> str:
    """Text on the path to give in place of a folder that is no complete model."""
    inner = folder / "model"  # where a run leaves it
    if (inner / "config.json").is_file():
        return f"did you mean '{inner}'?"
    if (folder / "adapter_config.json").is_file():
        return (
            "it is a LoRA adapter, and whole models are read: merge it into its base model "
            "(merge_and_unload in PEFT); a run of hone leaves the merged one in <run.dir>/model"
        )
    return "give the folder of a model in the Hugging Face layout: config.json, weights, tokenizer"


def _incomplete(key: str) -> Any:
    """Details where a key names a folder that lacks something of a model."""

    def find(view: FileFacts) -> Found:
        path = view[key]
        if path is None or not Path(path).is_dir():
            return
        needed = (("config.json",), ("*.safetensors",), _TOKENIZER_FILES)
        for missing, patterns in zip(("config.json", "weights", "tokenizer"), needed, strict=True):
            if not any(any(Path(path).glob(pattern)) for pattern in patterns):
                yield {"path": path, "missing": missing, "fix": _instead_of(Path(path))}
                return

    return find


def _other_tokens(key: str) -> Any:
    """Details where the model of a key does not know all tokens of the policy, or has no room for
    them."""

    def find(view: FileFacts) -> Found:
        own, other = Path(view["model.tokenizer"] or view["model.path"]), Path(view[key] or "")
        if view[key] is None or own == other:
            return
        tokens, known, facts = tokens_of(own), tokens_of(other), ModelFacts.known(view[key])
        found = difference(tokens, known) if known else None
        if found is None and facts is not None and facts.vocab_size is not None:
            policy_size = view.plan.model and view.plan.model.vocab_size
            found = lacking_room(tokens, policy_size or len(tokens), facts.vocab_size)
        if found:
            yield {"path": other, "difference": found}

    return find


def _tokens_beyond(key: str) -> Any:
    """Details where texts become tokens that the model of a key lacks: its tokenizer is larger."""

    def find(view: FileFacts) -> Found:
        path, named = view[key], view["model.tokenizer"] if key == "model.path" else None
        if path is None or (facts := ModelFacts.known(path)) is None or facts.vocab_size is None:
            return
        folder = Path(named or path)
        template = "" if view["data.chat"] == "never" else _template(view, folder, key)
        if beyond := tokens_beyond(folder, facts.vocab_size, template=template):
            text, number = min(beyond.items(), key=lambda item: item[1])
            whose = f"and that of model.tokenizer '{named}'" if named else "and its tokenizer"
            yield {
                "path": path,
                "size": f"{facts.vocab_size:,}",
                "beyond": f"{whose} {len(beyond):,} that it lacks",
                "first": f"the first is {text!r}, token {number}",
            }

    return find


def _template(view: FileFacts, folder: Path, key: str) -> str:
    """The chat template that texts are put into for the model of a key."""
    given: Path | None = view["model.chat_template"] if key == "model.path" else None
    if given is not None:
        return given.read_text(encoding="utf-8") if given.is_file() else ""
    files = (folder / name for name in _TEMPLATE_FILES)
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return "\n".join([*texts, str(_settings(folder).get("chat_template", ""))])


def _settings(folder: Path) -> dict[str, Any]:
    """The content of a folder's `tokenizer_config.json`. Raises NotKnownError where it is
    damaged."""
    file = folder / "tokenizer_config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        raise NotKnownError("tokenizer_config.json") from None


def _not_here(key: str, *, must_exist: bool) -> Any:
    """Details where a key names no folder of this machine: as a mistake, or as a hub name."""

    def find(view: FileFacts) -> Found:
        path = view[key]
        if path is None or Path(path).exists():
            return
        parent = Path(path).parent
        folders = [x.name for x in parent.iterdir() if x.is_dir()] if parent.is_dir() else []
        near = get_close_matches(Path(path).name, folders, 1)
        is_local = must_be_local(path) or "/" not in path
        if is_local == must_exist and (is_local or parent.is_dir()):
            yield {
                "path": path,
                "parent": parent,
                "name": Path(path).name,
                "near": f"did you mean '{parent / near[0]}'?" if near else "",
                "make": _made(path),
            }

    return find


def _made(path: str) -> str:
    """The command that creates a missing file or folder, where one is known."""
    return "run `hone quickstart` first, which makes it" if path.startswith(_QUICKSTART) else ""


def _without_spec(key: str) -> Callable[[FileFacts], Found]:
    def find(view: FileFacts) -> Found:
        facts = None if view[key] is None else ModelFacts.known(view[key])
        if facts is not None and facts.family not in (None, *VALUE_FAMILIES):
            yield {"path": view[key], "name": facts.family}

    return find


def _scores(key: str) -> Callable[[FileFacts], Found]:
    def find(view: FileFacts) -> Found:
        facts = None if view[key] is None else ModelFacts.known(view[key])
        if facts is not None and facts.classifies:
            yield {"path": view[key]}

    return find


_MODEL = (
    warning("@is_hybrid", "@uses_gpu_of_host", each=_missing_kernels,
            says="{missing}", why="without it plain torch computes the same, many times slower"),
    error("@is_model_file", says="model.path '{model.path}' is a file",
          fix="give the folder it is in"),
    error("@model_folder", each=_no_config,
          says="model.path '{model.path}' holds no config.json", fix="{fix}"),
    error("@model_folder", each=_bad_config,
          says="the config.json of model.path '{model.path}' {problem}",
          fix="get the model again | correct the file | name another in model.path"),
    error("@has_config", "not @has_weights", given=("model.init = pretrained",),
          says="model.init is pretrained, and model.path '{model.path}' holds no weights "
          "(*.safetensors)",
          fix="set model.init to random to draw them from the seed"),
    error("@has_config", "not @has_tokenizer", given=("model.tokenizer = unset",),
          only=RECIPE_COMMANDS,
          says="model.path '{model.path}' holds no tokenizer, and model.tokenizer is unset",
          fix="set model.tokenizer to a folder or hub name"),
    *(error(each=_not_here(key, must_exist=True),
            says=f"{key} '{{path}}' does not exist",
            fix="{make} | {near} | give a folder with config.json, or a hub name with its owner, "
            "such as Qwen/Qwen3-0.6B")
      for key in ("model.path", "model.tokenizer", *MODEL_KEYS.values())),
    *(error(each=_incomplete(key), says=f"{key} '{{path}}' holds no {{missing}}", fix="{fix}")
      for key in MODEL_KEYS.values()),
    *(error(each=_other_tokens(key), given=given,
            says=f"{key} '{{path}}' has another tokenizer than the policy", why="{difference}",
            fix=OTHER_TOKENS[key])
      for key, given in (("critic.path", ("algorithm.advantage = gae",)), ("teacher.path", ()))),
    *(error(each=_tokens_beyond(key), given=given,
            says=f"{key} '{{path}}' has {{size}} tokens, {{beyond}}", why="{first}",
            fix=f"{name} | use a model that has room for them (resize_token_embeddings in "
            "transformers)")
      for key, given, name in (
          ("model.path", (), "name the tokenizer of the model in model.tokenizer"),
          ("reward.model.path", (), "put the model's own tokenizer into its folder"))),
    *(error(each=_scores(key), given=given, only=("rl", "sft", "dpo", "eval", "generate"),
            says=f"{key} '{{path}}' is a model for sequence classification",
            why="it scores texts and predicts no tokens", fix="name a language model")
      for key, given in (("model.path", ("model.init = pretrained",)), ("teacher.path", ()))),
    *(warning(each=_not_here(key, must_exist=False),
              says=f"{key} '{{path}}' is taken for a name on the hub",
              why="the folder '{parent}' is here and has no '{name}'",
              fix="{near} | write './{path}' for what must be a folder")
      for key in ("model.path", "model.tokenizer")),
    error(each="@hub_problems",
          says="{key} '{path}' is no folder here, and the hub does not give its config.json",
          why="{problem}", fix="{near} | name another model"),
    error("@lacks_template", says="model.chat_template '{model.chat_template}' is no file",
          fix="give the path of a Jinja file"),
    error("@unserved",
          says="{the_model} is of the family {family} with {unserved} in its config.json",
          why=f"{SERVED}; best are {', '.join(SPECS)}",
          fix="use another model"),
    warning("not @has_spec", given=("not @unserved",),
            says="{the_model} is of the family {family}, which is none of hone's own",
            why="layers of transformers train and sample it, after a check that packed rows give "
            "what transformers gives; a step of decode takes about a fifth longer than with fused "
            "layers, and memory is planned as of Llama's"),
    error("not @has_spec", "model.lora.rank > 0",
          says="model.lora.rank is {model.lora.rank}, and {the_model} is of the family {family}",
          why="which modules of it take adapters is not known",
          fix="model.lora.rank = 0 | use a model of another family"),
    *(error(each=_without_spec(key), given=given, only=only,
            says=f"{key} '{{path}}' is of the family {{name}}, and has to give values",
            why=f"only models of the families {', '.join(VALUE_FAMILIES)} do",
            fix="use a model of one of these")
      for key, given, only in (
          ("model.path", (), ("reward-model",)),
          ("model.path", ("algorithm.advantage = gae", "critic.path = unset"), ("rl",)),
          ("critic.path", ("algorithm.advantage = gae",), ("rl",)),
          ("reward.model.path", (), ("rl", "eval", "generate")))),
    warning("model.dtype = bfloat16", "run.device = cpu",
            why="there it is slow and imprecise", fix="model.dtype = auto"),
)  # fmt: skip


# -- data ----------------------------------------------------------------------------------------


def _sources(view: FileFacts, *sections: str) -> Iterator[tuple[str, SourceBase]]:
    for section in sections or ("train", "eval"):
        for index, source in enumerate(view[f"data.{section}"]):
            yield f"data.{section}.{index}", source


def _missing_source(view: FileFacts) -> Found:
    for key, source in _sources(view):
        path = local_path(source.path)
        if is_url(source.path) or (has_wildcards(source.path) and files_that_match(str(path))):
            continue
        if must_be_local(source.path) and not path.exists():
            present = sorted(x.name for x in path.parent.glob("*") if data_suffix(x))
            there = f"'{path.parent}' holds {', '.join(present[:5])}" if present else ""
            yield {"key": key, "path": source.path, "there": there, "make": _made(source.path)}


def _unreadable_source(view: FileFacts) -> Found:
    for key, source in _sources(view):
        path = local_path(source.path)
        if path.is_file() and data_suffix(path) is None:
            problem = f"ends in '{path.suffix}'" if path.suffix else "has no suffix"
            yield {"key": key, "path": source.path, "problem": problem}


def _missing_reader(view: FileFacts) -> Found:
    """The message for a source that cannot be read because a library is missing."""
    for key, source in _sources(view):
        path, given = local_path(source.path), f"{key}.path '{source.path}'"
        missing = None
        if path.is_file() and data_suffix(path) is None:
            continue
        if is_url(source.path):
            if (package := package_for(source.path)) is not None:
                missing = missing_extra(package, needed_by=given)
        elif not path.exists():
            if must_be_local(source.path):
                continue
            reading = (
                f"{key}.path: there is no file or folder '{source.path}', and reading it from the "
                "hub"
            )
            missing = missing_extra("datasets", needed_by=reading)
        elif is_saved_dataset(path):
            saved = f"{given} is a data set that `datasets` has saved, and reading it"
            missing = missing_extra("datasets", needed_by=saved)
        else:
            # Of a folder that also has others, the files of one split are read.
            files = [path] if path.is_file() else path.iterdir()
            if {suffix for file in files if (suffix := data_suffix(file))} == {".parquet"}:
                missing = missing_extra("pyarrow", needed_by=given)
        yield from [] if missing is None else [{"missing": missing}]


def _bad_pattern(view: FileFacts) -> Found:
    for key, source in _sources(view):
        try:
            re.compile(source.answer_pattern or "")
        except re.error as problem:
            yield {"key": key, "pattern": source.answer_pattern, "problem": problem}


def _repeated(view: FileFacts, section: str) -> Found:
    """Sources of a section whose rows an earlier one of `data.train` reads."""
    first: dict[tuple[str, str, str | None], str] = {}
    for key, source in _sources(view, *dict.fromkeys(("train", section))):
        identity = source.path, source.split, source.subset
        if identity in first and key.startswith(f"data.{section}."):
            yield {"key": key, "first": first[identity], "path": source.path}
        if key.startswith("data.train."):
            first.setdefault(identity, key)


_OF_REWARDS = ("columns.task", "answer_pattern", "task")
_OF_PAIRS = (*_OF_REWARDS, "columns.margin")
_OF_SCORES = (*_OF_REWARDS, "columns.answer", "columns.label")
_OF_ORDER = ("columns.difficulty", "columns.pass_rate")
_OF_RATES = ("columns.pass_rate",)
_OF_THE_MIX = ("weight", "max_epochs", "from_step", "until_step")
UNREAD_OF_SOURCES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rl": {"eval": _OF_ORDER},
    "sft": {"train": (*_OF_REWARDS, *_OF_RATES), "eval": (*_OF_REWARDS, *_OF_ORDER)},
    "dpo": {"train": (*_OF_PAIRS, *_OF_RATES), "eval": (*_OF_PAIRS, *_OF_ORDER)},
    "reward-model": {"train": (*_OF_SCORES, *_OF_RATES), "eval": (*_OF_SCORES, *_OF_ORDER)},
    "eval": {"train": (*_OF_THE_MIX, *_OF_ORDER), "eval": _OF_ORDER},
    "generate": {"train": (*_OF_THE_MIX, *_OF_ORDER)},
}
"""Keys of each source that a command reads past: demonstrations have no rewards, and what is not
trained on is taken whole, in the order of its files."""


def _unused_columns(view: FileFacts) -> Found:
    for section, names in UNREAD_OF_SOURCES[view.command].items():
        for key, source in _sources(view, section):
            for name in names:
                *above, last = name.split(".")
                owner = getattr(source, above[0]) if above else source
                if differs(owner, last):
                    yield {"key": f"{key}.{name}", "command": view.command}


def _idle_rates(view: FileFacts) -> Found:
    for key, source in _sources(view, "train"):
        if source.columns.pass_rate is not None and view["data.curriculum.pass_rate"] is None:
            yield {"key": f"{key}.columns.pass_rate"}


_DATA = (
    error("not data.train", only=("rl", *SUPERVISED, "generate"),
          fix="name at least one source"),
    error("not data.eval", "not @held_out", only=("eval",),
          says="there is nothing to evaluate on",
          why="data.eval names no source, and data.eval_fraction holds no rows of data.train out",
          fix="set data.eval | set data.train and data.eval_fraction"),
    error(each=_missing_source, says="{key}.path: there is no '{path}'", why="{there}",
          fix="{make} | put it there | name another file with --{key}.path"),
    error(each=_unreadable_source, says="{key}.path '{path}' {problem}",
          fix=f"use a file in one of these formats: {', '.join(DATA_SUFFIXES)}"),
    error(each=_missing_reader, says="{missing}"),
    error(each="@data_problems", says="{key}: {problem}"),
    warning(each="@weak_pairs", says="{key}: {problem}",
            fix="leave such rows out"),
    warning("rollout.prompts_per_step > @num_train_rows",
            why="a step draws prompts more than once, each time as a group of its own",
            fix="rollout.prompts_per_step = {num_train_rows} | add rows"),
    warning("data.examples_per_step > @num_train_rows",
            why="a step trains on rows more than once",
            fix="data.examples_per_step = {num_train_rows} | add rows"),
    error(each=_bad_pattern, says="{key}.answer_pattern '{pattern}' is no regular expression",
          why="{problem}"),
    warning(each="@unread_arrays",
            says="{key} '{path}' is a JSON array of {mib} MiB",
            why="whether its rows have the columns that reward functions need is not checked "
            "before the run reads it",
            fix="use JSON lines (.jsonl), of which it is"),
    warning(each=lambda view: _repeated(view, "train"),
            says="{key}.path repeats {first}.path ('{path}')",
            fix="raise {first}.weight to draw a source more often"),
    warning(each=lambda view: _repeated(view, "eval"),
            says="{key}.path and {first}.path read the same rows ('{path}')",
            why="evaluation would measure what was trained on",
            fix="use another split | leave data.eval empty and set data.eval_fraction"),
    warning("data.eval_fraction", "data.eval",
            says="data.eval_fraction is {data.eval_fraction}, and data.eval names sources",
            why="nothing is held out of the training rows", fix="remove one of the two"),
    error("@has_constant_prompts",
          says="data.prompt_template is '{data.prompt_template}', the same text for every row",
          fix="name a column in braces"),
    error("data.chat = always", "not @has_chat_template",
          says="data.chat is always, and the tokenizer has no chat template",
          fix="set model.chat_template to the path of a Jinja file | data.chat = auto"),
    error("data.system_prompt is set", "not @has_chat_template", given=("data.chat = auto",),
          says="data.system_prompt is set, and the tokenizer has no chat template",
          why="a system message is one of a chat",
          fix="set model.chat_template to the path of a Jinja file | put the text into "
          "data.prompt_template, and remove data.system_prompt"),
    *(unused(key, "data.chat = never", instead="data.chat = auto")
      for key in ("data.system_prompt", "model.chat_template")),
    error("data.max_image_tokens < @tokens_per_image",
          why="the family makes as many of an image of any size",
          fix="data.max_image_tokens = {tokens_per_image}"),
    error("engine.max_num_batched_tokens < @tokens_per_image",
          why="its tokens see each other, and one step of the engine computes them",
          fix="engine.max_num_batched_tokens = {tokens_per_image} | more"),
    *(warning(f"@largest_image >= {room}", only=only,
              why="a row with such an image is longer, and is left out or refused",
              fix=f"lower data.max_image_tokens | raise {room}")
      for room, only in (("data.max_prompt_tokens", ("rl", "eval", "generate")),
                         ("data.max_tokens", SUPERVISED))),
    *(unused(f"data.({names})", given=("not @sees_images", "not @unserved"),
             why="the model is one of text")
      for names in ("max_image_tokens|image_workers", "image_errors|image_urls")),
    unused("model.image_cache_gib", given=("not @sees_images", "not @unserved"),
           why="the model is one of text"),
    unused("data.shuffle", only=("eval", "generate"),
           why="what is not trained on is taken in the order of its files"),
    *(unused("data.shuffle_window", given=given, only=(command,),
             why="what is not trained on is taken in the order of its files")
      for command, given in (("eval", ("not data.eval_fraction",)), ("generate", ()))),
    unused("data.max_eval_rows", given=("not data.eval_fraction",), why="no rows are held out"),
    unused("data.max_eval_rows", given=("data.eval_fraction",), only=("generate",),
           why="`hone generate` leaves out all rows that `data.eval_fraction` holds out"),
    unused("data.(eval|eval_fraction)", only=("generate",),
           why="`hone generate` answers the prompts of data.train that are not held out"),
    warning(each=_unused_columns, only=tuple(UNREAD_OF_SOURCES),
            says="{key} is set and has no effect", why="`hone {command}` does not use it",
            fix="remove {key}"),
    warning(each=_idle_rates, only=("rl",), says="{key} is set and has no effect",
            why="no prompt rests", fix="data.curriculum.pass_rate = [0, 1] | remove {key}"),
)  # fmt: skip

_PLACES = (
    error(each=_bad_run_dir, says="run.dir '{run.dir}' {problem}", fix="name another folder"),
    error(each=_bad_output, says="output '{output}' {problem}", fix="give the path of a new file"),
    error(each=_read_and_written, only=("generate",),
          says="output '{output}' is also read as data.train.{index}.path",
          fix="name another output"),
)  # fmt: skip

RULES = with_facts(FileFacts, *_MODEL, *_DATA, *_PLACES)
