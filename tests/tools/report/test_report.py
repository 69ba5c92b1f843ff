"""The report renders from any folder, needs nothing from outside, and shows what the files say."""

import fcntl
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from html import escape, unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from hone.cli.report import run as report_command
from hone.observe.differences import differences, flat
from hone.observe.histogram import Histogram
from hone.observe.loggers import append_event
from hone.observe.printable import breakable
from hone.observe.run_folder import RunFolder
from hone.paths import settings_file
from hone.tools.report.charts import MAX_POINTS
from hone.tools.report.write import distinct_names, sentence, write_report
from tests.observe.fake_run import Scalars, write_run
from tests.tables import table

DASH = "\N{EN DASH}"
VOID = {"meta", "br", "link", "img", "hr", "input", "wbr"}


class Page(HTMLParser):
    """Checks that elements nest, and collects ids, links and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        self.ids += [str(v) for k, v in attrs if k == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "dt", "dd"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data


def render(*runs: Path) -> tuple[str, Page]:
    output = None if len(runs) == 1 else runs[0].parent / "comparison.html"
    html = write_report(*runs, output=output).read_text()
    page = Page(html)
    assert len(set(page.ids)) == len(page.ids)
    assert {*page.links} <= {f"href=#{name}" for name in page.ids}, "a link leads elsewhere"
    written = re.sub(r'<script type="text/plain".*?</script>', "", html, flags=re.S)
    assert re.findall(r"(?:https?:)?//[a-z]|url\((?!#)|@import", written) == []
    return html, page


def chart_data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def charts_of(html: str) -> dict[str, dict[str, Any]]:
    return {
        chart["title"]: chart for part in chart_data(html)["sections"] for chart in part["charts"]
    }


def test_a_full_run(tmp_path: Path) -> None:
    def symptom(scalars: Scalars, age: int) -> None:
        scalars["train/grad_norm"] *= 30 if age == 0 else 1

    folder = write_run(tmp_path / "sums", num_steps=60, symptom=symptom)
    html, page = render(folder)
    run = RunFolder.read(folder)
    charts = charts_of(html)
    assert chart_data(html)["steps"] == [list(range(1, 61))]
    drawn = charts["Reward"]["lines"][0]["values"]
    assert drawn == pytest.approx(run.values("reward/mean"), rel=1e-5)
    assert {"Entropy", "Engine and trainer", "Throughput", "Reward parts"} <= charts.keys()
    phases = {line["label"]: line["share"] for line in charts["Time by phase"]["lines"]}
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
    ):
        assert expected in page.text
    assert f"{run.values('eval/reward/mean')[-1]:.3g}" in page.text
    assert "No alarm was raised" not in page.text


def test_a_supervised_run(tmp_path: Path) -> None:
    html, page = render(write_run(tmp_path / "run", num_steps=50, supervised=True))
    assert [*charts_of(html)][:3] == ["Loss", "Gradient norm", "Learning rate"]
    assert "Held-out loss" in page.text
    assert "Training loss" in page.text
    assert 'id="samples"' not in html
    assert "No alarm was raised" in page.text


@pytest.mark.parametrize(
    ("loss", "named"),
    [("hinge", "hinge"), ({"sigmoid": 1.0, "sft": 0.2}, "sigmoid + sft x 0.2")],
)
def test_a_run_on_preferences(loss: Any, named: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=50, supervised=True)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["algorithm"] = {"loss": loss}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        margins = {"rewards/margins": row["step"] / 10, "rewards/accuracies": 0.75}
        row |= {"rewards/chosen": 0.1, "rewards/rejected": -0.2, "logps/chosen": -3.0} | margins
        row |= {f"eval/{name}": x for name, x in margins.items()} if "eval/loss" in row else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, page = render(folder)
    charts = charts_of(html)
    lines = {title: [line["label"] for line in chart["lines"]] for title, chart in charts.items()}
    assert lines["Margin"] == lines["Pairs in the right order"] == ["training", "held out"]
    assert lines["Implicit rewards"] == ["chosen", "rejected"]
    assert charts["Margin"]["lines"][0]["values"][-1] == 5.0
    assert "Held-out accuracy" in page.text
    assert f"Algorithm {named} " in re.sub(r"\s+", " ", page.text)


def test_a_run_of_a_reward_model(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=50, supervised=True)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"trainer": {}, "algorithm": {"center_coef": 0.01}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        measured = {"margin": 0.5, "accuracy": 0.75, "min_reward": -1.0, "mean_reward": 0.0}
        row |= measured | {"max_reward": 1.0}
        row |= {f"eval/{name}": x for name, x in measured.items()} if "eval/loss" in row else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, page = render(folder)
    lines = {
        title: [line["label"] for line in chart["lines"]]
        for title, chart in charts_of(html).items()
    }
    assert lines["Margin"] == lines["Pairs in the right order"] == ["training", "held out"]
    assert lines["Rewards"] == ["largest", "mean", "smallest"]
    assert "Held-out accuracy" in page.text
    assert "reward modelling" in page.text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    _, page = render(tmp_path)
    assert "No step has been recorded in this folder yet" in page.text


@table("missing", ["config.yaml", "events.jsonl", "samples.jsonl"])
def test_a_partial_folder(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    (folder / missing).unlink()
    _, page = render(folder)
    assert "Training reward" in page.text


@table("torn", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
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


@table(
    "last_step, end, is_locked, status",
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
        (0, ("interrupted", 1), False, "stopped"),
        (0, ("interrupted", 1), True, "empty"),  # it is being started again
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


def test_what_ended_a_run_before_its_first_step_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 200}")
    told = " ".join(render(tmp_path)[1].text.split())
    assert "No step has been recorded in this folder yet. The" in told
    append_event(tmp_path, "interrupted", message="Ctrl-C ended the run at once")
    told = "recorded in this folder yet: Ctrl-C ended the run at once. The"
    assert told in " ".join(render(tmp_path)[1].text.split())


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


def jumps(html: str) -> dict[str, str]:
    """The links at the top, by what they lead to."""
    found = re.search(r'<nav [^>]*aria-label="Sections">(.*?)</nav>', html, re.S)
    assert found is not None
    return dict(re.findall(r'<li><a href="#([^"]+)">([^<]+)</a></li>', found[1]))


def test_each_section_has_a_link_at_the_top(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=30)
    html, page = render(folder)
    sections = re.findall(r'<section id="([^"]+)"', html)
    assert [*jumps(html)] == [name for name in sections if name != "alarms-2"]
    assert {"Learning", "Sampling", "Speed", "Samples", "Evaluation", "Settings"} <= {
        *jumps(html).values()
    }
    assert len(re.findall(r"<section\b", html)) == len(sections) + 1, "all but the tiles"
    assert "alarms" not in jumps(html)
    alarm = {"name": "a", "metric": "m", "value": 1.0, "limit": 0.1, "advice": "look"}
    append_event(folder, "alarm", step=7, **alarm)
    assert next(iter(jumps(render(folder)[0]))) == "alarms"
    other = write_run(tmp_path / "other", num_steps=3)
    append_event(other, "alarm", step=2, **alarm)
    html, page = render(folder, other)
    assert {"alarms", "alarms-2", "events-2", "configuration-2"} <= {*page.ids}
    assert jumps(html)["what-differs-between-the-configurations"] == "Differences"


@table("missing, is_there", [("", True), ("reward", False), ("samples.jsonl", False)])
def test_the_lowest_rewards_are_one_link_away(tmp_path: Path, missing: str, is_there: bool) -> None:
    """It stands before the first curve, and leads to the list of samples itself, past controls."""
    folder = write_run(tmp_path / "run", num_steps=3)
    samples = folder / "samples.jsonl"
    if missing == "samples.jsonl":
        samples.unlink()
    elif missing:
        rows = [json.loads(line) | {missing: None} for line in samples.read_text().splitlines()]
        samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, page = render(folder)
    assert ("href=#lowest-reward" in page.links) == is_there
    if is_there:
        assert html.index('href="#lowest-reward"') < html.index('class="tiles"')
        assert html.index('class="controls"') < html.index('id="lowest-reward"')
        assert html.index('id="lowest-reward"') < html.index('class="groups"')


@table(
    "rates, rank, labels",
    [
        (["train/lr"], 0, ["AdamW: all weights"]),
        (["train/lr"], 8, ["AdamW: adapters"]),
        (
            ["train/lr", "train/muon_lr"],
            0,
            ["AdamW: embeddings, head, vectors", "Muon: hidden matrices"],
        ),
        (["train/lr", "critic/lr"], 0, ["AdamW: all weights", "critic"]),
    ],
)
def test_learning_rates_are_those_of_named_parameters(
    tmp_path: Path, rates: list[str], rank: int, labels: list[str]
) -> None:
    def write(folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.yaml").write_text(f"model: {{lora: {{rank: {rank}}}}}")
        rows = [dict.fromkeys(rates, 1e-3) | {"step": step} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    lines = charts_of(render(first)[0])["Learning rate"]["lines"]
    assert [line["label"] for line in lines] == labels
    titles = [title for title in charts_of(render(first, second)[0]) if "Learning" in title]
    assert len(titles) == len(rates)


AXIS_SCRIPT = """
globalThis.document = {
  getElementById: () => ({ textContent: "{}" }), querySelectorAll: () => [],
  querySelector: () => null, addEventListener: () => {},
};
"""


def result_of(expression: str, statements: str = "") -> Any:
    """The value of an expression in JavaScript behind the page's script and `statements`."""
    if shutil.which("node") is None:
        pytest.skip("the page's script needs node to run here")
    script = (files("hone.tools.report") / "charts.js").read_text()
    program = f"{AXIS_SCRIPT}{script}\n{statements}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def marks_of(values: list[float], scale: str, *, whole: bool = False) -> list[list[Any]]:
    """Marks and labels of the page's axis over `values`."""
    asked = f"axis({json.dumps(values)}, {json.dumps(scale)}, {json.dumps(whole)})"
    return result_of("[y.marks, y.marks.map(y.label)]", f"const y = {asked};")


