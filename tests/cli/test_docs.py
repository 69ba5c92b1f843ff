"""The documentation: links lead somewhere, and the reference has every key."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hone.config.aliases import FRAMEWORKS, aliases
from hone.config.commands import COMMANDS
from hone.config.recipe import RECIPES, recipe_names
from hone.config.schema import fields, is_section, locate
from hone.config.tree import TREES
from hone.envs import Env, Episode

ROOT = Path(__file__).parents[2]


def program(name: str) -> ModuleType:
    """A file of `docs/site`."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / f"docs/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return program("build")


def test_every_key_is_in_the_reference(site: ModuleType) -> None:
    by_command = site.key_reference().split("\n## hone ")[1:]
    assert len(by_command) == len(TREES)
    for text, (command, tree) in zip(by_command, TREES.items(), strict=True):
        assert text.startswith(f"{command}\n")
        for field in fields(tree):
            name = f"### `{field.key}`" if is_section(field.annotation) else f"`--{field.key}`"
            assert name in text, field.key


def test_names_of_other_frameworks_stand_at_their_keys(site: ModuleType) -> None:
    page = site.name_reference()
    for row in aliases():
        for framework in FRAMEWORKS:
            for name in row.names.get(framework, ()):
                assert f"| `{name}` |" in page, name
    said = site.names_elsewhere("rollout.n_samples_per_prompt")
    assert "TRL: `num_generations`" in said
    assert f"*Elsewhere*: {said}" in site.key_reference()
    assert site.names_elsewhere("run.seed.nothing") == ""


def test_links_between_pages_lead_to_files(site: ModuleType) -> None:
    for pattern in site.PAGES:
        for page in ROOT.glob(pattern):
            for link in site._LINK.findall(page.read_text()):
                is_outside = "://" in link or link.startswith("mailto:")
                assert is_outside or (page.parent / link).exists(), f"{page}: {link}"


def test_commands_and_flags_that_pages_name_are_there(site: ModuleType) -> None:
    every = (page for pattern in site.PAGES for page in ROOT.glob(pattern))
    pages = [page for page in every if page.name != "CHANGELOG.md"]
    unknown = []
    for page in pages:
        code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
        text = "\n".join(code).replace("\\\n", " ")
        for command, words in re.findall(r"(?m)(?:^|`)hone ([a-z][a-z-]*)(.*)$", text):
            own = [tree for name, tree in TREES.items() if name.split()[0] == command]
            trees = own or [TREES["rl"]]
            if command == "check":  # takes a shape in place of a model, as `hone bench` does
                trees = [*trees, TREES["bench train"]]
            if command not in COMMANDS:
                unknown.append(f"{page.name}: hone {command}")
            unknown += [
                f"{page.name}: hone {command} --{key}"
                for key in re.findall(r" --(\w+(?:\.\w+)+)", words)
                if not any(locate(tree, key.split(".")) for tree in trees)
            ]
    assert len(pages) > 10
    assert unknown == []


def test_the_table_of_recipes_has_what_their_comments_say(site: ModuleType) -> None:
    table = {
        name: site.recipe_facts((RECIPES / f"{name}.yaml").read_text()) for name in recipe_names()
    }
    assert table["gsm8k"][1:3] == ("Qwen3-0.6B", "one of 80 GB, by the prediction of `hone check`")
    assert table["code"][3:] == ("not measured", "not measured")
    assert table["quickstart-rl"][0].startswith("The quick start's second half: GRPO on sums")
    assert table["quickstart-rl"][1:] == (
        "two layers, 0.4 M weights",
        "none",
        "a minute on two idle cores, both halves",
        "held-out accuracy from 0.465 to 0.960 (benchmarks/README.md)",
    )
    for name, (title, *facts) in table.items():
        text = " ".join((RECIPES / f"{name}.yaml").read_text().replace("#", " ").split())
        assert title, name
        for label, fact in zip(("Model", "GPU", "Time", "Curve"), facts, strict=True):
            said = f"{label}: " in text or (
                label in ("Time", "Curve") and "Time and curve: " in text
            )
            assert bool(fact) == said, (name, label)


