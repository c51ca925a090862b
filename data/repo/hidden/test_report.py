from stall import report


def test_table_more():
    rows = [["a", "bbb", "1"], ["cc", "d", "200"]]
    assert report.table(rows, gap=1) == "a  bbb   1\ncc d   200"
    assert report.table([["x"], ["yy"]]) == " x\nyy"


def test_bar_more():
    assert [len(report.bar(v, 7, 14)) for v in (1, 3, 7, 8, -1)] == [2, 6, 14, 14, 0]
    assert report.bar(5, 0) == ""
    assert len(report.bar(1, 100, 10)) == 1


def test_top_more():
    assert report.top({}, 2) == []
    assert report.top({"z": 5, "y": 5, "x": 1, "w": 0}, 3) == ["y", "z", "x"]


def test_average_more():
    assert report.average([2, 4, 6], 1) == [2, 4, 6]
    assert report.average([2, 4, 6], 3) == [4]
    assert report.average([1, 2, 3, 4, 5], 4) == [2.5, 3.5]
    try:
        report.average([1], 0)
    except ValueError:
        return
    raise AssertionError("a window of 0")


def test_median_more():
    assert report.median([7]) == 7
    assert report.median([1, 9]) == 5
    assert report.median([5, 3, 9, 1, 7]) == 5
    try:
        report.median([])
    except ValueError:
        return
    raise AssertionError("no values")


def test_streak_more():
    assert report.streak([3, 2, 1]) == 1
    assert report.streak([1, 1, 2, 3, 0, 5, 6, 7, 8]) == 5
    assert report.streak([1, 2, 3, 0]) == 3
