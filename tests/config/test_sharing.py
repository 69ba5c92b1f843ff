"""One recipe serves all commands; what is in no tree is a mistake in each."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from hone.config import schema
from hone.config.base import Section
from hone.config.load import dump_config, load_config, load_noted
from hone.config.recipe import to_yaml
from hone.config.sharing import command_of, key_paths
from hone.config.tree import SUPERVISED, TREES, GenerateConfig, RLConfig, SFTConfig
from hone.errors import UserError
from tests.tables import table

NEEDED = ["--model.path=m", "--data.train=[{path: t.jsonl}]"]
OTHERS = [name for name in TREES if name not in ("rl", *SUPERVISED)]


def write(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "mine.yaml"
    file.write_text(to_yaml(values))
    return file


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def test_demonstrations_take_a_recipe_of_reinforcement_learning(tmp_path: Path) -> None:
    values = {
        "run": {"dir": "runs/both", "steps": 3},
        "data": {"max_tokens": 99, "examples_per_step": 4},
        "rollout": {"temperature": 0.5},
        "reward": {"functions": [{"fn": "math"}]},
        "trainer": {"prompts_per_minibatch": 2, "optimizer": {"lr": 0.25}},
    }
    recipe = write(tmp_path, values)
    cfg, notes = load_noted(SFTConfig, recipe, NEEDED)
    assert (cfg.run.steps, cfg.trainer.optimizer.lr, cfg.data.max_tokens) == (3, 0.25, 99)
    assert cfg.run.dir == Path("runs/both/sft")
    left_out = "rollout, reward, trainer.prompts_per_minibatch"
    assert notes == [f"`hone sft` leaves out of mine.yaml: {left_out}"]
    run, notes = load_noted(RLConfig, recipe, NEEDED)
    assert (run.run.dir, run.rollout.temperature) == (Path("runs/both"), 0.5)
    assert notes == ["`hone rl` leaves out of mine.yaml: data.max_tokens, data.examples_per_step"]


@table("trained", [RLConfig, SFTConfig])
@table("command", OTHERS)
def test_every_command_takes_a_whole_recipe_of_training(
    command: str, trained: type[Section], tmp_path: Path
) -> None:
    whole = tmp_path / "whole.yaml"
    whole.write_text(dump_config(load_config(trained, None, NEEDED)))
    cfg: Any
    cfg, notes = load_noted(TREES[command], whole, [])
    assert cfg.model.path == "m"
    if command != "plan" or trained is SFTConfig:
        assert notes[0].startswith(f"`hone {command}` leaves out of whole.yaml: ")


def test_a_misspelt_key_of_training_is_a_mistake_in_every_command(tmp_path: Path) -> None:
    commands = cycle(OTHERS)
    for field in list(schema.fields(RLConfig))[::4]:
        if "0" in field.path or schema.is_section(field.annotation):
            continue
        wrong = (*field.path[:-1], f"{field.path[-1]}x")
        (tmp_path / "mine.yaml").write_text(
            to_yaml(nested(wrong, 1))
            + "reward: {functions: [{fn: math}]}\n" * (wrong[0] != "reward")
        )
        with pytest.raises(UserError) as caught:
            load_config(TREES[next(commands)], tmp_path / "mine.yaml", [])
        told = str(caught.value)
        assert f"{'.'.join(wrong)}: unknown key ({tmp_path / 'mine.yaml'}, line " in told


@table(
    "command, values, told",
    [
        (
            "rl",
            {"data": {"max_tokens": 9}},
            "it is a key of `hone sft`, `hone dpo`, `hone reward",
        ),
        ("rl", {"data": {"max_tokens": 9}, "rollout": {"temperature": 1}}, None),
        ("sft", {"trainer": {"prompts_per_minibatch": 9}}, "it is a key of `hone rl`"),
        ("sft", {"rollout": {"temprature": 1}}, "did you mean rollout.temperature"),
        ("sft", {"reward": {}, "trainer": {"optimiser": 1}}, "did you mean trainer.optimizer"),
        ("rl", {"steps": 3}, "did you mean run.steps"),
        ("eval", {"modle": {"path": "m"}}, "modle: unknown key"),
        ("eval", {"trainer": {"lr": 1}}, "did you mean trainer.optimizer.lr"),
        ("eval", {"trainer": 3, "algorithm": {"loss": "gspo"}}, None),
        ("rl", {"plan": {"gpus": 8}, "generation": {"top_p": 0.5}}, None),
        ("rl", {"plan": {"gpu_number": 8}}, "plan.gpu_number: unknown key"),
    ],
)
def test_what_is_left_out_and_what_is_refused(
    command: str, values: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    recipe = write(tmp_path, values)
    if told is None:
        assert load_noted(TREES[command], recipe, NEEDED)[1]
        return
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        load_config(TREES[command], recipe, NEEDED)


def test_flags_are_of_the_commands_own_tree(tmp_path: Path) -> None:
    recipe = write(tmp_path, {"rollout": {"temperature": 0.5}})
    with pytest.raises(UserError, match=r"in `hone rl`|a key of `hone rl`"):
        load_config(TREES["eval"], recipe, [*NEEDED, "--rollout.prompts_per_step=3"])


def test_an_evaluation_ends_samples_as_the_run_does(tmp_path: Path) -> None:
    values = {"rollout": {"stop": ["END"]}, "run": {"steps": 3}}
    cfg: Any = load_config(TREES["eval"], write(tmp_path, values), NEEDED)
    assert cfg.eval.stop == ("END",)
    cfg = load_config(TREES["eval"], write(tmp_path, values | {"eval": {"stop": []}}), NEEDED)
    assert cfg.eval.stop == ()


TRAINS = {"run": {"dir": "r", "steps": 3}, "model": {"path": "m", "init": "random"}}
NO_TRAINING = {"model": {"path": "m"}}
EVAL, GENERATE = ("eval", "run.dir"), ("generate", "output")


@table(
    "recipe, command, trained, flags, expected",
    [
        (TRAINS, EVAL, "r", "", ("r/model", "r/eval")),
        (TRAINS, EVAL, "", "", ("m", "r/eval-start")),
        (TRAINS, EVAL, "r", "--model.path=m", ("m", "r/eval-start")),
        (TRAINS, EVAL, "r", "--model.path=r/model", ("r/model", "r/eval")),
        (TRAINS, EVAL, "r", "--model.path=x", ("x", "r/eval")),
        (TRAINS, EVAL, "r", "--run.dir=here", ("r/model", "here")),
        (TRAINS, EVAL, "r other", "--run.dir=other", ("other/model", "other")),
        (TRAINS, GENERATE, "r", "", ("r/model", "r/completions.jsonl")),
        (TRAINS, GENERATE, "", "", ("m", "r/completions-start.jsonl")),
        (TRAINS, GENERATE, "r", "--output=x.jsonl", ("r/model", "x.jsonl")),
        (
            {"run": {"steps": 3}, "model": {"path": "m"}},
            EVAL,
            "",
            "",
            ("m", "runs/mine/eval-start"),
        ),
        (NO_TRAINING, EVAL, "", "", ("m", "runs/mine")),
        (NO_TRAINING, EVAL, "runs/mine", "", ("runs/mine/model", "runs/mine/eval")),
        (NO_TRAINING, GENERATE, "", "", ("m", "completions.jsonl")),
    ],
)
def test_what_a_recipes_run_has_trained_is_what_is_sampled(  # noqa: PLR0917
    recipe: dict[str, Any],
    command: tuple[str, str],
    trained: str,
    flags: str,
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in trained.split():
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / "config.json").touch()
    values = recipe | {"data": {"train": [{"path": "t.jsonl"}]}}
    (name, key), (model, place) = command, expected
    cfg: Any
    cfg, notes = load_noted(TREES[name], write(tmp_path, values), flags.split())
    assert (cfg.model.path, f"{locate(cfg, key)}") == (model, place)
    is_random = recipe is TRAINS and model == "m"
    assert cfg.model.init == ("random" if is_random else "pretrained")
    told = [note for note in notes if note.startswith(f"model.path is {model}: ")]
    assert len(told) == ("model.path" not in flags and (recipe is not NO_TRAINING or trained != ""))
    if "output" in cfg.model_fields_set:
        assert "--output" in flags


def locate(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def test_generation_samples_as_the_run_does_and_leaves_evaluation_out(tmp_path: Path) -> None:
    values = {
        "rollout": {"max_completion_tokens": 7, "temperature": 0.5, "top": {}},
        "data": {"eval": [{"path": "e.jsonl"}], "max_prompt_tokens": 5},
    }
    del values["rollout"]["top"]
    cfg = load_config(GenerateConfig, write(tmp_path, values), NEEDED)
    assert (cfg.generation.max_completion_tokens, cfg.generation.temperature) == (7, 0.5)
    assert (cfg.data.eval, cfg.data.max_prompt_tokens) == ((), 5)
    cfg = load_config(
        GenerateConfig, write(tmp_path, values), [*NEEDED, "--generation.temperature=1"]
    )
    assert (cfg.generation.max_completion_tokens, cfg.generation.temperature) == (7, 1)


@table(
    "keys, command",
    [
        ("", "rl"),
        ("model.path", "rl"),
        ("model.path engine.enable_sleep", "rl"),
        ("model.path data.train", "rl"),
        ("model.path data.train data.max_tokens trainer.optimizer.lr", "sft"),
        ("model.path data.train rollout.temperature trainer.optimizer.lr", "rl"),
        ("model.path data.eval reward.functions eval.top_p", "eval"),
        ("model.path data.eval reward.functions eval.top_p data.train.0.path", "rl"),
        ("model.path data.train output generation.top_p", "generate"),
        ("model.path data.train.0.path data.train.0.columns.rejected", "dpo"),
        ("model.path data.train.0.columns.margin algorithm.center_coef", "reward-model"),
    ],
)
def test_whose_recipe_it_is(keys: str, command: str) -> None:
    assert command_of([tuple(key.split(".")) for key in keys.split()]) == command


@table(
    "keys, command",
    [
        ("model.path data.train", "dpo"),
        ("model.path data.train reward.functions", "rl"),
        ("model.path data.train algorithm.center_coef", "reward-model"),
    ],
)
def test_pairs_decide_where_keys_do_not(keys: str, command: str) -> None:
    assert command_of([tuple(key.split(".")) for key in keys.split()], has_pairs=True) == command


def test_paths_of_a_recipe() -> None:
    values = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}]}
    assert list(key_paths(values)) == [("a", "b"), ("a", "c"), ("d",)]
    within = list(key_paths(values, into_lists=True))
    assert within == [("a", "b"), ("a", "c"), ("d", "0", "e")]
