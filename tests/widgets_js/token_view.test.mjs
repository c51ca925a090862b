import assert from "node:assert/strict";
import test from "node:test";
import { load, packed } from "./load.mjs";

const { alternatives, before, breakable, chunks, column, joined, ranked, shade, split } = await load("token_view");

test("chunks cover every token once and never cross a turn", () => {
  const rows = [
    { n: 7, turns: [[0, "prompt", "task", 0, 2], [1, "action", "policy", 2, 7]] },
    { n: 0, turns: [] },
    { n: 3, turns: [[0, "prompt", "task", 0, 3]] },
  ];
  const all = chunks(rows, 2);
  assert.deepEqual(all.map((c) => [c.row, c.turn, c.first, c.last]), [[0, 0, 0, 2], [0, 1, 2, 4], [0, 1, 4, 6], [0, 1, 6, 7], [2, 0, 7, 9], [2, 0, 9, 10]]);
});

test("before finds the part of a token", () => {
  assert.equal(before([0, 2, 7], 0), 0);
  assert.equal(before([0, 2, 7], 6), 1);
  assert.equal(before([0, 2, 7], 99), 2);
  assert.equal(before([0, 5, 5, 9], 5), 2); // an empty row begins where the next one does
});

test("shade: missing is its own side, and bars hang from the end that is 0", () => {
  const around = { scale: "around", lo: -2, hi: 2, middle: 0 };
  assert.deepEqual(shade(null, around), { share: 0, side: "missing" });
  assert.deepEqual(shade(0, around), { share: 0, side: "high" });
  assert.deepEqual(shade(-1, around), { share: 0.5, side: "low" });
  assert.deepEqual(shade(9, around), { share: 1, side: "high" });
  assert.deepEqual(shade(-Infinity, around), { share: 1, side: "low" });
  assert.deepEqual(shade(-3, { scale: "down", lo: -4, hi: 0 }), { share: 0.75, side: "down" });
  assert.deepEqual(shade(0, { scale: "down", lo: -4, hi: 0 }), { share: 0, side: "down" });
  assert.deepEqual(shade(1, { scale: "up", lo: 0, hi: 4 }), { share: 0.25, side: "up" });
  assert.equal(shade(1, { scale: "flag" }).side, "flag");
  assert.equal(shade(0, { scale: "flag" }).side, "none");
});

test("telling tokens: the order, and none that is missing", () => {
  const col = column(packed([-1, null, -3, -2]));
  assert.deepEqual(ranked({ telling: "low", middle: 0 }, col), [2, 3, 0]);
  assert.deepEqual(ranked({ telling: "far", middle: -2 }, col), [0, 2, 3]);
});

test("spans that touch become one", () => {
  assert.deepEqual(joined([[0, 2, 4]], [0, 4, 6]), [[0, 2, 6]]);
  assert.deepEqual(joined([[0, 2, 4], [1, 2, 4]], [0, 8, 9]), [[0, 2, 4], [0, 8, 9], [1, 2, 4]]);
  assert.deepEqual(joined([[0, 0, 2], [0, 5, 7]], [0, 1, 6]), [[0, 0, 7]]);
});

test("split keeps every character", () => {
  for (const text of ["·a·b⏎", "", "···", "plain", "‹U+200B›"]) assert.equal(split(text).join(""), text);
});

test("a line may break between two tokens unless they are one word", () => {
  for (const [a, b] of [["wor", "ld"], ["\u00e9", "t"], ["1", "2"], ["a", "\u0301"]]) assert.equal(breakable(a, b), false);
  for (const [a, b] of [["word", "·next"], ["⏎", "a"], ["<|im_start|>", "user"], ['"', "name"], ["(", "("]]) assert.equal(breakable(a, b), true);
});

test("alternatives of a token end where none are recorded", () => {
  const ints = (values) => new DataView(new Int32Array(values).buffer);
  const at = alternatives(2, { id: ints([7, 8, -1, -1, 9, -1]), piece: ints([1, 0, 0, 0, 2, 0]), logprob: packed([-0.5, -1, null, null, -0.25, null]) });
  assert.deepEqual(at(0), [{ id: 7, piece: 1, logprob: -0.5 }, { id: 8, piece: 0, logprob: -1 }]);
  assert.deepEqual(at(1), []);
  assert.deepEqual(at(2), [{ id: 9, piece: 2, logprob: -0.25 }]);
});
