"""`hone completion bash|zsh|fish`: a script that completes commands, recipes, keys and values.

Everything is in the script, so that a key press starts no Python; print it again after an update.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from hone.config.base import Section
from hone.config.recipe import recipe_names
from hone.config.schema import fields, is_section, members
from hone.config.tree import RECIPE_COMMANDS, TREES
from hone.errors import UserError

__all__ = ["SHELLS", "run"]

_USAGE = """\
usage: hone completion bash|zsh|fish

Prints a script that completes commands, recipes, keys and values. To have it in
every shell:
  bash: hone completion bash >> ~/.bashrc
  zsh:  hone completion zsh > ~/.zfunc/_hone    (a folder of $fpath, then compinit)
  fish: hone completion fish > ~/.config/fish/completions/hone.fish
"""

_SWITCH = ("true", "false")


def run(argv: Sequence[str]) -> int:
    """Print the script of a shell."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if argv[0] not in SHELLS or len(argv) > 1:
        raise UserError(f"`hone completion` takes one of {', '.join(SHELLS)}, got {argv[0]!r}")
    sys.stdout.write(SHELLS[argv[0]]())
    return 0


def _second_words() -> dict[str, list[str]]:
    """What may follow a command, files apart."""
    recipes = recipe_names()
    return {
        **{name: recipes for name in TREES if " " not in name},
        "check": [*RECIPE_COMMANDS, *recipes],
        "tune": recipes,
        "bench": [name.partition(" ")[2] for name in TREES if " " in name],
        "recipes": ["show", "copy"],
        "completion": list(SHELLS),
        "quickstart": ["--seed", "--dir"],
    }


def _flags() -> dict[str, list[str]]:
    """The flags of each command, `bench` by its benchmarks; of `check` those of all that it
    checks."""
    found = {name: [*_keys(tree), "--help"] for name, tree in TREES.items()}
    for name in RECIPE_COMMANDS:
        found[name].append("--nproc")
    checked = dict.fromkeys(x for name in RECIPE_COMMANDS for x in found[name])
    return found | {
        "check": [*checked, "--gpu", "--json"],
        "doctor": ["--run.dir", "--json"],
        "tune": [*found["plan"], "--nproc", "--candidates", "--steps-each"],
    }


def _keys(tree: type[Section]) -> Iterator[str]:
    for field in fields(tree):
        if not is_section(field.annotation):
            yield f"--{field.key}"


def _values() -> dict[str, tuple[str, ...]]:
    """By flag, the values that it takes, where they can be listed."""
    found: dict[str, tuple[str, ...]] = {}
    for tree in TREES.values():
        for field in fields(tree):
            kinds = [kind for kind in members(field.annotation) if kind is not type(None)]
            words = tuple(word for kind in kinds for word in _words(kind))
            key = f"--{field.key}"
            if words:
                found[key] = tuple(dict.fromkeys([*found.get(key, ()), *words]))
    return found


