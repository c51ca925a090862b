// A form built from a JSON schema. The input becomes a JSON string like that of a model, which only Python parses.

/** Editor type for a schema: string, number, boolean, choice, array, tuple, object, variants, or json for all others. */
export function kindOf(schema) {
  if (!schema || schema.$ref) return "json";
  if (schema.enum || "const" in schema) return "choice";
  const variants = schema.anyOf ?? schema.oneOf;
  if (variants) return "variants";
  if (Array.isArray(schema.type)) return "json";
  if (schema.type === "integer" || schema.type === "number") return "number";
  if (schema.type === "string" || schema.type === "boolean") return schema.type;
  if (schema.type === "null") return "null";
  if (schema.type === "array") return schema.prefixItems ? "tuple" : schema.items ? "array" : "json";
  if (schema.type === "object" && schema.properties) return "object";
  return "json";
}

/** Convert the input of a number field to JSON. A number stays unchanged; other input becomes a string, which the tool rejects. */
export function numberText(raw) {
  const text = raw.trim();
  return /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(text) ? text : JSON.stringify(raw);
}

/** Build a JSON object from [name, JSON text] pairs, skipping those without text. */
export function objectText(pairs) {
  return `{${pairs.filter(([, text]) => text !== null).map(([name, text]) => `${JSON.stringify(name)}: ${text}`).join(", ")}}`;
}

/** Short display name of a type. */
export function typeName(schema) {
  const kind = kindOf(schema);
  if (kind === "choice") return "one of";
  if (kind === "variants") return (schema.anyOf ?? schema.oneOf).map(typeName).join(" or ");
  if (kind === "array") return `list of ${typeName(schema.items)}`;
  if (kind === "json") return schema?.type && !Array.isArray(schema.type) ? `${schema.type}, as JSON` : "any, as JSON";
  return kind === "number" ? schema.type : kind;
}

/** Index of the variant that a value matches. */
export function variantOf(variants, value) {
  const fits = (schema) => {
    const kind = kindOf(schema);
    if (kind === "choice") return (schema.enum ?? [schema.const]).some((x) => JSON.stringify(x) === JSON.stringify(value));
    if (value === null) return kind === "null";
    if (kind === "array" || kind === "tuple") return Array.isArray(value);
    if (kind === "object") return typeof value === "object" && !Array.isArray(value);
    if (kind === "number") return typeof value === "number" && (schema.type === "number" || Number.isInteger(value));
    return kind === typeof value;
  };
  const at = variants.findIndex(fits);
  return at < 0 ? 0 : at;
}

