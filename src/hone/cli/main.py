"""`hone`: the command line. Each command is a module, imported when it is called."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import hone
from hone.config import UserError
from hone.distributed.processes import processes

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "quickstart": "make a tiny model and watch it learn arithmetic on this machine",
    "rl": "train by reinforcement learning with verifiable rewards",
    "sft": "train on demonstrations",
    "generate": "sample completions for prompts from a file",
    "eval": "score a model on a data set",
    "report": "draw the report of a run folder",
    "bench": "measure the speed of the engine, beside vLLM where wanted",
    "check": "check a recipe and print its derived numbers; needs no GPU",
}

_RECIPE_COMMANDS = ("rl", "sft", "generate", "eval")

_USAGE = """\
hone: post-training of language models by reinforcement learning.

usage: hone COMMAND [RECIPE] [--section.key VALUE ...]

{commands}

RECIPE is a YAML file or the name of a built-in; flags win over it.
`hone COMMAND --help` explains every key, `hone rl --help rollout` one section.

examples:
  hone quickstart
  hone rl gsm8k --model.path Qwen/Qwen3-0.6B --rollout.n_samples_per_prompt 16
"""


_MEMORY_ADVICE = """\
In this order: switch trainer.recompute on; lower trainer.max_tokens_per_microbatch; lower
engine.gpu_memory_utilization, or switch engine.enable_sleep on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a user's mistake, 130 after Ctrl-C.

    With `HONE_TRACEBACK=1` in the environment, mistakes show where they were found.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _set_up_logging()
        return _dispatch(arguments)
    except BrokenPipeError:
        # The reader of our output is gone (`hone rl --help | head`); stay silent at exit as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if os.environ.get("HONE_TRACEBACK"):
            raise
        where = "" if isinstance(error, UserError) else "\n(HONE_TRACEBACK=1 shows where)"
        _say(f"error: {error}{where}")
        return 2
    except RuntimeError as error:
        # By name: this file must not load torch.
        if type(error).__name__ != "OutOfMemoryError" or os.environ.get("HONE_TRACEBACK"):
            raise
        _say(f"error: out of GPU memory. {error}\n{_MEMORY_ADVICE}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    command, rest = arguments[0], arguments[1:]
    if command in ("-V", "--version"):
        sys.stdout.write(f"hone {hone.__version__}\n")
        return 0
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, 1)
        hint = f"Did you mean `hone {near[0]}`?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise UserError(f"there is no command '{command}'. {hint}")
    if command in _RECIPE_COMMANDS and any(word in ("-h", "--help") for word in rest):
        from hone.cli.help import print_help

        return print_help(command, [word for word in rest if not word.startswith("-")])
    return import_module(f"hone.cli.{command}").run(rest)


def usage() -> str:
    """The page that `hone` alone prints."""
    return _USAGE.format(
        commands="\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())
    )


def _set_up_logging() -> None:
    """Our own messages from level info on, others' from warning on, as plain lines on stderr.

    Of several processes, which all say the same, the first alone; errors come from each.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    is_first = processes().rank == 0
    logging.getLogger("hone").setLevel(logging.INFO if is_first else logging.ERROR)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