def test_long_keys_of_running_text_may_break_and_blocks_of_code_stay() -> None:
    key, short = "trainer.optimizer.weight_decay_of_all", "a.b"
    blocks = f"<pre><code>{key}</code></pre> <pre><span></span><code>{key}</code></pre>"
    kept = f"<code>{short}</code> {blocks}"
    page = program("breaks").on_post_page(f"<code>{key}</code> {kept}", page=None, config=None)
    broken = "trainer.<wbr>optimizer.<wbr>weight_<wbr>decay_<wbr>of_<wbr>all"
    assert page == f"<code>{broken}</code> {kept}"


def test_every_page_has_its_place(site: ModuleType) -> None:
    nav = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")]:
        assert str(page.relative_to(ROOT)) in nav, page.name


def test_the_house_has_every_room_in_the_order_of_imports() -> None:
    """CONTRIBUTING.md, against the contract in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        [name.strip() for name in layer.split("|")] for layer in settings["contracts"][0]["layers"]
    ]
    floors = {name.removeprefix("hone."): n for n, layer in enumerate(layers) for name in layer}
    (house,) = re.findall(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    rows = [re.findall(r"\w+", line[:38]) for line in house.splitlines()]
    named = [name for row in rows for name in row]
    folders = {path.parent.name for path in (ROOT / "src/hone").glob("*/__init__.py")}
    assert folders - {*named} <= {"recipes"}
    for above, below in pairwise(rows):
        lowest, highest = max(floors[x] for x in above), min(floors[x] for x in below)
        assert lowest < highest, (above, below)


def test_the_table_of_symptoms_names_alarms_keys_and_tests_that_are_there() -> None:
    """And every alarm that advises a setting has its row."""
    text = (ROOT / "docs/monitoring.md").read_text()
    table = text.partition("| rule of the guides |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    source = (ROOT / "src/hone/observe/alarms.py").read_text()
    advising = re.findall(r'Rule\(\n\s+"(\w+)",(?:(?!Rule\().)*?\n\s+advice\.', source, re.DOTALL)
    assert sorted(re.findall(r"\w+", row[1])[0] for row in rows) == sorted(advising)
    missing: list[str] = []
    for _, _, _, changes, test in rows:
        keys = re.findall(r"`(\w+(?:\.\w+)+)`", changes)
        missing += [key for key in keys if not locate(TREES["rl"], key.split("."))]
        path, _, name = test.strip("`").rpartition("::")
        tests = (ROOT / (path or "tests/loops/test_symptoms.py")).read_text()
        if f"def {name}(" not in tests and f'    "{name}": Case(' not in tests:
            missing.append(test)
    assert missing == []


EXTENDING = (ROOT / "docs/extending.md").read_text()


def test_the_diffs_of_the_page_on_extending_are_in_the_repository() -> None:
    """What a diff adds or leaves as it is stands in its file, in this order; what it removes does
    not stand between."""
    num_hunks = 0
    for diff in re.findall(r"^```diff\n(.*?)^```", EXTENDING, re.DOTALL | re.MULTILINE):
        for name, body in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.M):
            if name == "mine.yaml":
                continue
            text = (ROOT / name).read_text()
            for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
                kept = [line[1:] for line in hunk.splitlines() if not line.startswith("-")]
                assert "\n".join(kept) in text, f"{name}: {kept}"
                num_hunks += 1
    assert num_hunks > 10


def test_the_environment_of_the_page_on_extending_works() -> None:
    (source,) = re.findall(r"```python\n# guess.py\n(.*?)```", EXTENDING, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    env: Env = namespace["Guess"]()
    said = [env.step(episode(*turns)) for turns in (["7 "], ["7", "x"], ["7", "x", "42"])]
    assert said == ["higher", "a whole number, please", 1 / 3]
    assert env.step(episode("50", must_end=True)) == 0.0


def episode(*turns: str, must_end: bool = False) -> Episode:
    return Episode(
        turns=turns,
        stop_reason="eos",
        must_end=must_end,
        state=None,
        seed=0,
        prompt="?",
        answer="42",
        task="",
        metadata={},
    )
