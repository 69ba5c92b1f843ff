"""Writes metrics, events and samples: to the run folder first, then to trackers.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import orjson

from hone.config.run import LogConfig
from hone.observe.column_values import json_value
from hone.observe.disk import AppendedFile
from hone.observe.episode_rows import turn_rows
from hone.observe.histogram import Histogram
from hone.observe.trackers import Tracker, start_trackers
from hone.observe.whole_file import whole_file
from hone.types import (
    NOT_SAMPLED,
    Branch,
    Group,
    Message,
    PerToken,
    Sample,
    with_opened_tag,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BRANCH_TOKENS",
    "ENTROPY",
    "PER_TOKEN",
    "POLICY_LOGPROBS",
    "RunLog",
    "append_event",
    "completion_row",
    "groups_to_write",
    "json_line",
    "pair_row",
    "sample_row",
]

GIVEN_COLUMNS = "row"
"""Key of an output row under which columns of the prompt's row are kept if their names are
reserved."""
_SAME_ROLES = ("completion", "response", "output", "ground_truth")
"""Columns that would be read in place of the row's completion or answer."""
_OF_PAIRS = ("margin",)
"""Columns that describe the completions of an earlier pair."""
_OF_THE_ROW = ("prompt", "answer", "task")
"""Fields of a sample that are usually columns of the prompt's row."""
_RENDERED = "rendered"
PER_TOKEN = "prompt_token_ids"
"""The first per-token field of a sample's row. All later fields have one value per token."""
BRANCH_TOKENS = "branch_tokens"
"""The per-token fields of each branch, only where a sample has branches."""
POLICY_LOGPROBS, ENTROPY = "policy_logprobs", "entropy"
"""The last fields: log-probabilities and entropy of the policy before its update, or when it was
first trained on the tokens."""
_DIGITS = 5
"""Decimal digits of these two fields."""

MAX_LANES = 64

Item = TypeVar("Item")

ImageRows = Sequence[Mapping[str, Any]]
"""The images of a sample as its row names them (`hone.images.thumbnails`)."""


_KEY = "run.dir"


class _JsonLines:
    """An append-only file of JSON rows. Opening it removes the steps that will be computed
    again."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            _cut(path, resume_step)
        self._file = AppendedFile(path, _KEY)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, resume_step: int | None) -> None:
    """Keep only the rows of steps < `resume_step`, atomically; None keeps nothing. Rows without a
    step are kept; an incomplete last line (the process died while writing) is removed."""
    with whole_file(path, _KEY) as kept, path.open(encoding="utf-8", errors="replace") as rows:
        for line in rows:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if resume_step is not None and row.get("step", -1) < resume_step:
                kept.write(line if line.endswith("\n") else line + "\n")


def json_line(row: Mapping[str, Any]) -> bytes:
    """Encode a row of a JSONL file, with its newline. NaN and infinity become null."""
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
    except ValueError:  # only then search for NaN: the search takes longer than writing
        text = dumps(_finite(row))
    return text.encode(errors="backslashreplace")


def _json_array(values: PerToken) -> bytes:
    """Encode thousands of numbers, as `json` does but ten times as fast."""
    if not values:
        return b"[]"
    array = np.frombuffer(values, values.typecode)
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: bytes that are no UTF-8 text to base64, other types to their
    name."""
    try:
        return json_value(value)
    except ValueError:
        return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Append an event to a run folder whose log is not open. Raises DiskError if it cannot be
    written."""
    events = AppendedFile(run_dir / "events.jsonl", _KEY)
    events.write(json_line(_event(kind, fields)))
    events.close()


def _event(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "timestamp_s": time.time(), **fields}


class RunLog:
    """The files of a run folder, and the trackers of `log.to`.

    `resume_step` is the first step that will be computed; None starts the files anew. `config` is
    the resolved configuration, which trackers show. `images` names the images of a sample. Raises
    UserError if the package of a tracker is missing or broken.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: LogConfig,
        *,
        resume_step: int | None = None,
        config: Mapping[str, Any] | None = None,
        images: Callable[[Sample], ImageRows] = lambda sample: (),
    ) -> None:
        self._images = images
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
        """Record an event: an alarm, a dropped sample, a checkpoint."""
        self._events.write(_event(kind, fields))

    def lanes(self, step: int, lanes: Mapping[str, Sequence[tuple[str, float, float]]]) -> None:
        """Record the activity of trainers and engines in a step: state, begin and end, in seconds
        of wall clock time. With very many devices, some are left out, evenly."""
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
        """Write whole groups, evenly chosen from the step's, until they have `samples_per_step`
        samples; one of them has a failed sample if any does. With `failed_first`, groups without a
        failed sample are written only if others are too few. The histograms cover all samples.

        `advantages` maps the id of each trained sample to the mean advantage of its tokens.
        `policy` maps the id of each row (`Sample.paths`) to per-token columns of the policy,
        `POLICY_LOGPROBS` and `ENTROPY`.
        """
        rows: list[dict[str, Any]] = []
        for group in groups_to_write(groups, self._samples_per_step, failed_first=failed_first):
            for sample in group.samples:
                place = {"step": step, "split": split}
                advantage = {} if advantages is None else {"advantage": advantages.get(sample.id)}
                own_row = sample_row(sample, with_times=True, images=self._images(sample))
                row = place | advantage | own_row
                paths = [*row.get(BRANCH_TOKENS, ()), row]
                for path, (row_id, own) in zip(paths, sample.paths.items(), strict=True):
                    for name, scored in (policy or {}).get(row_id, {}).items():
                        values = (round(value, _DIGITS) for value in scored.tolist())
                        path[name] = [next(values) if m else None for m in own.loss_mask]
                rows.append(row)
                self._samples.write(row)
        histograms = _histograms(groups, step if split == "train" else None)
        if histograms:
            plain = {name: asdict(histogram) for name, histogram in histograms.items()}
            self._histograms.write({"step": step, "split": split, **plain})
        for tracker in self._trackers:
            tracker.samples(step, split, rows, histograms)

    def close(self) -> None:
        """Close all files and trackers."""
        files = (self._metrics, self._events, self._samples, self._histograms, self._lanes)
        for destination in (*files, *self._trackers):
            destination.close()


