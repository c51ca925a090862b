from stall import orders


def test_read():
    assert orders.read("3 x apple @ 0.40") == (3, "apple", 40)
    assert orders.read("12 x a @ b @ 1.5") == (12, "a @ b", 150)


def test_read_refuses():
    for text in ("", "3 apple @ 0.40", "3 x apple", "x x apple @ 1"):
        try:
            orders.read(text)
        except ValueError:
            continue
        raise AssertionError(f"{text!r} was read")


def test_read_all():
    text = "# monday\n3 x apple @ 0.40\n\n  1 x pear @ 1 \n"
    assert orders.read_all(text) == [(3, "apple", 40), (1, "pear", 100)]


def test_rebate():
    assert [orders.rebate(n) for n in (1, 9, 10, 49, 50)] == [0, 0, 5, 5, 10]


def test_price():
    assert orders.price((3, "apple", 40)) == 120
    assert orders.price((10, "apple", 40)) == 380


def test_total():
    assert orders.total([]) == 0
    assert orders.total([(3, "apple", 40)]) == 420
    assert orders.total([(1, "scale", 5000)]) == 5000


def test_merged():
    assert orders.merged([(1, "a", 5), (2, "b", 5), (3, "a", 5), (1, "a", 6)]) == [
        (4, "a", 5),
        (2, "b", 5),
        (1, "a", 6),
    ]