BROKEN = {
    "trainer.optimizer.weight_decay": "trainer.|optimizer.|weight_|decay",
    "eval/reward/a_b/mean": "eval/|reward/|a_|b/|mean",
    "rewards.py:is_short": "rewards.|py:|is_|short",
    "data.train.0.path": "data.|train.0.|path",
    "0.975, 1.0e-6, 3/4, 12:30": "0.975, 1.0e-6, 3/4, 12:30",
    "/tmp/a.b_ <c.d>": "/tmp/|a.|b_ <c.|d>",
}
"""Names, and with `|` where a narrow page may break them."""


def test_a_long_name_breaks_after_its_separators_and_a_number_never() -> None:
    for name, broken in BROKEN.items():
        assert breakable(name) == escape(broken).replace("|", "<wbr>")


def test_the_script_of_the_page_breaks_names_where_python_does() -> None:
    found = result_of(f"{json.dumps([*BROKEN])}.map(breakable)")
    assert [unescape(name) for name in found] == [
        broken.replace("|", "<wbr>") for broken in BROKEN.values()
    ]


@table("scale", ["linear", "zero", "share"])
@table(
    "values",
    [[0.99998, 1.00003], [1.0, 1.0], [123456.0, 123457.0], [0.5, 0.5004], [-1.00001, -1.0], [0, 0]],
)
def test_marks_of_an_axis_read_differently(values: list[float], scale: str) -> None:
    marks, labels = marks_of(values, scale)
    assert len(marks) > 1
    assert len(set(labels)) == len(labels), labels
    unit = {"k": 1e3, "M": 1e6, "%": 0.01}
    for mark, label in zip(marks, labels, strict=True):
        read = float(label.rstrip("kM%").replace(",", "")) * unit.get(label[-1], 1)
        assert read == pytest.approx(mark, abs=1e-3 * abs(marks[1] - marks[0])), label


