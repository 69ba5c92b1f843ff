"""Completion scripts, tried in the shells that are here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config.commands import COMMANDS
from hone.tools.completion import SHELLS
from tests.tables import table

CASES: list[tuple[str, set[str], set[str]]] = [
    ("hone ", set(COMMANDS), {"gsm8k", "--run.steps"}),
    ("hone ge", {"generate"}, {"rl"}),
    ("hone rl ", {"gsm8k", "code", "mine.yaml"}, {"rl"}),
    ("hone rl gs", {"gsm8k"}, {"code"}),
    ("hone rl gsm8k --trainer.opt", {"--trainer.optimizer.lr"}, {"--run.steps"}),
    ("hone eval gsm8k --tr", set(), {"--trainer.optimizer.lr"}),
    ("hone rl gsm8k --algorithm.loss ", {"ppo_clip", "gspo"}, {"gsm8k"}),
    ("hone rl gsm8k --algorithm.loss=g", {"gspo"}, {"ppo_clip"}),
    ("hone rl gsm8k --eval.at_start f", {"false"}, {"true"}),
    ("hone rl --data.train.0.path mi", {"mine.yaml"}, {"gsm8k"}),
    ("hone bench ", {"engine", "train"}, {"gsm8k"}),
    ("hone bench train --rows.t", {"--rows.tokens"}, {"--decode.batch"}),
    ("hone recipes ", {"show", "copy"}, {"gsm8k"}),
    ("hone recipes copy ", {"gsm8k", "dapo-maths"}, {"show"}),
    ("hone completion ", {"bash", "zsh", "fish"}, {"gsm8k"}),
    ("hone check sft --data.max_t", {"--data.max_tokens"}, {"--run.steps"}),
    ("hone env ", {"try", "check"}, {"gsm8k"}),
    ("hone env try gs", {"gsm8k"}, {"check"}),
    ("hone env try gsm8k --r", {"--rows", "--raw", "--rollout.stop"}, {"--trainer.recompute"}),
    ("hone env check --env.ret", {"--env.retries"}, {"--env.max_turns"}),
    ("hone data ", {"show", "stats", "check"}, {"gsm8k"}),
    ("hone data stats gs", {"gsm8k"}, {"check"}),
    ("hone data show --f", {"--from", "--for"}, {"--gpu"}),
    ("hone data check --data.max_t", {"--data.max_tokens"}, {"--trainer.recompute"}),
    ("hone check --g", {"--gpu"}, {"--json"}),
]


def script(shell: str, folder: Path) -> Path:
    file = folder / f"hone.{shell}"
    file.write_text(SHELLS[shell]())
    return file


def run(folder: Path, *command: str) -> list[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=600)
    assert done.stderr == "", done.stderr
    return done.stdout.split("\n")


_BASH = """
source "$1"
COMP_WORDS=($3) COMP_CWORD=$4
[[ $5 == 1 ]] && COMP_WORDS+=("")
_hone
printf '%s\\n' "${COMPREPLY[@]}"
"""


def in_bash(line: str, folder: Path) -> set[str]:
    """As readline cuts words, at `=` too; without candidates it falls back to files."""
    words = shlex.split(line.replace("=", " = "))
    is_new = line.endswith(" ")
    index = len(words) - (0 if is_new else 1)
    given = [" ".join(words), str(index), "1" if is_new else "0"]
    file = str(script("bash", folder))
    found = {x for x in run(folder, "bash", "-c", _BASH, "-", file, "-", *given) if x}
    prefix = "" if is_new else words[-1]
    falls_back = {x for x in os.listdir(folder) if x.startswith(prefix)}
    last_flag = words[-1 if is_new else -2].startswith("--")
    return found or falls_back if last_flag or len(words) > 2 else found | falls_back


# What the completion system of zsh gives to functions, and what these call, outside of an
# interactive shell.
_ZSH = """
compdef() { :; }
compset() { PREFIX=${PREFIX#*=}; }
compadd() { shift; local x; for x in "$@"; do [[ $x == $PREFIX* ]] && print -r -- "$x"; done; }
_files() { local x; for x in $PREFIX*(N); do print -r -- "$x"; done; }
_describe() { local x; for x in "${(@P)2}"; do compadd -- "${x%%:*}"; done; }
source "$1"
words=("${@[2,-1]}")
CURRENT=$#words
PREFIX="${words[-1]}"
_hone
exit 0
"""


def in_zsh(line: str, folder: Path) -> set[str]:
    words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
    out = run(folder, "zsh", "-f", "-c", _ZSH, "-", str(script("zsh", folder)), *words)
    return {x for x in out if x}


def in_fish(line: str, folder: Path) -> set[str]:
    commands = f"source {script('fish', folder)}; complete -C {shlex.quote(line)}"
    found = {x.partition("\t")[0] for x in run(folder, "fish", "--no-config", "-c", commands) if x}
    return {x.rpartition("=")[2] for x in found}


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"no {name}"))
        for name in SHELLS
    ],
)
@table("case", CASES)
def test_what_is_offered(shell: str, case: tuple[str, set[str], set[str]], tmp_path: Path) -> None:
    line, offered, not_offered = case
    (tmp_path / "mine.yaml").write_text("")
    found = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}[shell](line, tmp_path)
    assert offered <= found
    assert not not_offered & found


@table("shell", SHELLS)
def test_a_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for words in ("trainer.optimizer.lr", "gsm8k", "ppo_clip", "recipes"):
        assert words in text
    assert main(["completion"]) == 0
    assert f"hone completion {shell}" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "takes one of bash, zsh, fish, got 'csh'" in capsys.readouterr().err
