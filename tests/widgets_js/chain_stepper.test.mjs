import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { composer, grouped, percent, KEYS } = await load("chain_stepper");

test("the text box does what the chain can take", () => {
  assert.equal(composer({ force: true, observe: false }), "force");
  assert.equal(composer({ force: false, observe: true }), "observe");
  assert.equal(composer({ force: false, observe: false }), null);
});

test("probabilities are never shown as certain or impossible when they are not", () => {
  assert.equal(percent(1), "100 %");
  assert.equal(percent(0.5), "50.0 %");
  assert.equal(percent(0.0001), "<0.1 %");
  assert.equal(percent(0.999), "99.9 %");
});

test("samples are grouped, the most frequent first, and each group counts its successes", () => {
  const items = [["a", "x", null], ["b", "x", true], ["b", "y", false], ["c", "y", null]].map(([action, first, success]) => ({ action, first, success }));
  assert.deepEqual(grouped(items, "action"), [
    { key: "b", first: 1, n: 2, good: 1, scored: 2 },
    { key: "a", first: 0, n: 1, good: 0, scored: 0 },
    { key: "c", first: 3, n: 1, good: 0, scored: 0 },
  ]);
  assert.deepEqual(grouped(items, "first").map((g) => [g.key, g.n, g.good]), [["x", 2, 1], ["y", 2, 0]]);
});

test("each key has one meaning", () => {
  assert.equal(new Set(Object.values(KEYS)).size, Object.keys(KEYS).length);
});
