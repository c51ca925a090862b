from stall.stock import Stock, difference


def test_take_all_and_no_more():
    stock = Stock({"a": 2})
    assert stock.take("a", 2) == 0
    try:
        stock.take("a")
    except ValueError:
        assert stock.level("a") == 0
        return
    raise AssertionError("took what is not there")


def test_steps():
    stock = Stock()
    assert [stock.add("a"), stock.add("a", 5), stock.take("a"), stock.add("b", 0)] == [1, 6, 5, 0]
    assert stock.total() == 5
    assert stock.low(5) == ["b"]
    assert stock.low(6) == ["b", "a"]


def test_difference_more():
    assert difference({}, {"x": 2}) == {"x": 2}
    assert difference({"x": 2, "y": 1}, {"y": 4}) == {"x": -2, "y": 3}
    assert difference({"x": 1}, {"x": 1}) == {}
