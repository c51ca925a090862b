import assert from "node:assert/strict";
import test from "node:test";
import { load, packed } from "./load.mjs";

const { blocks, branches, bubbles, chosen, column, filtered, pairs, sorted, texts } = await load("trajectory_view");

test("texts are found by their ends, whatever they hold", () => {
  const all = ["", "naïve", "👩🏽‍🚀", "<b>"];
  const bytes = all.map((t) => new TextEncoder().encode(t));
  const ends = new Int32Array([0, ...bytes.map(((n) => (b) => (n += b.length))(0))]);
  const text = new Uint8Array(bytes.flatMap((b) => [...b]));
  const read = texts({ text: new DataView(text.buffer), ends: new DataView(ends.buffer) });
  assert.equal(read.length, 4);
  assert.deepEqual(all.map((_, i) => read.at(i)), all);
  assert.equal(texts(undefined).length, 0);
});

test("filters are joined; sorting keeps the missing last in both directions", () => {
  const data = { n: 5, outcome: [0, 1, 0, 2, 0], stop: [0, 0, 1, 1, 0], task: [0, 0, 0, 1, 1] };
  assert.deepEqual(filtered(data, {}), [0, 1, 2, 3, 4]);
  assert.deepEqual(filtered(data, { outcome: 0, stop: 0 }), [0, 4]);
  assert.deepEqual(filtered(data, { task: 0, found: (i) => i > 0 }), [1, 2]);
  const col = column(packed([3, null, 1, 3, -2]));
  assert.deepEqual(sorted([0, 1, 2, 3, 4], col, true), [0, 3, 2, 4, 1]);
  assert.deepEqual(sorted([0, 1, 2, 3, 4], col, false), [4, 2, 0, 3, 1]);
  assert.deepEqual(sorted([2, 1], undefined, true), [2, 1]);
});

test("clicks: alone, added, a range of what is shown", () => {
  const rows = [9, 7, 5, 3];
  assert.deepEqual(chosen([1], rows, 1, -1), [7]);
  assert.deepEqual(chosen([1], rows, 1, -1, { add: true }), [1, 7]);
  assert.deepEqual(chosen([1, 7], rows, 1, -1, { add: true }), [1]);
  assert.deepEqual(chosen([9], rows, 2, 0, { range: true }), [9, 7, 5]);
  assert.deepEqual(chosen([3], rows, 0, 1, { range: true, add: true }), [3, 9, 7]);
  assert.deepEqual(chosen([3], rows, 2, -1, { range: true }), [5]);
});

test("a tree of shared turns becomes lines", () => {
  const leaf = (from, to, i) => ({ from, to, of: [i], ends: [i], then: [] });
  const tree = [{ from: 0, to: 3, of: [0, 1], ends: [], then: [leaf(3, 5, 0), leaf(3, 4, 1)] }];
  assert.deepEqual(branches(tree).map((x) => [x.depth, x.from, x.to]), [[0, 0, 3], [1, 3, 5], [1, 3, 4]]);
});

test("code and JSON in a text are distinguished from prose", () => {
  assert.deepEqual(blocks("Look:\n```python\nx = 1\n\ny = 2\n```\nDone."), [{ prose: "Look:" }, { code: "x = 1\n\ny = 2" }, { prose: "Done." }]);
  assert.deepEqual(blocks('{"a": [1]}'), [{ code: '{\n  "a": [\n    1\n  ]\n}' }]);
  assert.deepEqual(blocks("{a}"), [{ prose: "{a}" }]);
  assert.deepEqual(blocks("```\nnot closed"), [{ prose: "```\nnot closed" }]);
  assert.deepEqual(blocks(" "), []);
  assert.deepEqual(pairs('{"code": "a\\nb", "n": [1]}'), [["code", "a\nb"], ["n", "[1]"]]);
  assert.equal(pairs('{"code": "cut'), null);
});

test("the turns of a chat as messages by role", () => {
  const call = { name: "f", arguments: "{}", ok: null, unreadable: null };
  const done = { ...call, ok: true, result: "5" };
  const message = (role, content) => ({ role, content, thinking: "" });
  const roles = (turn, last = false) => bubbles(turn, last).map((b) => [b.role, b.text]);
  assert.deepEqual(roles({ kind: "prompt", messages: [message("system", "s"), message("user", "u")], calls: [] }), [["system", "s"], ["user", "u"]]);
  assert.deepEqual(roles({ kind: "action", messages: [message("assistant", "I look")], calls: [call, call] }), [["assistant", "I look"], ["tool call", ""], ["tool call", ""]]);
  assert.deepEqual(roles({ kind: "action", messages: [message("assistant", "")], calls: [call] }), [["tool call", ""]], "no empty bubble");
  const seen = bubbles({ kind: "observation", messages: [message("tool", "5"), message("user", "go on")], calls: [done] });
  assert.deepEqual(seen.map((b) => [b.role, b.text, b.call]), [["tool result", "5", done], ["user", "go on", null]]);
  assert.deepEqual(roles({ kind: "forced", text: "The", messages: [], calls: [] }), [], "the action that follows contains it");
  assert.deepEqual(roles({ kind: "forced", text: "The", messages: [], calls: [] }, true), [["assistant", "The"]]);
  assert.deepEqual(roles({ kind: "action", text: "<x>", messages: [], calls: [] }), [["assistant", "<x>"]]);
});
