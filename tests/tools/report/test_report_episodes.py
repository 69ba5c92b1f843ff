"""Episodes in the report and in the served page: which are chosen, how their turns are drawn."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.run import LogConfig
from hone.observe.loggers import RunLog
from hone.tools.report import samples as samples_module
from hone.tools.report.episodes import MAX_CHARS, NUM_EACH, EpisodePicks, branches_of, turns_of
from hone.tools.report.served import serve
from hone.tools.report.write import write_report
from hone.types import FailureKind, Reward, Sample, StopReason, Turn
from tests.observe.fake_run import make_group, write_run
from tests.tools.report.test_report_samples import (
    needs_node,
    opened,
    rows_of,
    run_script,
    with_tokenizer,
    write_rows,
)

Row = dict[str, Any]


def row(name: str, *, turns: int = 2, reward: float | None = 0.0, **fields: Any) -> Row:
    """The head of a row of a sample file."""
    said = [
        {
            "start": 10 * number,
            "end": 10 * number + 5,
            "stop_reason": "eos",
            "reward": 0.0,
            "text": f"turn {number}",
            "observed": [{"role": "tool", "name": "add", "content": f"<{number}>"}],
            "policy_s": 1.0,
            "env_s": 0.25,
        }
        for number in range(turns)
    ]
    if said:
        del said[-1]["observed"]
    return {"id": name, "prompt": "p", "turns": said, "attempt": 0, "reward": reward} | fields


def picked(rows: list[Row]) -> dict[str, list[str]]:
    picks = EpisodePicks()
    for held in rows:
        picks.add(held, split="train")
    return {kind: [e["id"] for e in each] for kind, each in picks.columns().items()}


def test_the_last_failed_worst_and_longest_episodes_are_picked() -> None:
    rows = [row(f"{n}", turns=1 + n % 7, reward=(n * 5 % 11) / 10) for n in range(40)]
    rows += [row(f"f{n}", reward=None, failure="crash") for n in range(9)]
    rows.append(row("z", turns=1, reward=0.5, num_tokens=3))
    found = picked(rows)
    assert found["last"] == ["z"]
    assert found["failed"] == ["f8", "f7", "f6", "f5", "f4"]
    scored = [held for held in rows if held["reward"] is not None]
    by_reward = {held["id"]: held["reward"] for held in scored}
    by_turns = {held["id"]: len(held["turns"]) for held in scored}
    lowest = sorted(by_reward.values())[:NUM_EACH]
    assert [by_reward[name] for name in found["worst"]] == lowest
    most = sorted(by_turns.values(), reverse=True)[:NUM_EACH]
    assert [by_turns[name] for name in found["longest"]] == most


def test_samples_without_an_environment_are_no_episodes() -> None:
    plain = row("a", turns=1)
    plain["turns"] = [{"start": 0, "end": 5, "stop_reason": "eos", "reward": 0.0}]
    assert picked([plain, plain | {"reward": None, "failure": "timeout"}]) == {}


def test_an_episode_that_failed_before_its_first_turn_is_one() -> None:
    assert picked([row("a", turns=0, reward=None, failure="crash")]) == {
        "last": ["a"],
        "failed": ["a"],
    }


def test_long_texts_are_cut_in_their_middle() -> None:
    held = row("a")
    held["turns"][0]["text"] = "x" * 3 * MAX_CHARS + "end"
    (first, _) = turns_of(held) or ()
    assert first["text"].startswith("xxx")
    assert first["text"].endswith("end")
    assert len(first["text"]) < MAX_CHARS + 100


def episodes(step: int) -> list[Any]:
    """Groups of two samples, each an episode of two turns."""
    group = make_group(step, 0, np.random.default_rng(step), num_samples=2)
    for sample in group.samples:
        _play(sample, fails=sample.index == 1)
    return [group]


def _play(sample: Sample, *, fails: bool) -> None:
    said = {"role": "tool", "name": "add", "content": "7 <b>"}
    sample.text = "add 3 4\n7 <b>\nit is 7"
    times = {"policy_s": 0.5, "env_s": 0.125}
    sample.turns = [
        Turn(start=0, end=2, text="add 3 4", stop_reason=StopReason.EOS, messages=(said,), **times),
        Turn(start=4, end=6, text="it is 7", stop_reason=StopReason.EOS, **times),
    ]
    sample.reward = None if fails else Reward(total=0.5, parts={"env": 0.5})
    sample.failure = FailureKind.CRASH if fails else None


def written(tmp_path: Path, steps: range = range(1, 4)) -> Path:
    folder = write_run(tmp_path / "run", num_steps=2)
    with RunLog(folder, LogConfig(to=()), resume_step=1) as log:
        for step in steps:
            log.log(step, {"reward/mean": 0.5})
            log.samples(step, episodes(step))
    return folder


def test_the_page_has_the_episodes(tmp_path: Path) -> None:
    html = write_report(written(tmp_path)).read_text()
    data = re.search(r'id="picked">(.*?)</script>', html)
    assert data is not None
    found = json.loads(data[1])
    assert [*found] == ["last", "failed", "worst", "longest"]
    assert [len(each) for each in found.values()] == [1, 3, 3, 3]
    (last,) = found["last"]
    assert (last["step"], last["failure"]) == (3, "crash")
    assert last["turns"][0] == {
        "text": "add 3 4",
        "start": 0,
        "end": 2,
        "stop": "eos",
        "policy_s": 0.5,
        "env_s": 0.125,
        "observed": [{"role": "tool", "name": "add", "text": "7 <b>"}],
    }


def test_a_page_without_episodes_has_no_section(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    write_rows(folder, [held for held in rows_of(folder) if held["failure"] is None])
    assert 'id="episodes"' not in write_report(folder).read_text()


def test_the_served_page_keeps_up_with_episodes(tmp_path: Path) -> None:
    folder = written(tmp_path)

    def last(port: int) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/episodes", timeout=60) as reply:
            return json.load(reply)["last"][0]

    with serve(folder, 0) as server:
        assert last(server.port)["step"] == 3
        with RunLog(folder, LogConfig(to=()), resume_step=4) as log:
            log.samples(4, episodes(4))
        assert last(server.port)["step"] == 4
        with RunLog(folder, LogConfig(to=()), resume_step=2) as log:
            log.samples(2, episodes(2))
        assert last(server.port)["step"] == 2, "the run was resumed from an earlier step"


def test_a_sample_has_its_turns_with_and_without_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    folder = written(tmp_path)
    _, groups = opened(folder)
    assert groups[0]["samples"][0]["turns"][0]["text"] == "add 3 4", "no tokenizer: texts alone"
    with_tokenizer(folder)
    _, groups = opened(folder)
    sample = groups[0]["samples"][0]
    assert (sample["turns"][0]["start"], sample["turns"][0]["end"]) == (0, 2)
    assert "text" not in sample["turns"][0], "its tokens spell it"
    monkeypatch.setattr(samples_module, "MAX_TOKEN_BYTES", 0)
    _, groups = opened(folder)
    assert groups[0]["samples"][0]["turns"][1]["text"] == "it is 7"


def test_a_sample_with_a_prompt_of_its_own_shows_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    first, second = rows_of(folder)[:2]
    write_rows(folder, [first, second | {"prompt": "opened otherwise"}])
    _, [group] = opened(folder)
    assert "prompt" not in group["samples"][0]
    assert group["samples"][1]["prompt"] == "opened otherwise"


def test_abandoned_paths_are_read() -> None:
    branch = {"turns": [{"start": 0, "end": 2, "text": "a", "observed": "b"}]}
    assert branches_of({"branches": [branch]}) == [
        [{"text": "a", "start": 0, "end": 2, "stop": "", "observed": [{"text": "b"}]}]
    ]


TURNS = [
    {
        "text": "add <3> 4",
        "policy_s": 1.5,
        "env_s": 0.02,
        "reward": -0.1,
        "observed": [{"role": "tool", "name": "add", "text": "<7>", "calls": ["f(<x>)"]}],
    },
    {"text": "it is 7", "stop": "length"},
]


@needs_node
def test_turns_are_drawn_with_role_tool_time_and_reward() -> None:
    html = run_script(f"episodeHtml({json.dumps({'turns': TURNS})})")
    speakers = re.findall(r"<b>([^<]*)</b>", html)
    assert speakers == ["policy 1", "tool add", "policy 2"]
    for text in (
        "add &#60;3&#62; 4",
        "&#60;7&#62;",
        "f(&#60;x&#62;)",
        "1.5 s",
        "20 ms",
        "\u22120.1",
    ):
        assert text in html
    assert "<3>" not in html
    assert html.count('class="turn own"') == 2
    assert html.count('class="turn tool"') == 1


def drawn(turns: list[Row]) -> str:
    return run_script(f"episodeHtml({json.dumps({'turns': turns})})")


@needs_node
def test_a_turn_says_what_it_called_its_tokens_and_its_reward() -> None:
    answers = [{"role": "tool", "name": name, "text": "7"} for name in ("add", "<b>", "add")]
    turns = [
        {"start": 0, "end": 1, "text": "x", "observed": answers, "reward": 0.5},
        {"start": 21, "end": 23, "text": "y", "observed": [{"role": "user", "text": "no"}]},
        {"start": 30, "end": 1030, "text": "z", "reward": -1},
    ]
    facts = re.findall(
        r'<p class="speaker"><b>(.*?)</b><span class="dim">(.*?)</span></p>', drawn(turns)
    )
    assert [(name, re.sub(r"<.*?>", "", text)) for name, text in facts] == [
        ("policy 1", "calls add \u00d7 2, &#60;b&#62; · 1 token · reward +0.5"),
        ("tool add", "20 tokens"),
        ("tool &#60;b&#62;", ""),
        ("tool add", ""),
        ("policy 2", "2 tokens"),
        ("user", "7 tokens"),
        ("policy 3", "1,000 tokens · reward \u22121"),
    ]


@needs_node
def test_long_texts_are_folded_and_escaped() -> None:
    hostile = "</li><script>x</script>" * 100
    short, lines = "<i>" * 10, "a\n" * 20
    html = drawn([
        {"text": hostile, "observed": [{"role": "tool", "name": hostile, "text": hostile}]},
        {"text": lines, "observed": [{"role": "user", "text": short, "calls": [hostile]}]},
    ])  # fmt: skip
    assert html.count("<details>") == html.count("<summary>") == 4
    assert "show all 2,300 characters" in html
    assert "<script" not in html
    assert "<i>" not in html
    (peek, *_) = re.findall(r'class="peek">(.*?)…', html)
    assert len(peek.replace("&#60;", "<").replace("&#62;", ">")) == 160
    assert html.count("<li") == html.count("</li>") == 4
    assert "<details" not in drawn([{"text": short}])


@needs_node
def test_long_texts_of_tokens_are_folded() -> None:
    sample = {
        "pieces": ["ab "] * 500,
        "ids": [1] * 500,
        "logprobs": [-1] * 500,
        "versions": 0,
        "mask": 1,
        "turns": [{"start": 0, "end": 450}, {"start": 460, "end": 500}],
    }
    html = run_script(f"completionHtml({json.dumps(sample)})")
    assert html.count("<details>") == 1
    assert html.count("data-t=") == 500
    assert "show all 1,350 characters" in html


@needs_node
def test_the_middle_of_many_turns_is_folded() -> None:
    turns: list[Row] = [{"text": f"t{number}"} for number in range(1, 31)]
    html = drawn(turns)
    assert re.findall(r"policy (\d+)", html) == [f"{number}" for number in range(1, 31)]
    assert "<summary>show turns 5 to 26</summary>" in html
    inside = html[html.index("<details>") : html.index("</details>")]
    assert re.findall(r"policy (\d+)", inside) == [f"{number}" for number in range(5, 27)]
    assert "<details" not in drawn(turns[:12])


@needs_node
def test_branches_are_drawn_before_the_last_path() -> None:
    html = run_script(f"episodeHtml({json.dumps({'turns': TURNS, 'branches': [TURNS[:1]]})})")
    assert "path 1 of 2" in html
    assert "path 2 of 2" in html
    assert html.index("<details") < html.index("path 2 of 2")


@needs_node
def test_tokens_of_turns_are_shaded_and_the_rest_is_the_environment() -> None:
    """An observation without messages is what lies between two turns."""
    sample = {
        "pieces": ["a", "b", "OBS", "c"],
        "ids": [1, 2, 3, 4],
        "logprobs": [-1, -1, 0, -1],
        "versions": 0,
        "mask": [1, 1, 0, 1],
        "turns": [{"start": 0, "end": 2}, {"start": 3, "end": 4}],
    }
    html = run_script(f"completionHtml({json.dumps(sample)})")
    lines = html.split("<li")[1:]
    assert [re.findall(r">([a-cOBS]+)</i>", line) for line in lines] == [["a", "b"], ["OBS"], ["c"]]
    assert 'class="env"' in lines[1]
    flat = run_script(f"(FORM = 'text', completionHtml({json.dumps(sample)}))")
    assert "<li" not in flat
    assert "OBS" in flat


@needs_node
def test_how_an_episode_ended() -> None:
    ended = {
        "reward": 0.5,
        "parts": {"env": 0.5},
        "stop": "max_turns",
        "turns": TURNS,
        "attempt": 1,
    }
    html = run_script(f"endHtml({json.dumps(ended)})")
    for text in ("reward <b>0.5</b>", "all turns were used", "attempt 2", "environment 20 ms"):
        assert text in html
    failed = run_script(f"endHtml({json.dumps({'failure': 'crash', 'detail': '<exit>'})})")
    assert "crash" in failed
    assert "&#60;exit&#62;" in failed


def test_times_are_of_the_sample_alone() -> None:
    """Two samples are equal where only their times differ."""
    (group,) = episodes(1)
    turn = group.samples[0].turns[0]
    assert replace(turn, policy_s=9.0, env_s=9.0) == turn
