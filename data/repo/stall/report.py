"""Numbers as text, and numbers about numbers."""


def table(rows, gap=2):
    """Rows of texts, each column as wide as its widest text; the last column stands to the right."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:-1], widths[:-1])]
        lines.append((" " * gap).join([*cells, row[-1].rjust(widths[-1])]))
    return "\n".join(lines)


def bar(value, most, width=20):
    """A bar of # that is `width` long for `most`; something that is not 0 has one # at least."""
    if value <= 0 or most <= 0:
        return ""
    return "#" * min(width, max(1, value * width // most))


def top(counts, n=3):
    """The n names with most, the most first; those alike by name."""
    return sorted(counts, key=lambda name: (-counts[name], name))[:n]


def average(values, window):
    """Means of each run of `window` values that follow each other."""
    if window < 1:
        raise ValueError("a window of at least one")
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]


def median(values):
    """The one in the middle, or the mean of the two."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def streak(values):
    """How many values in a row, at most, are larger than the one before, counting the first of them too."""
    best = run = 1 if values else 0
    for before, value in zip(values, values[1:]):
        run = run + 1 if value > before else 1
        best = max(best, run)
    return best
