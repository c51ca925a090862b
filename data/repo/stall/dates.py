"""Days of the calendar as (year, month, day)."""

MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    """Whether the year has a 29 February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year, month):
    """How many days the month has; 1 is January."""
    return MONTHS[month - 1] + (1 if month == 2 and is_leap(year) else 0)


def number(year, month, day):
    """Which day of the year it is; 1 January is 1."""
    return sum(days_in(year, m) for m in range(1, month)) + day


def tomorrow(year, month, day):
    """The day after."""
    if day < days_in(year, month):
        return (year, month, day + 1)
    if month < 12:
        return (year, month + 1, 1)
    return (year + 1, 1, 1)


def weekday(year, month, day):
    """0 is Monday."""
    past = year - 1
    return (past * 365 + past // 4 - past // 100 + past // 400 + number(year, month, day) - 1) % 7


def is_market(year, month, day):
    """The market is on Wednesdays and Saturdays, and on the last day of the year on no account."""
    if month == 12 and day == 31:
        return False
    return weekday(year, month, day) in (2, 5)