def _words(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return _SWITCH
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _commands() -> dict[str, str]:
    from hone.cli.main import COMMANDS  # which imports this module by its name

    return COMMANDS


def _bash() -> str:
    """Keys are given as `--key value` or `--key=value`, which readline cuts at the `=`."""

    def cases(table: Mapping[str, Sequence[str]]) -> str:
        lines = (f"{shlex.quote(x)}) words={shlex.quote(' '.join(table[x]))} ;;" for x in table)
        return "".join(f"    {line}\n" for line in lines)

    seconds, flags, values = map(cases, (_second_words(), _flags(), _values()))
    return f"""\
# bash completion of hone; after an update print it again: hone completion bash
_hone() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words="" command
  COMPREPLY=()
  if [[ $cur == "=" ]]; then cur=""
  elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(_commands()))} -- "$cur"))
    return
  fi
  case "$prev" in
{values}    --*) [[ $prev == --help || $prev == --json ]] || return ;;
  esac
  if [[ -n $words && $cur != --* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    return
  fi
  words=""
  command="${{COMP_WORDS[1]}}"
  if [[ $command == bench && COMP_CWORD -gt 2 ]]; then command="bench ${{COMP_WORDS[2]}}"; fi
  if [[ $cur == -* ]]; then
    case "$command" in
{flags}    esac
  elif [[ $command == recipes && COMP_CWORD -eq 3 ]]; then
    words={shlex.quote(" ".join(recipe_names()))}
  elif [[ $command == bench\\ * ]]; then
    words={shlex.quote(" ".join(recipe_names()))}
  else
    case "$command" in
{seconds}    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o bashdefault -o default -F _hone hone
"""


def _zsh() -> str:

    def cases(table: Mapping[str, Sequence[str]]) -> str:
        lines = (f"{shlex.quote(x)}) found=({shlex.join(table[x])}) ;;" for x in table)
        return "".join(f"    {line}\n" for line in lines)

    seconds, flags, values = map(cases, (_second_words(), _flags(), _values()))
    commands = " ".join(shlex.quote(f"{name}:{text}") for name, text in _commands().items())
    return f"""\
#compdef hone
# zsh completion of hone; after an update print it again: hone completion zsh
_hone() {{
  local -a found
  local prev="${{words[CURRENT-1]}}" command="${{words[2]}}"
  if ((CURRENT == 2)); then
    local -a commands=({commands})
    _describe command commands
    return
  fi
  if [[ $PREFIX == --*=* ]]; then
    prev="${{PREFIX%%=*}}"
    compset -P '*='
  fi
  case "$prev" in
{values}    --help|--json) ;;
    --*) _files; return ;;
  esac
  if (($#found)) && [[ $PREFIX != --* ]]; then
    compadd -- $found
    return
  fi
  found=()
  if [[ $command == bench ]] && ((CURRENT > 3)); then command="bench ${{words[3]}}"; fi
  if [[ $PREFIX == -* ]]; then
    case "$command" in
{flags}    esac
  elif [[ $command == bench\\ * ]] || {{ [[ $command == recipes ]] && ((CURRENT == 4)); }}; then
    found=({shlex.join(recipe_names())})
  else
    case "$command" in
{seconds}    esac
  fi
  compadd -- $found
  [[ $PREFIX == -* ]] || _files
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _hone "$@"; else compdef _hone hone; fi
"""


def _fish() -> str:
    lines = ["# fish completion of hone; after an update print it again: hone completion fish"]
    lines += ["complete -c hone -e"]
    none = "__fish_use_subcommand"
    for name, text in _commands().items():
        lines.append(f"complete -c hone -f -n {none} -a {name} -d {_fish_quoted(text)}")
    for name, words in _second_words().items():
        if not words[0].startswith("-"):
            condition = f"__fish_seen_subcommand_from {name}"
            if name in ("bench", "recipes"):
                condition += f"; and not __fish_seen_subcommand_from {' '.join(words)}"
            seen = _fish_quoted(condition)
            lines.append(f"complete -c hone -n {seen} -a {_fish_quoted(' '.join(words))}")
    named = _fish_quoted(" ".join(recipe_names()))
    lines.append(
        "complete -c hone -n '__fish_seen_subcommand_from show copy engine train'" + f" -a {named}"
    )
    values = _values()
    flags = _flags() | {"quickstart": ["--seed", "--dir"]}
    commands_of: dict[str, list[str]] = {}
    for command, names in flags.items():
        for flag in names:
            commands_of.setdefault(flag, []).append(command)
    for flag, commands in commands_of.items():
        seen = dict.fromkeys(word for command in commands for word in command.split())
        words = [word for word in seen if word != "bench"]
        condition = f"__fish_seen_subcommand_from {' '.join(words)}"
        takes = "" if flag in ("--help", "--json") else " -r"
        if flag in values:
            takes = f" -x -a {_fish_quoted(' '.join(values[flag]))}"
        lines.append(f"complete -c hone -n {_fish_quoted(condition)} -l {flag[2:]}{takes}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    """In single quotes, where fish reads a backslash before a quote."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
