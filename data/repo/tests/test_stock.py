from stall.stock import Stock, difference


def test_add_and_take():
    stock = Stock({"apple": 2})
    assert stock.add("apple") == 3
    assert stock.add("pear", 4) == 4
    assert stock.take("pear", 4) == 0
    assert stock.level("plum") == 0


def test_refusals():
    stock = Stock({"apple": 2})
    for wrong in ((stock.take, "apple", 3), (stock.take, "plum", 1), (stock.add, "apple", -1)):
        try:
            wrong[0](*wrong[1:])
        except ValueError:
            continue
        raise AssertionError(wrong[1:])
    assert stock.level("apple") == 2


def test_low():
    stock = Stock({"fig": 1, "apple": 3, "pear": 5, "date": 1})
    assert stock.low(4) == ["date", "fig", "apple"]
    assert stock.low(1) == []


def test_total():
    assert Stock({"fig": 1, "apple": 3}).total() == 4
    assert Stock().total() == 0


def test_difference():
    assert difference({"a": 1, "b": 2}, {"b": 2, "c": 3}) == {"a": -1, "c": 3}
