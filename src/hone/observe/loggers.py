"""Where metrics, events and samples go. Everything lands in the run folder first.

    with RunLog(run_dir, cfg.log, resume_step=start) as log:
        log.log(step, to_scalars(metrics))
        log.event("alarm", step=step, metric="train/grad_norm")
        log.samples(step, groups)

The run folder holds `metrics.jsonl` (one row a step), `events.jsonl`, `samples.jsonl` (some groups
of each step, whole), `histograms.jsonl` (of all its samples) and `lanes.jsonl` (what trainers and
engines did when); each row is written and flushed at
once, so that a killed run keeps every finished step. When a run resumes at step s, rows of steps
>= s are cut off: they are about to be computed again.
"""

from __future__ import annotations

import json
import math
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import orjson

from hone.config.run import LogConfig
from hone.observe.column_values import json_value
from hone.observe.disk import AppendedFile, writing
from hone.observe.histogram import Histogram
from hone.observe.trackers import Tracker, start_trackers
from hone.observe.whole_file import whole_file
from hone.types import NOT_SAMPLED, Group, Message, PerToken, Sample, with_opened_tag

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ENTROPY",
    "PER_TOKEN",
    "POLICY_LOGPROBS",
    "RunLog",
    "append_event",
    "chosen",
    "completion_row",
    "json_line",
    "pair_row",
    "sample_row",
]

GIVEN_COLUMNS = "row"
"""Of a row to train on, the object with the columns of the prompt's row whose names are taken."""
_SAME_ROLES = ("completion", "response", "output", "ground_truth")
"""Columns that would be read in place of the completion or the answer of the row."""
_OF_PAIRS = ("margin",)
"""Columns that say something of the completions of an earlier pair."""
_OF_THE_ROW = ("prompt", "answer", "task")
"""Fields of a sample that are columns of the prompt's row, as a rule."""
_RENDERED = "rendered"
PER_TOKEN = "prompt_token_ids"
"""The first of the fields of a sample's row that have a value for each token."""
POLICY_LOGPROBS, ENTROPY = "policy_logprobs", "entropy"
"""The last: of the policy before its update, or where it has first trained on the tokens."""
_DIGITS = 5
"""Of these."""

MAX_LANES = 64

Item = TypeVar("Item")


_KEY = "run.dir"


class _JsonLines:
    """An append-only file of JSON rows; opening it cuts off the steps that are computed again."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            with writing(path, _KEY):
                _cut(path, resume_step)
        self._file = AppendedFile(path, _KEY)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, resume_step: int | None) -> None:
    """Keep the rows of steps < `resume_step`, atomically. None keeps nothing.

    A row without a step stays; a torn last line (the process died while writing) goes.
    """
    with whole_file(path) as kept, path.open(encoding="utf-8", errors="replace") as rows:
        for line in rows:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if resume_step is not None and row.get("step", -1) < resume_step:
                kept.write(line if line.endswith("\n") else line + "\n")


def json_line(row: Mapping[str, Any]) -> bytes:
    """A row of a JSONL file, with its end of line. NaN and infinity become null."""
    parts: list[bytes] = []
    for has_arrays, items in groupby(row.items(), lambda item: isinstance(item[1], PerToken)):
        if has_arrays:
            parts += (b'"%s": %s' % (key.encode(), _json_array(values)) for key, values in items)
        else:
            parts.append(_json_object(dict(items))[1:-1])
    return b"{%s}\n" % b", ".join(parts)


def _json_object(row: Mapping[str, Any]) -> bytes:
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        text = dumps(row)
    except ValueError:  # looked for only then: that takes longer than writing
        text = dumps(_finite(row))
    return text.encode(errors="backslashreplace")


def _json_array(values: PerToken) -> bytes:
    """As `json` has it, in a tenth of the time: thousands of numbers a row."""
    if not values:
        return b"[]"
    array = np.frombuffer(values, values.typecode)
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """What JSON lacks: bytes that are no text in base64, and what is no value of a column by its
    name."""
    try:
        return json_value(value)
    except ValueError:
        return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(held) for key, held in value.items()}
        case list() | tuple():
            return [_finite(held) for held in value]
        case _:
            return value


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Add an event to a run folder whose log is closed, or was never opened.

    Raises DiskError where it cannot be written.
    """
    events = AppendedFile(run_dir / "events.jsonl", _KEY)
    events.write(json_line(_event(kind, fields)))
    events.close()


