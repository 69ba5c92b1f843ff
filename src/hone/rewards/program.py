"""Runs the program of an episode (`env.harness.command`) in the worker of its session.

The driver asks in three steps: `start` starts the program; `step` waits a moment for its end, again
and again, so that the driver may pause the episode's clock; a last `step` that `must_end` reads the
score, once the driver has the turns that the program asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import IO, Any

from hone.envs.session import Action, DataRow, End, ModelAccess
from hone.images.parts import data_uri, has_images
from hone.observe.disk import DiskError, temporary_folder
from hone.rewards.shapes import DeadlineError, InvalidScoreError, ProgramError
from hone.types import Observation, StopReason

__all__ = ["CALL_TIMEOUT_S", "HAS_ENDED", "TERMINATE", "WAS_CUT", "ProgramSession"]

HAS_ENDED = "has_ended"
"""Key of the state that `step` answers with: whether the program has ended."""
WAS_CUT = "was_cut"
"""Key of the same state: whether it was ended since its time was over."""
TERMINATE = str(StopReason.DEADLINE)
"""Stop reason of the `step` that ends the program, since its time is over."""

CALL_TIMEOUT_S = 60.0
"""Deadline of one call of `ProgramSession`, which waits for far less than that."""
_SLICE_S = 2.0
"""Longest time that one `step` waits for the end of the program."""
_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL, in which a program may still print its score."""
_KEPT_BYTES = 64 * 1024
"""Bytes of the end of each output that are kept."""
_SHOWN_CHARS = 500
"""Most characters of an output in a message."""
_NO_SCORES = ("nan", "inf", "infinity", "true", "false")
_LIMITS = tuple(map(str, (StopReason.MAX_TURNS, StopReason.LENGTH, StopReason.DEADLINE)))


class ProgramSession:
    """One run of the program. Implements `Session`."""

    def __init__(self, command: str, parent: Path | None) -> None:
        """The folder of the episode is made in `parent`, which outlives no worker that is killed;
        None: where the system keeps temporary files."""
        self._command, self._parent = shlex.split(command), parent
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: tuple[_End, ...] = ()
        self._was_cut = False

    def start(self, row: DataRow) -> None:
        """Start the program. Raises ProgramError where that is not possible."""
        assert row.model is not None, "the driver says where the policy is"
        task = _task(row)
        try:
            self._folder = temporary_folder("hone-episode-", self._parent)
        except DiskError as error:
            raise ProgramError(str(error)) from error
        if os.geteuid() == 0:  # commands of its shell (`shell.py`) may run as another user
            self._folder.chmod(0o711)
        try:
            process = subprocess.Popen(
                self._command,
                env=_environment(row.model, self._folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            text = f"env.harness.command cannot be started: {error}"
            raise ProgramError(text) from error
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._outputs = _End(process.stdout), _End(process.stderr)
        Thread(target=_write, args=(process.stdin, task), daemon=True).start()

    def step(self, action: Action) -> Observation | End:
        """Wait for the end of the program, or read its score."""
        assert self._process is not None
        if action.must_end:
            return self._end(action)
        if action.stop_reason == TERMINATE:
            self._terminate()
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SLICE_S)
        has_ended = self._process.returncode is not None
        return Observation(state={HAS_ENDED: has_ended, WAS_CUT: self._was_cut})

    def close(self) -> None:
        """Kill what still runs of the program, and remove its folder."""
        # The id of a process that has been waited for may be that of another one by now; what such
        # a program has left behind is killed by the worker.
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, action: Action) -> End:
        """The score of the program, which has ended after `action.index` turns. One that was cut at
        a limit may fail, since it asked for turns that it did not get."""
        assert self._process is not None
        printed, complaint = (output.text() for output in self._outputs)
        score = _score(printed)
        is_cut = action.stop_reason in _LIMITS
        if action.stop_reason == TERMINATE and score is None:
            raise DeadlineError(
                "the program was ended at the deadline of the episode (`env.episode_timeout_s`), "
                "and had printed no score"
            )
        code = self._process.returncode
        if code and not is_cut:
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            said = complaint.strip()[-_SHOWN_CHARS:] or "nothing"
            raise ProgramError(f"the program ended with {how}; the end of its stderr: {said}")
        if not action.index:
            raise ProgramError("the program ended without a turn of the policy")
        return End(score=score, truncated=is_cut)

    def _terminate(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            return
        self._was_cut = True
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the program that have not left its group; the worker
        kills others once the session is closed."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class _End:
    """Reads a stream in a thread, and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._kept = stream, b""
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), _KEPT_BYTES):
            self._kept = (self._kept + part)[-_KEPT_BYTES:]

    def text(self) -> str:
        """What has been kept. A process that the program has left behind may hold the stream open,
        so its end is not waited for long."""
        self._thread.join(_SLICE_S)
        return self._kept.decode(errors="replace")


def _score(printed: str) -> Mapping[str, float] | float | None:
    """The score in the last line that is not empty: a JSON number, or an object with `score`. None
    where the line is something else. Raises InvalidScoreError for what Python prints of numbers
    that are not finite and of truth values, since reward functions would score in their place."""
    lines = printed.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if last.lower().removeprefix("-") in _NO_SCORES:
        raise InvalidScoreError(
            f"the program printed {last!r} as its last line; a score is a finite number: 1.0"
        )
    try:
        value: Any = json.loads(last)
    except ValueError:
        return None
    if isinstance(value, dict) and "score" in value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _task(row: DataRow) -> bytes:
    """The task of a program: the row without the key, which is in its environment. Its messages
    have images as those of OpenAI's chat API do. Raises ProgramError where a file is gone."""
    fields = asdict(row) | {"model": None if row.model is None else row.model.name}
    fields["messages"] = [
        message | {"content": [*map(_sent, message["content"])]}
        if has_images(message.get("content"))
        else message
        for message in row.messages
    ]
    return json.dumps(fields, default=str).encode()


def _sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a message, with a data URI in the place of an image's file."""
    if part["type"] != "image":
        return part
    file: Path | bytes = part["image"]
    try:
        data = file.read_bytes() if isinstance(file, Path) else file
    except OSError as error:
        raise ProgramError(f"an image of the row cannot be read: {error}") from error
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def _environment(model: ModelAccess, folder: Path) -> dict[str, str]:
    """The variables of the program: those of hone, and how clients find the policy."""
    known = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    no_proxy = ",".join(filter(None, (known, "127.0.0.1", "localhost")))
    return os.environ | {
        "OPENAI_BASE_URL": f"{model.base_url}/v1",
        "OPENAI_API_KEY": model.api_key,
        "ANTHROPIC_BASE_URL": model.base_url,
        "ANTHROPIC_API_KEY": model.api_key,
        "HONE_MODEL": model.name,
        "HONE_TASK_FILE": "/dev/stdin",
        "HONE_EPISODE_DIR": str(folder),
        "TMPDIR": str(folder),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def _write(stream: IO[bytes], content: bytes) -> None:
    """Write the whole content, unless the program does not read it."""
    with contextlib.suppress(OSError), stream:
        stream.write(content)
