"""`hone.data_show`, `data_stats` and `data_check`: what the command says, as text and as a page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.cli.main import main
from hone.errors import UserError

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(5)]


def test_the_text_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for words, found in (
        (["show", "--rows", "2"], hone.data_show("rows.jsonl", rows=2)),
        (["stats"], hone.data_stats("rows.jsonl")),
        (["check"], hone.data_check("rows.jsonl")),
    ):
        capsys.readouterr()
        assert main(["data", words[0], "rows.jsonl", *words[1:]]) == 0
        assert capsys.readouterr().out.split() == str(found).split()


def test_rows_of_a_program_have_a_name_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = hone.data_show(ROWS, rows=1, first=4)
    assert "rows.jsonl, line 4" in str(shown)
    assert "3+1=" in str(shown)
    assert "2+1=" not in str(shown)
    assert "/hone-" not in str(shown) + shown.page
    assert not list(tmp_path.iterdir())
    shown.save("page.html")
    assert Path("page.html").read_text() == shown.page


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    shown = hone.data_show(ROWS)
    start, frame, end = shown._repr_html_().partition(html.escape(shown.page))
    assert frame
    assert (start[:16], end[-9:]) == ('<iframe srcdoc="', "></iframe>"[-9:])


def test_settings_are_sections_and_problems_are_named() -> None:
    lacking = [*ROWS, {"prompt": "what?", "answer": None}]
    refused = hone.data_check(lacking)
    assert refused.has_problems
    assert "rows.jsonl, line 6" in str(refused)
    dropped = hone.data_check(lacking, data={"missing_answers": "drop"})
    assert not dropped.has_problems
    assert "dropped: 1 of 6 rows" in str(dropped)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hone.data_show(ROWS, rows=0), r"rows=0; allowed: a whole number >= 1"),
        (lambda: hone.data_show(ROWS, data={"filtr": "a.py:f"}), r"did you mean --data\.filter"),
        (lambda: hone.data_stats("nowhere.jsonl"), r"nowhere\.jsonl"),
        (lambda: hone.data_check([]), r"data holds no rows"),
        (lambda: hone.data_check(3), r"data is of type int; give a list of dicts"),
        (lambda: hone.data_show(ROWS, command="bake"), r"got 'bake'"),
    ],
)
def test_mistakes_say_what_to_give(call: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        call()
