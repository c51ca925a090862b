// Virtualized list of trajectories, and the selected ones side by side. Numbers arrive as buffers, turns on demand.

const OUTCOME = ["success", "failed", "unscored", "dropped"];
const SIGN = { success: "✓", failed: "✗", unscored: "–", dropped: "⌀" };
const LETTER = { prompt: "P", action: "A", observation: "O", forced: "F" };

/** Reader of concatenated texts: `at(i)` is the i-th one, and `rank(i)` its place in the order of a column's texts. */
export function texts(packed) {
  const bytes = typed(packed?.text, Uint8Array);
  const ends = typed(packed?.ends, Int32Array);
  const decoder = new TextDecoder();
  const index = packed?.index && typed(packed.index, Int32Array);
  const text = (i) => decoder.decode(bytes.subarray(ends[i], ends[i + 1]));
  return { length: index ? index.length : Math.max(0, ends.length - 1), rank: (i) => index[i], at: (i) => text(index ? index[i] : i) };
}

/** The rows that pass the filters: outcome, stop, task (an index, or null), found (a function, or null). */
export function filtered(data, { outcome = null, stop = null, task = null, found = null }) {
  const out = [];
  for (let i = 0; i < data.n; i++) {
    if (outcome !== null && data.outcome[i] !== outcome) continue;
    if (stop !== null && data.stop[i] !== stop) continue;
    if (task !== null && data.task[i] !== task) continue;
    if (found && !found(i)) continue;
    out.push(i);
  }
  return out;
}

/** Stable sort by a column, with missing values last in both directions. */
export function sorted(rows, col, down) {
  if (!col) return rows;
  const sign = down ? -1 : 1;
  const value = col.rank ?? col.at;
  return rows.slice().sort((a, b) => {
    const x = value(a);
    const y = value(b);
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * (x - y) || a - b;
  });
}

/** The tree of shared turns as lines: { depth, from, to, of, ends }. */
export function branches(tree, depth = 0) {
  return tree.flatMap((node) => [{ depth, ...node }, ...branches(node.then, depth + 1)]);
}

/** Selection after a click on `rows[at]`. A plain click selects only it, Ctrl toggles it, Shift selects from `anchor` to it. */
export function chosen(selected, rows, at, anchor, { add = false, range = false } = {}) {
  const i = rows[at];
  if (range && anchor >= 0) {
    const span = rows.slice(Math.min(anchor, at), Math.max(anchor, at) + 1);
    return add ? [...new Set([...selected, ...span])] : span;
  }
  if (add) return selected.includes(i) ? selected.filter((x) => x !== i) : [...selected, i];
  return [i];
}

