"""A table reports every wrong row, and an empty one fails."""

import sys
from itertools import product

import pytest

from tests import tables
from tests.tables import check_rows, table


def assert_even(number):
    assert number % 2 == 0, f"{number} is odd"


def test_rows_that_hold_pass():
    check_rows([2, 4], assert_even)
    check_rows([(1, 3), (2, 2)], lambda a, b: assert_even(a + b), minimum=2)


def test_all_wrong_rows_are_reported_with_their_names_and_places():
    with pytest.raises(pytest.fail.Exception) as failed:
        check_rows({"two": 2, "three": 3, "five": 5, "text": "x"}, assert_even)
    text = str(failed.value)
    assert text.startswith("3 of 4 rows are wrong:")
    assert "three\n    AssertionError: 3 is odd" in text
    assert "five\n    AssertionError: 5 is odd" in text
    assert "text\n    TypeError: " in text
    assert "test_tables.py" in text
    assert "two" not in text


def test_a_row_may_fail_by_pytest_too():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)1 of 1 rows.*no good.*test_tables\.py"):
        check_rows(["x"], lambda _: pytest.fail("no good"))


def test_a_row_that_skips_is_wrong_since_it_would_hide_the_others():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)1 of 2 rows.*not here"):
        check_rows(["x", "y"], lambda row: pytest.skip("not here") if row == "x" else None)


def test_rows_are_counted_once_each_also_those_of_two_tables():
    before = tables.rows_checked()
    check_rows([1, 2], lambda _: check_rows([1, 2, 3], lambda _: None))
    check_rows([1], lambda _: None)
    with pytest.raises(pytest.fail.Exception):
        check_rows([1, 2], assert_even)
    assert tables.rows_checked() == before + 2 * 3 + 1 + 2


def test_two_tables_are_every_pair_of_their_rows():
    seen = []

    @table("number", (1, 2))
    @table("letter", "ab")
    def check(number, letter):
        seen.append((letter, number))

    check()
    assert sorted(seen) == list(product("ab", (1, 2)))


def test_a_row_has_a_folder_a_patch_and_an_output_of_its_own(tmp_path, monkeypatch, capsys):
    most, seen = tables.MOST_SHOWN, []

    @table("number", (1, 2, 3))
    def check(number, tmp_path, monkeypatch, capsys):
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").touch()
        assert most == tables.MOST_SHOWN
        monkeypatch.setattr(tables, "MOST_SHOWN", 0)
        assert capsys.readouterr().out == ""
        sys.stdout.write("not for the next row")
        seen.append(number)

    check(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("offset", [0, 1])
@table("row, text", [((1, 2), "(1, 2)"), ([3], "[3]")])
def test_a_table_and_parameters_of_pytest_go_together(offset, row, text):
    assert str(row) == text
    assert offset in (0, 1)


def test_a_wrong_table_is_refused_where_it_is_written():
    with pytest.raises(AssertionError, match="does not take all of letter"):
        table("letter", "ab")(lambda number: None)
    with pytest.raises(AssertionError, match="does not have 2 values"):
        table("letter, number", [("a",)])


def test_a_table_that_lost_its_rows_fails():
    with pytest.raises(pytest.fail.Exception, match="The table has 0 rows, fewer than 1"):
        check_rows([], assert_even)
    with pytest.raises(pytest.fail.Exception, match="has 1 rows, fewer than 2"):
        check_rows([2], assert_even, minimum=2)


def test_a_long_report_counts_the_rest():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)30 of 30 rows.*and 10 more"):
        check_rows([1] * 30, assert_even)


def test_a_table_whose_rows_all_skip_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="needs node"):
        check_rows(["x", "y"], lambda _: pytest.skip("needs node"))
