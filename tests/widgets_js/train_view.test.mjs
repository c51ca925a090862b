import assert from "node:assert/strict";
import test from "node:test";
import { load, packed } from "./load.mjs";

const { column, margin, nearest, ribbon, segments, thin, tick } = await load("train_view");

test("a line has a gap where a number is missing or not finite", () => {
  const col = column(packed([1, 2, null, 4, Infinity, 6]));
  assert.deepEqual(segments([1, 2, 3, 4, 5, 6], col), [[[1, 1], [2, 2]], [[4, 4]], [[6, 6]]]);
});

test("thin loses no spike", () => {
  const points = Array.from({ length: 10000 }, (_, i) => [i, i === 7777 ? 99 : i % 7]);
  const fewer = thin(points, 200);
  assert.ok(fewer.length <= 400);
  assert.ok(fewer.some(([, v]) => v === 99));
  assert.deepEqual(fewer.map((p) => p[0]), fewer.map((p) => p[0]).toSorted((a, b) => a - b));
  assert.equal(thin(points.slice(0, 100), 200).length, 100);
});

test("nearest step", () => {
  assert.equal(nearest([1, 2, 4, 8], 2.9), 1);
  assert.equal(nearest([1, 2, 4, 8], 3.1), 2);
  assert.equal(nearest([1, 2, 4, 8], -5), 0);
  assert.equal(nearest([1, 2, 4, 8], 99), 3);
});

test("the margin has room for the longest label", () => {
  assert.equal(margin(["0", "1"]), 30);
  assert.ok(margin(["−0.00123"]) > 8 * 6);
});

test("axis numbers", () => {
  assert.equal(tick(0.02, 0.01), "0.02");
  assert.equal(tick(-1, 1), "−1");
  assert.equal(tick(12000, 2000), "12k");
  assert.equal(tick(0, 0.00001), "0");
});

test("a band has a gap where an end is missing, and no more points than pixels", () => {
  const low = column(packed([0, 1, null, 3]));
  const high = column(packed([1, 2, 3, 4]));
  assert.deepEqual(ribbon([1, 2, 3, 4], low, high, 100), [[[1, 0, 1], [2, 1, 2]], [[4, 3, 4]]]);
  const many = column(packed(Array(1000).fill(0.5)));
  assert.ok(ribbon(Array.from({ length: 1000 }, (_, i) => i), many, many, 90)[0].length <= 90);
});