def groups_to_write(
    groups: Sequence[Group], num_samples: int, *, failed_first: bool = False
) -> list[Group]:
    """The groups to write: as few as have `num_samples` samples, evenly chosen, at least one with
    a failed sample where there are any."""
    largest = max((len(group.samples) for group in groups), default=0)
    count = math.ceil(num_samples / max(largest, 1))
    failed = [group for group in groups if _has_failed(group)]
    if failed_first:
        picked = _spread(failed, count)
        others = [group for group in groups if not _has_failed(group)]
        return picked + _spread(others, count - len(picked))
    picked = _spread(groups, count)
    if failed and picked and not any(map(_has_failed, picked)):
        picked[-1] = failed[0]
    return picked


def _has_failed(group: Group) -> bool:
    return any(sample.failure is not None for sample in group.samples)


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly chosen."""
    count = min(count, len(items))
    return [items[position * len(items) // count] for position in range(count)]


def _histograms(groups: Sequence[Group], step: int | None) -> dict[str, Histogram]:
    """Histograms of a step's samples, by name. Empty without samples. `staleness` is the number of
    updates between the oldest token's weights and those that `step` trains, if a step is given."""
    samples = [sample for group in groups for sample in group.samples]
    oldest = [_oldest_version(sample) for sample in samples] if step is not None else []
    behind = [step - 1 - version for version in oldest if step is not None and version is not None]
    histograms = {
        "staleness": Histogram.of(behind) if any(behind) else None,
        "reward": Histogram.of([s.reward.total for s in samples if s.reward is not None]),
        "completion_tokens": Histogram.of([s.num_sampled for s in samples]),
    }
    return {name: histogram for name, histogram in histograms.items() if histogram is not None}


def _oldest_version(sample: Sample) -> int | None:
    """The oldest weight version that sampled a token, or None if none was sampled."""
    paths = (sample, *sample.branches)
    sampled = (v for path in paths for v in path.weight_versions if v != NOT_SAMPLED)
    return min(sampled, default=None)


