"""The return types of the Python API, read from the files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from hone.cli.eval import evaluation_rows
from hone.config.rules.finding import Finding
from hone.curves import CURVES, curves
from hone.observe.printable import breakable
from hone.observe.run_folder import RunFolder

__all__ = [
    "Check",
    "Evaluation",
    "RunResult",
    "SampleRecord",
    "read_samples",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """A completion with its rewards, from the files of a run."""

    id: str
    prompt: str
    """The rendered prompt that the model saw."""
    completion: str
    answer: str | None
    task: str
    stop_reason: str
    """`eos`, `stop_string`, or `length` where the completion was cut."""
    reward: float | None
    """The weighted sum; None where it was not scored, or scoring failed."""
    parts: Mapping[str, float]
    """Score of each reward function, by its name."""
    failure: str | None
    """Why the sample has no reward, as a `FailureKind`."""
    failure_detail: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was sampled from."""
    step: int | None = None
    """The update that it was sampled for; None outside of training."""
    split: str | None = None
    """`train` or `eval`; None outside of training."""
    advantage: float | None = None
    """Mean advantage of its trained tokens (they differ with `gae` and with a KL penalty in the
    reward); None where it was not trained."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> SampleRecord:
        """From a row of `samples.jsonl`, `eval_samples.jsonl` or the output of `hone generate`."""
        names = ("id", "answer", "task", "stop_reason", "reward", "failure")
        fields = {name: row[name] for name in (*names, "failure_detail", "token_ids", "logprobs")}
        return cls(
            **fields,
            prompt=row.get("rendered", row["prompt"]),
            completion=row["completion"] if "completion" in row else row["text"],
            parts=row["reward_parts"],
            step=row.get("step"),
            split=row.get("split"),
            advantage=row.get("advantage"),
        )


def read_samples(file: Path) -> list[SampleRecord]:
    """All samples of a JSONL file; an empty list without the file. A last line that is still being
    written is left out."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [SampleRecord.of_row(json.loads(line)) for line in lines if line.endswith("\n")]


@dataclass(frozen=True)
class RunResult:
    """A training run that has ended. A notebook shows its curves."""

    run_dir: Path
    steps: int
    """Updates done in all, earlier launches included."""
    stopped_by: int | None = None
    """The signal that stopped the run before its last step, such as 2 for Ctrl-C; else None."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each step, of this and earlier launches, as for `pandas.DataFrame`."""
        return [dict(row) for row in RunFolder.read(self.run_dir, has_ended=True).rows]

    @cached_property
    def final(self) -> dict[str, Any]:
        """The last value of every metric."""
        return {name: value for row in self.metrics for name, value in row.items()}

    @cached_property
    def samples(self) -> list[SampleRecord]:
        """The samples that were written, `log.samples_per_step` of each step."""
        return read_samples(self.run_dir / "samples.jsonl")

    @property
    def model_dir(self) -> Path:
        """The folder of the trained model, in Hugging Face format."""
        return self.run_dir / "model"

    @property
    def report(self) -> Path:
        """The report of the run, a page that works without a network."""
        return self.run_dir / "report.html"

    def __repr__(self) -> str:
        last = {curve.name: self.final.get(curve.metric) for curve in CURVES}
        shown = {name: value for name, value in last.items() if value is not None}
        values = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        return f"RunResult({str(self.run_dir)!r}, steps={self.steps}: {values})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{curves(self.metrics)}"


@dataclass(frozen=True)
class Evaluation:
    """The score of a model on a data set."""

    run_dir: Path
    metrics: Mapping[str, float]
    """Metrics by name, such as `eval/reward/mean`, and its standard error over prompts
    `eval/reward/stderr`."""

    def _repr_html_(self) -> str:
        lines = "".join(
            f"<tr><td>{breakable(name)}</td><td>{value}</td><td>{error}</td></tr>"
            for name, value, error in evaluation_rows(self.metrics)
        )
        return f"<table><tr><th>metric</th><th>value</th><th>&plusmn;</th></tr>{lines}</table>"

    @cached_property
    def samples(self) -> list[SampleRecord]:
        """All samples of the evaluation."""
        return read_samples(self.run_dir / "eval_samples.jsonl")


_WRONG = ("", "settings", "what is wrong")
_NUMBERS = ("number", "value", "how it follows")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of `hone.check`, before a run starts. A notebook shows it as tables."""

    findings: Sequence[Finding]
    derived: Mapping[str, Any]
    """Numbers that follow from the configuration, as `hone check` prints them."""
    config: Mapping[str, Any]
    """The whole configuration, defaults included."""
    derivations: Mapping[str, str]
    """How each number of `derived` follows, by its name."""

    @property
    def errors(self) -> list[str]:
        """Messages on mistakes that would stop the run."""
        return [finding.message for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[str]:
        """Messages on settings that may not be what was meant."""
        return [finding.message for finding in self.findings if finding.level == "warning"]

    def _repr_html_(self) -> str:
        findings = sorted(self.findings, key=lambda finding: finding.level)
        problems = [
            (
                f"<b>{finding.level}</b>",
                breakable(", ".join(finding.keys)),
                breakable(finding.message),
            )
            for finding in findings
        ]
        numbers = [
            (breakable(name), escape(_shown(value)), breakable(self.derivations.get(name, "")))
            for name, value in self.derived.items()
        ]
        summary = f"errors: {len(self.errors)}, warnings: {len(self.warnings)}"
        return "".join(
            [
                f"<p><b>{summary}</b></p>",
                _table(_WRONG, problems, num_whole=1) if problems else "",
                _table(_NUMBERS, numbers, num_whole=2) if numbers else "",
            ]
        )


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_whole: int) -> str:
    """An HTML table; cells are HTML. Its words stand to the left, which notebooks do not do, and
    after the first `num_whole` columns they break where a phone has no room for a whole word."""
    whole = "text-align:left;vertical-align:top;white-space:normal;max-width:60em"
    styles = [whole] * num_whole + [f"{whole};overflow-wrap:break-word"] * (
        len(columns) - num_whole
    )

    def line(tag: str, words: Sequence[str]) -> str:
        cells = (f'<{tag} style="{s}">{x}</{tag}>' for s, x in zip(styles, words, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"