def _event(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "timestamp_s": time.time(), **fields}


class RunLog:
    """The files of a run folder, and the trackers that are switched on.

    `resume_step` is the first step that will be computed; None starts the folder's files afresh.
    `config` is the resolved configuration, shown by trackers. Raises UserError where a tracker is
    switched on whose package is missing or broken.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: LogConfig,
        *,
        resume_step: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._metrics, self._events, self._samples, self._histograms, self._lanes = (
            _JsonLines(run_dir / f"{name}.jsonl", resume_step)
            for name in ("metrics", "events", "samples", "histograms", "lanes")
        )
        self._trackers: Sequence[Tracker] = start_trackers(
            cfg, run_dir, resume_step=resume_step, config=config or {}
        )
        self._samples_per_step = cfg.samples_per_step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._metrics.write({"step": step, "timestamp_s": time.time(), **scalars})
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def event(self, kind: str, **fields: Any) -> None:
        """Record something that happened: an alarm, a drop, a checkpoint."""
        self._events.write(_event(kind, fields))

    def lanes(self, step: int, lanes: Mapping[str, Sequence[tuple[str, float, float]]]) -> None:
        """Record what trainers and engines did in a step: state, beginning and end, in seconds of
        the wall clock. Of very many devices some are left out, evenly."""
        rounded = {
            name: [(state, round(begin, 3), round(end, 3)) for state, begin, end in lanes[name]]
            for name in _spread([*lanes], MAX_LANES)
        }
        self._lanes.write({"step": step, "lanes": rounded})

    def samples(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        advantages: Mapping[str, float] | None = None,
        policy: Mapping[str, Mapping[str, Tensor]] | None = None,
        split: str = "train",
        failed_first: bool = False,
    ) -> None:
        """Write whole groups, spread evenly over the step's, until they hold `samples_per_step`
        samples; with `failed_first` groups without a failed sample only where others are too few.
        The histograms are of all samples.

        `advantages` maps the id of each trained sample to the mean advantage of its tokens,
        `policy` that of each to what the policy says of its trained tokens, `POLICY_LOGPROBS` and
        `ENTROPY`.
        """
        rows: list[dict[str, Any]] = []
        for group in chosen(groups, self._samples_per_step, failed_first=failed_first):
            for sample in group.samples:
                place = {"step": step, "split": split}
                advantage = {} if advantages is None else {"advantage": advantages.get(sample.id)}
                row = place | advantage | sample_row(sample)
                for name, scored in (policy or {}).get(sample.id, {}).items():
                    values = (round(value, _DIGITS) for value in scored.tolist())
                    row[name] = [next(values) if m else None for m in sample.loss_mask]
                rows.append(row)
                self._samples.write(row)
        histograms = _histograms(groups, step if split == "train" else None)
        if histograms:
            plain = {name: asdict(histogram) for name, histogram in histograms.items()}
            self._histograms.write({"step": step, "split": split, **plain})
        for tracker in self._trackers:
            tracker.samples(step, split, rows, histograms)

    def close(self) -> None:
        """Flush and release all of them."""
        files = (self._metrics, self._events, self._samples, self._histograms, self._lanes)
        for destination in (*files, *self._trackers):
            destination.close()


def chosen(groups: Sequence[Group], num_samples: int, *, failed_first: bool = False) -> list[Group]:
    """As few groups as hold `num_samples` samples, evenly: those that are written."""
    largest = max((len(group.samples) for group in groups), default=0)
    count = math.ceil(num_samples / max(largest, 1))
    failed: list[Group] = []
    others: list[Group] = []
    for group in groups:
        has_failed = any(sample.failure is not None for sample in group.samples)
        (failed if failed_first and has_failed else others).append(group)
    found = _spread(failed, count)
    return found + _spread(others, count - len(found))


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of them, evenly."""
    count = min(count, len(items))
    return [items[position * len(items) // count] for position in range(count)]


def _histograms(groups: Sequence[Group], step: int | None) -> dict[str, Histogram]:
    """Of the samples of a step, by name; none without samples. `staleness` is how many updates the
    oldest token of a sample is behind the weights that `step` trains, where one is."""
    samples = [sample for group in groups for sample in group.samples]
    oldest = [_oldest_version(sample) for sample in samples] if step is not None else []
    behind = [step - 1 - version for version in oldest if step is not None and version is not None]
    found = {
        "staleness": Histogram.of(behind) if any(behind) else None,
        "reward": Histogram.of([s.reward.total for s in samples if s.reward is not None]),
        "completion_tokens": Histogram.of([s.num_sampled for s in samples]),
    }
    return {name: histogram for name, histogram in found.items() if histogram is not None}


def _oldest_version(sample: Sample) -> int | None:
    """The oldest weights behind a token; None where none was sampled."""
    return min((v for v in sample.weight_versions if v != NOT_SAMPLED), default=None)


def completion_row(sample: Sample) -> dict[str, Any]:
    """As `sample_row`, as a row of data to train on: `prompt` and `completion` as such a row has
    them, and the columns of the prompt's row. Columns whose names the row has for itself, or that
    would be read in place of its completion or answer, are in the object `row`."""
    return _training_row(sample, {"completion": _said(sample)}, _SAME_ROLES)


def pair_row(best: Sample, worst: Sample) -> dict[str, Any]:
    """As `completion_row` of the better one, with `chosen` and `rejected` for its completion:
    texts, or messages where the prompt is a list of them."""
    said = {
        "chosen": _turn(best),
        "rejected": _turn(worst),
        "rejected_reward": None if worst.reward is None else worst.reward.total,
        "rejected_stop_reason": str(worst.stop_reason),
    }
    return _training_row(best, said, (*_SAME_ROLES, *_OF_PAIRS))


def _training_row(
    sample: Sample, said: Mapping[str, Any], reserved: Sequence[str]
) -> dict[str, Any]:
    """A row with the completions `said`, in which no column of the prompt's row has a name that is
    `reserved`."""
    row, prompt = sample_row(sample), sample.prompt
    rest = {key: row.pop(key) for key in [*row][[*row].index(PER_TOKEN) :]}
    del row["text"]
    own = {"id": row.pop("id"), "prompt": prompt.unrendered, **said}
    if (rendered := row.pop("prompt")) != prompt.unrendered:
        row[_RENDERED] = rendered
    own |= row
    taken = {*own, *rest, *reserved, _RENDERED, GIVEN_COLUMNS}
    columns, nested = dict[str, Any](), dict[str, Any]()
    for name, value in prompt.metadata.items():
        if name not in taken:
            columns[name] = value
        elif name not in _OF_THE_ROW or own[name] != value:
            nested[name] = value
    return own | columns | ({GIVEN_COLUMNS: nested} if nested else {}) | rest


def _turn(sample: Sample) -> str | list[Message]:
    if isinstance(sample.prompt.unrendered, str):
        return _said(sample)
    return [{"role": "assistant", "content": _said(sample)}]


def _said(sample: Sample) -> str:
    return with_opened_tag(sample.prompt.text, sample.text)


def sample_row(sample: Sample) -> dict[str, Any]:
    """Everything needed to find a sample again and to recompute its metrics, ready for `json_line`.

    What has a value for each token comes last: who wants the rest alone need not parse it.
    """
    return {
        "id": sample.id,
        "prompt_id": sample.prompt.id,
        "task": sample.prompt.task,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "text": sample.text,
        "num_tokens": sample.num_sampled,
        "stop_reason": str(sample.stop_reason),
        "turns": [
            {
                "start": turn.start,
                "end": turn.end,
                "stop_reason": str(turn.stop_reason),
                "reward": turn.reward,
            }
            for turn in sample.turns
        ],
        "reward": None if sample.reward is None else sample.reward.total,
        "reward_parts": {} if sample.reward is None else dict(sample.reward.parts),
        "failure": None if sample.failure is None else str(sample.failure),
        "failure_detail": sample.failure_detail,
        PER_TOKEN: PerToken("i", sample.prompt.token_ids),
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "weight_versions": sample.weight_versions,
        "loss_mask": sample.loss_mask,
    }
