from stall import orders


def test_rebates():
    assert [orders.rebate(n) for n in (0, 11, 48, 51, 200)] == [0, 5, 5, 10, 10]
    assert [orders.price((n, "a", 33)) for n in (1, 9, 10, 20, 50)] == [33, 297, 313, 627, 1485]


def test_total_more():
    assert orders.total([(1, "a", 4999)]) == 5299
    assert orders.total([(1, "a", 5001)]) == 5001
    assert orders.total([(2, "a", 100), (10, "b", 10)], delivery=7, free_from=295) == 295
    assert orders.total([(2, "a", 100)], delivery=7, free_from=201) == 207


def test_read_more():
    assert orders.read("007 x red fig @ 12") == (7, "red fig", 1200)
    assert orders.read("1 x y x z @ 0.01") == (1, "y x z", 1)
    for text in ("1.5 x a @ 1", "1 x a @ b", "-1 x a @ 1"):
        try:
            orders.read(text)
        except ValueError:
            continue
        raise AssertionError(text)


def test_merged_more():
    assert orders.merged([]) == []
    assert orders.merged([(2, "b", 1), (2, "a", 1), (0, "b", 1), (3, "b", 1)]) == [(5, "b", 1), (2, "a", 1)]


def test_read_all_more():
    assert orders.read_all("") == []
    assert orders.read_all("  # x\n2 x a @ 1\n#3 x b @ 1\n") == [(2, "a", 100)]
