"""The samples of a run for a served page: numbers to filter by in memory, texts in the file.

    table = SampleTable(Path("runs/gsm8k"))
    table.refresh()                                     # reads what the run has written since
    table.select({"show": "failed", "order": "newest"})  # -> a page of groups, in JSON's types
    table.group(12)                                     # -> its texts, token by token

Of each sample there are a few numbers and where its row lies in its file. What is sent is an index
of the groups of one page, in the form of `hone.tools.report.samples`, and later the texts of
those that are opened; the filters and orders are those of `samples.js`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.observe.run_folder import sample_files
from hone.tools.report.episodes import EpisodePicks
from hone.tools.report.images import asked_of
from hone.tools.report.pieces import Splitter
from hone.tools.report.samples import SampleIndex, SampleRow, text_of

__all__ = ["SampleTable", "newest_from"]

PAGE_GROUPS = 25
NUM_BINS = 30
_TRUNCATED = ("length", "max_turns", "deadline")
_MAX_SEARCHES = 8
"""Number of searches that are kept: the next groups of a page, and newly written samples, repeat
them."""


@dataclass(slots=True)
class _File:
    """A sample file with the position up to which it was read."""

    path: Path
    split: str
    """Split of rows that name none."""
    inode: int = 0
    end: int = 0


@dataclass(slots=True)
class _Samples:
    """Columns with one value per sample; groups are given by their first sample."""

    reward: list[float] = field(default_factory=list[float])
    """Rewards; nan if there is none, as in `parts`."""
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    tokens: list[int] = field(default_factory=list[int])
    is_failed: list[bool] = field(default_factory=list[bool])
    is_truncated: list[bool] = field(default_factory=list[bool])
    group: list[int] = field(default_factory=list[int])
    place: list[tuple[_File, int, int, int]] = field(
        default_factory=list[tuple[_File, int, int, int]]
    )
    """Position of a row: file, first byte of the row, first byte of its per-token part, and end."""
    first: list[int] = field(default_factory=list[int])
    """First sample of each group; `step` and `split` are per group too."""
    step: list[int] = field(default_factory=list[int])
    split: list[str] = field(default_factory=list[str])


class SampleTable:
    """The samples of one run. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._files: dict[Path, _File] = {}
        self._samples = _Samples()
        self._picks = EpisodePicks()
        self._last: tuple[Any, ...] = ()
        self._searched: dict[str, set[int]] = {}
        self._searched_until: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._samples.reward)

    def refresh(self) -> None:
        """Read the rows that were written since. A file that was cut, because the run was resumed
        from an earlier step, is read again."""
        with self._lock:
            files = sample_files(self._dir)
            for split, path in files.items():
                known, now = self._files.get(path), path.stat()
                if known and (known.inode != now.st_ino or now.st_size < known.end):
                    self._forget()
                    return self.refresh()
                file = self._files.setdefault(path, _File(path, split, now.st_ino))
                if now.st_size > file.end:
                    self._read(file)
        return None

    def _read(self, file: _File) -> None:
        with file.path.open("rb") as rows:
            rows.seek(file.end)
            for line in rows:
                if not line.endswith(b"}\n"):  # incomplete: it is read again later
                    break
                row = SampleRow.parse(line)
                self._add(file, row, file.end, file.end + len(line))
                file.end += len(line)

    def _add(self, file: _File, row: SampleRow, begin: int, end: int) -> None:
        samples, head, number = self._samples, row.head, len(self)
        self._picks.add(head, split=file.split)
        if (group := (file.path, *row.group())) != self._last:
            self._last = group
            samples.first.append(number)
            samples.step.append(int(head.get("step") or 0))
            samples.split.append(head.get("split") or file.split)
        samples.group.append(len(samples.first) - 1)
        samples.reward.append(_number(head.get("reward")))
        for name, value in (head.get("reward_parts") or {}).items():
            column = samples.parts.setdefault(name, [])
            column += [math.nan] * (number - len(column))
            column.append(_number(value))
        samples.tokens.append(head.get("num_tokens", 0))
        samples.is_failed.append(bool(head.get("failure")))
        samples.is_truncated.append(str(head.get("stop_reason")) in _TRUNCATED)
        samples.place.append((file, begin, begin + row.cut, end))

    # -- requests of the page -------------------------------------------------------------------

    def select(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the groups with a sample that the filters let through.

        `query` has, all as text and all optional: `search`, `show` (failed, truncated), `order`,
        `by` (a reward function), `split`, `from` and `to` (steps), `low` and `high` (of the score),
        `until` (a number of samples, to go on behind new ones) and `offset` of the page. The mask
        has a 1 for each sample of these groups that is let through. Raises ValueError for what is
        no number.
        """
        with self._lock:
            samples, score = self._samples, self._score(query.get("by", ""))
            mask = self._matching(query, score)
            order = self._ordered(mask, score, query.get("order", "newest"))
            offset = int(query.get("offset") or 0)
            if offset < 0:
                raise ValueError(f"offset is {offset}; pages begin at 0")
            shown = order[offset : offset + PAGE_GROUPS]
            index, questions = SampleIndex([""]), list[str]()
            of_groups: list[int] = []
            for group in shown:
                numbers = self._numbers(group)
                heads = [self._head(number) for number in numbers]
                index.add(0, samples.split[group], heads, 0)
                first = heads[0]
                prompt = asked_of(first)["prompt"].strip()
                questions.append(prompt[-300:] or str(first.get("prompt_id", "")))
                of_groups += mask[numbers.start : numbers.stop].astype(int).tolist()
            return {
                "num": int(mask.sum()),
                "all": len(self),
                "num_groups": len(order),
                "numbers": shown,
                "questions": questions,
                "index": index.columns(),
                "mask": of_groups,
                "scores": _bins(score[mask]),
                "lengths": _bins(np.asarray(samples.tokens, dtype=np.float64)[mask]),
                "splits": list(dict.fromkeys(samples.split)),
                "functions": [*samples.parts],
                "hasSteps": len(set(samples.step)) > 1,
                "newestFrom": newest_from(samples.step),
                "hasScores": bool(np.isfinite(self._score("")).any()) or any(samples.is_failed),
            }

    def group(self, number: int, split: Splitter | None) -> dict[str, Any]:
        """The texts of a group, as in a chunk of the written page. Raises IndexError."""
        with self._lock:
            if not 0 <= number < len(self._samples.first):
                raise IndexError(number)
            rows = [self._row(sample) for sample in self._numbers(number)]
        first = rows[0].head
        asked = asked_of(first)
        return {
            "prompt_id": first.get("prompt_id", ""),
            "task": first.get("task", ""),
            **asked,
            "answer": first.get("answer"),
            "samples": [text_of(row, split, with_tokens=True, asked=asked) for row in rows],
        }

    def episodes(self) -> dict[str, Any]:
        """The episodes that are worth a look, by kind."""
        with self._lock:
            return self._picks.columns()

    def _score(self, name: str) -> npt.NDArray[np.float64]:
        samples = self._samples
        column = samples.parts.get(name, []) if name else samples.reward
        values = np.full(len(self), np.nan)
        values[: len(column)] = column
        return values

    def _matching(
        self, query: Mapping[str, str], score: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.bool_]:
        samples = self._samples
        of_sample = np.asarray(samples.group, dtype=np.int64)
        mask = np.ones(len(self), dtype=np.bool_)
        if query.get("until"):
            mask[int(query["until"]) :] = False
        if query.get("show") == "failed":
            mask &= np.asarray(samples.is_failed, dtype=np.bool_)
        elif query.get("show") == "truncated":
            mask &= np.asarray(samples.is_truncated, dtype=np.bool_)
        step = np.asarray(samples.step, dtype=np.int64)[of_sample]
        if query.get("from"):
            mask &= step >= float(query["from"])
        if query.get("to"):
            mask &= step <= float(query["to"])
        if query.get("split"):
            is_wanted = [split == query["split"] for split in samples.split]
            mask &= np.asarray(is_wanted, dtype=np.bool_)[of_sample]
        if query.get("low"):
            mask &= score >= float(query["low"])
        if query.get("high"):
            mask &= score <= float(query["high"])
        if words := query.get("search", "").strip().lower():
            found = np.zeros(len(self), dtype=np.bool_)
            found[list(self._search(words))] = True
            mask &= found
        return mask

    def _ordered(
        self, mask: npt.NDArray[np.bool_], score: npt.NDArray[np.float64], order: str
    ) -> list[int]:
        """Groups with a sample in the mask, in `order`. A group counts as good as the best of these
        samples, or as bad as the worst; ties are broken by the mean, then by arrival. Groups
        without a score are last."""
        samples = self._samples
        num, group = len(samples.first), np.asarray(samples.group, dtype=np.int64)
        is_in = np.zeros(num, dtype=np.bool_)
        is_in[group[mask]] = True
        has = mask & np.isfinite(score)
        best, worst = np.full(num, -np.inf), np.full(num, np.inf)
        np.maximum.at(best, group[has], score[has])
        np.minimum.at(worst, group[has], score[has])
        counts = np.bincount(group[has], minlength=num)
        mean = np.bincount(group[has], score[has], minlength=num) / np.maximum(counts, 1)
        longest = np.zeros(num)
        np.maximum.at(longest, group[mask], np.asarray(samples.tokens, dtype=np.float64)[mask])
        step, nothing = np.asarray(samples.step, dtype=np.float64), np.zeros(num)
        keys = {
            "newest": (step, nothing),
            "oldest": (-step, nothing),
            "best": (best, mean),
            "worst": (-worst, -mean),
            "spread": (best - worst, nothing),
            "longest": (longest, nothing),
        }
        first, second = keys.get(order, keys["newest"])
        return [number for number in np.lexsort((-second, -first)).tolist() if is_in[number]]

    def _search(self, words: str) -> set[int]:
        """Samples with the words in prompt, text, answer, id or failure. A hit in the prompt or
        answer counts for the whole group. Rows are read again; an earlier search is continued."""
        found = self._searched.pop(words, set[int]())
        begin = self._searched_until.pop(words, 0)
        for number, head in self._heads(begin, words):
            told = ("prompt", "rendered", "answer", "prompt_id")
            if any(words in str(head.get(name, "")).lower() for name in told):
                found.update(self._numbers(self._samples.group[number]))
            own = ("text", "completion", "id", "failure_detail")
            if any(words in str(head.get(name, "")).lower() for name in own):
                found.add(number)
        self._searched[words], self._searched_until[words] = found, len(self)
        if len(self._searched) > _MAX_SEARCHES:
            oldest = next(iter(self._searched))
            del self._searched[oldest], self._searched_until[oldest]
        return found

    def _heads(self, begin: int, words: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Heads of the rows from `begin` on that may contain the words; only those are parsed."""
        wanted = json.dumps(words, ensure_ascii=False)[1:-1].lower().encode(errors="replace")
        plain = wanted.isascii()  # capitals of other letters may have several bytes
        places = self._samples.place
        for file in self._files.values():
            with file.path.open("rb") as rows:
                for number in range(begin, len(places)):
                    of, first, cut, _ = places[number]
                    if of is not file:
                        continue
                    rows.seek(first)
                    head = rows.read(cut - first)
                    if not plain or wanted in head.lower():
                        yield number, SampleRow.parse(_closed(head)).head

    def _numbers(self, group: int) -> range:
        first = self._samples.first
        end = first[group + 1] if group + 1 < len(first) else len(self)
        return range(first[group], end)

    def _head(self, number: int) -> Mapping[str, Any]:
        file, first, cut, _ = self._samples.place[number]
        return SampleRow.parse(_closed(_bytes(file.path, first, cut))).head

    def _row(self, number: int) -> SampleRow:
        file, first, _, end = self._samples.place[number]
        return SampleRow.parse(_bytes(file.path, first, end))


def _bytes(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as rows:
        rows.seek(begin)
        return rows.read(end - begin)


def _closed(head: bytes) -> bytes:
    """A row that was cut before its per-token part, closed to a JSON object."""
    return head if head.endswith(b"}\n") else head + b"}"


def newest_from(steps: Sequence[int]) -> int:
    """The first of the newest tenth of the steps that have samples, one of them at least."""
    held = sorted(set(steps))
    return held[-max(math.ceil(len(held) / 10), 1)] if held else 0


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _bins(values: npt.NDArray[np.float64]) -> dict[str, Any] | None:
    held = values[np.isfinite(values)]
    if not held.size:
        return None
    counts, edges = np.histogram(held, NUM_BINS)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
