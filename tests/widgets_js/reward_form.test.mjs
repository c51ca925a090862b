import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { chosen, widths } = await load("reward_form");
const rows = [["a", "a", "", "0", "1", "gained", ""], ["b", "b", "", "1", "1", "same", ""], ["c", "c", "", "1", "0", "lost", ""]];

test("rows by change", () => {
  assert.deepEqual(chosen(rows, "changed").map((r) => r[0]), ["a", "c"]);
  assert.deepEqual(chosen(rows, "lost").map((r) => r[0]), ["c"]);
  assert.equal(chosen(rows, "all").length, 3);
});

test("bars share one scale", () => {
  assert.deepEqual(widths([["0", 4, 1], ["1", 0, 2]]), [[100, 25], [0, 50]]);
  assert.deepEqual(widths([]), []);
});
