"""`hone serve RECIPE or MODEL [--nproc N] [flags]`: answer requests over HTTP with a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hone.cli.command import (
    check_here,
    load_checked,
    quiet_transformers,
    say_loading,
    take_nproc,
)
from hone.config.recipe import recipe_names
from hone.config.tree import ServeConfig
from hone.errors import UserError
from hone.extras import missing_extra
from hone.observe.printable import printable

if TYPE_CHECKING:
    from hone.door.security import Keys
    from hone.door.server import DoorServer

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check, load the model, and answer requests until Ctrl-C."""
    nproc, arguments = take_nproc(argv)
    for package in ("starlette", "uvicorn"):
        if (missing := missing_extra(package, needed_by="hone serve")) is not None:
            raise UserError(missing)
    cfg = load_checked(ServeConfig, with_model(arguments), check_here, nproc)
    say_loading()
    from hone.loops.serving import run_serving

    quiet_transformers()
    try:
        run_serving(cfg, nproc or 1, on_start=lambda *started: _print_start(cfg, *started))
    except KeyboardInterrupt:
        sys.stderr.write("the server has ended\n")
    return 0


def with_model(argv: Sequence[str]) -> list[str]:
    """The arguments with a model in the place of the recipe as `--model.path`: a folder with a
    `config.json`, or a name of the hub."""
    words = list(argv)
    if not words or words[0].startswith("-") or "=" in words[0]:
        return words
    name = words[0]
    is_folder = (Path(name) / "config.json").is_file()
    is_on_hub = "/" in name and not Path(name).exists() and not name.endswith((".yaml", ".yml"))
    if is_folder or (is_on_hub and name not in recipe_names()):
        return ["--model.path", *words]
    return words


def _print_start(cfg: ServeConfig, server: DoorServer, keys: Keys) -> None:
    """Print the address, and an example with the key: on the terminal alone, never in a log."""
    key = "$HONE_API_KEY"
    if cfg.serve.key_file is None:
        lines = [f"export HONE_API_KEY={keys.key}"]
    else:
        lines = [f'export HONE_API_KEY="$(cat {cfg.serve.key_file})"']
    lines += [
        f'curl {server.url}/v1/chat/completions -H "Authorization: Bearer {key}" \\',
        "  -H 'Content-Type: application/json' \\",
        """  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'""",
    ]
    sys.stdout.write(f"{cfg.model.path} is served at {server.url} (Ctrl-C ends it)\n\n")
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    sys.stdout.flush()
