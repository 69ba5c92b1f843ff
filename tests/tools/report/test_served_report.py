"""`hone watch`: a page that keeps up with a run, and samples that come as they are shown."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.cli.main import main
from hone.config.run import LogConfig
from hone.loops.launch import lock_run_dir
from hone.observe.local_server import LocalServer
from hone.observe.loggers import RunLog
from hone.observe.run_folder import RunFolder
from hone.tools.report import sample_table
from hone.tools.report.pieces import Splitter
from hone.tools.report.sample_table import SampleTable
from hone.tools.report.served import serve
from tests.observe.fake_run import make_group, write_run
from tests.tools.report.test_report_samples import STUB, needs_node, opened, with_tokenizer

NUM_STEPS = 6
GROUPS = 2 * NUM_STEPS
PER_GROUP = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of `NUM_STEPS` steps; each wrote two groups."""
    run = write_run(tmp_path / "run", num_steps=NUM_STEPS)
    (run / "samples.jsonl").unlink()
    write_steps(run, range(1, NUM_STEPS + 1), resume_step=1)
    return run


def write_steps(run: Path, steps: range, *, resume_step: int) -> None:
    """Go on with a run from `resume_step`."""
    rng = np.random.default_rng(resume_step)
    with RunLog(run, LogConfig(to=()), resume_step=resume_step) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 10})
            log.samples(step, [make_group(step, index, rng) for index in range(2)])


def read(folder: Path) -> SampleTable:
    table = SampleTable(folder)
    table.refresh()
    return table


def shown(table: SampleTable, **query: str) -> list[tuple[int, list[int]]]:
    """Groups by number, each with the mask of its samples."""
    page = table.select(query)
    first = [*page["index"]["groups"]["first"], len(page["mask"])]
    masks = [page["mask"][begin:end] for begin, end in pairwise(first)]
    return list(zip(page["numbers"], masks, strict=True))


QUERIES: list[dict[str, str]] = [
    {},
    {"order": "oldest"},
    {"order": "best"},
    {"order": "worst", "by": "correct"},
    {"order": "spread"},
    {"order": "longest"},
    {"show": "failed", "order": "oldest"},
    {"show": "truncated", "order": "longest"},
    {"from": "2", "to": "4", "order": "best"},
    {"low": "1", "high": "1.2"},
    {"low": "0.5", "by": "correct", "order": "worst"},
    {"split": "train", "order": "oldest"},
    {"search": "no verdict", "order": "oldest"},
    {"search": "TRAIN leaves", "order": "best"},
    {"search": "gsm8k:14/2/1"},
    {"search": "nothing like it"},
]


@needs_node
@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_the_server_filters_and_orders_as_the_page_does(
    monkeypatch: pytest.MonkeyPatch, folder: Path, query: dict[str, str]
) -> None:
    """The script of a written page, which has all samples, is the reference."""
    monkeypatch.setattr(sample_table, "PAGE_GROUPS", 100)
    index, groups = opened(folder)
    script = "\n".join(
        (Path(sample_table.__file__).parent / name).read_text()
        for name in ("charts.js", "samples.js")
    )
    numbers = {name: float(query[name]) for name in ("from", "to", "low", "high") if name in query}
    chosen = {"show": query.get("show", "all"), "by": query.get("by", ""), **numbers}
    if "split" in query:
        chosen["split"] = index["splits"].index(query["split"])
    program = f"""
      const words = {json.dumps(query.get("search", ""))};
      const found = words ? new Set(searched(INDEX, CHUNKS, 0, words)) : null;
      const mask = matching(INDEX, {{...ALL, ...{json.dumps(chosen)}, found}});
      const order = {json.dumps(query.get("order", "newest"))};
      const groups = ordered(INDEX, mask, order, {json.dumps(query.get("by", ""))});
      const rows = groups.map((g) => [g, [...mask.slice(...sampleRange(INDEX, g))]]);
      console.log(JSON.stringify(rows));"""
    source = STUB % (json.dumps(index), json.dumps(groups)) + script + program
    done = subprocess.run(["node", "-e", source], capture_output=True, text=True, check=True)
    expected = [(number, mask) for number, mask in json.loads(done.stdout)]
    assert shown(read(folder), **query) == expected


def test_a_page_has_what_it_shows_and_no_more(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(sample_table, "PAGE_GROUPS", 5)
    table = read(folder)
    pages = [table.select({"order": "oldest", "offset": str(offset)}) for offset in (0, 5, 10)]
    assert [page["numbers"] for page in pages] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert [len(page["index"]["reward"]) for page in pages] == [20, 20, 8]
    assert all(page["num"] == page["all"] == GROUPS * PER_GROUP for page in pages)
    assert all(page["num_groups"] == GROUPS for page in pages)
    assert sum(pages[0]["lengths"]["counts"]) == GROUPS * PER_GROUP, "those of all pages"


def test_a_group_is_that_of_the_written_page(folder: Path) -> None:
    with_tokenizer(folder)
    with serve(folder, 0) as server:
        _, groups = opened(folder)
        for number in (0, GROUPS - 1):
            assert json.loads(get(server, f"/group?number={number}")[1]) == groups[number]


def test_what_a_run_writes_is_read_once_it_is_whole(folder: Path) -> None:
    """A group comes sample by sample, and a row in two parts."""
    file = folder / "samples.jsonl"
    rows = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"")
    table, whole = SampleTable(folder), read
    for row in rows:
        with file.open("ab") as out:
            out.write(row[:50])
            out.flush()
            table.refresh()
            out.write(row[50:])
        before = len(table)
        table.refresh()
        assert len(table) == before + 1
        table.select({"search": "train"})
    assert table.select({}) == whole(folder).select({})
    assert table.select({"search": "train"}) == whole(folder).select({"search": "train"})