def completion_row(sample: Sample, images: Sequence[str] = ()) -> dict[str, Any]:
    """Row of a sample as training data: `prompt`, `completion` and the columns of the prompt's row,
    plus the fields of `sample_row`. Columns with reserved names, or names that would be read in
    place of its completion or answer, are in the object `row`. `images` are those of the prompt,
    as values that a row of any file may have."""
    return _training_row(sample, {"completion": _completion_text(sample)}, _SAME_ROLES, images)


def pair_row(best: Sample, worst: Sample, images: Sequence[str] = ()) -> dict[str, Any]:
    """Row of a pair as training data: `completion_row` of the better sample with `chosen` and
    `rejected` in place of `completion`: texts, or messages if the prompt is a list of messages."""
    completions = {
        "chosen": _turn(best),
        "rejected": _turn(worst),
        "rejected_reward": None if worst.reward is None else worst.reward.total,
        "rejected_stop_reason": str(worst.stop_reason),
    }
    return _training_row(best, completions, (*_SAME_ROLES, *_OF_PAIRS), images)


def _training_row(
    sample: Sample, completions: Mapping[str, Any], reserved: Sequence[str], images: Sequence[str]
) -> dict[str, Any]:
    """A row with the completions `completions`. No column of the prompt's row keeps a name in
    `reserved`, or another one for images where there are some."""
    row, prompt = sample_row(sample), sample.prompt
    row["turns"] = turn_rows(sample.turns, _completion_text(sample))
    rest = {key: row.pop(key) for key in [*row][[*row].index(PER_TOKEN) :]}
    del row["text"]
    own = {"id": row.pop("id"), "prompt": prompt.unrendered, **completions}
    if (rendered := row.pop("prompt")) != prompt.unrendered:
        row[_RENDERED] = rendered
    own |= row
    if images:
        own["images"], reserved = [*images], (*reserved, "image")
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
        return _completion_text(sample)
    return [{"role": "assistant", "content": _completion_text(sample)}]


def _completion_text(sample: Sample) -> str:
    return with_opened_tag(sample.prompt.text, sample.text)


def sample_row(
    sample: Sample, *, with_times: bool = False, images: ImageRows = ()
) -> dict[str, Any]:
    """Row with everything needed to find a sample again and to recompute its metrics, ready for
    `json_line`. Per-token fields come last, so that readers of the rest need not parse them.
    `with_times` is that of `turn_rows`; `images` are those of the sample."""
    branches: dict[str, Any] = {}
    branch_tokens: dict[str, Any] = {}
    if sample.branches:
        branches["branches"] = [
            {"turns": turn_rows(branch.turns, None, with_times=with_times)}
            for branch in sample.branches
        ]
        branch_tokens[BRANCH_TOKENS] = [_plain_tokens(branch) for branch in sample.branches]
    return {
        "id": sample.id,
        "prompt_id": sample.prompt.id,
        "task": sample.prompt.task,
        "index": sample.index,
        "prompt": sample.prompt.text,
        **({"images": images} if images else {}),
        "answer": sample.prompt.answer,
        "text": sample.text,
        "num_tokens": sample.num_sampled,
        "stop_reason": str(sample.stop_reason),
        "turns": turn_rows(sample.turns, sample.text, with_times=with_times),
        "attempt": sample.attempt,
        **branches,
        "reward": None if sample.reward is None else sample.reward.total,
        "reward_parts": {} if sample.reward is None else dict(sample.reward.parts),
        "failure": None if sample.failure is None else str(sample.failure),
        "failure_detail": sample.failure_detail,
        PER_TOKEN: PerToken("i", sample.prompt.token_ids),
        **_token_fields(sample),
        **branch_tokens,
    }


def _token_fields(path: Sample | Branch) -> dict[str, Any]:
    return {
        "token_ids": path.token_ids,
        "logprobs": path.logprobs,
        "weight_versions": path.weight_versions,
        "loss_mask": path.loss_mask,
    }


def _plain_tokens(branch: Branch) -> dict[str, Any]:
    """The per-token fields of a branch as lists, since `json_line` encodes no nested arrays."""
    fields = {PER_TOKEN: branch.prompt_ids} | _token_fields(branch)
    return {name: list(values) for name, values in fields.items()}
