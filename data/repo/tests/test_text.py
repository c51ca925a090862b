from stall import text


def test_wrap():
    assert text.wrap("a bb ccc d", 4) == ["a bb", "ccc", "d"]
    assert text.wrap("a bb cc d", 5) == ["a bb", "cc d"]
    assert text.wrap("", 5) == []


def test_slug():
    assert text.slug("Red  Apples!") == "red-apples"
    assert text.slug("-7 figs-") == "7-figs"


def test_distance():
    assert text.distance("fig", "fog") == 1
    assert text.distance("apple", "pale") == 2
    assert text.distance("", "abc") == 3


def test_nearest():
    assert text.nearest("appel", ["pear", "apple", "ample"]) == "apple"
    assert text.nearest("zebra", ["pear", "fig"]) is None


def test_plural():
    assert [text.plural(n, w) for n, w in ((1, "fig"), (2, "fig"), (0, "box"))] == ["1 fig", "2 figs", "0 boxes"]
    assert [text.plural(2, w) for w in ("berry", "day", "peach")] == ["2 berries", "2 days", "2 peaches"]