let names = 0;

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: `Call the tool ${model.get("_about")?.name}`,
      build(context) {
        const { root } = context;
        const about = model.get("_about");
        root.classList.add("afk-toolform");
        const prefix = `afk-f${++names}-`;
        let count = 0;
        let json = false; // true while the JSON text is edited instead of the fields

        const lines = (text) => Math.min(12, Math.max(1, text.split("\n").length));
        function area(label, changed, mono = true) {
          const node = h("textarea", { rows: 1, class: mono ? "afk-code" : null, "aria-label": label, spellcheck: "false", autocapitalize: "off" });
          node.addEventListener("input", () => {
            node.rows = lines(node.value);
            changed();
          });
          return node;
        }

        /** Create the editor of one value: its element `el`, `text()` for its JSON text, and `set(value)`. */
        function editor(schema, label) {
          const kind = kindOf(schema);
          if (kind === "string") {
            const node = area(label, edited);
            return { el: node, text: () => JSON.stringify(node.value), set(v) { node.value = typeof v === "string" ? v : JSON.stringify(v ?? ""); node.rows = lines(node.value); } };
          }
          if (kind === "number") {
            const node = h("input", { type: "text", inputmode: schema.type === "integer" ? "numeric" : "decimal", class: "afk-code", "aria-label": label, oninput: edited, value: "0" });
            return { el: node, text: () => numberText(node.value), set(v) { node.value = typeof v === "string" ? v : JSON.stringify(v ?? 0); } };
          }
          if (kind === "boolean" || kind === "choice") {
            const options = kind === "boolean" ? [true, false] : schema.enum ?? [schema.const];
            const node = h("select", { "aria-label": label, onchange: edited }, ...options.map((v) => h("option", { value: JSON.stringify(v) }, typeof v === "string" ? v : JSON.stringify(v))));
            return { el: node, text: () => node.value, set(v) { node.value = JSON.stringify(v); if (node.selectedIndex < 0) node.selectedIndex = 0; } };
          }
          if (kind === "null") return { el: h("span", { class: "afk-soft" }, "null"), text: () => "null", set() {} };
          if (kind === "object") return fields(schema, label);
          if (kind === "array" || kind === "tuple") return list(schema, label, kind === "tuple");
          if (kind === "variants") {
            const variants = schema.anyOf ?? schema.oneOf;
            const host = h("div", { class: "afk-inner" });
            const select = h("select", { "aria-label": `Type of ${label}` }, ...variants.map((v, i) => h("option", { value: i }, typeName(v))));
            let inner = null;
            function pick(i) {
              select.value = String(i);
              inner = editor(variants[i], label);
              host.replaceChildren(inner.el);
            }
            select.addEventListener("change", () => {
              pick(Number(select.value));
              edited();
            });
            pick(0);
            return { el: h("div", { class: "afk-variants" }, select, host), text: () => inner.text(), set(v) { pick(variantOf(variants, v)); inner.set(v); } };
          }
          const node = area(label, edited);
          node.value = "null";
          node.placeholder = "JSON";
          return { el: node, text: () => node.value.trim() || "null", set(v) { node.value = JSON.stringify(v, null, 1); node.rows = lines(node.value); } };
        }

        function list(schema, label, fixed) {
          const host = h("ol", { class: "afk-items" });
          let items = [];
          const add = h("button", { type: "button", "aria-label": `Add to ${label}` }, "+ add");
          function append(item, value) {
            const inner = editor(item, `${label}, item ${items.length + 1}`);
            if (value !== undefined) inner.set(value);
            const row = h("li", {}, inner.el);
            const entry = { inner, row };
            if (!fixed) {
              row.append(h("button", { type: "button", title: "Remove", "aria-label": `Remove item ${items.length + 1} of ${label}`, onclick() {
                items = items.filter((x) => x !== entry);
                row.remove();
                edited();
                add.focus();
              } }, "×"));
            }
            items.push(entry);
            host.append(row);
            return inner;
          }
          add.addEventListener("click", () => {
            const inner = append(schema.items);
            (inner.el.matches?.("input, textarea, select") ? inner.el : inner.el.querySelector("input, textarea, select, button"))?.focus();
            edited();
          });
          if (fixed) schema.prefixItems.forEach((item) => append(item));
          return {
            el: h("div", { class: "afk-list" }, host, fixed ? null : add),
            text: () => `[${items.map((x) => x.inner.text()).join(", ")}]`,
            set(values) {
              items = [];
              host.replaceChildren();
              const given = Array.isArray(values) ? values : [];
              if (fixed) schema.prefixItems.forEach((item, i) => append(item, given[i]));
              else given.forEach((value) => append(schema.items, value));
            },
          };
        }

        function fields(schema, label, outer = false) {
          const needed = new Set(schema.required ?? []);
          const rows = Object.entries(schema.properties ?? {}).map(([name, part]) => {
            const inner = editor(part, outer ? name : `${label}: ${name}`);
            const id = `${prefix}${++count}`;
            const optional = !needed.has(name);
            const given = optional ? h("input", { type: "checkbox", id, "aria-label": `Pass ${name}`, title: "Pass a value, or use the tool's default" }) : null;
            const has = "default" in part;
            if (has) inner.set(part.default);
            const row = h("div", { class: "afk-field" },
              h("div", { class: "afk-fieldhead" }, given, h(optional ? "label" : "span", optional ? { for: id, class: "afk-kind" } : { class: "afk-kind" }, name),
                h("span", { class: "afk-soft" }, `${typeName(part)}${optional ? ` · optional${has ? `, ${JSON.stringify(part.default)} if not given` : ""}` : ""}`)),
              part.description ? h("div", { class: "afk-soft afk-doc" }, part.description) : null, inner.el);
            const show = () => { if (optional) inner.el.hidden = !given.checked; };
            given?.addEventListener("change", () => {
              show();
              edited();
            });
            show();
            return { name, inner, given, show, row };
          });
          const extra = h("div", { class: "afk-soft" });
          return {
            el: h("div", { class: outer ? "afk-fields" : "afk-fields afk-nested", role: outer ? null : "group", "aria-label": outer ? null : label }, ...rows.map((r) => r.row), rows.length ? null : h("div", { class: "afk-soft" }, "No arguments."), extra),
            text: () => objectText(rows.map((r) => [r.name, r.given && !r.given.checked ? null : r.inner.text()])),
            set(value) {
              const object = value && typeof value === "object" && !Array.isArray(value) ? value : {};
              for (const r of rows) {
                const there = Object.hasOwn(object, r.name);
                if (there) r.inner.set(object[r.name]);
                if (r.given) r.given.checked = there;
                r.show();
              }
              const unknown = Object.keys(object).filter((k) => !rows.some((r) => r.name === k));
              extra.textContent = unknown.length ? `not in the schema, so not sent: ${unknown.join(", ")}` : "";
            },
          };
        }

        const form = fields(about.parameters, about.name, true);
        const text = area("arguments as JSON", () => context.put("draft", text.value));
        const textBox = h("div", { class: "afk-fields", hidden: true }, h("div", { class: "afk-soft" }, "The arguments exactly as the model would write them, valid or not."), text);
        const asForm = h("button", { type: "button", "aria-pressed": "true" }, "Fields");
        const asText = h("button", { type: "button", "aria-pressed": "false" }, "JSON");
        const call = h("button", { type: "button", class: "afk-go", title: "Call the tool (Ctrl+Enter)" }, "Call");
        const cancel = h("button", { type: "button", hidden: true }, "Cancel");
        const running = h("span", { class: "afk-soft", role: "status" });
        const inChain = h("button", { type: "button", hidden: !about.agent, title: "Start a chain with this call and open it in the stepper", onclick: () => context.ask("chain", json ? text.value : form.text()) }, "Open in a chain");
        const which = h("select", { class: "afk-which", "aria-label": "Call shown", onchange: () => context.ask("pick", Number(which.value)) });
        const below = belowBox(context, model, host, "A chain that begins with this call", () => inChain.focus());
        const result = h("div", { class: "afk-answer" });
        root.append(
          h("div", { class: "afk-bar" }, h("span", { class: "afk-title" }, about.name), h("span", { class: "afk-soft" }, `${about.timeout === null ? "no time limit" : `at most ${about.timeout} s`} · ${about.max_chars === null ? "no length limit" : `${about.max_chars.toLocaleString("en-US")} characters`}`),
            h("span", { class: "afk-grow" }), h("span", { role: "group", "aria-label": "How to enter the arguments" }, asForm, " ", asText)),
          h("div", { class: "afk-doc afk-about" }, about.description),
          ...(about.hidden.length ? [h("div", { class: "afk-soft afk-about" }, `not seen by the model: ${about.hidden.join("; ")}`)] : []),
          form.el, textBox,
          h("div", { class: "afk-bar afk-foot" }, call, cancel, inChain, running, h("span", { class: "afk-grow" }), which),
          result,
          h("details", { class: "afk-about" }, h("summary", {}, "the schema that the model sees"), h("pre", { class: "afk-code", tabindex: "0" }, about.schema)), below);

        let mine = null; // the draft written from the fields, which must not be read back into the fields
        function edited() {
          mine = form.text();
          text.value = mine;
          text.rows = lines(mine);
          context.put("draft", mine);
        }
        function readDraft() {
          const draft = model.get("draft");
          if (draft === mine || (json && draft === text.value)) return;
          text.value = draft;
          text.rows = lines(draft);
          try {
            form.set(JSON.parse(draft));
          } catch {
            // Text that is not valid JSON stays in the text field.
          }
        }
        function mode(toText) {
          json = toText;
          if (!toText) {
            mine = null;
            readDraft();
          }
          asForm.setAttribute("aria-pressed", String(!toText));
          asText.setAttribute("aria-pressed", String(toText));
          form.el.hidden = toText;
          textBox.hidden = !toText;
        }
        asForm.addEventListener("click", () => mode(false));
        asText.addEventListener("click", () => mode(true));
        const go = () => context.ask("call", json ? text.value : form.text());
        call.addEventListener("click", go);
        cancel.addEventListener("click", () => context.ask("cancel"));
        root.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
          event.preventDefault();
          if (!model.get("busy")) go();
        });

        function drawBusy() {
          const busy = model.get("busy");
          call.disabled = busy;
          cancel.hidden = !busy;
          running.textContent = busy ? "running …" : "";
        }
        function drawResult() {
          const r = model.get("_result");
          result.replaceChildren();
          if (!r?.calls) {
            result.append(h("div", { class: "afk-soft" }, "No calls yet."));
            return;
          }
          const word = r.ok ? "✓ ok" : r.error === null ? "✗ failed, and the model sees the reason" : "✗ failed with an error: the model sees only that the call failed";
          result.append(...[
            h("div", { class: "afk-cardhead", role: "status" }, h("b", { class: r.ok ? "afk-good" : "afk-bad" }, word),
              h("span", { class: "afk-soft afk-num" }, [brief(r.seconds), plural(r.characters, "character"), r.truncated ? "truncated" : null, r.done ? "ends the chain" : null, r.reward === null ? null : `turn reward ${r.reward}`, ...r.metrics.map(([k, v]) => `${k} ${v}`)].filter(Boolean).join(" · "))),
            h("div", { class: "afk-soft" }, "what the model sees:"),
            r.observation ? h("pre", { class: "afk-seen afk-code", tabindex: "0", dir: "auto", role: "region", "aria-label": "what the model sees" }, ...marks(r.observation)) : r.images.length ? null : h("div", { class: "afk-seen afk-soft" }, "(empty)"),
            ...pictures(r.images),
            r.characters > r.observation.length ? h("div", { class: "afk-soft" }, `${(r.characters - r.observation.length).toLocaleString("en-US")} more characters`) : null].filter(Boolean));
          if (r.error !== null) {
            result.append(h("details", { open: true }, h("summary", {}, r.error), h("pre", { class: "afk-code", tabindex: "0" }, r.traceback)));
          }
          if (r.redefined) result.append(h("div", { class: "afk-notice" }, `A later cell has redefined ${about.name}, but this form still calls the old definition. Run the cell of the form again.`));
          result.append(h("details", {}, h("summary", {}, "as Python"), h("pre", { class: "afk-code", tabindex: "0" }, r.code)));
        }
        function drawCalls() {
          const calls = model.get("_calls") ?? [];
          which.hidden = calls.length < 2;
          which.replaceChildren(...calls.map(([n, given, ok]) => h("option", { value: n }, `${ok ? "✓" : "✗"} call ${n}: ${given}`)));
          which.value = String(model.get("_result")?.number ?? "");
        }
        context.on("_calls", drawCalls);
        context.on("busy", drawBusy);
        context.on("_result", () => { drawResult(); drawCalls(); });
        context.on("draft", readDraft);
        readDraft();
        drawBusy();
        drawResult();
        drawCalls();
      },
    });
  },
};