def test_rounding_is_a_flat_line_in_the_middle() -> None:
    marks, _ = marks_of([0.999999, 1.0], "linear")
    assert marks[0] <= 0.5
    assert marks[-1] >= 1.5


@table("width", [0, 1, 149])
def test_a_plot_without_room_is_not_drawn(width: int) -> None:
    """Such as in a window of no size: its axes would have negative widths."""
    statements = f"""
      const lines = [{{ run: 0, label: "a", values: [1, 2] }}];
      const chart = {{ kind: "curves", scale: "zero", lines }};
      Object.assign(DATA, {{ steps: [[1, 2]], sections: [{{ charts: [chart] }}] }});
      const plot = {{ clientHeight: 190, innerHTML: "", querySelector: () => ({{}}) }};
      const parts = {{ ".plot": plot, ".legend": {{}} }};
      const dataset = {{ section: 0, chart: 0 }};
      const figure = {{ dataset, querySelector: (name) => parts[name] }};
      const drawn = [{width}, 400].map((width) => {{
        plot.clientWidth = width;
        draw(figure);
        return plot.innerHTML;
      }});"""
    narrow, wide = result_of("drawn", statements)
    assert narrow == ""
    assert "<rect" in wide
    assert '="-' not in wide


@table("scale", ["linear", "zero"])
@table("values", [[0, 1], [0, 2], [3.5, 4.5], [0, 0], [17, 390]])
def test_marks_of_counts_are_whole(values: list[float], scale: str) -> None:
    marks, labels = marks_of(values, scale, whole=True)
    assert len(set(labels)) > 1
    assert all(mark == int(mark) for mark in marks)


