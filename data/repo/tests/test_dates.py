from stall import dates


def test_leap():
    assert [y for y in (1900, 1996, 1999, 2000, 2023, 2024, 2100) if dates.is_leap(y)] == [1996, 2000, 2024]


def test_days_in():
    assert [dates.days_in(2023, m) for m in (1, 2, 4, 12)] == [31, 28, 30, 31]
    assert dates.days_in(2024, 2) == 29


def test_number():
    assert dates.number(2023, 1, 1) == 1
    assert dates.number(2023, 12, 31) == 365
    assert dates.number(2024, 3, 1) == 61


def test_tomorrow():
    assert dates.tomorrow(2023, 2, 28) == (2023, 3, 1)
    assert dates.tomorrow(2024, 2, 28) == (2024, 2, 29)
    assert dates.tomorrow(2023, 12, 31) == (2024, 1, 1)
    assert dates.tomorrow(2023, 5, 30) == (2023, 5, 31)


def test_weekday():
    assert dates.weekday(2024, 1, 1) == 0
    assert dates.weekday(2000, 2, 29) == 1
    assert dates.weekday(1999, 12, 31) == 4


def test_market():
    assert dates.is_market(2024, 1, 3)
    assert dates.is_market(2024, 1, 6)
    assert not dates.is_market(2024, 1, 7)
    assert not dates.is_market(2025, 12, 31)
