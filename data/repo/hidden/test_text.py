from stall import text


def test_wrap_more():
    for width in (3, 5, 8):
        lines = text.wrap("one two three four five six", width)
        assert " ".join(lines) == "one two three four five six"
        assert all(len(line) <= width or " " not in line for line in lines)
        following = zip(lines, lines[1:])
        assert all(len(line) + 1 + len(after.split()[0]) > width for line, after in following)


def test_distance_more():
    for a, b, far in (("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2), ("abc", "abc", 0)):
        assert text.distance(a, b) == far
        assert text.distance(b, a) == far


def test_nearest_more():
    assert text.nearest("fig", ["fog", "fug"]) == "fog"
    assert text.nearest("fig", ["foo", "fug"], 1) == "fug"
    assert text.nearest("abcd", ["ab"], 2) == "ab"
    assert text.nearest("abcd", ["ab"], 1) is None
    assert text.nearest("x", []) is None


def test_plural_more():
    words = ("toy", "pass", "fox", "peach", "city", "plum", "ray")
    assert [text.plural(3, w).split()[1] for w in words] == [
        "toys", "passes", "foxes", "peaches", "cities", "plums", "rays",
    ]  # fmt: skip
    assert text.plural(1, "city") == "1 city"


def test_slug_more():
    assert text.slug("A1 b2--C3") == "a1-b2-c3"
    assert text.slug("!!") == ""