def test_charts_of_zeros_are_named_in_one_line(tmp_path: Path) -> None:
    """A band or a second curve with other values keeps its chart."""
    zeros = ("rollout/staleness/mean", "rollout/staleness/max", "off_policy/ratio/mean")
    rows = [
        dict.fromkeys((*zeros, "policy/approx_kl", "train/loss"), 0.0)
        | {"step": step, "policy/ref_kl": step, "off_policy/ratio/p05": -1.0}
        | {"off_policy/ratio/p95": 1.0}
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {"completion_tokens": Histogram.of([0.0, 4.0]), "staleness": Histogram.of([0.0])}
    held = {name: asdict(histogram) for name, histogram in found.items() if histogram is not None}
    spread = [{"step": step, "split": "train", **held} for step in (1, 2)]
    (tmp_path / "histograms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spread))
    html, page = render(tmp_path)
    assert charts_of(html).keys() == {"Movement of the policy", "Importance ratio", "Lengths"}
    assert "Always 0: Loss, Staleness" in page.text


def test_text_of_models_cannot_break_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    hostile = "</script><script>alert(1)</script><b>&"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"prompt": hostile, "answer": hostile, "failure_detail": hostile}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": hostile, "step": 1}) + "\n")
    html, page = render(folder)
    assert "<script>alert" not in html
    assert hostile in page.text


def test_long_runs_are_thinned_and_keep_their_last_step(tmp_path: Path) -> None:
    rows = [{"step": s, "timestamp_s": 0.0, "reward/mean": s / 9001} for s in range(1, 9002)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, _ = render(tmp_path)
    (steps,), chart = chart_data(html)["steps"], charts_of(html)["Reward"]
    assert len(steps) <= MAX_POINTS
    assert (steps[0], steps[-1]) == (3, 9001)
    assert chart["lines"][0]["values"][0] == pytest.approx(2 / 9001, rel=1e-4)


def test_histograms_of_steps_lie_on_common_bins(tmp_path: Path) -> None:
    """A row of counts for the low half of the values, one for the high half, one for all."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    halves = ((0.0, 1.0), (1.0, 2.0), (0.0, 2.0))
    rows = [
        {
            "step": step,
            "split": split,
            "reward": {"low": low, "high": high, "counts": [3] + [0] * 28 + [1]},
        }
        for step, (low, high) in enumerate(halves, start=1)
        for split in ("eval", "train")
    ]
    (tmp_path / "histograms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = charts_of(render(tmp_path)[0])["Rewards"]
    assert (chart["low"], chart["high"], chart["steps"]) == (0.0, 2.0, [1, 2, 3])
    held = [{bin: share for bin, share in enumerate(column) if share} for column in chart["shares"]]
    assert held == [{0: 0.75, 15: 0.25}, {15: 0.75, 30: 0.25}, {0: 0.75, 30: 0.25}]


def test_steps_of_equal_values_do_not_widen_the_range(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    rows = [
        {"step": step, "split": "train", "reward": asdict(found)}
        for step, values in enumerate(([1.0, 1.0], [0.0, 1.0], [0.0]))
        if (found := Histogram.of(values)) is not None
    ]
    (tmp_path / "histograms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = charts_of(render(tmp_path)[0])["Rewards"]
    assert (chart["low"], chart["high"]) == (0.0, 1.0)
    assert [(column[0], column[-1]) for column in chart["shares"]] == [(0, 1), (0.5, 0.5), (1, 0)]


def compared(tmp_path: Path) -> list[Path]:
    folders = [write_run(tmp_path / name, num_steps=n, seed=n) for name, n in (("a", 9), ("b", 5))]
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config["algorithm"]["advantage"] = "rloo"
    config["data"]["train"].append({"path": "more.jsonl"})
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    for folder, version in zip(folders, ("2.11.0", "2.12.0"), strict=True):
        held = {"python": "3.12.1", "torch": version, "device": "CPU"}
        (folder / "environment.json").write_text(json.dumps(held))
    return folders


def table_under(page: Page, title: str) -> str:
    """What stands between a title and the next one."""
    rest = " ".join(page.text[page.text.index(title) + len(title) :].split())
    return rest.partition("What differs")[0]


def test_several_runs_are_overlaid_and_what_differs_is_listed(tmp_path: Path) -> None:
    folders = compared(tmp_path)
    html, page = render(*folders)
    assert chart_data(html)["names"] == ["a", "b"]
    assert chart_data(html)["steps"] == [[*range(1, 10)], [*range(1, 6)]]
    charts = charts_of(html)
    for folder, line in zip(folders, charts["Reward: training"]["lines"], strict=True):
        values = RunFolder.read(folder).values("reward/mean")
        assert line["values"] == pytest.approx(values, rel=1e-5)
    assert [line["run"] for line in charts["Reward: evaluation"]["lines"]] == [0, 1]
    assert {"Time by phase of a", "Time by phase of b"} <= charts.keys()
    configurations = table_under(page, "What differs between the configurations")
    assert "algorithm.advantage grpo rloo" in configurations
    assert "<td>algorithm.<wbr>advantage</td>" in html
    assert f"data.train.1.path {DASH} more.jsonl" in configurations
    assert "run.seed" not in configurations
    environments = table_under(page, "What differs between the environments")
    assert "torch 2.11.0 2.12.0" in environments
    assert "3.12.1" not in environments
    assert "different kinds" not in page.text


def test_runs_that_do_not_differ_have_one_word_and_no_empty_columns(tmp_path: Path) -> None:
    (first, second) = compared(tmp_path)
    (second / "config.yaml").write_text((first / "config.yaml").read_text())
    (second / "environment.json").write_text((first / "environment.json").read_text())
    _, page = render(first, second)
    for what in ("configurations", "environments"):
        table = table_under(page, f"What differs between the {what}")
        assert "nothing" in table
        assert "a b nothing" not in table


def test_unequal_rewards_are_said_first(tmp_path: Path) -> None:
    folders = compared(tmp_path)
    said = "These runs are not rewarded by the same functions"
    functions = [{"fn": "math", "weight": 1.0, "args": {}}, {"fn": "r.py:short", "weight": 0.1}]
    for held in (functions[:1], functions):
        for folder in folders[len(held) - 1 :]:
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["reward"] = {"functions": held}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if held != functions:
            assert said not in " ".join(render(*folders)[1].text.split())
    text = " ".join(render(*folders)[1].text.split())
    assert said in text
    assert "; b: math + r.py:short x 0.1)" in text


def test_settings_that_have_changed_midway_are_said_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    told = "Settings have changed after step 2: trainer.optimizer.lr is 0.1, was 0.003."
    assert told not in " ".join(render(folder)[1].text.split())
    append_event(folder, "changed", step=2, settings=["trainer.optimizer.lr is 0.1, was 0.003"])
    assert told in " ".join(render(folder)[1].text.split())
    other = write_run(tmp_path / "other", num_steps=3)
    text = " ".join(render(folder, other)[1].text.split())
    assert "Settings of run have changed after step 2" in text


@table(
    "runs, expected",
    [
        (["runs/a", "runs/b"], "runs/comparison.html"),
        (["runs/q/rl", "runs/b"], "runs/comparison.html"),
        (["one/a", "two/b"], "one/comparison.html"),
        (["a", "b"], "comparison.html"),
    ],
)
def test_a_comparison_lies_where_its_runs_do(
    runs: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in runs:
        write_run(Path(run), num_steps=2)
    assert write_report(*map(Path, runs)) == Path(expected)
    assert [str(p) for p in Path().rglob("comparison.html")] == [expected]


def test_runs_of_different_kinds_are_said_to_be(tmp_path: Path) -> None:
    rl = write_run(tmp_path / "rl", num_steps=3)
    sft = write_run(tmp_path / "sft", num_steps=3, supervised=True)
    html, page = render(rl, sft)
    told = " ".join(page.text.split())
    assert (
        "These runs are of different kinds (rl: reinforcement learning; sft: supervised "
        "fine-tuning)" in told
    )
    assert "Settings that only one kind of run has are not listed" in told
    assert "algorithm.advantage" not in table_under(page, "What differs between the configurations")
    assert "Not recorded of rl, sft" in told
    assert [line["run"] for line in charts_of(html)["Loss: training"]["lines"]] == [0, 1]
    assert [line["run"] for line in charts_of(html)["Reward: training"]["lines"]] == [0]


@table(
    "paths, names",
    [
        (["/x/a", "/x/b"], ["a", "b"]),
        (["/x/a", "/y/a"], ["x/a", "y/a"]),
        (["/x/a/m", "/y/a/m", "/y/b/m"], ["x/a/m", "y/a/m", "y/b/m"]),
    ],
)
def test_runs_are_named_by_their_folders(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names


def write_evaluation(folder: Path) -> None:
    """What `hone eval` leaves, with the samples of a run."""
    source = write_run(folder / "source", num_steps=2)
    rows = [json.loads(line) for line in (source / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        del row["step"], row["split"]
    (folder / "eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = {"eval/pass@1": 0.25, "eval/pass@1/stderr": 0.0625}
    (folder / "eval.json").write_text(json.dumps(held))
    (folder / "eval_config.yaml").write_text("model: {path: some/model}\n")


def test_an_evaluation_of_its_own(tmp_path: Path) -> None:
    write_evaluation(tmp_path)
    html, page = render(tmp_path)
    told = " ".join(page.text.split())
    assert "Kind evaluation Model some/model" in told
    assert "pass@1 0.25 0.0625" in told
    assert 'id="samples"' in html
    assert "No step has been recorded" not in told
    shutil.copytree(tmp_path, tmp_path.parent / "second")
    _, both = render(tmp_path, tmp_path.parent / "second")
    pair = "0.25 ± 0.0625"
    assert f"hone eval: pass@1 {pair} {pair}" in " ".join(both.text.split())


def test_an_evaluation_that_failed(tmp_path: Path) -> None:
    (tmp_path / "eval_config.yaml").write_text("model: {path: some/model}\n")
    append_event(tmp_path, "eval_error", message="no reward")
    _, page = render(tmp_path)
    assert "The run failed" in page.text
    assert "no reward" in page.text


def test_completions_of_generate(tmp_path: Path) -> None:
    write_evaluation(tmp_path)
    output = tmp_path / "completions.jsonl"
    (tmp_path / "eval_samples.jsonl").rename(output)
    settings_file(output).write_text("model: {path: some/model}\nrun: {seed: 3}\n")
    html, page = render(output)
    assert (tmp_path / "completions.jsonl.report.html").is_file()
    assert "Kind generation Model some/model" in " ".join(page.text.split())
    assert 'id="samples"' in html


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    target = tmp_path / "out" / "page.html"
    assert report_command([str(folder), "--output", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert "Training reward" in target.read_text()
    with pytest.raises(ValueError, match="is no run"):
        report_command([str(tmp_path / "nowhere")])
    assert report_command([*map(str, compared(tmp_path)), "--output", str(target)]) == 0
    assert "2 runs compared" in target.read_text()
    with pytest.raises(ValueError, match="named twice"):
        report_command([str(folder), str(folder / ".." / "run")])


@table(
    "text, html",
    [
        ("a < b", "a &lt; b"),
        ("see `hone rl`", "see <code>hone rl</code>"),
        ("a.b: `run.steps`", "a.b: <code>run.<wbr>steps</code>"),
        ("`a<b` or `c`.", "<code>a&lt;b</code> or <code>c</code>."),
        ("one ` alone", "one ` alone"),
    ],
)
def test_what_stands_between_backticks_is_code(text: str, html: str) -> None:
    assert sentence(text) == html


@table(
    "trees, expected",
    [
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], [["b", "2", "3"]]),
        ([{"a": "1"}, {"b": "1"}], [["a", "1", DASH], ["b", DASH, "1"]]),
        ([{"a": "1"}, {}, {"a": "1"}], []),
        ([{"a": "1"}, {}, {"a": "2"}], [["a", "1", DASH, "2"]]),
        ([{"a": "None", "b": "1"}, {"b": "1"}], []),
        ([{"a": "None"}, {"a": "1"}], [["a", "None", "1"]]),
    ],
)
def test_differences(trees: list[dict[str, str]], expected: list[list[str]]) -> None:
    assert differences(trees) == expected


def test_a_tree_by_dotted_keys() -> None:
    tree = {"a": {"b": [1, {"c": None}], "d": []}, "e": "x"}
    assert flat(tree) == {"a.b.0": "1", "a.b.1.c": "None", "a.d": "[]", "e": "x"}
