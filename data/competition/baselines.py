"""Simple models for a competition, without packages. Each call trains on train.csv and writes submission.csv.

import baselines
baselines.linear()
"""

import csv
import math


def read(path):
    """Return the rows of a file of numbers, without its header."""
    with open(path, newline="") as file:
        return [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]


def submit(predict):
    """Write the predictions of a function of (x1, x2). Labels that are only 0 and 1 are predicted as 0 or 1."""
    classes = {row[-1] for row in read("train.csv")} <= {0.0, 1.0}
    with open("submission.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", "y"])
        for number, *x in read("test.csv"):
            y = predict(*x)
            out.writerow([int(number), int(y >= 0.5) if classes else y])


def solve(matrix, vector):
    """Solve a system of linear equations by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(len(rows)):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def fitted(features, penalty=1e-6, scale=float, back=float):
    """Return the least-squares predictor with these features of (x1, x2), for labels on a scale."""
    data = [(features(*x), scale(y)) for _, *x, y in read("train.csv")]
    n = range(len(data[0][0]))
    matrix = [[sum(f[i] * f[j] for f, _ in data) + penalty * (i == j) for j in n] for i in n]
    weights = solve(matrix, [sum(f[i] * y for f, y in data) for i in n])
    return lambda *x: back(sum(w * f for w, f in zip(weights, features(*x), strict=True)))


def plane(x1, x2):
    return [1.0, x1, x2]


def squares(x1, x2):
    return [1.0, x1, x2, x1 * x1, x1 * x2, x2 * x2]


def zero():
    submit(lambda *x: 0.0)


def mean():
    labels = [row[-1] for row in read("train.csv")]
    submit(lambda *x: sum(labels) / len(labels))


def median():
    labels = sorted(row[-1] for row in read("train.csv"))
    submit(lambda *x: labels[len(labels) // 2])


def linear(penalty=1e-6):
    submit(fitted(plane, penalty))


def quadratic(penalty=1e-6):
    submit(fitted(squares, penalty))


def exponential(penalty=1e-6):
    """For positive labels that grow by factors: a linear model of their logarithm."""
    submit(fitted(plane, penalty, lambda y: math.log(max(y, 1e-9)), lambda z: math.exp(min(z, 50.0))))


def knn(k=5):
    data = [(x1, x2, y) for _, x1, x2, y in read("train.csv")]

    def predict(x1, x2):
        nearest = sorted([((a - x1) * (a - x1) + (b - x2) * (b - x2), y) for a, b, y in data])[:k]
        return sum(y for _, y in nearest) / len(nearest)

    submit(predict)
