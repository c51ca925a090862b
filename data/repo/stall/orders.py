"""Orders: lines such as "3 x apple @ 0.40"."""

from stall import money


def read(line):
    """(count, name, cents for one)"""
    count, found, rest = line.partition(" x ")
    name, also, price = rest.rpartition(" @ ")
    if not found or not also or not count.strip().isdigit():
        raise ValueError(f"no order: {line!r}")
    return (int(count), name.strip(), money.parse(price.strip()))


def read_all(text):
    """The orders of a text; empty lines and those that begin with # are left out."""
    lines = [line.strip() for line in text.splitlines()]
    return [read(line) for line in lines if line and not line.startswith("#")]


def rebate(count):
    """Per cent that is taken off: 5 from ten on, 10 from fifty on."""
    if count >= 50:
        return 10
    if count >= 10:
        return 5
    return 0


def price(order):
    """Cents for one order, its rebate taken off."""
    count, _, each = order
    full = count * each
    return full - money.percent(full, rebate(count))


def total(orders, delivery=300, free_from=5000):
    """Cents for all of them; delivery is free from some amount on, and nothing is paid for nothing."""
    goods = sum(price(order) for order in orders)
    if goods == 0 or goods >= free_from:
        return goods
    return goods + delivery


def merged(orders):
    """One order for each name and price, in the order in which they first came."""
    counts = {}
    for count, name, each in orders:
        counts[name, each] = counts.get((name, each), 0) + count
    return [(count, name, each) for (name, each), count in counts.items()]
