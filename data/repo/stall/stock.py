"""What is on the shelf."""


class Stock:
    """Counts by name; a name that was never added has 0."""

    def __init__(self, counts=None):
        self.counts = dict(counts or {})

    def level(self, name):
        """How many there are."""
        return self.counts.get(name, 0)

    def add(self, name, count=1):
        """Put some on the shelf; gives the new level."""
        if count < 0:
            raise ValueError("a count is not negative")
        self.counts[name] = self.level(name) + count
        return self.counts[name]

    def take(self, name, count=1):
        """Take some away; gives the new level. What is not there cannot be taken."""
        if count > self.level(name):
            raise ValueError(f"only {self.level(name)} of {name}")
        self.counts[name] -= count
        return self.counts[name]

    def low(self, least):
        """Names with fewer than `least`, the scarcest first, then by name."""
        few = [name for name, count in self.counts.items() if count < least]
        return sorted(few, key=lambda name: (self.counts[name], name))

    def total(self):
        """How many things there are."""
        return sum(self.counts.values())


def difference(old, new):
    """What changed from one {name: count} to another, without what did not."""
    names = sorted(set(old) | set(new))
    return {name: new.get(name, 0) - old.get(name, 0) for name in names if new.get(name, 0) != old.get(name, 0)}
