"""Files, classes and other names of code on the pages of docs/design are in the tree."""

from __future__ import annotations

import builtins
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

from hone.config.schema import locate
from hone.config.tree import TREES
from tests.tables import table

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/design").glob("*.md"))
NOT_BUILT = {
    "Encoder",
    "Grid",
    "StateLayout",
    "engine/states.py",
    "families/gemma3.py",
    "families/grid_positions.py",
    "families/qwen3_5.py",
    "families/qwen3_vl.py",
    "families/smolvlm.py",
    "models/encoders/gemma3.py",
    "models/encoders/qwen3_vl.py",
    "models/encoders/smolvlm.py",
    "models/linear_attention.py",
}
"""What model-input.md says is still to come."""
OF_OTHERS = {
    "CheckpointException",
    "Gemma3ForCausalLM",
    "HuggingFaceStorageWriter",
    "LlamaForCausalLM",
    "mrope_section",
    "multinomial_with_seed",
    "sampling_seed",
    "save_on_cpu",
    "use_collectives",
    "weights_only",
}
"""Names of torch, transformers and SGLang that pages speak of and hone does not use."""
_FILE = re.compile(r"(?<![\w./<-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|js|ya?ml|toml|json|html)\b(?![(/])")
_NAME = re.compile(r"(?<![\w./<-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w/-])")
_DEFINED = re.compile(
    r"^ *class (\w+)(?:\((.*)\))?|^(\w+)(?:: [^=\n]+)? = |^(?:    )+(\w+),?$", re.M
)
_IMPORTED = re.compile(r"^ *(?:from [\w.]+ )?import (.+)$", re.M)


class Code:
    """The names that the tree has."""

    def __init__(self) -> None:
        folders = ("src", "tests", "benchmarks", "examples")
        self.files = {file for folder in folders for file in (ROOT / folder).rglob("*.*")}
        self.texts = {
            file: file.read_text(encoding="utf-8")
            for file in self.files
            if file.suffix in (".py", ".js", ".jinja") and self._has_code(file)
        }

    def _has_code(self, file: Path) -> bool:
        """Whether pages name what stands in the file: that of hone and of the choice of tests."""
        is_chosen = file.parent.name in ("tests", "selection") and file != Path(__file__)
        return is_chosen or file.is_relative_to(ROOT / "src")

    @cached_property
    def all_words(self) -> set[str]:
        words = set(re.findall(r"\w+", "\n".join(self.texts.values())))
        return words | {file.stem for file in self.files}

    @cached_property
    def classes(self) -> dict[str, list[tuple[Path, list[str]]]]:
        """Files of each class, or of another name that begins a line, and its bases there."""
        found: dict[str, list[tuple[Path, list[str]]]] = defaultdict(list)
        for file, text in self.texts.items():
            for name, bases, constant, listed in _DEFINED.findall(text):
                found[name or constant or listed].append((file, re.findall(r"\w+", bases)))
            for names in _IMPORTED.findall(text):
                for name in re.findall(r"\w+", names):
                    found[name].append((file, []))
        return found

    def has_file(self, path: str, folders: list[str]) -> bool:
        """Whether a page may name this file, where its place in a table names these folders."""
        bases = [ROOT, ROOT / "src", ROOT / "src/hone", ROOT / "docs/design"]
        if any((base / folder / path).is_file() for base in bases for folder in ["", *folders]):
            return True
        if path.endswith(".py"):  # a name alone, in a sentence
            return "/" not in path and not folders and any(f.name == path for f in self.files)
        return any(path in text for text in self.texts.values())  # a run writes it

    def has_name(self, name: str) -> bool:
        """Whether code or a configuration has a name; words of English and shells pass."""
        first, *more = parts = name.split(".")
        if more and any(locate(tree, parts) is not None for tree in TREES.values()):
            return True
        if re.match(r"_?[A-Z]\w*[a-z]", first):
            if first not in self.classes:
                return False
            return not more or self._has_attribute(first, more[0])
        return all(part in self.all_words for part in parts if "_" in part.strip("_"))

    def _has_attribute(self, name: str, attribute: str) -> bool:
        """Whether the word stands in the file of a class or of one of its bases."""
        names, seen, word = [name], set[str](), re.compile(rf"\b{attribute}\b")
        while names:
            one = names.pop()
            seen.add(one)
            for file, bases in self.classes.get(one, []):
                if word.search(self.texts[file]):
                    return True
                names += [base for base in bases if base not in seen]
        return False


class Piece(NamedTuple):
    """A piece of code of a page."""

    text: str
    folders: list[str]
    """The folders that its place in a table names."""
    is_drawing: bool = False
    """It is a line of a block, where words of English begin with capitals too."""


def pieces(page: str) -> list[Piece]:
    found: list[Piece] = []
    prose: list[str] = []
    in_block, package = False, ""
    for line in page.splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif in_block:
            found.append(Piece(line, [], is_drawing=True))
        elif line.startswith("|"):
            cells = line.split("|")[1:-1]
            if cells[0].strip():
                only = re.fullmatch(r"\s*`(\w+/)`\s*", cells[0])
                package = only[1] if only else ""
            for cell in cells:
                folders = [package] if package else list[str]()
                for piece in re.findall(r"`([^`]+)`", cell):
                    found.append(Piece(piece, [*folders]))
                    inner = re.findall(r"(?:\w+/)+", piece)
                    folders += [base + folder for folder in inner for base in ("", package)]
        else:
            prose.append(line)
    return found + [Piece(piece, []) for piece in re.findall(r"`([^`]+)`", "\n".join(prose))]


def unknown(page: str, code: Code) -> set[str]:
    """What a page names that the tree has not."""
    wrong: set[str] = set()
    for text, folders, is_drawing in pieces(page):
        wrong |= {path for path in _FILE.findall(text) if not code.has_file(path, folders)}
        for name in _NAME.findall(_FILE.sub(" ", text)):
            is_word = is_drawing and not re.search(r"[a-z][A-Z]|_", name)
            if not (is_word or hasattr(builtins, name) or code.has_name(name)):
                wrong.add(name)
    return {name for name in wrong if name.partition(".")[0] not in OF_OTHERS}


@pytest.fixture(scope="module")
def code() -> Code:
    return Code()


def test_what_the_design_names_is_there(code: Code) -> None:
    wrong = {page.name: unknown(page.read_text(), code) for page in PAGES}
    to_come = wrong.pop("model-input.md")
    assert to_come == NOT_BUILT
    assert {name: sorted(names) for name, names in wrong.items() if names} == {}


@table(
    "page, wrong",
    [
        ("`rollout/runner.py`, `episodes.py` and `Runner.withdraw`", set[str]()),
        ("`rollout/vllm.py`", {"rollout/vllm.py"}),
        ("| `trainer/` | `scorer.py` | `FrozenScorer` |\n| | `runner.py` |", {"runner.py"}),
        ("the `BatchLayout` of\n`Runner.no_such_method` and `plan_reference_passes`, `Batcher`",
         {"BatchLayout", "Runner.no_such_method", "plan_reference_passes"}),
        ("```\nOn the way: loops/loop.py, GangWorker\n```", {"GangWorker"}),
        ("`rollout.prompts_per_step` and `rollout.prompts_a_step`", {"rollout.prompts_a_step"}),
    ],
)  # fmt: skip
def test_planted_names(code: Code, page: str, wrong: set[str]) -> None:
    assert unknown(page, code) == wrong
