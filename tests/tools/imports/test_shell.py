"""Shell scripts are read as the shell would run them; what it would do by itself is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.tools.imports.shell import Script, read_script
from tests.tables import table


def read(text: str, **environment: str) -> Script:
    return read_script(text, environment, Path("run.sh"))


def run(text: str, **environment: str) -> list[str]:
    """The words of the commands that a script runs, one text each."""
    return [" ".join(word.text for word in one) for one in read(text, **environment).commands]


NPU = """\
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
batch=${BATCH:-1024}
EXTRA=()
case "${DEVICE}" in
    gpu | cuda) ;;
    npu) ;;
    *)
        echo "DEVICE must be gpu or npu, got: ${DEVICE}" >&2
        exit 1
        ;;
esac
case "${DEVICE}" in
    gpu)
        tp=${tp:-2}
        case "${MACHINE:-}" in
            gb200) EXTRA+=(eager=True) ;;
            *) per_node=8 ;;
        esac
        ;;
    npu)
        batch=16
        tp=4
        EXTRA+=(compile=False)
        ;;
esac
LAUNCH=(python3)
if [ "${UV:-1}" != 0 ] && [ "$DEVICE" = gpu ] && { [ "$tp" = 4 ] || [ "$tp" = 2 ]; }; then
    LAUNCH=(uv run python3)
