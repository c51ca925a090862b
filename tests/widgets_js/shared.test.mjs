import assert from "node:assert/strict";
import test from "node:test";
import { load, packed } from "./load.mjs";

const { column, duration, laneWidth, number, plural, ticks, typed } = await load();

test("a buffer that starts at an odd byte is copied, not viewed", () => {
  const bytes = new Uint8Array(13);
  new DataView(bytes.buffer).setFloat32(1, 1.5, true);
  new DataView(bytes.buffer).setFloat32(5, -2, true);
  assert.deepEqual([...typed(new DataView(bytes.buffer, 1, 8), Float32Array)], [1.5, -2]);
  assert.deepEqual([...typed(undefined, Int32Array)], []);
});

test("missing is null, never 0", () => {
  const col = column(packed([0, null, -1.5, ...Array(7).fill(null), 3]));
  assert.equal(col.at(0), 0);
  assert.equal(col.at(1), null);
  assert.equal(col.at(2), -1.5);
  assert.equal(col.at(10), 3);
  assert.equal(col.at(11), null);
  assert.equal(col.at(-1), null);
  assert.equal(column(undefined).at(0), null);
});

test("numbers are written as Python writes them", () => {
  const same = [[0, "0"], [1, "1"], [-0.25, "−0.25"], [1 / 3, "0.3333"], [1e-5, "1.00e−5"], [2.5e7, "2.50e7"], [Infinity, "∞"], [-Infinity, "−∞"], [null, "–"], [NaN, "–"]];
  for (const [value, text] of same) assert.equal(number(value), text);
});

test("ticks are round and inside", () => {
  assert.deepEqual(ticks(0, 1, 4), [0, 0.5, 1]);
  assert.deepEqual(ticks(-0.02, 0.03, 4), [-0.02, 0, 0.02]);
  assert.deepEqual(ticks(5, 5), [5]);
  for (const t of ticks(-3.7, 19.2, 5)) assert.ok(t >= -3.7 && t <= 19.2);
});

test("words", () => {
  assert.equal(plural(1, "token"), "1 token");
  assert.equal(plural(1200, "token"), "1,200 tokens");
  assert.equal(duration(4.25), "4.3 s");
  assert.equal(duration(200), "3 min 20 s");
  assert.equal(duration(7500), "2 h 5 min");
  assert.equal(duration(null), "–");
});

test("room for names: as much as the longest needs, within bounds", () => {
  assert.equal(laneWidth([23, 25], 17), "70px");
  assert.equal(laneWidth([], undefined), "62px");
  assert.equal(laneWidth(Array(200000).fill(500)), "230px", "however many there are");
});

test("a saved notebook holds the latest pictures of its views, and the outputs of others unchanged", async () => {
  const { withPictures } = await load();
  const live = "application/vnd.jupyter.widget-view+json";
  const view = { data: { [live]: { model_id: "a" }, "text/html": "old", "text/plain": "A" }, metadata: { agentfly_kit: { view: "a" } } };
  const slider = { data: { [live]: { model_id: "b" }, "text/html": "slider" }, metadata: {} };
  const content = { cells: [{ source: "text" }, { outputs: [view, slider, { text: "x" }] }] };
  const outputs = withPictures(content, new Map([["a", "new"]])).cells[1].outputs;
  assert.deepEqual(outputs[0], { data: { "text/html": "new", "text/plain": "A" }, metadata: view.metadata });
  assert.deepEqual(outputs.slice(1), [slider, { text: "x" }]);
  assert.equal(withPictures(content, new Map()).cells[1].outputs[0].data["text/html"], "old");
  assert.ok(live in view.data, "the open notebook is unchanged");
});
