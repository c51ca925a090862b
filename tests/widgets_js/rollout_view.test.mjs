import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { STATES, gauge, near, order, shares } = await load("rollout_view");
const at = (...names) => Uint8Array.from(names.map((n) => STATES.indexOf(n)));

test("lanes: in their place, or what has stood longest first; what is over last", () => {
  const state = at("done", "sampling", "queued", "tool", "sampling");
  const since = Float32Array.from([1, 5, 0, 2, 3]);
  assert.deepEqual(order(state, since, new Set(), "place"), [0, 1, 2, 3, 4]);
  assert.deepEqual(order(state, since, new Set(["sampling"]), "place"), [1, 4]);
  assert.deepEqual(order(state, since, new Set(), "longest"), [3, 4, 1, 2, 0]);
});

test("running lanes first, then queued, failed and finished ones, in the order of the tasks", () => {
  const state = at("succeeded", "cancelled", "failed", "queued", "sampling", "done", "unscored", "tool");
  assert.deepEqual(order(state, new Float32Array(8), new Set(), "running"), [4, 7, 3, 2, 6, 0, 5, 1]);
});

test("the bar of a reward spans all rewards, and at least 0 to 1", () => {
  assert.equal(gauge(0, 0, 0.5), 0);
  assert.equal(gauge(1, 1, 1), 1);
  assert.equal(gauge(0, -1, 1), 0.5);
  assert.equal(gauge(5, 0, 10), 0.5);
});

test("shares touch each other and never leave the whole", () => {
  const counts = { done: 2, failed: 1, sampling: 1, queued: 4 };
  assert.deepEqual(shares(counts, 8), [["done", 0, 0.25], ["failed", 0.25, 0.375], ["sampling", 0.375, 0.5]]);
  assert.deepEqual(shares(counts, 0), []);
});

test("only the rows near the window are made", () => {
  assert.deepEqual(near(0, 100, 20, 1000, 2), [0, 7]);
  assert.deepEqual(near(10000, 100, 20, 1000, 2), [498, 507]);
  assert.deepEqual(near(99999, 100, 20, 10, 2), [10, 10]);
  assert.deepEqual(near(0, 100, 20, 0), [0, 0]);
});
