"""Recipes and flags: every spelling, every mistake, and what is written reads back."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hone.config import recipe, schema
from hone.config.base import Section
from hone.config.load import dump_config, load_config, load_noted, resolve_recipe
from hone.config.recipe import to_yaml
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.errors import UserError
from tests.tables import table

TREES = [RLConfig, SFTConfig, EvaluateConfig, GenerateConfig]
NEEDED = ["--model.path=m", "--data.train=[{path: t.jsonl}]"]


def load(*flags: str, text: str | None = None, folder: Path | None = None) -> RLConfig:
    if text is None:
        return load_config(RLConfig, None, [*NEEDED, *flags])
    assert folder is not None
    (folder / "recipe.yaml").write_text(text)
    return load_config(RLConfig, folder / "recipe.yaml", [*NEEDED, *flags])


def message(*flags: str, text: str | None = None, folder: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(*flags, text=text, folder=folder)
    return str(caught.value)


# -- spellings ----------------------------------------------------------------------------------


@table(
    "flags",
    [
        ["--rollout.n_samples_per_prompt", "3"],
        ["--rollout.n_samples_per_prompt=3"],
        ["--rollout.n-samples-per-prompt", "3"],
        ["--rollout.n-samples-per-prompt=3"],
        ["rollout.n_samples_per_prompt=3"],
        ["--rollout", "{n_samples_per_prompt: 3}"],
        ["--rollout.n_samples_per_prompt=9", "--rollout.n_samples_per_prompt=3"],
    ],
)
def test_spellings_of_a_value(flags: list[str]) -> None:
    assert load(*flags).rollout.n_samples_per_prompt == 3


@table(
    "flags, expected",
    [
        (["--trainer.offload_activations"], True),
        (["--trainer.offload_activations", "true"], True),
        (["--trainer.offload_activations=True"], True),
        (["trainer.offload_activations=true"], True),
        (["--trainer.offload_activations", "--run.seed", "1"], True),
        (["--trainer.offload_activations", "run.seed=1"], True),
        (["--trainer.offload_activations", "false"], False),
        (["--no-trainer.offload_activations"], False),
        (["--trainer.no-offload_activations"], False),
        (["--trainer.no_offload_activations"], False),
        (["--trainer.offload_activations", "--no-trainer.offload_activations"], False),
    ],
)
def test_spellings_of_a_switch(flags: list[str], expected: bool) -> None:
    assert (
        load("--trainer.offload_activations=false", *flags).trainer.offload_activations is expected
    )


def test_lists_and_mappings_inline_and_by_index() -> None:
    cfg = load(
        "--data.train.0.weight=2",
        "--data.train.1.path=u.jsonl",
        "--data.train.1.columns.prompt=q",
        "--rollout.stop",
        '["###", "no"]',
        "--trainer.optimizer.betas.1=0.99",
        "--reward.functions.0.weight=0.5",
        "--reward.functions.1={fn: length, args: {target_tokens: 5}}",
        "--reward.functions.1.args.scale=1e-3",
    )
    assert [(s.path, s.weight, s.columns.prompt) for s in cfg.data.train] == [
        ("t.jsonl", 2.0, None),
        ("u.jsonl", 1.0, "q"),
    ]
    assert cfg.rollout.stop == ("###", "no")
    assert cfg.trainer.optimizer.betas == (0.9, 0.99)
    assert [(f.fn, f.weight) for f in cfg.reward.functions] == [("exact_match", 0.5), ("length", 1)]
    assert cfg.reward.functions[1].args == {"target_tokens": 5, "scale": 0.001}


def test_text_is_taken_as_typed() -> None:
    cfg = load("--log.project=007", "--data.system_prompt", "true", "--run.dir", "1e5")
    assert (cfg.log.project, cfg.data.system_prompt, str(cfg.run.dir)) == ("007", "true", "1e5")
    assert load("--data.system_prompt=x", "--data.system_prompt=null").data.system_prompt is None
    assert load("--algorithm.correction.kind=none").algorithm.correction.kind == "none"
    assert load("--run.resume=5").run.resume == 5
    assert load("--data.prompt_template", "Q={prompt}").data.prompt_template == "Q={prompt}"
    assert load("--trainer.max_tokens_per_forward=none").trainer.max_tokens_per_forward is None


def test_yaml_means_what_it_looks_like(tmp_path: Path) -> None:
    text = """
        run: {dir: runs/no, resume: 3}
        trainer: {optimizer: {lr: 1e-6, eps: 1E-9}}
        rollout: {stop: [no, on, 1:30], temperature: .5}
        algorithm:
    """
    cfg = load(text=text, folder=tmp_path)
    assert cfg.trainer.optimizer.lr == 1e-6
    assert cfg.trainer.optimizer.eps == 1e-9
    assert cfg.rollout.stop == ("no", "on", "1:30")
    assert cfg.rollout.temperature == 0.5
    assert cfg.run.dir == Path("runs/no")
    assert cfg.algorithm == load().algorithm


def test_flags_win_over_the_recipe(tmp_path: Path) -> None:
    text = "run: {seed: 1, steps: 2}\ndata: {train: [{path: a.jsonl, weight: 3}]}"
    cfg = load("--run.seed=5", text=text, folder=tmp_path)
    assert (cfg.run.seed, cfg.run.steps, cfg.data.train[0].path) == (5, 2, "t.jsonl")


# -- mistakes -----------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_with_their_origin(tmp_path: Path) -> None:
    text = "run:\n  steps: many\ntrainer:\n  lr: 3\n  optimizer:\n    betas: [0.9, x]\n"
    found = message("--rollout.temperature=hot", "--run.sede", "3", text=text, folder=tmp_path)
    recipe_file = tmp_path / "recipe.yaml"
    for part in (
        f"run.steps: got 'many' ({recipe_file}, line 2); allowed: whole number >= 1",
        f"trainer.lr: unknown key ({recipe_file}, line 4); did you mean trainer.optimizer.lr?",
        f"trainer.optimizer.betas.1: got 'x' ({recipe_file}, line 6); allowed: number",
        "rollout.temperature: got 'hot' (flag --rollout.temperature=hot); allowed: number >= 0",
        "run.sede: unknown key (flag --run.sede); did you mean --run.seed?",
    ):
        assert part in found
    assert found.startswith("5 problems")


def test_missing_keys_are_named_with_their_help() -> None:
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, None, ["--data.eval=[{split: test}]"])
    text = str(caught.value)
    for key in ("model.path", "data.train", "data.eval.0.path"):
        assert f"{key}: required." in text
    assert "Folder in the Hugging Face layout" in text
    assert "--data.train.0.path VALUE" in text
    assert "data.train.0.path: required" not in text


@table(
    "flags, part",
    [
        (["--run.steps"], "--run.steps needs a value; allowed: whole number >= 1"),
        (["--run.steps=true"], "run.steps: got True"),
        (["--rollout.temperature=.inf"], "rollout.temperature: got inf"),
        (["--run.resume=sometimes"], "allowed: one of auto, never, or whole number"),
        (["--model.dtype=float16"], "allowed: one of auto, float32, bfloat16"),
        (["--rollout.stop=###"], "rollout.stop: got None"),
        (["--rollout.stop=x"], "rollout.stop: got 'x'"),
        (["--rollout.stop=[x"], "expected ',' or ']'"),
        (["--data.train.4.path=x"], "entry 4 of 'data.train', which has 1 entries"),
        (["--trainer.offload_activations=maybe"], "trainer.offload_activations: got 'maybe'"),
        (["--no-trainer.offload_activations=maybe"], "a switch takes true or false"),
        (["--trainer=5"], "trainer: got 5"),
        (["recipe.yaml"], "the recipe goes first"),
        (["--trainer.optimizer.betas=[1]"], "trainer.optimizer.betas"),
        (["--reward.functions={fn: math}"], "list of entries with the keys fn, weight, args"),
        (["--trainer.learning_rate=1"], "did you mean --trainer.optimizer.lr"),
        (["--lr=1"], "did you mean --trainer.optimizer.lr or --critic.lr?"),
        (["--temperature=1"], "=1); did you mean --rollout.temperature or --eval.temperature?"),
        (["--max_tokens=8"], "did you mean --rollout.max_completion_tokens?"),
        (["--num_samples=8"], "did you mean --rollout.n_samples_per_prompt?"),
        (["--top_p=1"], "training samples from the whole distribution"),
        (["--top_p=1"], "; did you mean --eval.top_p?"),
        (["--n=8"], "did you mean --rollout.n_samples_per_prompt?"),
        (["--clip=1"], "did you mean --reward.clip?"),
        (["--epochs=1"], "did you mean --data.train.0.max_epochs or --trainer.num_epochs?"),
        (["--steps=1"], "did you mean --run.steps or"),
        (["--dir=x"], "did you mean --run.dir or"),
        (["--batch_size=8"], "did you mean --rollout.prompts_per_step?"),
        (["--answer=a"], "did you mean --data.train.0.columns.answer or"),
        (["--zzzzqqq=1"], "unknown key (flag --zzzzqqq=1)"),
    ],
)
def test_mistakes_in_flags(flags: list[str], part: str) -> None:
    assert part in message(*flags)


@table(
    "text, part",
    [
        ("- 1", "must be a mapping"),
        ("run: {seed: 1\n", "not valid YAML: line"),
        ("run:\n  seed: 1\n  seed: 2\n", "line 3: the key 'run.seed' is given twice"),
        ("run:\n  steps: yes please: no", "not valid YAML: line 2"),
        ("run: 5", "run: got 5"),
        ("data: {train: {path: x}}\nrun: []", "run: got []"),
        ("run: &a\n  b: *a", "nested more than"),
        ("? [a]\n: 1", "a key must be a plain name"),
        ("run:\n  dir: !!python/name:os.system x", "not valid YAML"),
    ],
)
def test_mistakes_in_recipes(text: str, part: str, tmp_path: Path) -> None:
    assert part in message(text=text, folder=tmp_path)


def test_recipes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm.yaml").write_text("run: {seed: 1}")
    monkeypatch.setattr(recipe, "RECIPES", tmp_path)
    assert resolve_recipe("gsm") == tmp_path / "gsm.yaml"
    assert resolve_recipe(str(tmp_path / "gsm.yaml")) == tmp_path / "gsm.yaml"
    for name in ("gms", "gsm.yml", "x/gsm", str(tmp_path)):
        with pytest.raises(UserError, match="one of: gsm"):
            resolve_recipe(name)


@table(
    "tree, recipe_name, text, folder",
    [
        (RLConfig, "my.yaml", "", "runs/my"),
        (RLConfig, "my.v2.yml", "run:", "runs/my.v2"),
        (RLConfig, "my.yaml", "run: {steps: 3}", "runs/my"),
        (RLConfig, "my.yaml", "run: {dir: there}", "there"),
        (SFTConfig, "my.yaml", "", "runs/my"),
        (EvaluateConfig, "my.yaml", "", "runs/my"),
        (RLConfig, None, "", "runs/rl"),
        (SFTConfig, None, "", "runs/sft"),
        (EvaluateConfig, None, "", "runs/eval"),
    ],
)
def test_runs_of_several_recipes_do_not_share_a_folder(
    tree: type[Section],
    recipe_name: str | None,
    text: str,
    folder: str,
    tmp_path: Path,
) -> None:
    path = None if recipe_name is None else tmp_path / recipe_name
    if path is not None:
        path.write_text(text)
    for flags, expected in (([], folder), (["--run.dir=here"], "here")):
        cfg: Any = load_config(tree, path, [*NEEDED, *flags])
        assert cfg.run.dir == Path(expected)


def test_the_folder_of_a_recipe_is_for_commands_that_have_one(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("")
    assert not hasattr(load_config(GenerateConfig, path, NEEDED).run, "dir")
    path.write_text("run: 3")
    with pytest.raises(UserError, match=r"run: got 3 .*my\.yaml, line 1"):
        load_config(RLConfig, path, NEEDED)


# -- R22: every key, misspelled -----------------------------------------------------------------


def misspellings(name: str) -> set[str]:
    middle = len(name) // 2
    doubled = name[:middle] + name[middle] + name[middle:]
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return {doubled, swapped if len(name) > 3 else name + "s"} - {name}


def check_suggestions(tree: type[Section], needed: list[str]) -> None:
    """Each key of a tree, misspelled, fails and names the right one; the recipe way and by flag."""
    for field in schema.fields(tree):
        siblings = {other.path[-1] for other in schema.fields(tree)}
        for wrong in misspellings(field.path[-1]) - siblings:
            path = [*field.path[:-1], wrong]
            with pytest.raises(UserError) as caught:
                load_config(tree, None, [*needed, f"--{'.'.join(path)}=1"])
            suggested = str(caught.value).partition("did you mean")[2]
            assert f"--{field.key}" in suggested, f"{path=} {suggested=}"


@pytest.mark.parametrize("tree", TREES)
def test_R22_a_misspelled_key_names_the_right_one(tree: type[Section]) -> None:
    check_suggestions(tree, NEEDED)


def _first_key(tree: type[Section], path: Any) -> list[str]:
    return [next(schema.fields(tree)).key]


def _same_section_only(tree: type[Section], path: Any) -> list[str]:
    return [path[0]]


@table("bug", [_first_key, _same_section_only, lambda tree, path: []])
def test_R22_suggestions_planted(bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.config.unknown.nearest", bug)
    with pytest.raises(AssertionError):
        check_suggestions(GenerateConfig, NEEDED)


@table("key", ["gpus", "num_gpus", "rollout.tempratur", "lora_rank", "rollout.xyz", "xyz"])
def test_recipes_flags_and_python_answer_an_unknown_key_alike(key: str, tmp_path: Path) -> None:
    """Only the place differs, and that flags have dashes before them."""
    nested: Any = 1
    for part in reversed(key.split(".")):
        nested = {part: nested}
    with pytest.raises(UserError) as caught:
        load_noted(RLConfig, None, NEEDED, [("Python", nested)])
    said = [
        message(f"--{key}=1"),
        message(text=to_yaml(nested), folder=tmp_path),
        str(caught.value),
    ]
    hints = {one.partition("); ")[2].replace(" --", " ") for one in said}
    assert len(hints) == 1, said
    assert hints != {""}, said


def test_R22_unknown_keys_of_a_recipe_fail_in_every_section(tmp_path: Path) -> None:
    for field in schema.fields(RLConfig):
        if schema.is_section(field.annotation):
            nested: dict[str, Any] = {"zzz": 1}
            for part in reversed(field.path):
                nested = {part: nested}
            if "0" not in field.path:
                assert f"{field.key}.zzz: unknown key" in message(
                    text=to_yaml(nested), folder=tmp_path
                )


# -- round trips --------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_TRICKY = st.sampled_from(
    ["", "1e-6", "null", "true", "no", "007", "~", "{a: 1}", "- x", "#", "a: b"]
)
_TEXTS = _TRICKY | _TEXT
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
)


def values_of(annotation: Any, metadata: Any = ()) -> st.SearchStrategy[Any]:
    """Valid values of a field, as a recipe would hold them."""
    limits: dict[str, Any] = {}
    least = 0
    for bound in metadata:
        match bound:
            case bounds.Ge(ge=x):
                limits["min_value"] = x
            case bounds.Gt(gt=x):
                limits |= {"min_value": x, "exclude_min": True}
            case bounds.Le(le=x):
                limits["max_value"] = x
            case bounds.Lt(lt=x):
                limits |= {"max_value": x, "exclude_max": True}
            case bounds.MinLen(min_length=x):
                least = x
            case _:
                pass
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Annotated:
        patterns = [
            found.pattern
            for info in arguments[1:]
            for found in getattr(info, "metadata", ())
            if hasattr(found, "pattern")
        ]
        (pattern,) = patterns
        return st.from_regex(pattern.replace("[0-9]*$", "[0-9]{0,3}"), fullmatch=True)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(member, metadata) for member in arguments])
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values_of(arguments[0]), min_size=least, max_size=2)
    if origin is tuple:
        return st.tuples(*[values_of(member) for member in arguments]).map(list)
    if origin is dict:
        return st.dictionaries(_TEXTS, _VALUES, max_size=2)
    if schema.is_section(annotation):
        return sections_of(annotation)
    if annotation is float:
        return st.floats(allow_nan=False, allow_infinity=False, **limits)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        str: _TEXTS,
        Path: st.from_regex(r"[a-z0-9]{1,8}(/[a-z.]{1,5}x)?", fullmatch=True),
        type(None): st.none(),
    }
    limits = {key: value for key, value in limits.items() if not key.startswith("exclude")}
    return simple[annotation] if annotation in simple else st.integers(**limits)


def names_a_file(path: Any) -> bool:
    return path != "" and "\0" not in str(path) and not str(path).startswith("~")


def sections_of(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    needed, optional = {}, {}
    for name, info in section.model_fields.items():
        values = values_of(info.annotation, info.metadata)
        if name == "path":
            values = values.filter(names_a_file)
        (needed if info.is_required() else optional)[name] = values
    return st.fixed_dictionaries(needed, optional=optional)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("tree", TREES)
def test_a_dumped_tree_loads_equal(
    tree: type[Section], data: st.DataObject, tmp_path: Path
) -> None:
    cfg = tree.model_validate(data.draw(sections_of(tree)))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(cfg), encoding="utf-8")
    assert load_config(tree, path, []) == cfg


LEAVES = [field for field in schema.fields(RLConfig) if not schema.is_section(field.annotation)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flag_sets_what_a_recipe_sets(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(LEAVES))
    assert field.info is not None
    value = data.draw(values_of(field.annotation, field.info.metadata))
    assume(field.path[-1] != "path" or names_a_file(value))
    # An unset text is written null, so the text "null" needs the recipe.
    assume(not (isinstance(value, str) and value.lower() in ("null", "none")))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assume(isinstance(value, str) or (text.isprintable() and "Infinity" not in text))
    nested = load_config(RLConfig, None, NEEDED).model_dump(mode="json")
    inner: Any = nested
    for part in field.path[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else _entry(inner)
    inner[field.path[-1]] = value
    if field.key == "reward.model.path":
        del nested["reward"]["functions"]  # whose default depends on it
    by_flag = load_config(RLConfig, None, [*NEEDED, *_filled(field), f"--{field.key}={text}"])
    assert by_flag == RLConfig.model_validate(nested)


def _entry(entries: list[Any]) -> Any:
    if not entries:
        entries.append({"path": "e.jsonl"})
    return entries[0]


def _filled(field: schema.Field) -> list[str]:
    return ["--data.eval=[{path: e.jsonl}]"] if field.path[:3] == ("data", "eval", "0") else []