/** Split a text into prose and code: fenced blocks, and a text that is JSON as a whole. */
export function blocks(text) {
  const trimmed = text.trim();
  if (/^[[{]/.test(trimmed)) {
    try {
      return [{ code: JSON.stringify(JSON.parse(trimmed), null, 2) }];
    } catch { /* not JSON */ }
  }
  const out = [];
  text.split(/^```[^\n`]*\n([\s\S]*?)^```[^\S\n]*$/m).forEach((part, i) => { if (part.trim()) out.push(i % 2 ? { code: part.replace(/\n$/, "") } : { prose: part.replace(/^\n+|\n+$/g, "") }); });
  return out;
}

/** The arguments of a call as [name, text] pairs, or null if they are not a JSON object. */
export function pairs(json) {
  try {
    return Object.entries(JSON.parse(json)).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
  } catch {
    return null;
  }
}

/** The messages of a turn as bubbles { role, text, thinking, call }, with one bubble per tool call of an action. */
export function bubbles(turn, last) {
  const results = turn.calls.filter((call) => call.ok !== null || call.unreadable !== null);
  let used = 0;
  const out = [];
  for (const m of turn.messages) {
    const answers = turn.kind === "observation" && used < results.length ? [results[used]] : [];
    used += answers.length;
    out.push({ role: answers.length || m.role === "tool" ? "tool result" : m.role, text: m.content, thinking: m.thinking, call: answers[0] ?? null, images: m.images });
  }
  if (turn.kind === "action" || (turn.kind === "forced" && turn.messages.length)) out.push(...turn.calls.map((call) => ({ role: "tool call", text: "", thinking: "", call })));
  if (!turn.messages.length && (turn.kind !== "forced" || last)) out.push({ role: { prompt: "prompt", observation: "tool result" }[turn.kind] ?? "assistant", text: turn.text, thinking: "", call: null });
  return out.filter((b) => b.text || b.thinking || b.call);
}

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: "Trajectories",
      build(context) {
        const { root } = context;
        root.classList.add("afk-trajectoryview");
        const about = model.get("_about");
        const b = model.get("_buffers");
        const cols = Object.fromEntries(about.columns.map((c) => [c.key, (c.text ? texts : column)(b.columns[c.key])]));
        const grid = about.columns.filter((c) => c.widths.length);
        const look = (c) => `afk-cell afk-c-${c.key} ${c.text ? "" : "afk-num afk-number"} ${c.widths[1] ? "" : "afk-hide1"} ${c.widths[2] ? "" : "afk-hide0"}`;
        const data = { n: about.n, outcome: typed(b.outcome, Uint8Array), stop: typed(b.stop, Int32Array), task: typed(b.task, Int32Array), group: typed(b.group, Int32Array), ids: texts(b.ids), labels: texts(b.labels), says: texts(b.says), why: texts(b.why) };
        let slowest = 0;
        for (let i = 0; i < data.n; i++) slowest = Math.max(slowest, cols.seconds.at(i) ?? 0);

        // --- frame ---
        const option = (value, text) => h("option", { value }, text);
        const search = h("input", { type: "search", placeholder: "Search in all texts", "aria-label": "Search in all texts", spellcheck: "false" });
        const outcome = h("select", { "aria-label": "Outcome", title: about.hint }, option("", "all outcomes"), ...OUTCOME.map((name, i) => option(i, `${SIGN[name]} ${name} (${about.counts[name]})`)));
        const stop = h("select", { "aria-label": "Stop reason" }, option("", "all stop reasons"), ...about.stops.map((name, i) => option(i, name)));
        const task = h("select", { "aria-label": "Task" }, option("", `every task (${about.num_tasks.toLocaleString("en-US")})`), ...about.tasks.map((name, i) => option(i, name)));
        const sort = h("select", { "aria-label": "Sort by" }, option("", "original order"),
          ...about.columns.filter((c) => c.sortable).map((c) => option(c.key, c.label)));
        const notes = () => model.get("_notes");
        const down = h("button", { type: "button", "aria-pressed": "true", title: "Largest first", onclick: () => { down.setAttribute("aria-pressed", String(down.getAttribute("aria-pressed") !== "true")); refilter(); } }, "↓ largest first");
        const shown = h("span", { class: "afk-soft afk-num", role: "status" });
        const wholeGroup = h("button", { type: "button", title: "Select all chains of the same group (key: g)", onclick: () => group() }, "Select its group");
        const clear = h("button", { type: "button", title: "Clear the selection (key: Escape)", onclick: () => pick([]) }, "Clear");
        const detail = h("div", { class: "afk-detail" });
        const codeHolder = h("div", {});
        const below = belowBox(context, model, host, "Opened from the list", () => list.el.focus());
        let rows = [];
        let anchor = -1;
        let selected = model.get("_selected");
        let kept = []; // rows that stay selected while the cursor moves

        const list = windowed({
          row: 46, label: "Trajectories. Arrow keys move and select, Space keeps a row selected for comparison, Shift extends, g selects the group, Enter opens the tokens, Escape clears.", multi: true,
          fill(box, at) {
            const i = rows[at];
            if (!box.parts) {
              const span = (name) => h("span", { class: name });
              const p = (box.parts = { sign: span("afk-sign"), word: span("afk-word"), cells: grid.map((c) => h(c.text ? "bdi" : "span", { class: look(c) })), id: h("bdi", { class: "afk-lane afk-soft" }), facts: span("afk-facts afk-num afk-soft"), time: span("afk-bar2"), fill: span("afk-barfill"), fill2: span("afk-barfill2"), secs: span("afk-num afk-secs"), keep: h("span", { class: "afk-keep" }, "kept"), note: span("afk-tagnote"), why: span("afk-why"), says: h("bdi", { class: "afk-says" }) });
              p.time.append(p.fill, p.fill2);
              p.time.setAttribute("aria-hidden", "true");
              box.append(h("span", { class: "afk-outcome" }, p.sign, " ", p.word), ...p.cells, h("span", { class: "afk-line2" }, p.id, p.keep, p.note, p.why, p.says, p.facts, p.time, p.secs));
            }
            const p = box.parts;
            const name = OUTCOME[data.outcome[i]];
            box.className = `afk-item afk-grid afk-o-${name}${at === list.cursor ? " afk-cursor" : ""}`;
            box.setAttribute("aria-selected", String(selected.includes(i)));
            p.sign.textContent = SIGN[name];
            p.word.textContent = name;
            const id = data.ids.at(i);
            const question = cols.question.at(i);
            grid.forEach((c, k) => { p.cells[k].textContent = c.text ? cols[c.key].at(i) : number(cols[c.key].at(i)); });
            p.id.textContent = data.labels.at(i).slice(about.prefix);
            box.title = `${question}\n${id}`;
            const failed = cols.failed.at(i);
            p.facts.textContent = `${plural(cols.actions.at(i), "action")}, ${plural(cols.calls.at(i), "call")}${failed ? ` (${failed} failed)` : ""}`;
            const seconds = cols.seconds.at(i) ?? 0;
            const width = (x) => `${slowest > 0 ? Math.min(100, (100 * x) / slowest) : 0}%`;
            p.fill.style.width = width(cols.sampling.at(i) ?? 0);
            p.fill2.style.width = width(cols.tools.at(i) ?? 0);
            p.time.title = `${brief(cols.sampling.at(i) ?? 0)} sampling, ${brief(cols.tools.at(i) ?? 0)} in tools, of ${brief(seconds)}`;
            p.secs.textContent = brief(seconds);
            const why = data.why.at(i);
            p.why.textContent = why ? `${name === "dropped" ? "left out: " : ""}${why}` : "";
            p.why.title = why;
            p.why.hidden = !why;
            p.keep.hidden = !kept.includes(i);
            p.note.textContent = notes()[i] ?? "";
            p.note.title = `note: ${p.note.textContent}`;
            p.note.hidden = !p.note.textContent;
            p.says.textContent = data.says.at(i);
            const cells = grid.map((c, k) => (c.key === "question" ? "" : (cols[c.key].at(i) ?? "") === "" ? `no ${c.label}` : `${c.label} ${p.cells[k].textContent}`));
            box.setAttribute("aria-label", [`${question} ${id}: ${name}`, ...cells, p.facts.textContent, why ? p.why.textContent : null, p.note.hidden ? null : p.note.title, p.keep.hidden ? null : "kept"].filter(Boolean).join(", "));
          },
          move(at, event) {
            if (event.shiftKey) pick(chosen(selected, rows, at, anchor < 0 ? at : anchor, { range: true }));
            else {
              anchor = at;
              pick([...kept.filter((i) => i !== rows[at]), rows[at]]);
            }
          },
        });
        for (const k of [0, 1, 2]) root.style.setProperty(`--columns${2 - k}`, grid.map((c) => c.widths[k]).join(" "));
        const by = (key) => { if (sort.value === key) down.click(); else { sort.value = key; refilter(); } };
        const heads = h("div", { class: "afk-grid afk-heads", role: "group", "aria-label": "Columns" }, h("span", { class: "afk-outcome" }, "outcome"), ...grid.map((c) => (c.sortable
          ? h("button", { type: "button", class: `afk-link ${look(c)}`, title: `Sort by ${c.label}`, "data-key": c.key, onclick: () => by(c.key) }, c.label)
          : h("span", { class: look(c), title: c.hint || null }, c.label))));
        const key = (name) => h("i", { class: `afk-key-mark ${name}`, "aria-hidden": "true" });
        const press = (...parts) => h("span", {}, ...parts);
        const legend = h("div", { class: "afk-sub afk-soft afk-keys" }, h("span", {}, "Compare: ", h("kbd", {}, "Ctrl"), " or ", h("kbd", {}, "⌘"), " and click, or ", h("kbd", {}, "Space"), " keeps a row while the arrow keys move on"), press(h("kbd", {}, "Shift"), " a range"), press(h("kbd", {}, "g"), " its group"), press(h("kbd", {}, "Enter"), " its tokens"), press(h("kbd", {}, "Esc"), " clear"),
          h("span", {}, key("afk-barfill"), "sampling ", key("afk-barfill2"), `in tools; the full width is the time of the slowest chain, ${brief(slowest)}`));
        root.append(
          h("div", { class: "afk-bar" }, h("span", { class: "afk-title" }, about.n === 1 ? "1 trajectory" : `${about.n.toLocaleString("en-US")} trajectories`),
            search, outcome, stop, about.num_tasks > 1 ? task : null, h("label", {}, "Sort ", sort), down),
          h("div", { class: "afk-bar afk-sub" }, shown, h("span", { class: "afk-grow" }), wholeGroup, clear),
          heads, list.el, legend, detail, codeHolder, below);

        // --- which rows ---
        function found() {
          const f = model.get("_found");
          const want = search.value.trim();
          if (!want) return null;
          if (f?.query !== want) return undefined; // Python is still searching
          const bits = typed(f.bits, Uint8Array);
          return (i) => ((bits[i >> 3] >> (i & 7)) & 1) === 1;
        }
        function refilter() {
          const choice = (x) => (x.value === "" ? null : Number(x.value));
          const hit = found();
          if (hit === undefined) {
            shown.textContent = "searching …";
            return;
          }
          const col = cols[sort.value];
          rows = sorted(filtered(data, { outcome: choice(outcome), stop: choice(stop), task: choice(task), found: hit }), col, down.getAttribute("aria-pressed") === "true");
          down.hidden = !col;
          list.n = rows.length;
          for (const x of heads.querySelectorAll("button")) x.removeAttribute("aria-pressed");
          heads.querySelector(`[data-key="${sort.value}"]`)?.setAttribute("aria-pressed", "true");
          list.cursor = rows.length ? Math.min(Math.max(0, list.cursor), rows.length - 1) : -1;
          anchor = -1;
          list.el.scrollTop = 0;
          list.draw();
          say();
        }
        function say() {
          const all = rows.length === about.n ? "all shown" : `${rows.length.toLocaleString("en-US")} of ${about.n.toLocaleString("en-US")} shown`;
          shown.textContent = `${all}${selected.length ? ` · ${selected.length.toLocaleString("en-US")} selected → view.selection` : ""}`;
          clear.hidden = !selected.length;
          wholeGroup.disabled = list.cursor < 0;
        }
        let waiting = 0;
        search.addEventListener("input", () => {
          clearTimeout(waiting);
          waiting = setTimeout(() => {
            const want = search.value.trim();
            context.put("_query", want);
            refilter();
          }, 150);
        });
        for (const x of [outcome, stop, task, sort]) x.addEventListener("change", refilter);
        context.on("_found", refilter);
        context.on("_notes", () => list.draw());

        // --- selection ---
        function pick(value) {
          context.put("_selected", value);
        }
        function group() {
          if (list.cursor < 0) return;
          const g = data.group[rows[list.cursor]];
          const all = [];
          for (let i = 0; i < data.n; i++) if (data.group[i] === g) all.push(i);
          pick(all);
        }
        list.el.addEventListener("click", (event) => {
          const box = event.target.closest?.(".afk-item");
          if (!box) return;
          const at = box.row;
          const next = chosen(selected, rows, at, anchor, { add: event.ctrlKey || event.metaKey, range: event.shiftKey });
          if (!event.shiftKey) anchor = at;
          kept = [];
          list.show(at);
          pick(next);
        });
        list.el.addEventListener("dblclick", () => { if (list.cursor >= 0) context.ask("tokens", rows[list.cursor]); });
        list.el.addEventListener("keydown", (event) => {
          if (event.ctrlKey || event.metaKey || event.altKey) return;
          if (event.key === " " && list.cursor >= 0) {
            const i = rows[list.cursor];
            kept = kept.includes(i) ? kept.filter((x) => x !== i) : [...selected.filter((x) => x !== i), i];
            pick([...kept.filter((x) => x !== i), i]);
            list.draw();
          }
          else if (event.key === "Enter" && list.cursor >= 0) context.ask("tokens", rows[list.cursor]);
          else if (event.key === "g") group();
          else if (event.key === "Escape") pick([]);
          else return;
          event.preventDefault();
        });
        context.on("_selected", () => {
          selected = model.get("_selected");
          kept = kept.filter((i) => selected.includes(i));
          if (selected.length === 1 && rows[list.cursor] !== selected[0]) {
            const at = rows.indexOf(selected[0]);
            if (at >= 0) list.show(at);
          }
          list.draw();
          say();
        });

        // --- side by side ---
        const button = (text, title, act, more = {}) => h("button", { type: "button", class: "afk-small", title, onclick: act, ...more }, text);
        const pre = (text, tabindex = "0") => [h("pre", { dir: "auto", tabindex }, ...marks(text))];
        function called(c) {
          const named = pairs(c.arguments);
          const long = (text) => text.includes("\n") || text.length > 100;
          return h("div", { class: "afk-call" }, "→ ", h("b", { dir: "auto" }, c.name), " ",
            ...(named === null ? [h("code", { dir: "auto" }, c.arguments)] : named.map(([name, text]) => (long(text) ? h("div", {}, h("span", { class: "afk-soft" }, `${name} =`), folded(text, pre)) : h("code", { dir: "auto" }, `${name}=${text} `)))),
            c.unreadable !== null ? h("div", { class: "afk-bad" }, `✕ could not be read: ${c.unreadable}`) : null);
        }
        function result(c) {
          const seconds = h("span", { class: "afk-soft afk-num" }, ` · ${brief(c.seconds)}${c.truncated ? ", truncated" : ""}`);
          return [h("div", { class: c.ok ? "" : "afk-bad" }, c.ok ? "✓" : "✕ failed", seconds), ...prose(c.result),
            c.error !== null ? h("details", {}, h("summary", {}, c.error), h("pre", { tabindex: "0" }, c.traceback || "no traceback")) : ""];
        }
        const call = (c) => h("div", {}, called(c), ...(c.ok !== null ? result(c) : []));
        /** Show the beginning of a long text, and the whole text on request. */
        function folded(text, show) {
          const lines = text.split("\n");
          if (text.length <= 1200 && lines.length <= 16) return h("div", {}, ...show(text));
          const start = lines.slice(0, 8).join("\n").slice(0, 500);
          return h("details", { class: "afk-fold" }, h("summary", {}, h("div", { class: "afk-start" }, ...show(`${start} …`, null)), h("span", { class: "afk-link2" }, `all ${text.length.toLocaleString("en-US")} characters`)), ...show(text));
        }
        const prose = (text) => blocks(text).map((b) => (b.code !== undefined ? folded(b.code, pre) : folded(b.prose, (x) => [h("div", { class: "afk-prose", dir: "auto" }, ...marks(x))])));
        const factsOf = (t) => [t.n === null ? null : plural(t.n, "token"), t.seconds > 0 ? brief(t.seconds) : null, t.reward === null ? null : `reward ${t.reward}`, t.stop && t.stop !== "stop" ? `ended by ${t.stop}` : null].filter(Boolean);
        function chat(t, i, last, fold) {
          const facts = [`turn ${i}`, ...(["task", "policy", "tool"].includes(t.author) ? [] : [`by ${t.author}`]), ...factsOf(t)].join(" · ");
          return bubbles(t, last).map((b, k) => {
            const head = [h("b", {}, b.role), h("span", { class: "afk-soft afk-num" }, b.call && b.role === "tool result" ? ` of ${b.call.name}` : "", k === 0 ? ` · ${facts}` : "")];
            const inside = [b.thinking ? h("details", { class: "afk-soft" }, h("summary", {}, "thinking"), ...prose(b.thinking)) : "",
              ...(b.role === "tool call" ? [called(b.call)] : b.call && b.call.ok !== null ? result(b.call) : prose(b.text)), ...pictures(b.images)];
            const kind = { system: "prompt", user: "prompt", prompt: "prompt", assistant: "action", "tool call": "action", "tool result": "observation" }[b.role] ?? "forced";
            const box = h("div", { class: `afk-turn2 afk-bubble afk-${kind} afk-role-${b.role.split(" ").at(-1)}` });
            if (t.kind === "prompt" && (fold || b.role === "system")) box.append(h("details", {}, h("summary", { class: "afk-turnhead" }, ...head, h("span", { class: "afk-link2" }, "show")), ...inside));
            else box.append(h("div", { class: "afk-turnhead" }, ...head), ...inside);
            return box;
          });
        }
        function turn(t, i, longest, fold) {
          const facts = factsOf(t);
          const time = h("span", { class: "afk-timebar", "aria-hidden": "true" });
          time.style.width = `${longest > 0 ? (100 * t.seconds) / longest : 0}%`;
          // The calls of an observation repeat its text.
          const body = t.kind === "observation" && t.calls.length ? [] : [h("div", { class: "afk-text", dir: "auto" }, t.text)];
          const inside = [...body, ...(t.kind === "action" || t.kind === "forced" ? [] : t.calls.map(call)), ...pictures(t.messages.flatMap((m) => m.images))];
          const head = [h("span", { class: "afk-badge", "aria-hidden": "true" }, LETTER[t.kind] ?? "?"), h("b", {}, `${i} ${t.kind}`), h("span", { class: "afk-soft afk-num" }, ` by ${t.author}${facts.length ? ` · ${facts.join(" · ")}` : ""}`)];
          const box = h("div", { class: `afk-turn2 afk-${LETTER[t.kind] ? t.kind : "prompt"}` });
          if (t.kind === "prompt" && fold) box.append(h("details", {}, h("summary", { class: "afk-turnhead" }, ...head), ...inside));
          else box.append(h("div", { class: "afk-turnhead" }, ...head), ...inside);
          box.append(time);
          return box;
        }
        function noteOf(c) {
          const input = h("input", { type: "text", maxlength: "1000", placeholder: "saved with the rollout, as trajectory.note", "aria-label": `Note on ${c.id}` });
          input.value = notes()[c.i] ?? "";
          input.addEventListener("change", () => context.ask("annotate", [c.i, input.value]));
          return h("label", { class: "afk-noteline" }, "Note ", input);
        }
        function drawDetail() {
          const d = model.get("_detail");
          detail.replaceChildren();
          if (!d?.columns?.length) {
            detail.append(h("div", { class: "afk-soft afk-hint" }, "Select a trajectory to read it. Several are shown side by side."));
            return;
          }
          if (d.of > d.columns.length) detail.append(h("div", { class: "afk-note" }, `The first ${d.columns.length} of ${d.of.toLocaleString("en-US")} selected trajectories are shown here; view.selection contains all of them.`));
          if (d.columns.length > 1) {
            const lines = h("div", { class: "afk-tree", role: "group", "aria-label": "Turns shared by the selected chains" });
            const name = Object.fromEntries(d.columns.map((c) => [c.i, c.name === c.id ? c.id : `“${c.question.slice(0, 40)}” ${c.name}`]));
            for (const x of branches(d.tree)) {
              const span = x.to - x.from === 1 ? `turn ${x.from}` : `turns ${x.from} to ${x.to - 1}`;
              const who = x.of.length === d.columns.length ? `all ${x.of.length}` : x.of.length > 1 ? `${x.of.length} chains` : name[x.of[0]];
              const line = h("div", { class: "afk-branch" }, x.depth ? h("span", { class: "afk-soft", "aria-hidden": "true" }, "└ ") : null, h("b", { class: "afk-num" }, span), x.of.length > 1 ? ` shared by ${who}` : " only in ", x.of.length > 1 ? null : h("bdi", {}, who),
                ...x.ends.map((i) => (x.of.length > 1 ? h("span", { class: "afk-soft" }, " · ends ", h("bdi", {}, name[i])) : null)));
              line.style.paddingLeft = `${14 * x.depth}px`;
              lines.append(line);
            }
            const open = d.columns.length <= 8;
            detail.append(h("details", { class: "afk-shared", open }, h("summary", {}, "Shared turns"), lines));
            if (d.columns.length === 2) detail.append(h("div", { class: "afk-row2 afk-pad" }, button("Compare tokens", "Compare both in one token view, from the first difference", () => context.ask("tokens", d.columns.map((c) => c.i)))));
          }
          const asChat = model.get("_chat");
          const form = (on, text, title) => button(text, title, () => { context.put("_chat", on); drawDetail(); }, { "aria-pressed": String(asChat === on) });
          detail.append(h("div", { class: "afk-row2 afk-pad", role: "group", "aria-label": "Format of the turns" }, form(true, "Chat", "Messages with their roles, tool calls and results"), form(false, "Turns", "The text of each turn as the model saw it, with its author"), h("span", { class: "afk-soft" }, asChat ? "messages by role; “Tokens” shows what is trained" : "text by turn, with template tokens")));
          const grid = h("div", { class: "afk-columns", tabindex: "0", role: "group", "aria-label": "Selected trajectories side by side" });
          grid.style.setProperty("--columns", d.columns.length);
          d.columns.forEach((c, k) => {
            const same = k > 0 && c.turns[0]?.text === d.columns[0].turns[0]?.text; // shown in the first column
            const longest = Math.max(...c.turns.map((t) => t.seconds), 0);
            const head = h("div", { class: `afk-colhead afk-o-${c.outcome}` },
              h("div", { class: "afk-coltitle" }, h("span", { class: "afk-sign", "aria-hidden": "true" }, SIGN[c.outcome]), h("div", {}, h("b", { dir: "auto" }, c.question), " ", h("bdi", { class: "afk-soft", title: c.id }, c.name))),
              c.fields.length ? h("div", { dir: "auto" }, ...c.fields.flatMap(([name, text], k) => [h("span", { class: "afk-soft" }, `${k ? " · " : ""}${name} `), text])) : null,
              h("div", { class: "afk-num" }, h("b", {}, c.reward === null ? "unscored" : `reward ${c.reward}`), c.metrics.length ? ` = ${c.metrics.map(([name, v]) => `${name} ${v}`).join(", ")}` : "", ` · ${c.stop} · ${plural(c.actions, "action")} · ${brief(c.seconds)}`),
              c.dropped ? h("div", { class: "afk-badge2" }, `⌀ left out of the batch: ${c.dropped}`) : null,
              c.error ? h("div", { class: "afk-bad" }, `✕ ${c.error}`) : null,
              noteOf(c),
              h("div", { class: "afk-row2" },
                button("Tokens", "Show the tokens with all their values (key: Enter)", () => context.ask("tokens", c.i), { "aria-label": `Tokens of ${c.id}` }),
                button("Stepper", about.agent ? "Continue, rewind or edit the chain in the stepper" : "Pass agent= to TrajectoryView to open chains in the stepper", () => context.ask("stepper", c.i), { disabled: !about.agent, "aria-label": `Open ${c.id} in the stepper` }),
                button("As Python", "Python code that loads this trajectory and continues from it", () => context.ask("code", c.i), { "aria-label": `${c.id} as Python` })));
            const body = c.turns.length ? c.turns.flatMap((t, i) => (asChat ? chat(t, i, i === c.turns.length - 1, same) : turn(t, i, longest, same))) : [h("div", { class: "afk-soft afk-hint" }, "No turns.")];
            grid.append(h("section", { class: "afk-column", "aria-label": c.id }, head, ...body));
          });
          detail.append(grid);
        }
        context.on("_detail", drawDetail);

        let codeShown = model.get("_code")?.n ?? 0;
        context.on("_code", () => {
          const { n, text } = model.get("_code") ?? {};
          if (!n || n === codeShown) return;
          codeShown = n;
          codeHolder.replaceChildren(codeBox(text, () => list.el.focus()));
        });

        // The list's height is known only once it is attached to the page.
        requestAnimationFrame(() => list.draw());
        refilter();
        drawDetail();
      },
    });
  },
};
