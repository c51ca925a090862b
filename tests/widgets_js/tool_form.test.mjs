import assert from "node:assert/strict";
import test from "node:test";
import { load } from "./load.mjs";

const { kindOf, numberText, objectText, readable, typeName, variantOf } = await load("tool_form");

test("each schema has an editor", () => {
  const cases = [
    [{ type: "string" }, "string"], [{ type: "integer" }, "number"], [{ enum: ["a", "b"], type: "string" }, "choice"], [{ const: 3 }, "choice"],
    [{ anyOf: [{ type: "string" }, { type: "null" }] }, "variants"], [{ type: "array", items: { type: "string" } }, "array"],
    [{ type: "array", prefixItems: [{ type: "string" }] }, "tuple"], [{ type: "array" }, "json"], [{ type: "object", properties: {} }, "object"],
    [{ type: "object", additionalProperties: { type: "string" } }, "json"], [{ $ref: "#/$defs/Node" }, "json"], [{}, "json"], [undefined, "json"], [{ type: ["string", "null"] }, "json"],
  ];
  for (const [schema, kind] of cases) {
    assert.equal(kindOf(schema), kind);
    assert.equal(typeof typeName(schema), "string");
  }
});

test("digits stay as they were typed, and what is no number is a text", () => {
  for (const text of ["12345678901234567890", "-0.10", "1e-3", "7"]) assert.equal(numberText(` ${text} `), text);
  for (const text of ["", "seven", "1,5", "0x10", "01", "NaN", "Infinity", "+3"]) assert.equal(JSON.parse(numberText(text)), text);
});

test("an argument that is not given is not there", () => {
  assert.equal(objectText([["a", "1"], ["b", null], ['"', '"x"']]), '{"a": 1, "\\"": "x"}');
  assert.equal(objectText([]), "{}");
});

test("a value goes to the variant that can hold it", () => {
  const variants = [{ type: "integer" }, { type: "array", items: {} }, { enum: ["x"] }, { type: "null" }, { type: "number" }];
  assert.deepEqual([3, [1], "x", null, 1.5, {}].map((v) => variantOf(variants, v)), [0, 1, 2, 3, 4, 0]);
});

test("what cannot be seen is written as its number", () => {
  assert.deepEqual(readable("a\u202eb\u0000\n\t\u200b"), [{ text: "a" }, { hidden: "‹U+202E›" }, { text: "b" }, { hidden: "‹U+0000›" }, { text: "\n\t" }, { hidden: "‹U+200B›" }]);
  assert.deepEqual(readable(""), []);
});
