"""Files that a shell script reads with `source` are read as parts of it, and none is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import read_file
from hone.tools.imports.shell import Script, read_script
from tests.tables import table

HERE = 'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'


def read(folder: Path, files: Mapping[str, str], script: str = "scripts/run.sh") -> Script:
    """Write files, and read one of them from their folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_script(files[script], {"HOME": "home"}, Path(script))


def run(script: Script) -> list[str]:
    return [" ".join(word.text for word in one) for one in script.commands]


MODEL = "MODEL_ARGS=(\n  --num-layers 36\n  --rotary-base ${BASE:-1000000}\n)\n"
LAUNCH = (
    HERE
    + """\
source "${SCRIPT_DIR}/env.sh"
BASE=5000000 source "${SCRIPT_DIR}/models/qwen3-4B.sh"
python3 relax/entrypoints/train.py ${MODEL_ARGS[@]} --hf-checkpoint $MODEL_PATH \\
  --rollout-batch-size 32
"""
)


def test_a_value_says_which_file_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    env = "\nARGS=(\n)\nexport MODEL_PATH=Qwen/Qwen3-4B\n"
    files = {"run.sh": LAUNCH, "models/qwen3-4B.sh": MODEL, "env.sh": env}
    made = read(tmp_path, {f"scripts/{name}": text for name, text in files.items()})
    assert not made.notes
    assert [(word.text, word.where) for word in made.commands[0][2:6]] == [
        ("--num-layers", "scripts/models/qwen3-4B.sh, line 2"),
        ("36", "scripts/models/qwen3-4B.sh, line 2"),
        ("--rotary-base", "scripts/models/qwen3-4B.sh, line 3"),
        ("5000000", "scripts/models/qwen3-4B.sh, line 3"),
    ]
    found = convert(read_file("relax", Path("scripts/run.sh"), {}))
    given = {one.name: (one.value, one.where) for one in found.source.given}
    assert given["num_layers"] == (36, "scripts/models/qwen3-4B.sh, line 2")
    assert given["rollout_batch_size"] == (32, "line 5")
    assert found.key("model.path") == "Qwen/Qwen3-4B"
    assert main(["import", "relax", "scripts/run.sh"]) == 0
    printed = capsys.readouterr().out
    assert "path: Qwen/Qwen3-4B" in printed
    assert "knows no setting" not in printed


