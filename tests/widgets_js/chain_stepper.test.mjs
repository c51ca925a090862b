import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { composer, percent, KEYS } = await load("chain_stepper");

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

test("each key has one meaning", () => {
  assert.equal(new Set(Object.values(KEYS)).size, Object.keys(KEYS).length);
});