fi
"${LAUNCH[@]}" -m train batch=$batch tp=$tp per_node=$per_node "${EXTRA[@]}" "$@"
"""
RUNS = [
    # A script, and what it runs.
    (NPU, {}, ["uv run python3 -m train batch=1024 tp=2 per_node=8"]),
    (NPU, {"DEVICE": "npu"},
     ["python3 -m train batch=16 tp=4 per_node=$per_node compile=False"]),
    (NPU, {"MACHINE": "gb200", "UV": "0"},
     ["python3 -m train batch=1024 tp=2 per_node=$per_node eager=True"]),
    ("A=1\nif [ $A = 2 ]; then B=1; else B=2; fi\nrun $B", {}, ["run 2"]),
    ("A=1\nif [ $A = 1 ]; then B=1; else B=2; fi\nrun $B", {}, ["run 1"]),
    ("A=3\nif [[ $A -lt 2 || $A -gt 4 ]]; then B=1\nelif (( A == 3 )); then B=2\nelse B=3\nfi\n"
     "run $B", {}, ["run 2"]),
    ("A=x.tar.gz\nif [[ $A == *.gz && ! $A =~ ^y ]]; then B=1; fi\nrun $B", {}, ["run 1"]),
    ("if [ x = y ]; then\n  if [ x = x ]; then A=1; fi\n  B=2\nfi\nrun ${A:-none} ${B:-none}", {},
     ["run none none"]),
    ('if test -z "${X:-}"; then A=1; else A=2; fi; run $A', {"X": "here"}, ["run 2"]),
    ('[ "$1" = debug ] && A=1\n[ a = a ] && B=2 || B=3\n[ a = b ] || C=4\nrun ${A:-0} $B $C', {},
     ["run 0 2 4"]),
    ("if ! [ a = b ]; then A=1; fi; run $A", {}, ["run 1"]),
    ("while [[ $# -gt 0 ]]; do case $1 in --lr) LR=$2; shift 2;; esac; done\nrun ${LR:-1e-6}", {},
     ["run 1e-6"]),
    ("for size in 7 14; do run $size; done", {}, ["run 7"]),
    ("train() {\n  local lr=$1\n  run --lr $lr \"$@\"\n}\ntrain 1 --x", {}, ["run --lr 1 1 --x"]),
    ("function train { run $1; }\ntrain 3", {}, ["run 3"]),
    ('ARGS="--lr 1"\nsrun -N 2 bash -c "cd /work && python -m train $ARGS \\\n --n 2" &>> log', {},
     ["python -m train --lr 1 --n 2"]),
    ("docker run image /bin/bash -lc 'run $X'", {"X": "1"}, ["run 1"]),
    ('C="run a"\neval "$C --b"', {}, ["run a --b"]),
    ("A=run\nA+=ner\nA+=' --x 1'\n$A", {}, ["runner --x 1"]),
    ("case a in a) run 1 ;; esac; case b in (a|b) run 2;; *) run 3; esac", {}, ["run 1", "run 2"]),
    ("export -a A=(1 2)\nrun ${A[@]}", {}, ["run 1 2"]),
    ("run lr=$1 ${2:-3}", {}, ["run lr=$1 3"]),
    ("f() { A=1; [ $1 = x ] && return; A=2; }\nf x; run $A; f y; run $A", {}, ["run 1", "run 2"]),
    ('run $(dirname "$(realpath "$0")") $(dirname -- ${BASH_SOURCE[0]:-$0}) $(dirname "$M")', {},
     ['run . . $(dirname "$M")']),
    ("cd /a; (cd b); X=$(pwd); cd ..; run $X $(pwd) $(cd c >/dev/null 2>&1 && pwd)", {},
     ["run /a / /c"]),
    ("if true; then run 1; fi # if\necho done; run 2 > log 2>&1 &", {}, ["run 1", "run 2"]),
]  # fmt: skip


@table("text, environment, expected", RUNS)
def test_the_branch_that_the_shell_takes_is_read(
    text: str, environment: dict[str, str], expected: list[str]
) -> None:
    assert run(text, **environment) == expected


SAID = [
    # A script, what it runs, and what is said.
    ("if [ -f x ]; then A=1; else A=2; fi\nrun $A", "run 1",
     "line 1: whether `[ -f x ]` holds is known only when the script runs, and this branch is "
     "read; it sets A"),
    ("M=$(hostname)\ncase $M in\n a*) A=1 ;;\n *) A=2 ;;\nesac\nrun $A", "run 1",
     "line 3: what `case` has for `$(hostname)` is known only when the script runs, and this "
     "branch is read; it sets A"),
    ("if which x; then exit 1; else A=2; fi\nrun ${A:-0}", "run 2",
     "line 1: whether `which x` holds is known only when the script runs, and this branch is read; "
     "it sets A"),
    ("if nvidia-smi; then run 1; else run 2; fi", "run 1",
     "line 1: whether `nvidia-smi` holds is known only when the script runs, and this branch is "
     "read"),
    ("which x && A=1\nrun $A", "run 1",
     "line 1: whether A is set to '1' is known only when the script runs; it is taken"),
    ('if [ -n "$KEY" ]; then A=1; else A=2; fi\nrun $A', "run 2",
     "line 1: KEY, which nothing sets, counts as empty, and decides over A"),
    ('[ -z "$KEY" ] && A=1\nrun $A', "run 1",
     "line 1: KEY, which nothing sets, counts as empty, and decides over A"),
    ("for n in 1 2; do A=$n; done\nrun $A", "run 1",
     "line 1: of the loop over n the first pass alone is read, with 1; it sets A"),
    ("A=1\nif [ $A = 1 ]; then exit; fi\nrun $A", "run 1",
     "line 2: with what is known here the script ends there; the rest is read as if it went on"),
    ("if python -c 'import torch_npu'; then A=1; else A=2; fi\nrun $A", "run 2",
     "line 1: `python -c import torch_npu` counts as failed: hone runs on no NPU"),
    ("f() { A=1; B=2; }\nwhich x && f\nrun $A", "run 1",
     "line 2: whether `f` runs is known only when the script runs; it is read, and sets A, B"),
    ("f() { A=1; }\nif which x; then f; fi\nrun $A", "run 1",
     "line 2: whether `which x` holds is known only when the script runs, and this branch is read; "
     "it sets A"),
    ("die() { exit 1; }\nif which x; then die; else A=2; fi\nrun ${A:-0}", "run 2",
     "line 2: whether `which x` holds is known only when the script runs, and this branch is read; "
     "it sets A"),
]  # fmt: skip


@table("text, command, words", SAID)
def test_what_only_a_run_could_tell_is_said(text: str, command: str, words: str) -> None:
    made = read(text)
    last = [one for one in made.commands if one[0].text == "run"][:1]
    assert [" ".join(word.text for word in one) for one in last] == [command]
    assert words in [*made.notes, *made.unsure.values()]


@pytest.mark.parametrize("text", [NPU, RUNS[3][0], RUNS[15][0]])
def test_nothing_is_said_of_what_is_known(text: str) -> None:
    notes = [note for note in read(text).notes if "torch_npu" not in note]
    assert not notes
    assert not read(text).unsure


HALVES = ["if", "case x in", "case x in a", "f() {", "[[ a", "((", "for x in", "fi", "}", ";;",
          "esac", "A=(", "${", "if a; then case b in c) }", "A=(; b", "A=(a | b)", "A=(a <b)",
          "read a <<E\n) read b <<E\nE", "source", "readlink", "source $"]  # fmt: skip


@table("text", HALVES)
def test_half_a_script_is_read_to_its_end(text: str) -> None:
    assert read(text).variables
