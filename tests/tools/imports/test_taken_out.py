"""Functions of a training script are copied to a file that a run may import."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from hone.cli.main import main
from hone.config.recipe import read_recipe
from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import read_file
from hone.tools.imports.imported import Imported
from hone.user_code.resolve import resolve
from tests.tables import table

TRAINS = """
args = GRPOConfig(output_dir="out", max_steps=4)
trainer = GRPOTrainer(model="m", reward_funcs=[score], args=args, train_dataset="d")
trainer.train()
"""
IMPORTS = "from trl import GRPOConfig, GRPOTrainer\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(script: str) -> Imported:
    Path("grpo.py").write_text(script)
    return convert(read_file("trl", Path("grpo.py"), {}), Path("mine.yaml"))


USES = '''
from __future__ import annotations

import re
from collections import Counter as Count

from trl import GRPOConfig, GRPOTrainer

TAGS = ["think", "answer"]
# What an answer looks like.
PATTERN = re.compile(
    rf"<{TAGS[1]}>(.*?)</answer>"
)
UNUSED = 3


def unused():
    raise SystemExit("ran")


def answer_of(text: GRPOConfig):
    found = PATTERN.search(text)  # the first
    return found[1] if found else None


class Scale:
    factor = 2.0


def kept(function):
    return function


@kept
def score(completions, answer, scale=Scale.factor, **kwargs):
    """The answer,\x0ctwice."""
    args = Count(map(answer_of, completions))
    return [scale * args[one] for one in answer]
'''


def test_a_function_is_copied_with_what_it_uses(folder: Path) -> None:
    (folder / "grpo.py").write_text(f"{USES}{TRAINS}")
    assert main(["import", "trl", "grpo.py", "--output", "sub/mine.yaml"]) == 0
    copy = (folder / "sub/mine_functions.py").read_text()
    left_out = ("from trl", "UNUSED", "def unused", "    raise")
    kept = [line for line in USES.splitlines() if line and not line.startswith(left_out)]
    assert [line for line in copy.splitlines()[1:] if line] == kept
    assert copy.startswith('"""Taken out of grpo.py')
    (entry,) = read_recipe(folder / "sub/mine.yaml").values["reward"]["functions"]
    assert entry["fn"] == "sub/mine_functions.py:score"
    score = resolve(entry["fn"])
    assert score(["<answer>4</answer>"], ["4"]) == [2.0]


def test_a_script_that_trains_is_never_imported_for_its_reward(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL is not installed here; where it is, importing the script would train."""
    (folder / "grpo.py").write_text(
        f"{IMPORTS}def score(completions, **kwargs):\n    return [1.0]\n{TRAINS}"
    )
    assert main(["import", "trl", "grpo.py", "--output", "mine.yaml"]) == 0
    told = capsys.readouterr().err
    assert "score copied to mine_functions.py" in told
    assert "line 1 imports trl" in (folder / "mine.yaml").read_text().replace("\n#    ", "")
    main(["check", "rl", "mine.yaml"])
    printed = capsys.readouterr().out
    assert "error: model.path" in printed
    assert "error: reward" not in printed


def test_nothing_is_written_without_an_output_and_nothing_is_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "grpo.py").write_text(f"{IMPORTS}def score(completions): ...\n{TRAINS}")
    assert main(["import", "trl", "grpo.py"]) == 0
    assert "#   RECIPE_functions.py: --output FILE also writes" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["grpo.py"]
    (folder / "mine_functions.py").write_text("mine")
    assert main(["import", "trl", "grpo.py", "--output", "mine.yaml"]) == 2
    assert "'mine_functions.py' exists" in capsys.readouterr().err
    assert (folder / "mine_functions.py").read_text() == "mine"
    assert not (folder / "mine.yaml").exists()


def test_a_recipe_is_written_with_its_functions_or_not_at_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "grpo.py").write_text(f"{IMPORTS}def score(completions): ...\n{TRAINS}")
    name = "m" * 230  # a name of the second file that no file system has
    assert main(["import", "trl", "grpo.py", "--output", f"{name}.yaml"]) == 2
    assert f"Could not write {name}_functions.py (--output)" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["grpo.py"]


def test_a_script_that_only_defines_is_named_itself(folder: Path) -> None:
    found = imported(
        dedent("""
        import re
        NUMBER = re.compile("[0-9]+")
        def score(completions):
            return [1.0 for _ in completions]
        def main():
            from trl import GRPOConfig, GRPOTrainer
            args = GRPOConfig(output_dir="out", max_steps=4)
            GRPOTrainer(model="m", reward_funcs=score, args=args, train_dataset="d").train()
        if __name__ == "__main__":
            main()
        """)
    )
    assert found.key("reward.functions.0.fn") == "grpo.py:score"
    assert found.taken_out is None


NOT_SURE = [
    ("words = load()\ndef score(completions): return words\n", "line 2 sets words"),
    ("words = open('w').read()\ndef score(completions): return words\n", "line 2 sets words"),
    ("if True:\n    n = 1\ndef score(completions): return n\n", "line 2 sets n"),
    ("if __name__ == '__main__':\n    n = 1\ndef score(completions): return n\n",
     "line 2 sets n"),
    ("n = 1\nn = 2\ndef score(completions): return n\n", "more than one line sets n"),
    ("n = [1]\nn.append(2)\ndef score(completions): return n\n", "line 3 changes n"),
    ("n = {}\ndef other():\n    n['a'] = 1\ndef score(completions): return n\n",
     "line 4 changes n"),
    ("n = 1\ndef other():\n    global n\n    n = 2\ndef score(completions): return n\n",
     "line 4 changes n"),
    ("def score(completions): return GRPOConfig\n", "GRPOConfig is of trl (line 1)"),
    ("from words import *\ndef score(completions): return n\n",
     "no line outside functions sets n"),
    ("def score(completions): return __file__\n", "__file__"),
    ("import re; n = 1\ndef score(completions): return n\n", "line 2 has several statements"),
    ("def main():\n    def score(completions): ...\n    return score\n",
     "no line outside functions sets score"),
]  # fmt: skip


@table("text, reason", NOT_SURE)
def test_what_is_not_sure_is_to_be_done(text: str, reason: str, folder: Path) -> None:
    found = imported(f"{IMPORTS}{text}{TRAINS}")
    assert found.taken_out is None
    assert found.key("reward.functions.0.fn") == "mine_functions.py:score"
    (to_do,) = [one for one in found.to_do if one.startswith("mine_functions.py: move score")]
    assert reason in to_do


def test_a_file_beside_the_script_is_found_from_the_same_folder_alone(folder: Path) -> None:
    (folder / "words.py").write_text("n = 1")
    text = f"{IMPORTS}import words\ndef score(completions): return words.n\n{TRAINS}"
    assert imported(text).taken_out is not None
    found = convert(read_file("trl", Path("grpo.py"), {}), Path("sub/mine.yaml"))
    assert found.taken_out is None
    assert any("imports a file beside the script" in one for one in found.to_do)
