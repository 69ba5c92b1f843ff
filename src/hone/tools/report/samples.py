"""Samples in the page: an index of all samples, and their texts in compressed chunks.

The index has a number for each sample of what the page filters, sorts and counts by, so that
`samples.js` opens only the chunks of what is shown or searched. Both are JSON, gzipped, in base64.

    index: {"runs", "splits", "stops", "failures", "functions": names,
            "groups": {"run", "split", "step", "first", "chunk": [G]},
            "reward", "advantage", "tokens", "stop", "failure": [N], "parts": {function: [N]}}
    chunk: [{"prompt_id", "task", "prompt", "answer", "samples": [{"id", "text" | "pieces", ...}]}]

Where a prompt has `images`, they are those of `hone.tools.report.images`.

`first` is the position of a group's first sample among the `N`. A sample with `pieces`, one a
token, has `ids`, `logprobs`, `versions` and `mask` beside it, and where it was trained
`policy` and `entropy`, what the trainer says of its tokens. An episode has `turns`, with texts
where it has no pieces, and `branches`; one that an older version has written has `parts`.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.observe.loggers import ENTROPY, PER_TOKEN, POLICY_LOGPROBS
from hone.observe.run_folder import RunFolder
from hone.tools.report.episodes import EpisodePicks, branches_of, turns_of
from hone.tools.report.images import asked_of, hashes_of, marked_pieces, pictures_of
from hone.tools.report.pieces import Splitter

__all__ = ["SampleIndex", "SampleRow", "SampleStore", "sample_store", "text_of"]

MAX_TEXT_BYTES = 64 << 20
"""Limit of the rows whose texts a page holds, without their per-token parts."""
MAX_TOKEN_BYTES = 16 << 20
"""Limit of the rows whose tokens are shown one by one."""
CHUNK_CHARS = 1 << 19
_PER_TOKEN = f', "{PER_TOKEN}": ['.encode()
_GZIP_LEVEL = 5


@dataclass(frozen=True, slots=True)
class SampleStore:
    """The samples in the form of the page."""

    index: str
    chunks: Sequence[str]
    left_out: str
    """Note on the texts that the page lacks. Empty if it has all."""
    episodes: Mapping[str, Any]
    """The episodes that are worth a look, by kind (`hone.tools.report.episodes`). Empty without an
    environment."""
    pictures: Mapping[str, str]
    """The small pictures of the images, as data URIs by hash."""
    has_scores: bool
    """Whether a sample has a reward."""


def sample_store(runs: Sequence[RunFolder]) -> SampleStore | None:
    """The samples of runs, group by group as in their files. None without samples. If the texts
    exceed the page's limit, evenly chosen groups have theirs; all are in the index."""
    files = [
        _SampleFile.scan(number, split, path)
        for number, run in enumerate(runs)
        for split, path in run.sample_files.items()
    ]
    num_groups = sum(file.num_groups for file in files)
    if not num_groups:
        return None
    texts = _Share(num_groups, MAX_TEXT_BYTES, sum(file.text_bytes for file in files))
    tokens = _Share(num_groups, MAX_TOKEN_BYTES, sum(file.token_bytes for file in files))
    splitters = [Splitter.of_run(run) for run in runs]
    index, chunks = SampleIndex([run.name for run in runs]), _Chunks()
    picks, several = EpisodePicks(), len(runs) > 1
    named: dict[str, Path] = {}
    with_text = 0
    for number, (file, rows) in enumerate(_groups(files)):
        has_text, has_tokens = texts.includes(number), tokens.includes(number)
        with_text += has_text
        index.add(file.run, file.split, [row.head for row in rows], chunks.number)
        for row in rows:
            picks.add(row.head, split=file.split, run=runs[file.run].name if several else "")
            named |= dict.fromkeys(hashes_of(row.head), runs[file.run].path)
        asked = asked_of(rows[0].head)
        held = [
            text_of(row, splitters[file.run], with_tokens=has_tokens, asked=asked)
            if has_text
            else {"id": row.head.get("id", "")}
            for row in rows
        ]
        first = rows[0].head
        chunks.add(
            {
                "prompt_id": first.get("prompt_id", ""),
                "task": first.get("task", ""),
                **(asked if has_text else {"prompt": ""}),
                "answer": first.get("answer"),
                "samples": held,
            }
        )
    left_out = ""
    if with_text < num_groups:
        left_out = (
            f"The texts of {with_text:,} of the {num_groups:,} groups of samples are in this page, "
            "evenly chosen; all groups count in its filters and histograms. The rest of the texts "
            f"are in {', '.join(sorted({file.path.name for file in files}))}."
        )
    return SampleStore(
        index=_packed(index.columns()),
        chunks=chunks.packed(),
        left_out=left_out,
        episodes=picks.columns(),
        pictures=pictures_of(named),
        has_scores=index.has_scores,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """Chooses groups within a budget of bytes: evenly spread, always with the last one."""

    num_groups: int
    budget: int
    whole: int

    def includes(self, number: int) -> bool:
        if self.whole <= self.budget:
            return True
        behind = self.num_groups - number
        return _ceil(behind * self.budget, self.whole) > _ceil(
            (behind - 1) * self.budget, self.whole
        )


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A line of a sample file. Its per-token part comes last and is parsed on demand."""

    line: bytes
    cut: int
    """Begin of the per-token part."""
    head: Mapping[str, Any]
    """The fields before it."""

    @classmethod
    def parse(cls, line: bytes) -> SampleRow:
        cut = line.find(_PER_TOKEN)
        if cut < 0:
            return cls(line, len(line), json.loads(line))
        return cls(line, cut, json.loads(line[:cut] + b"}"))

    def whole(self) -> dict[str, Any]:
        return json.loads(self.line)

    def group(self) -> tuple[Any, ...]:
        """Key of the row's group. Samples of a group are adjacent and have step, split and the
        first part of the id in common."""
        name = str(self.head.get("id", "")).rpartition("/")[0]
        return self.head.get("step"), self.head.get("split"), name


@dataclass(slots=True)
class _SampleFile:
    run: int
    split: str
    path: Path
    num_groups: int = 0
    text_bytes: int = 0
    token_bytes: int = 0

    @classmethod
    def scan(cls, run: int, split: str, path: Path) -> _SampleFile:
        """Count groups and bytes of a file."""
        file = cls(run, split, path)
        for rows in file.groups():
            file.num_groups += 1
            file.text_bytes += sum(row.cut for row in rows)
            file.token_bytes += sum(len(row.line) - row.cut for row in rows)
        return file

    def groups(self) -> Iterator[list[SampleRow]]:
        """Rows by group. An incomplete last line is left out."""
        held: list[SampleRow] = []
        last: tuple[Any, ...] | None = None
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"}\n"):
                    continue
                row = SampleRow.parse(line)
                group = row.group()
                if held and group != last:
                    yield held
                    held = []
                held.append(row)
                last = group
        if held:
            yield held


def _groups(files: Sequence[_SampleFile]) -> Iterator[tuple[_SampleFile, list[SampleRow]]]:
    for file in files:
        for rows in file.groups():
            yield file, rows


def text_of(
    row: SampleRow, split: Splitter | None, *, with_tokens: bool, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a sample that the page shows when its group is opened, with its prompt where
    that is not `asked`, the group's: a session may start with a text of its own."""
    head = row.head
    held: dict[str, Any] = {"id": head.get("id", "")}
    if (own := asked_of(head)) != asked:
        held |= own
    if head.get("failure_detail"):
        held["detail"] = head["failure_detail"]
    turns = head.get("turns") or []
    if branches := branches_of(head):
        held["branches"] = branches
    if not with_tokens and (seen := turns_of(head)) is not None:
        return held | {"turns": seen}
    if split is None or not (with_tokens or len(turns) > 1):
        return held | _texts(head)
    whole = row.whole()
    ids: list[int] = whole.get("token_ids") or []
    if not ids:
        return held | _texts(head)
    pieces = marked_pieces(split(ids), head, begin=len(whole.get(PER_TOKEN) or ()))
    mask = whole.get("loss_mask") or [1] * len(ids)
    if not with_tokens:
        return held | {"parts": _parts(pieces, mask)}
    if (seen := turns_of(head, with_text=False)) is not None:
        held["turns"] = seen
    versions: list[int] = whole.get("weight_versions") or []
    return held | {
        "pieces": pieces,
        "ids": ids,
        "logprobs": [_rounded(value) for value in whole.get("logprobs") or []],
        **{
            name: list(map(_rounded, values))
            for name, field in (("policy", POLICY_LOGPROBS), ("entropy", ENTROPY))
            if (values := whole.get(field))
        },
        "versions": versions[0] if len(set(versions)) == 1 else versions,
        "mask": 1 if all(mask) else mask,
    }


def _texts(head: Mapping[str, Any]) -> dict[str, Any]:
    """The turns of a row, or its text where it has none."""
    turns = turns_of(head)
    return (
        {"text": head.get("text", head.get("completion", ""))}
        if turns is None
        else {"turns": turns}
    )


def _parts(pieces: Sequence[str], mask: Sequence[int]) -> list[list[Any]]:
    """List of `[text, 1 if the policy wrote it else 0]`, in order."""
    parts: list[list[Any]] = []
    for piece, trained in zip(pieces, mask, strict=False):
        if not parts or parts[-1][1] != int(trained):
            parts.append(["", int(trained)])
        parts[-1][0] += piece
    return parts


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@dataclass(slots=True)
class _Names:
    """Numbers for the few different texts of a column."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class SampleIndex:
    """Columns of numbers that grow with each group."""

    def __init__(self, runs: Sequence[str]) -> None:
        self._runs = runs
        self._splits, self._stops = _Names(), _Names()
        self._failures = _Names({"": 0})
        self._group: dict[str, list[int]] = {
            name: [] for name in ("run", "split", "step", "first", "chunk")
        }
        names = ("reward", "advantage", "tokens", "stop", "failure")
        self._sample: dict[str, list[Any]] = {name: [] for name in names}
        self._parts: dict[str, list[float | None]] = {}

    def add(self, run: int, split: str, heads: Sequence[Mapping[str, Any]], chunk: int) -> None:
        """Add a group. `split` is the split of rows that name none."""
        sample, num_before = self._sample, len(self._sample["reward"])
        first = heads[0]
        values = {
            "run": run,
            "split": self._splits.number(first.get("split") or split),
            "step": int(first.get("step") or 0),
            "first": num_before,
            "chunk": chunk,
        }
        for name, value in values.items():
            self._group[name].append(value)
        for number, head in enumerate(heads, start=num_before):
            sample["reward"].append(_short(head.get("reward")))
            sample["advantage"].append(_short(head.get("advantage")))
            sample["tokens"].append(head.get("num_tokens", 0))
            sample["stop"].append(self._stops.number(str(head.get("stop_reason"))))
            sample["failure"].append(self._failures.number(head.get("failure") or ""))
            for name, value in (head.get("reward_parts") or {}).items():
                column = self._parts.setdefault(name, [])
                column += [None] * (number - len(column))
                column.append(_short(value))

    @property
    def has_scores(self) -> bool:
        """Whether a sample has a reward."""
        return any(reward is not None for reward in self._sample["reward"])

    def columns(self) -> dict[str, Any]:
        number = len(self._sample["reward"])
        for column in self._parts.values():
            column += [None] * (number - len(column))
        return {
            "runs": self._runs,
            "splits": [*self._splits.numbers],
            "stops": [*self._stops.numbers],
            "failures": [*self._failures.numbers],
            "functions": [*self._parts],
            "groups": self._group,
            **self._sample,
            "parts": self._parts,
        }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


class _Chunks:
    """Packs groups into compressed chunks of limited size."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open: list[str] = []
        self._num_chars = 0

    @property
    def number(self) -> int:
        """Number of the chunk for the next group."""
        return len(self._done)

    def add(self, group: Mapping[str, Any]) -> None:
        text = json.dumps(group, separators=(",", ":"), ensure_ascii=False)
        self._open.append(text)
        self._num_chars += len(text)
        if self._num_chars >= CHUNK_CHARS:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._done.append(_packed_text(f"[{','.join(self._open)}]"))
            self._open, self._num_chars = [], 0

    def packed(self) -> list[str]:
        self._close()
        return self._done


def _packed(data: object) -> str:
    return _packed_text(json.dumps(data, separators=(",", ":"), ensure_ascii=False))


def _packed_text(text: str) -> str:
    data = gzip.compress(text.encode(errors="backslashreplace"), _GZIP_LEVEL, mtime=0)
    return base64.b64encode(data).decode("ascii")
