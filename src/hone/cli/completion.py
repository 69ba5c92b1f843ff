"""`hone completion bash|zsh|fish`: a script that completes commands, recipes, keys and values."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hone.errors import UserError
from hone.tools.completion import SHELLS

__all__ = ["run"]

_USAGE = """\
usage: hone completion bash|zsh|fish

Prints a script that completes commands, recipes, keys and values. To have it in
every shell:
  bash: hone completion bash >> ~/.bashrc
  zsh:  hone completion zsh > ~/.zfunc/_hone    (a folder of $fpath, then compinit)
  fish: hone completion fish > ~/.config/fish/completions/hone.fish
"""


def run(argv: Sequence[str]) -> int:
    """Print the script of a shell."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if argv[0] not in SHELLS or len(argv) > 1:
        raise UserError(f"`hone completion` takes one of {', '.join(SHELLS)}, got {argv[0]!r}")
    sys.stdout.write(SHELLS[argv[0]]())
    return 0
