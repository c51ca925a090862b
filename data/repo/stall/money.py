"""Amounts of money as whole cents."""


def parse(text):
    """Cents of "12.50", "12.5", "12" or "-0.05"."""
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("-").partition(".")
    if not whole.isdigit() or len(part) > 2 or (part and not part.isdigit()):
        raise ValueError(f"no amount: {text!r}")
    return sign * (int(whole) * 100 + int(part.ljust(2, "0")))


def show(cents):
    """1250 as "12.50"."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02}"


def split(cents, parts):
    """Cents in so many parts that differ by one at most, the larger ones first."""
    if parts < 1:
        raise ValueError("at least one part")
    share, rest = divmod(cents, parts)
    return [share + 1 if i < rest else share for i in range(parts)]


def percent(cents, rate):
    """So many per cent of an amount that is not negative, half a cent rounded up."""
    return (cents * rate + 50) // 100


def change(cents, coins=(200, 100, 50, 20, 10, 5, 2, 1)):
    """The coins that make up an amount, the largest first."""
    found = []
    for coin in coins:
        while cents >= coin:
            found.append(coin)
            cents -= coin
    return found
