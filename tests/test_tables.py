"""A table reports every wrong row, and an empty one fails."""

import pytest

from tests.tables import check_rows


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
    with pytest.raises(pytest.fail.Exception, match=r"(?s)1 of 1 rows.*no good"):
        check_rows(["x"], lambda _: pytest.fail("no good"))


def test_a_table_that_lost_its_rows_fails():
    with pytest.raises(pytest.fail.Exception, match="The table has 0 rows, fewer than 1"):
        check_rows([], assert_even)
    with pytest.raises(pytest.fail.Exception, match="has 1 rows, fewer than 2"):
        check_rows([2], assert_even, minimum=2)


def test_a_long_report_counts_the_rest():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)30 of 30 rows.*and 10 more"):
        check_rows([1] * 30, assert_even)
