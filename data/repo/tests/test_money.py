from stall import money


def test_parse():
    assert money.parse("12.50") == 1250
    assert money.parse("12.5") == 1250
    assert money.parse("12") == 1200
    assert money.parse("-0.05") == -5


def test_parse_refuses():
    for text in ("", "x", "1.234", "1.x", "1,5", "--"):
        try:
            money.parse(text)
        except ValueError:
            continue
        raise AssertionError(f"{text!r} was read")


def test_show():
    assert [money.show(c) for c in (1250, 5, -5, 0, 100)] == ["12.50", "0.05", "-0.05", "0.00", "1.00"]


def test_split():
    assert money.split(10, 3) == [4, 3, 3]
    assert money.split(9, 3) == [3, 3, 3]
    assert money.split(11, 3) == [4, 4, 3]


def test_percent():
    assert money.percent(1000, 5) == 50
    assert money.percent(50, 5) == 3
    assert money.percent(49, 5) == 2


def test_change():
    assert money.change(388) == [200, 100, 50, 20, 10, 5, 2, 1]
    assert money.change(40) == [20, 20]
    assert money.change(0) == []
