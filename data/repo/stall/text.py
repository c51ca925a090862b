"""Words."""


def wrap(text, width):
    """Lines of at most `width` characters, broken at spaces; a longer word has a line of its own."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def slug(text):
    """Small letters and digits, with one - between words: "Red  Apples!" is "red-apples"."""
    kept = "".join(c if c.isalnum() else " " for c in text.lower())
    return "-".join(kept.split())


def distance(a, b):
    """How many letters must be changed, added or left out to make one word the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def nearest(word, words, most=2):
    """The known word that is nearest, the first of those alike; None if none is within `most`."""
    best = None
    for other in words:
        far = distance(word, other)
        if far <= most and (best is None or far < best[0]):
            best = (far, other)
    return best[1] if best else None


def plural(count, word):
    """ "1 apple", "2 apples", "3 boxes", "2 berries"."""
    if count == 1:
        return f"1 {word}"
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{count} {word[:-1]}ies"
    return f"{count} {word}{'es' if word.endswith(('s', 'x', 'ch')) else 's'}"
