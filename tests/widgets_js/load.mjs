// A widget's module as the page gets it: the shared source, then its own.
import { readFile } from "node:fs/promises";

const folder = new URL("../../widgets/", import.meta.url);

export async function load(stem) {
  const parts = await Promise.all(["_shared.js", ...(stem ? [`${stem}.js`] : [])].map((name) => readFile(new URL(name, folder), "utf8")));
  return import(`data:text/javascript;base64,${Buffer.from(parts.join("\n")).toString("base64")}`);
}

/** Packed as Python packs it: float32 values, one bit each that says whether it is there. */
export function packed(values) {
  const floats = new Float32Array(values.map((v) => v ?? 0));
  const bits = new Uint8Array(Math.ceil(values.length / 8));
  values.forEach((v, i) => {
    if (v !== null) bits[i >> 3] |= 1 << (i & 7);
  });
  return { values: new DataView(floats.buffer), present: new DataView(bits.buffer) };
}
