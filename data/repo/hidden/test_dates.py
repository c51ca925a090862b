import calendar
import datetime

from stall import dates


def test_leap_and_lengths():
    for year in (1600, 1700, 1804, 1900, 2000, 2008, 2019, 2400):
        assert dates.is_leap(year) == calendar.isleap(year), year
    for year in (2021, 2028):
        assert [dates.days_in(year, m) for m in range(1, 13)] == [
            calendar.monthrange(year, m)[1] for m in range(1, 13)
        ]


def test_days():
    for day in ("2023-03-31", "2024-02-29", "2024-12-30", "1999-12-31", "2100-02-28", "2025-01-01", "2016-11-30"):
        date = datetime.date.fromisoformat(day)
        after = date + datetime.timedelta(1)
        given = (date.year, date.month, date.day)
        assert dates.number(*given) == date.timetuple().tm_yday, day
        assert dates.tomorrow(*given) == (after.year, after.month, after.day), day
        assert dates.weekday(*given) == date.weekday(), day
    assert [dates.weekday(y, 7, 14) for y in (1, 4, 100, 400, 401, 1789)] == [5, 2, 2, 4, 5, 1]


def test_market_more():
    assert not dates.is_market(2022, 12, 31)
    assert dates.is_market(2022, 12, 28)
    assert dates.is_market(2020, 10, 31)
    assert dates.is_market(2022, 8, 31)
    assert [d for d in range(1, 8) if dates.is_market(2024, 4, d)] == [3, 6]
