"""The report renders from any folder, needs nothing from outside, and shows what the files say."""

import fcntl
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hone.cli.report import run as report_command
from hone.observe.charts import MAX_POINTS
from hone.observe.loggers import append_event
from hone.observe.report import write_report
from hone.observe.run_folder import RunFolder
from hone.observe.transcripts import split_pieces
from tests.observe.fake_run import Scalars, write_run

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects attributes and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data


def render(folder: Path) -> tuple[str, Page]:
    html = write_report(folder).read_text()
    page = Page(html)
    assert page.links == []
    assert re.findall(r"(?:https?:)?//[a-z]|url\(|@import", html) == []
    return html, page


def chart_data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_full_run(tmp_path: Path) -> None:
    def symptom(scalars: Scalars, age: int) -> None:
        scalars["train/grad_norm"] *= 30 if age == 0 else 1

    folder = write_run(tmp_path / "sums", num_steps=60, symptom=symptom)
    html, page = render(folder)
    run = RunFolder.read(folder)
    data = chart_data(html)
    charts = {chart["title"]: chart for section in data["sections"] for chart in section["charts"]}
    assert charts["Reward"]["steps"] == list(range(1, 61))
    drawn = charts["Reward"]["lines"][0]["values"]
    assert drawn == pytest.approx(run.values("reward/mean"), rel=1e-5)
    assert {"Entropy", "Engine and trainer", "Throughput", "Reward parts"} <= charts.keys()
    phases = {line["label"]: line["share"] for line in data["phases"]["lines"]}
    assert next(iter(phases)) == "generate"
    assert list(phases)[-1] == "unattributed"
    assert sum(phases.values()) == pytest.approx(1)
    for expected in (
        "sums",
        "60 of 200",
        "Evaluation reward",
        "pass@4",
        "Evaluation pass@1 (score \N{GREATER-THAN OR EQUAL TO} 1)",
        "train/grad_norm",
        "timeout",
    ):
        assert expected in page.text
    assert f"{run.values('eval/reward/mean')[-1]:.3g}" in page.text
    assert "No alarm was raised" not in page.text


def test_a_supervised_run(tmp_path: Path) -> None:
    html, page = render(write_run(tmp_path / "run", num_steps=50, supervised=True))
    titles = [c["title"] for section in chart_data(html)["sections"] for c in section["charts"]]
    assert titles[:3] == ["Loss", "Gradient norm", "Learning rate"]
    assert "Held-out loss" in page.text
    assert "Training loss" in page.text
    assert "Samples" not in page.text
    assert "No alarm was raised" in page.text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    _, page = render(tmp_path)
    assert "No step has been recorded in this folder yet" in page.text


@pytest.mark.parametrize("missing", ["config.yaml", "events.jsonl", "samples.jsonl"])
def test_a_partial_folder(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    (folder / missing).unlink()
    _, page = render(folder)
    assert "Training reward" in page.text


@pytest.mark.parametrize("torn", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
def test_a_half_written_line_is_ignored(tmp_path: Path, torn: str) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    with (folder / torn).open("a") as file:
        file.write('{"step": 4, "rew')
    render(folder)


def test_missing_values_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        num_steps=6,
        symptom=lambda scalars, age: scalars.update({"reward/mean": float("nan")}),
    )
    html, _ = render(folder)
    reward = chart_data(html)["sections"][0]["charts"][0]["lines"][0]["values"]
    assert [value is None for value in reward] == [False] * 3 + [True] * 3


NOW_S = 1e9


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of a run at work, as `launch` holds it."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    ("last_step", "end", "is_locked", "status"),
    [
        (200, None, False, "finished"),
        (200, None, True, "running"),  # the model is being written
        (20, None, True, "running"),
        (20, None, False, "stopped"),  # killed this moment
        (20, ("interrupted", 1), False, "stopped"),
        (20, ("error", 1), False, "failed"),
        (200, ("error", 1), False, "failed"),  # in the export
        (20, ("error", -1), False, "stopped"),  # it has gone on since
        (20, ("error", 1), True, "running"),  # it is going on
        (0, ("error", 1), False, "failed"),
        (0, None, False, "empty"),
    ],
)
def test_status(
    tmp_path: Path, last_step: int, end: tuple[str, float] | None, is_locked: bool, status: str
) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 200}")
    if last_step:
        row = {"step": last_step, "timestamp_s": NOW_S, "time/step_s": 5.0}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    if end is not None:
        event = {"kind": end[0], "timestamp_s": NOW_S + end[1], "step": 20, "message": "x"}
        (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / ".lock").touch()  # what earlier runs leave
    with locked(tmp_path) if is_locked else nullcontext():
        assert RunFolder.read(tmp_path).status == status


