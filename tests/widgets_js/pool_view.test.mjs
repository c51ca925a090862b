import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { actions, bands, ends, owners, picked, tiles } = await load("pool_view");
const counts = { size: 3, idle: 1, starting: 0, leased: 1, waiting: 0, dead: 0 };

test("tiles: by id, then the places where nothing was started", () => {
  const state = { counts, lanes: [[7, "idle", null, 2, 0.5, null], [4, "leased", "c1", 1, 3, "2"]] };
  assert.deepEqual(tiles(state).map((t) => [t.key, t.name, t.owner, t.turn]), [["s4", "leased", "c1", "2"], ["s7", "idle", null, null], ["e0", "empty", null, null]]);
  assert.equal(tiles({ ...state, closed: true }).length, 2);
});

test("bands stay in their box and end now", () => {
  const history = [{ t: 0, ...counts }, { t: 90, ...counts, leased: 3, idle: 0 }];
  const all = bands(history, 600, 40, 60, 100);
  assert.deepEqual(all.map((b) => b.name), ["leased", "starting", "idle"]);
  for (const { points } of all) for (const [x, y] of points) assert.ok(x >= 0 && x <= 600 && y >= -1e-9 && y <= 40 + 1e-9);
  assert.ok(all[0].points.some(([x, y]) => x === 600 && Math.abs(y) < 1e-9));
  assert.deepEqual(bands([], 600, 40, 60, 100), []);
});

test("leases by owner, the longest first, those by hand marked", () => {
  const state = { counts, lanes: [[1, "leased", "c1", 1, 3, "2", false], [2, "leased", "me", 1, 9, null, true], [3, "leased", "c1", 1, 5, "0", false], [4, "idle", "c1", 1, 5, null, false]] };
  assert.deepEqual(owners(state).map((r) => [r.owner, r.ids, r.age, r.hands]), [["me", [2], 9, ["this view"]], ["c1", [1, 3], 5, []]]);
});

test("what a person can do to a sandbox", () => {
  const state = { counts, lanes: [[1, "leased", "c1", 1, 3, "2", false], [2, "idle", null, 1, 9, null, false], [3, "closing", null, 1, 5, null, false], [4, "leased", "by hand", 1, 5, null, true], [5, "starting", null, 0, 1, null, false]] };
  const can = (id, more = {}) => Object.entries(actions({ ...state, ...more }, id)).filter(([, yes]) => yes).map(([name]) => name).join(" ");
  assert.equal(can(1), "take reset close");
  assert.equal(can(2), "take reset close");
  assert.equal(can(3), "take");
  assert.equal(can(4), "take reset close give_back");
  assert.equal(can(5), "take close");
  assert.equal(can(9), "take");
  assert.equal(can(null), "take");
  assert.equal(can(1, { closed: true }), "");
  assert.equal(can(1, { counts: { ...counts, size: 2 } }), "reset close", "one sandbox stays available to chains");
});

test("of a long name the end stays", () => {
  assert.deepEqual(ends("calculator-train-0007/1"), ["calculator-train-", "0007/1"]);
  assert.deepEqual(ends("a person"), ["a ", "person"]);
  for (const name of ["", "somebody", "-", "a-", "x-".repeat(30) + "\u{1F9D1}".repeat(20)]) assert.equal(ends(name).join(""), name);
  assert.deepEqual(ends("somebody"), ["somebody", ""]);
});

test("clicks select sandboxes: one, one more, a range", () => {
  const ids = [3, 4, 7, 9];
  assert.deepEqual(picked([], ids, 4, null), [4]);
  assert.deepEqual(picked([4], ids, 9, 4, { add: true }), [4, 9]);
  assert.deepEqual(picked([4, 9], ids, 9, 4, { add: true }), [4]);
  assert.deepEqual(picked([4], ids, 9, 4, { range: true }), [4, 7, 9]);
  assert.deepEqual(picked([3], ids, 4, 9, { range: true, add: true }), [3, 4, 7, 9]);
  assert.deepEqual(picked([3], ids, 4, 5, { range: true }), [4], "an anchor that ended is none");
});