PARTS = [
    # Files of a folder, of which scripts/run.sh is read, and what it runs.
    ({"run": "source env.sh\nrun $A", "env.sh": "A=1"}, ["run 1"]),
    ({"run": ". ./env.sh && run $A", "env.sh": "A=1\nB=2"}, ["run 1"]),
    ({"run": "source env.sh\nrun $A", "env.sh": "A=1", "scripts/env.sh": "A=2"}, ["run 1"]),
    ({"run": "source env.sh\nrun $A", "scripts/env.sh": "A=2"}, ["run 2"]),
    ({"run": "cd scripts/sub\nsource ../env.sh\nrun $A $(pwd)", "scripts/env.sh": "A=2"},
     ["run 2 scripts/sub"]),
    ({"run": "(cd sub && make)\nsource env.sh\nrun $A", "env.sh": "A=1", "sub/env.sh": "A=2"},
     ["make", "run 1"]),
    ({"run": 'cd "$(dirname "$0")/.." || exit 1\nsource "$(pwd)/env.sh"\nrun $A',
      "env.sh": "A=1"}, ["run 1"]),
    ({"run": 'source "$(dirname "$(readlink -f "$0")")/env.sh"\nrun $A', "scripts/env.sh": "A=2"},
     ["run 2"]),
    ({"run": "source ~/env.sh\nrun $A", "home/env.sh": "A=3"}, ["run 3"]),
    ({"run": "set -a; source .env; set +a\nrun $A", ".env": "# no quotes\nA=x/y # z\r\n"},
     ["run x/y"]),
    # What a file sets holds behind it, and what is set before holds in it.
    ({"run": "A=1\nsource env.sh\nrun $B $A\nsource env.sh\nrun $B $A",
      "env.sh": "B=${A}0\nA=7"}, ["run 10 7", "run 70 7"]),
    ({"run": "source lib.sh\nlaunch --x", "scripts/lib.sh": "launch() {\n  run $1 $(dirname "
      "${BASH_SOURCE[0]}) $(dirname $0)\n}"}, ["run --x scripts scripts"]),
    ({"run": "f() { source env.sh in; run $A $1; }\nf out", "env.sh": "A=$1"}, ["run in out"]),
    ({"run": "f() { source env.sh; run $A $1; }\nf out", "env.sh": "A=$1"}, ["run out out"]),
    ({"run": "source env.sh\nrun $A", "env.sh": "run before\nA=1"}, ["run before", "run 1"]),
    ({"run": "bash -c 'source env.sh && run $A'", "env.sh": "A=1"}, ["run 1"]),
    # Its end is not the script's.
    ({"run": "source env.sh\nrun $A", "env.sh": 'A=1\n[ -n "$A" ] && return 0\nA=2'}, ["run 1"]),
    ({"run": "source env.sh\nrun $A",
      "env.sh": 'if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then\n  exit 1\nfi\nA=1'}, ["run 1"]),
    # Files that read each other, behind a guard.
    ({"run": "source a.sh\nrun $A $B", "a.sh": '[ -z "${X:-}" ] || return\nX=1\nsource b.sh\nA=1',
      "b.sh": '[ -n "$X" ] || source a.sh\nB=1'}, ["run 1 1"]),
]  # fmt: skip