def test_the_error_stands_on_top(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    event = {"message": "no <reward> left", "step": 4, "phase": "generate"}
    for more in ({}, {"traceback": "File x"}):
        append_event(folder, "error", **event, **more)
        _, page = render(folder)
        assert "The run failed in step 4, during generate" in page.text
        assert page.text.index("no <reward> left") < page.text.index("Training reward")
        assert page.text.count("File x") == len(more)


def test_an_alarm_shows_value_and_step_of_one_event(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    for step, value in ((7, 0.5), (30, 0.25), (55, 0.75)):
        alarm = {"name": "a", "metric": "m", "value": value, "limit": 0.1, "advice": "look"}
        append_event(folder, "alarm", step=step, **alarm)
    append_event(folder, "alarm", name="b", step=56, metric="m", value=9.0, limit=8.0, advice="no")
    text = " ".join(render(folder)[1].text.split())
    assert "step 55 and 2 before, from step 7 on m 0.75 (limit 0.1) look" in text
    assert "step 56 m 9 (limit 8) no" in text


def test_no_two_sections_have_one_title(tmp_path: Path) -> None:
    html, _ = render(write_run(tmp_path / "run", num_steps=3))
    titles = re.findall(r'class="section">([^<]*?) *<', html)
    assert "Samples" in titles
    assert len(set(titles)) == len(titles)


AXIS_SCRIPT = """
globalThis.document = {
  getElementById: () => ({ textContent: "{}" }), querySelectorAll: () => [],
  querySelector: () => null, addEventListener: () => {},
};
globalThis.addEventListener = () => {};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script needs node to run here")
@pytest.mark.parametrize("scale", ["linear", "zero", "share"])
@pytest.mark.parametrize(
    "values",
    [[0.99998, 1.00003], [1.0, 1.0], [123456.0, 123457.0], [0.5, 0.5004], [-1.00001, -1.0], [0, 0]],
    ids=str,
)
def test_marks_of_an_axis_read_differently(values: list[float], scale: str) -> None:
    script = (files("hone.observe") / "report.js").read_text()
    asked = f"axis({json.dumps(values)}, {json.dumps(scale)})"
    program = (
        f"{AXIS_SCRIPT}{script}\nconst y = {asked};"
        "console.log(JSON.stringify([y.marks, y.marks.map(y.label)]));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    marks, labels = json.loads(done.stdout)
    assert len(marks) > 1
    assert len(set(labels)) == len(labels), labels
    unit = {"k": 1e3, "M": 1e6, "%": 0.01}
    for mark, label in zip(marks, labels, strict=True):
        read = float(label.rstrip("kM%").replace(",", "")) * unit.get(label[-1], 1)
        assert read == pytest.approx(mark, abs=1e-3 * abs(marks[1] - marks[0])), label


def test_text_of_models_cannot_break_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    hostile = "</script><script>alert(1)</script><b>&"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"prompt": hostile, "answer": hostile, "id": hostile, "failure_detail": hostile}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": hostile, "step": 1}) + "\n")
    html, page = render(folder)
    assert "<script>alert" not in html
    assert hostile in page.text


def test_long_runs_are_thinned_and_keep_their_last_step(tmp_path: Path) -> None:
    rows = [{"step": s, "timestamp_s": 0.0, "reward/mean": s / 3001} for s in range(1, 3002)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, _ = render(tmp_path)
    chart = chart_data(html)["sections"][0]["charts"][0]
    assert len(chart["steps"]) <= MAX_POINTS
    assert chart["steps"][-1] == 3001
    assert chart["lines"][0]["values"][0] == pytest.approx(2.5 / 3001, rel=1e-4)


def test_samples_of_first_and_last_steps_are_chosen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=9)
    samples = RunFolder.read(folder).samples(num_steps=3, per_step=2)
    assert [sample["step"] for sample in samples] == [9, 9, 5, 5, 1, 1]
    assert RunFolder.read(folder).samples(num_steps=50, per_step=1)[-1]["step"] == 1


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte: characters beyond ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["2 + 3 = 5", "Zürich, 東京 and 🙂!", "", "  spaces  \n\n"])
def test_pieces_join_to_the_decoded_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text).ids
    pieces = split_pieces(ids, lambda held: tokenizer.decode(list(held)))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_tokens_carry_id_logprob_and_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=1)
    tokenizer = byte_level_tokenizer()
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    row = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    ids = tokenizer.encode("a <b>").ids
    row |= {
        "token_ids": ids,
        "logprobs": [-0.25, -9.5, None, -2.0, -1.0],
        "weight_versions": [6, 6, 6, 7, 7],
        "loss_mask": [1, 1, 1, 1, 0],
    }
    (folder / "samples.jsonl").write_text(json.dumps(row) + "\n")
    html, page = render(folder)
    tokens = re.findall(r'<i class="(t[^"]*)" data-t="([^"]*)">(.*?)</i>', html)
    assert tokens == [
        ("t0", f"{ids[0]} -0.250 6", "a"),
        ("t8", f"{ids[1]} -9.500 6", " "),
        ("t9", f"{ids[2]} none 6", "&lt;"),
        ("t2", f"{ids[3]} -2.000 7", "b"),
        ("t1 inserted", f"{ids[4]} -1.000 7", "&gt;"),
    ]
    assert "a <b>" in page.text


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=1)
    row = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    _, page = render(folder)
    assert " ".join(map(str, row["token_ids"][:5])) in page.text


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    target = tmp_path / "out" / "page.html"
    assert report_command([str(folder), "--output", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert "Training reward" in target.read_text()
    with pytest.raises(ValueError, match="is not a run folder"):
        report_command([str(tmp_path / "nowhere")])
