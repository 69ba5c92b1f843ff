"""A row of the walk over all keys: what shows that a key has an effect."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """That a key has an effect: what differs between a run with and one without its flags."""

    value: str
    """What the key is set to in the second run; in the first unset, unless `given` sets it."""
    shows: str
    """Which of the things observed differs; or after `log:` a pattern that what the second run says
    must match and what the first says must not."""
    given: tuple[str, ...] = ()
    """Flags of both runs: what the key needs to be of use."""
    before: tuple[str, ...] | None = None
    """Flags of a run that went before in the same folder; None without one."""
    flag: str | None = None
    """The flag of the second run, where the key cannot be set alone."""
    command: str | None = None
    """Another command to show the effect with: `check`, for what takes several GPUs."""
    files: tuple[str, ...] = field(compare=False, default=())
    """Which of `walk_rows` have made it, from the root of the repository: one may replace parts of
    a row of another."""

    def __post_init__(self) -> None:
        frame = sys._getframe(1)
        while "walk_rows" not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        own = f"tests/config/walk_rows/{Path(frame.f_code.co_filename).name}"
        object.__setattr__(self, "files", (*self.files, own))
