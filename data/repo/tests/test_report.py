from stall import report


def test_table():
    assert report.table([["apple", "4"], ["fig", "12"]]) == "apple   4\nfig    12"
    assert report.table([]) == ""


def test_bar():
    assert report.bar(10, 20) == "#" * 10
    assert report.bar(1, 1000) == "#"
    assert report.bar(0, 5) == ""
    assert report.bar(9, 5) == "#" * 20


def test_top():
    assert report.top({"a": 1, "b": 3, "c": 3, "d": 2}) == ["b", "c", "d"]
    assert report.top({"a": 1, "b": 3}, 1) == ["b"]


def test_average():
    assert report.average([1, 2, 3, 6], 2) == [1.5, 2.5, 4.5]
    assert report.average([4], 2) == []


def test_median():
    assert report.median([3, 1, 2]) == 2
    assert report.median([4, 1, 2, 3]) == 2.5


def test_streak():
    assert report.streak([1, 2, 3, 3, 4]) == 3
    assert report.streak([]) == 0
    assert report.streak([5]) == 1