def test_new_samples_do_not_move_what_is_being_paged_through(folder: Path) -> None:
    table = read(folder)
    before = table.select({})
    write_steps(folder, range(7, 9), resume_step=7)
    table.refresh()
    until = str(before["all"])
    assert table.select({"until": until})["numbers"] == before["numbers"]
    assert table.select({})["num"] == before["num"] + 2 * 2 * PER_GROUP


def test_a_run_that_goes_on_from_an_earlier_step_is_read_anew(folder: Path) -> None:
    """Later it has as many bytes as before, or more."""
    table = read(folder)
    write_steps(folder, range(3, 12), resume_step=3)
    table.refresh()
    assert table.select({}) == read(folder).select({})
    assert len(table) == 2 * 11 * PER_GROUP


def get(server: LocalServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}") as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def server(folder: Path) -> Generator[LocalServer]:
    with serve(folder, 0) as server:
        yield server


def test_the_page_changes_with_the_run(server: LocalServer, folder: Path) -> None:
    stamp = lambda: json.loads(get(server, "/stamp")[1])["stamp"]  # noqa: E731
    first, before = stamp(), get(server, "/")[1]
    assert (stamp(), get(server, "/")[1]) == (first, before)
    assert f"{NUM_STEPS} of 200" in before
    assert '<script type="text/plain"' not in before, "samples are asked for"
    write_steps(folder, range(7, 8), resume_step=7)
    assert stamp() != first
    assert "7 of 200" in get(server, "/")[1]


def test_opened_groups_read_neither_metrics_nor_tokenizer_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(folder)
    with serve(folder, 0) as server:
        status, before = get(server, "/group?number=0")
        assert (status, "pieces" in before) == (200, True)
        monkeypatch.setattr(RunFolder, "read", None)
        monkeypatch.setattr(Splitter, "of_run", None)
        assert get(server, "/group?number=0") == (200, before)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/group?number=99", 404),
        ("/group?number=-1", 404),
        ("/group", 404),
        ("/samples?from=two", 400),
        ("/samples?offset=-5", 400),
        ("/../../etc/passwd", 404),
        ("/samples.jsonl", 404),
    ],
)
def test_nothing_else_is_answered(server: LocalServer, path: str, status: int) -> None:
    assert get(server, path)[0] == status


@pytest.mark.parametrize("missing", ["config.yaml", "events.jsonl", "samples.jsonl"])
def test_a_run_without_a_file_is_served(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with serve(folder, 0) as server:
        assert get(server, "/")[0] == get(server, "/samples")[0] == 200


def test_a_run_is_served_from_its_start(tmp_path: Path) -> None:
    """It has its folder, and no step yet."""
    with lock_run_dir(tmp_path), serve(tmp_path, 0) as server:
        assert "No step has been recorded" in get(server, "/")[1]
        write_steps(tmp_path, range(1, 2), resume_step=1)
        assert json.loads(get(server, "/samples")[1])["all"] == 2 * PER_GROUP
        assert "No step has been recorded" not in get(server, "/")[1]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err


def test_the_command_says_where_and_ends_with_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "hone", "watch", str(folder), "--port", "0"]
    # A shell may have these tests ignore it, which a child would inherit.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, earlier)
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{url}samples") as reply:
            assert json.load(reply)["all"] == GROUPS * PER_GROUP
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_shows_steps_as_they_come(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The run writes its next step once the page has asked for the samples."""
    select: Callable[[SampleTable, Mapping[str, str]], dict[str, Any]] = SampleTable.select
    asked = threading.Event()

    def selecting(table: SampleTable, query: Mapping[str, str]) -> dict[str, Any]:
        if not asked.is_set() and query:
            asked.set()
            found = select(table, query)
            write_steps(folder, range(7, 8), resume_step=7)
            return found
        return select(table, query)

    monkeypatch.setattr(SampleTable, "select", selecting)
    browser = ["chromium", "--headless=new", "--no-sandbox", "--window-size=1400,3000"]
    with serve(folder, 0) as server:
        done = subprocess.run(
            [
                *browser,
                "--virtual-time-budget=9000",
                "--dump-dom",
                f"http://127.0.0.1:{server.port}/",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    assert "7 of 200" in done.stdout
    assert (
        f"{GROUPS * PER_GROUP} of {GROUPS * PER_GROUP} samples, in {GROUPS} groups" in done.stdout
    )
    assert f"show {2 * PER_GROUP} newer" in done.stdout
    assert done.stdout.count('class="group"') == GROUPS
    assert RunFolder.read(folder).rows[-1]["step"] == 7
