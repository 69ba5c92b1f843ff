"""The report renders from any folder, needs nothing from outside, and shows what the files say."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hone.cli.report import run as report_command
from hone.observe.charts import MAX_POINTS
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


@pytest.mark.parametrize(
    ("last_step", "age_s", "status"),
    [(200, 1e6, "finished"), (20, 0, "running"), (20, 1e5, "stopped")],
)
def test_status(tmp_path: Path, last_step: int, age_s: float, status: str) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 200}")
    row = {"step": last_step, "timestamp_s": time.time() - age_s, "time/step_s": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert RunFolder.read(tmp_path).status == status


def test_an_interrupted_run_has_stopped_until_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 200}")
    now = time.time()
    row = {"step": 20, "timestamp_s": now - 1, "time/step_s": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    event = {"kind": "interrupted", "timestamp_s": now, "step": 20}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert RunFolder.read(tmp_path).status == "stopped"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": 21, "timestamp_s": now + 1}) + "\n")
    assert RunFolder.read(tmp_path).status == "running"


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
