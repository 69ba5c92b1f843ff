"""Scripts for shells that complete commands, recipes, keys and values.

Everything is in the script, so that a key press starts no Python; print it again after an update.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from hone.config.base import Section
from hone.config.bench_data import BenchDataConfig
from hone.config.commands import COMMAND, COMMANDS, RECIPE
from hone.config.data_view import VIEWS
from hone.config.env_try import EnvTryConfig
from hone.config.recipe import recipe_names
from hone.config.schema import fields, is_section, members
from hone.config.tree import RECIPE_COMMANDS, TREES, PlanConfig

__all__ = ["SHELLS"]

_SWITCH = ("true", "false")


_TREES: Mapping[str, type[Section]] = {
    **TREES,
    "bench data": BenchDataConfig,
    "env": EnvTryConfig,
    "tune": PlanConfig,
}
"""Trees by command, also of those that take only a part of a recipe."""
_WITH_ACTIONS = tuple(name for name, entry in COMMANDS.items() if entry.actions)
_WITH_TREES = tuple(name for name in _WITH_ACTIONS if any(COMMANDS[name].actions.values()))
"""Commands each of whose actions has a tree of its own."""
_OTHERS = tuple(name for name in _WITH_ACTIONS if name not in _WITH_TREES)


_OF_DATA = ("--data.", "--model.")
"""The keys with which `hone data` has most to do."""


def _second_words() -> dict[str, list[str]]:
    """What may follow a command, files apart."""
    groups = {RECIPE: recipe_names(), COMMAND: RECIPE_COMMANDS}
    found: dict[str, list[str]] = {}
    for name, entry in COMMANDS.items():
        words = [RECIPE] if entry.has_recipes else [*entry.actions, *entry.words]
        found[name] = [each for word in words for each in groups.get(word, [word])]
    return {name: words for name, words in found.items() if words}


def _flags() -> dict[str, list[str]]:
    """The flags of each command, `bench` by its benchmarks; of `check` those of all that it
    checks."""
    found = {name: [*_keys(tree), "--help"] for name, tree in _TREES.items()}
    viewed = (key for tree in VIEWS.values() for key in _keys(tree))
    found["data"] = [*dict.fromkeys(key for key in viewed if key.startswith(_OF_DATA)), "--help"]
    for name, entry in COMMANDS.items():
        if entry.has_recipes:
            found[name].append("--nproc")
        if COMMAND in entry.words:
            found[name] = list(dict.fromkeys(x for each in RECIPE_COMMANDS for x in found[each]))
        if entry.flags:
            found.setdefault(name, []).extend(entry.flags)
    return found


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
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(COMMANDS))} -- "$cur"))
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
  if [[ " {" ".join(_WITH_TREES)} " == *" $command "* ]] && ((COMP_CWORD > 2)); then
    command="$command ${{COMP_WORDS[2]}}"
  fi
  if [[ $cur == -* ]]; then
    case "$command" in
{flags}    esac
  elif [[ " {" ".join(_OTHERS)} " == *" $command "* ]] && ((COMP_CWORD == 3)); then
    words={shlex.quote(" ".join(recipe_names()))}
  elif [[ $command == *\\ * ]]; then
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
    described = " ".join(shlex.quote(f"{name}:{entry.summary}") for name, entry in COMMANDS.items())
    return f"""\
#compdef hone
# zsh completion of hone; after an update print it again: hone completion zsh
_hone() {{
  local -a found
  local prev="${{words[CURRENT-1]}}" command="${{words[2]}}"
  if ((CURRENT == 2)); then
    local -a commands=({described})
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
  if [[ $command == ({"|".join(_WITH_TREES)}) ]] && ((CURRENT > 3)); then
    command="$command ${{words[3]}}"
  fi
  if [[ $PREFIX == -* ]]; then
    case "$command" in
{flags}    esac
  elif [[ $command == *\\ * ]]; then
    found=({shlex.join(recipe_names())})
  elif [[ $command == ({"|".join(_OTHERS)}) ]] && ((CURRENT == 4)); then
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
    for name, entry in COMMANDS.items():
        lines.append(f"complete -c hone -f -n {none} -a {name} -d {_fish_quoted(entry.summary)}")
    for name, words in _second_words().items():
        if not words[0].startswith("-"):
            condition = f"__fish_seen_subcommand_from {name}"
            if name in _WITH_ACTIONS:
                condition += f"; and not __fish_seen_subcommand_from {' '.join(words)}"
            seen = _fish_quoted(condition)
            lines.append(f"complete -c hone -n {seen} -a {_fish_quoted(' '.join(words))}")
    named = _fish_quoted(" ".join(recipe_names()))
    actions = " ".join(action for name in _WITH_ACTIONS for action in COMMANDS[name].actions)
    lines.append(f"complete -c hone -n '__fish_seen_subcommand_from {actions}' -a {named}")
    values = _values()
    flags = _flags()
    commands_of: dict[str, list[str]] = {}
    for command, names in flags.items():
        for flag in names:
            commands_of.setdefault(flag, []).append(command)
    for flag, takers in commands_of.items():
        seen = dict.fromkeys(word for command in takers for word in command.split())
        words = [word for word in seen if word not in _WITH_TREES]
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
"""The function of each shell makes its script."""
