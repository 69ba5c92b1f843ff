"""The settings that a comparison names: those that the commands of its runs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hone.config.schema import locate
from hone.config.tree import TREES
from hone.observe.differences import DASH
from hone.observe.run_folder import RunFolder
from hone.rules import unread_keys
from hone.tools.report.settings import unequal_settings
from hone.tools.report.write import write_report
from tests.tools.report.test_report import Page

Tree = dict[str, Any]
RL: Tree = {"rollout": {"temperature": 1.0}, "trainer": {"optimizer": {"lr": 1e-6}}}
SFT: Tree = {"trainer": {"optimizer": {"lr": 1e-6}}}


def written(folder: Path, config: Tree, *, is_evaluation: bool = False) -> Path:
    folder.mkdir(parents=True)
    name = "eval_config.yaml" if is_evaluation else "config.yaml"
    (folder / name).write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def unequal(tmp_path: Path, *configs: Tree, is_evaluation: bool = False) -> list[list[str]]:
    folders = [
        written(tmp_path / str(number), config, is_evaluation=is_evaluation)
        for number, config in enumerate(configs)
    ]
    return unequal_settings([RunFolder.read(folder) for folder in folders]).rows


def test_what_the_command_does_not_read_is_left_out(tmp_path: Path) -> None:
    first = SFT | {"log": {"samples_per_step": 8, "project": "a"}}
    second = SFT | {"log": {"samples_per_step": 16, "project": "b"}}
    assert unequal(tmp_path / "sft", first, second) == [["log.project", "a", "b"]]
    rows = unequal(tmp_path / "rl", RL | {"log": first["log"]}, RL | {"log": second["log"]})
    assert rows == [["log.samples_per_step", "8", "16"], ["log.project", "a", "b"]]


def test_a_key_has_to_be_read_by_each_of_several_commands(tmp_path: Path) -> None:
    rl = RL | {"log": {"samples_per_step": 8, "project": "a"}}
    sft = SFT | {"log": {"samples_per_step": 16, "project": "b"}}
    assert unequal(tmp_path, rl, sft) == [["log.project", "a", "b"]]


def test_columns_that_a_command_reads_past_are_left_out(tmp_path: Path) -> None:
    def trained(**columns: str) -> Tree:
        return SFT | {"data": {"train": [{"path": "x", "columns": columns}]}}

    assert unequal(
        tmp_path,
        trained(pass_rate="a", task="a", prompt="a"),
        trained(pass_rate="b", task="b", prompt="b"),
    ) == [["data.train.0.columns.prompt", "a", "b"]]


def test_what_an_evaluation_takes_in_the_order_of_its_files(tmp_path: Path) -> None:
    first = {"data": {"shuffle": True, "eval": [{"path": "x"}], "max_prompt_tokens": 8}}
    second = {"data": {"shuffle": False, "eval": [{"path": "x"}], "max_prompt_tokens": 9}}
    assert unequal(tmp_path, first, second, is_evaluation=True) == [
        ["data.max_prompt_tokens", "8", "9"]
    ]


def test_a_missing_key_is_its_default(tmp_path: Path) -> None:
    """A second source has all keys of one; those with the values of defaults differ from nothing.
    Of a run without a configuration nothing is known."""
    source = {"path": "y", "weight": 1.0, "from_step": 1, "max_rows": 5, "columns": {"task": None}}
    one, two = ({"data": {"train": [{"path": "x"}, *more]}} for more in ([], [source]))
    assert unequal(tmp_path / "a", RL | one, RL | two) == [
        ["data.train.1.path", DASH, "y"],
        ["data.train.1.max_rows", DASH, "5"],
    ]
    stops = {"rollout": {"temperature": 1.0, "stop": []}}
    assert unequal(tmp_path / "b", RL, RL | stops, {}) == []


def test_values_are_those_of_recipes(tmp_path: Path) -> None:
    first = {"eval": {"at_start": True}, "run": {"seed": 1}, "log": {"project": None}}
    second = {"eval": {"at_start": False}, "run": {"seed": 2}, "log": {"project": "a"}}
    assert unequal(tmp_path, RL | first, RL | second) == [
        ["eval.at_start", "true", "false"],
        ["run.seed", "1", "2"],
        ["log.project", "unset", "a"],
    ]


def test_keys_of_mappings_are_compared(tmp_path: Path) -> None:
    first, second = ({"algorithm": {"loss": {"ppo_clip": weight}}} for weight in (1.0, 0.5))
    assert unequal(tmp_path, RL | first, RL | second) == [["algorithm.loss.ppo_clip", "1.0", "0.5"]]


def test_keys_of_another_version_are_named_apart(tmp_path: Path) -> None:
    folders = [
        written(tmp_path / name, RL | {"simulate": {"gpus": gpus}, "run": {"seed": gpus}})
        for name, gpus in (("a", 1), ("b", 2))
    ]
    rows, unknown = unequal_settings([RunFolder.read(folder) for folder in folders])
    assert rows == [["run.seed", "1", "2"]]
    assert unknown == ["simulate.gpus"]
    page = Page(write_report(*folders).read_text())
    assert "does not have them there: simulate.gpus." in page.text


def test_what_differs_comes_first(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, RL) for name in "ab"]

    def order() -> list[str]:
        ids = Page(write_report(*folders).read_text()).ids
        return [name.removeprefix("what-differs-between-") for name in ids[: ids.index("data")]][:3]

    assert order() == ["the-configurations", "results", "the-environments"]
    for folder, version in zip(folders, "12", strict=True):
        (folder / "environment.json").write_text(f'{{"torch": "{version}"}}')
    assert order() == ["the-configurations", "the-environments", "results"]


def test_each_unread_key_is_one_of_its_command() -> None:
    for command, tree in TREES.items():
        for key in unread_keys(command):
            assert locate(tree, key.split(".")) is not None, (command, key)
    assert "log.samples_per_step" in unread_keys("sft")
    assert "data.eval_fraction" in unread_keys("generate")
    assert unread_keys("rl") == frozenset()
