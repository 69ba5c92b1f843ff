"""`hone`: the command line. Each command is a module, imported when it is called."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module

from hone.config.commands import COMMANDS
from hone.distributed.processes import Processes, processes
from hone.distributed.spawn import INTERRUPTED, RESTART
from hone.errors import UserError
from hone.observe.printable import printable
from hone.version import __version__

__all__ = ["main"]

_USAGE = """\
hone: post-training of language models by reinforcement learning.

usage: hone COMMAND [RECIPE] [--section.key VALUE ...]

{commands}

RECIPE is a YAML file or the name of a built-in; flags win over it.
`hone rl --help` shows what nearly everybody sets, `hone rl --help rollout` all
keys of a section, `hone rl gsm8k --help` the values of a recipe.

examples:
  hone quickstart
  hone rl gsm8k --model.path Qwen/Qwen3-0.6B --rollout.n_samples_per_prompt 16
  hone rl gsm8k --nproc 8 --trainer.parallel.zero_stage 3
"""


_MEMORY_ADVICE = """\
In this order (benchmarks/memory.md has the numbers): lower engine.gpu_memory_utilization, or switch
engine.enable_sleep on; set trainer.optimizer.state_dtype to bfloat16; on several GPUs raise
trainer.parallel.zero_stage; lower trainer.max_tokens_per_microbatch; switch
trainer.offload to optimizer; set trainer.recompute to full, which comes before the offload where an
optimizer step has fewer than six micro-batches. `hone check` shows what training needs, by kind."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a user's mistake, 1 for other errors, 128 +
    n after signal n (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP).

    If several processes end because of one another, the first one to fail reports why. With
    `HONE_TRACEBACK=1` in the environment, a user's mistake also shows a traceback.
    """
    _open_closed_streams()
    code = _run(list(sys.argv[1:] if argv is None else argv))
    if argv is None and code > 128:
        # Exit at once: an ordinary exit would wait for a checkpoint that is being written.
        sys.stdout.flush()
        os._exit(code)
    if argv is None and "triton" not in sys.modules:
        # Otherwise the interpreter, as it ends, looks for cycles among all objects of torch several
        # times: 1.5 s after the last line. Triton would report what is kept as leaked.
        gc.freeze()
    return code


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the process was started without (`>&-`).
    Otherwise the next opened file gets its number and receives the printed text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open to the end


def _run(arguments: list[str]) -> int:
    try:
        own = processes()
    except UserError as error:
        _say(f"error: {error}")
        return 2
    _set_up_logging(own.rank)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        # The reader of the output is gone (`hone rl --help | head`): be silent at exit as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            if reported := _claim(own, loads_torch=False):
                command = COMMANDS.get(arguments[0])
                left = "nothing was written" if command is None else command.interrupted
                _say(f"interrupted; {left}")
                reported(INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "UnreachableError":  # nor can the reporting process be asked for
            if own.local_rank == 0:
                _say(f"error: {error}")
            return 1
        reported = _claim(own)
        if reported is None:
            return 1
        code = _explain(error)
        if code is None or os.environ.get("HONE_TRACEBACK"):
            if not own.has_other_hosts:
                raise
            traceback.print_exc()
            code = 1
        reported(code)
        return code


def _claim(own: Processes, *, loads_torch: bool = True) -> Callable[[int], None] | None:
    """Claim the report of why the run ends. Returns a function to call with the exit code once it
    is written, or None if another process has the claim."""
    if own.world_size == 1:
        return lambda code: None
    is_early = "hone.distributed.watch" not in sys.modules
    if not loads_torch and is_early:
        return None  # all processes are still starting; the launcher reports
    from hone.distributed.watch import claim

    claimed = claim(own)
    if claimed is None:
        return None

    def reported(code: int) -> None:
        claimed.reported(code)
        if is_early or own.has_other_hosts:  # the others may still be loading modules
            claimed.wait_for_acks(own)

    return reported


def _explain(error: Exception) -> int | None:
    """Report an error and return the exit code. None for an internal error."""
    from hone.observe.user_errors import user_message

    name = type(error).__name__  # compared by name: this file must not load torch
    if name in ("LostPeerError", "WorkersLostError", "StaleWeightsError"):
        _say(f"error: {error}")
        return 1
    if name == "RestartError":
        _say(f"error: {error}")
        return RESTART
    if (message := user_message(error)) is not None:
        _say(f"error: {processes().named(message)}")
        return 2
    if name == "OutOfMemoryError":
        _say(f"error: out of GPU memory. {error}\n{_MEMORY_ADVICE}")
        return 1
    return None


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    command, rest = arguments[0], arguments[1:]
    if command in ("-V", "--version"):
        sys.stdout.write(f"hone {__version__}\n")
        return 0
    if command not in COMMANDS:
        named = [name for name, it in COMMANDS.items() if command.lower() in it.other_names]
        near = named or get_close_matches(command, COMMANDS, 1)
        meant = " or ".join(f"`hone {name}`" for name in near)
        hint = f"Did you mean {meant}?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise UserError(f"there is no command '{command}'. {hint}")
    entry = COMMANDS[command]
    if entry.has_recipes and any(word in ("-h", "--help") for word in rest):
        from hone.cli.help import print_help

        return print_help(command, rest)
    module = import_module(f"hone.cli.{entry.module or command}")
    return module.run(rest, command) if entry.module in COMMANDS else module.run(rest)


def usage() -> str:
    """The page that `hone` without arguments prints."""
    return _USAGE.format(
        commands="\n".join(f"  {name:<12} {entry.summary}" for name, entry in COMMANDS.items())
    )


def _set_up_logging(rank: int) -> None:
    """Log hone's messages from level info and others' from warning, as plain lines on stderr. Of
    several processes only the first one logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger().setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    logging.getLogger("hone").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if rank > 0:
        warnings.simplefilter("ignore")


class _PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters: messages may quote rows of data."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _say(text: str) -> None:
    with suppress(OSError):  # its reader may be gone; the exit code still tells
        sys.stderr.write(f"{printable(text)}\n")
