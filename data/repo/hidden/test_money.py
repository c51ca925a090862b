import random

from stall import money


def test_what_is_shown_is_read():
    rng = random.Random(1)
    for cents in [0, 1, 99, 100, 101, -1, -100, -12345, *(rng.randrange(-(10**6), 10**6) for _ in range(10))]:
        assert money.parse(money.show(cents)) == cents


def test_parse_more():
    assert [money.parse(t) for t in ("0", "0.07", "7.7", "-3", "1000.01")] == [0, 7, 770, -300, 100001]
    for text in (".", "1.", "1..2", "1.234", "a", "1.-2"):
        try:
            money.parse(text)
        except ValueError:
            continue
        assert text == "1.", text


def test_split_more():
    for cents, parts in ((0, 4), (7, 7), (100, 6), (3, 5)):
        found = money.split(cents, parts)
        assert sum(found) == cents and len(found) == parts
        assert found == sorted(found, reverse=True) and found[0] - found[-1] <= 1
    try:
        money.split(5, 0)
    except ValueError:
        return
    raise AssertionError("no parts")


def test_percent_more():
    assert [money.percent(c, r) for c, r in ((200, 10), (333, 10), (335, 10), (1, 49), (1, 50), (0, 9))] == [
        20, 33, 34, 0, 1, 0,
    ]  # fmt: skip


def test_change_more():
    assert money.change(3) == [2, 1]
    assert money.change(9, (5, 3, 1)) == [5, 3, 1]
    assert money.change(200) == [200]
    assert money.change(599) == [200, 200, 100, 50, 20, 20, 5, 2, 2]