@table("files, expected", PARTS)
def test_what_a_file_sets_is_known_behind_it(
    files: dict[str, str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = read(tmp_path, {"scripts/run.sh": files.pop("run"), **files})
    assert run(made) == expected
    assert not [note for note in made.notes if "is not read" in note or "script ends" in note]


NOTED = [
    # Files, what the script runs, and all that is said.
    ({"run": "source $X\nrun"}, "run",
     ["line 1: `source $X` is not read: only a run of the script could tell which file that is. "
      "Set its variables in the script itself."]),
    ({"run": "\nsource models/a.sh\nrun"}, "run",
     ["line 2: `source models/a.sh` is not read: there is no file 'models/a.sh' here or in the "
      "folder of the script. Put it there, or set its variables in the script."]),
    ({"run": "source /no/a.sh\nrun"}, "run",
     ["line 1: `source /no/a.sh` is not read: there is no file '/no/a.sh'. Put it there, or set "
      "its variables in the script."]),
    ({"run": "source scripts\nrun"}, "run",
     ["line 1: `source scripts` is not read: 'scripts' is no regular file. Name a file of shell "
      "commands."]),
    ({"run": "source <(make_env)\nrun"}, "run",
     ["line 1: `source` is not read: it names no file. Set the variables in the script itself."]),
    ({"run": "source big.sh\nrun ${A:-0}", "big.sh": "A=1\n" + "#" * 256 * 1024}, "run 0",
     ["line 1: `source big.sh` is not read: 'big.sh' has more than 256 KiB. Set the variables that "
      "the script needs of it in the script itself."]),
    ({"run": "source odd.sh\nrun ${A:-0}", "odd.sh": "A=1\udcff"}, "run 0",
     ["line 1: `source odd.sh` is not read: 'odd.sh' is no text in UTF-8. Name a file of shell "
      "commands."]),
    ({"run": "source a.sh\nrun $A $B", "a.sh": "source b.sh\nA=1", "b.sh": "B=1\nsource a.sh"},
     "run 1 1",
     ["b.sh, line 2: `source a.sh` is not read: it is within that file itself. Nothing is to be "
      "done."]),
    # Only a run could tell.
    ({"run": 'source "${ROOT}/models/a.sh"\nrun $A', "scripts/models/a.sh": "A=1"}, "run 1",
     ["line 1: `source ${ROOT}/models/a.sh` counts as 'scripts/models/a.sh', since that file is "
      "here; only a run of the script could tell"]),
    ({"run": 'source "${0%/*}/a.sh"\nrun $A', "scripts/a.sh": "A=1"}, "run 1",
     ["line 1: `source ${0%/*}/a.sh` counts as 'scripts/a.sh', since that file is here; only a run "
      "of the script could tell"]),
    ({"run": "if [ -f a.sh ]; then source a.sh; else A=3; fi\nrun $A", "a.sh": "A=1\nB=2"}, "run 1",
     ["line 1: whether `[ -f a.sh ]` holds is known only when the script runs, and this branch is "
      "read; it sets A, B"]),
    ({"run": '[ -z "$X" ] && source a.sh\nrun $A', "a.sh": "A=1\nB=2"}, "run 1",
     ["line 1: X, which nothing sets, counts as empty, and decides over A, B"]),
    ({"run": '[ -n "$X" ] && source a.sh\nrun ${A:-0}', "a.sh": "A=1"}, "run 0",
     ["line 1: X, which nothing sets, counts as empty, and decides over `source a.sh`"]),
    ({"run": 'if [ -n "$X" ]; then source a.sh; fi\nrun ${A:-0}', "a.sh": "A=1"}, "run 0",
     ["line 1: X, which nothing sets, counts as empty, and decides over `source a.sh`"]),
    ({"run": "[ -f a.sh ] && source a.sh\nrun $A", "a.sh": "A=1\nB=2"}, "run 1",
     ["line 1: whether `source a.sh` runs is known only when the script runs; it is read, and sets "
      "A, B"]),
    ({"run": "\n\n\nsource a.sh\nrun $A", "a.sh": "which x && A=1\nif which y; then\nA=2; fi"},
     "run 2",
     ["a.sh, line 1: whether A is set to '1' is known only when the script runs; it is taken",
      "a.sh, line 2: whether `which y` holds is known only when the script runs, and this branch "
      "is read; it sets A"]),
    ({"run": "\nsource a.sh\nrun", "a.sh": "exit 1"}, "run",
     ["a.sh, line 1: with what is known here the script ends there; the rest is read as if it went "
      "on"]),
]  # fmt: skip


@table("files, command, notes", NOTED)
def test_what_is_not_known_of_a_file_is_said(
    files: dict[str, str],
    command: str,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if odd := files.pop("odd.sh", ""):
        (tmp_path / "odd.sh").write_bytes(odd.encode(errors="surrogateescape"))
    made = read(tmp_path, {"scripts/run.sh": files.pop("run"), **files})
    assert run(made)[-1] == command
    assert made.notes == notes


def test_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("env.sh")
    made = read(tmp_path, {"scripts/run.sh": "source env.sh\nrun"})
    assert made.notes == [
        "line 1: `source env.sh` is not read: 'env.sh' is no regular file. Name a file of shell "
        "commands."
    ]


def test_nothing_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "touch ran\nA=$(touch ran; echo 1)\n: > ran\ncd sub\nrm run.sh\n"
    made = read(tmp_path, {"scripts/run.sh": "source env.sh\nrun", "env.sh": text, "sub/x": ""})
    assert run(made) == ["touch ran", "rm run.sh", "run"]
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "scripts/run.sh").exists()
    assert Path.cwd() == tmp_path


def test_many_files_that_read_each_other_come_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{number}.sh" for number in range(12)]
    everything = "".join(f"source {name}\n" for name in names)
    made = read(
        tmp_path, {"scripts/run.sh": f"{everything}run", **dict.fromkeys(names, everything)}
    )
    assert run(made) == ["run"]
    assert any("at most 100 files are read, 8 within each other" in note for note in made.notes)
