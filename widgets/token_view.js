// Tokens coloured by a signal. Rows and turns arrive as JSON, numbers as buffers. Only elements near the viewport
// exist.

const CHUNK = 300; // number of tokens created together; more would make scrolling jerky, fewer would make the scroll bar jump

/** Position of a number on its scale, 0 to 1, and its side: "up", "down", "flag" or "none". */
export function shade(value, signal) {
  if (value === null) return { share: 0, side: "missing" };
  const { scale, lo = 0, hi = 1, middle = 0 } = signal;
  if (scale === "flag") return value > 0 ? { share: 1, side: "flag" } : { share: 0, side: "none" };
  if (!Number.isFinite(value)) return { share: 1, side: value > 0 ? "up" : scale === "around" ? "low" : "down" };
  if (scale === "around") {
    const reach = hi - middle;
    return { share: reach > 0 ? Math.min(1, Math.abs(value - middle) / reach) : 0, side: value >= middle ? "high" : "low" };
  }
  const share = hi > lo ? Math.min(1, Math.max(0, (value - lo) / (hi - lo))) : 1;
  return scale === "down" ? { share: 1 - share, side: "down" } : { share, side: "up" };
}

/** Chunks of at most `size` tokens of one turn: { row, turn, first, last }, with indices into all tokens; `last` is exclusive. */
export function chunks(rows, size = CHUNK) {
  const out = [];
  let base = 0;
  rows.forEach((row, r) => {
    row.turns.forEach(([, , , first, last], t) => {
      for (let a = first; a < last; a += size) out.push({ row: r, turn: t, first: base + a, last: base + Math.min(last, a + size) });
    });
    base += row.n;
  });
  return out;
}

/** The last entry of sorted `starts` that is <= x. */
export function before(starts, x) {
  let lo = 0;
  let hi = starts.length - 1;
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (starts[mid] <= x) lo = mid;
    else hi = mid - 1;
  }
  return lo;
}

/** Tokens that have a value, the most informative first. */
export function ranked(signal, col) {
  const key = { low: (v) => v, high: (v) => -v, far: (v) => -Math.abs(v - signal.middle) }[signal.telling];
  const out = [];
  for (let i = 0; i < col.length; i++) if (col.has(i)) out.push(i);
  return out.sort((a, b) => key(col.at(a)) - key(col.at(b)) || a - b);
}

/** Add or replace a span of one row; adjacent spans of a row are merged. */
export function joined(spans, span) {
  const [row, a, b] = span;
  const rest = [];
  let lo = a;
  let hi = b;
  for (const [r, x, y] of spans) {
    if (r === row && x <= hi && y >= lo) {
      lo = Math.min(lo, x);
      hi = Math.max(hi, y);
    } else rest.push([r, x, y]);
  }
  return [...rest, [row, lo, hi]].sort((p, q) => p[0] - q[0] || p[1] - q[1]);
}

/** A token's visible text, split so that whitespace signs can be drawn paler than the text. */
export function split(text) {
  return text.match(/[·⏎⇥␍⍽]+|[^·⏎⇥␍⍽]+/gu) ?? [];
}
/** True if a line may break between the texts of two tokens, that is, anywhere but inside a word. */
export function breakable(before, after) {
  return !(/[\p{L}\p{N}\p{M}]$/u.test(before) && /^[\p{L}\p{N}\p{M}]/u.test(after));
}
const plain = (text) => !/[·⏎⇥␍⍽]/u.test(text);
const marked = (text) => split(text).flatMap((part, i) => (/^[·⏎⇥␍⍽]/u.test(part) ? [i ? h("wbr") : null, h("i", { class: "afk-ws" }, part)] : [part])).filter((part) => part !== null);

/** The recorded alternatives of token i, most probable first: [{ id, piece, logprob }]. */
export function alternatives(width, buffers) {
  const ids = typed(buffers.id, Int32Array);
  const pieces = typed(buffers.piece, Int32Array);
  const logprobs = column(buffers.logprob);
  return (i) => {
    const out = [];
    for (let k = i * width; k < (i + 1) * width && ids[k] >= 0; k++) out.push({ id: ids[k], piece: pieces[k], logprob: logprobs.at(k) });
    return out;
  };
}

function read(model) {
  const about = model.get("_about");
  const buffers = model.get("_buffers");
  const bits = typed(buffers.mask, Uint8Array);
  const starts = [];
  let base = 0;
  for (const row of about.rows) {
    starts.push(base);
    base += row.n;
  }
  const columns = {};
  for (const signal of about.signals) columns[signal.name] = column(buffers.columns[signal.name]);
  return {
    about,
    starts,
    columns,
    piece: typed(buffers.piece, Int32Array),
    id: typed(buffers.id, Int32Array),
    mask: (i) => ((bits[i >> 3] >> (i & 7)) & 1) === 1,
    alternatives: about.alternatives ? alternatives(about.alternatives, buffers.alternatives) : () => [],
  };
}

const ICON = { prompt: "P", action: "A", observation: "O", forced: "F" };

export default {
  initialize: keepPictures,
  render({ model, el }) {
    return mount({ model, el }, {
      label: "Tokens by signal",
      build(context) {
        const { root } = context;
        const data = read(model);
        const { about, starts, columns } = data;
        const parts = chunks(about.rows);
        const partStarts = parts.map((p) => p.first);
        const signals = Object.fromEntries(about.signals.map((x) => [x.name, x]));
        let cursor = -1; // the token under the keyboard cursor
        let anchor = -1; // start of a selection made with Shift or by dragging
        let dragging = false;
        // The placeholders of an image are one cell. `head` is the first token of the cell of each token.
        const head = Int32Array.from({ length: about.total }, (_, i) => i);
        const cells = new Map();
        about.rows.forEach((row, r) => row.images.forEach(([first, last, picture]) => {
          head.fill(starts[r] + first, starts[r] + first, starts[r] + last);
          cells.set(starts[r] + first, { last: starts[r] + last, picture: about.pictures[picture] });
        }));
        const after = (i) => cells.get(i)?.last ?? i + 1;
        const say = (i) => (cells.has(i) ? `${cells.get(i).picture[1]}, ${plural(after(i) - i, "token")}` : about.vocabulary[data.piece[i]][0]);

        // --- frame ---
        const select = h("select", { "aria-label": "Signal" }, h("option", { value: "mask" }, "mask and author"),
          ...about.signals.map((x) => h("option", { value: x.name }, x.label)));
        const jump = h("button", { type: "button", title: "Go to the most notable token of this signal, then the next (key: n)" }, "Most notable ▸");
        // Buttons for two signals that are important in every step, whichever signal is shown.
        const seek = [["clipped", "Next clipped", "c"], ["ratio", "Largest |ratio − 1|", "r"]].filter(([name]) => signals[name])
          .map(([name, text, key]) => ({ name, key, order: null, place: -1, button: h("button", { type: "button", title: `Works for any displayed signal (key: ${key})` }, text) }));
        const go = h("select", { "aria-label": "Go to turn", class: "afk-goto" }, h("option", { value: "" }, "Go to turn …"));
        const chosen = h("span", { class: "afk-soft afk-num", role: "status" });
        const clear = h("button", { type: "button", title: "Clear the selection (key: Escape)" }, "Clear");
        const legend = h("div", { class: "afk-legend afk-num" });
        const scroller = h("div", {
          class: "afk-tokens", tabindex: "0", role: "application", "aria-label":
            "Tokens. Arrow keys move, Shift extends the selection, Enter selects, Page keys move by turn, n goes to the next notable token, c to the next clipped one, r to the largest ratio, Escape clears.",
        });
        const card = h("div", { class: "afk-card afk-num" });
        const host = h("div", { class: "afk-child" });
        const hand = about.agent ? h("button", { type: "button", title: "Open the chain of this token in the stepper", onclick: () => context.ask("stepper", before(starts, Math.max(0, cursor))) }, "Open in stepper") : null;
        const code = h("pre", { class: "afk-code", tabindex: "0", "aria-label": "this view as Python" });
        const spoken = h("div", { class: "afk-spoken", "aria-live": "polite" });
        root.classList.add("afk-tokenview");
        root.append(
          h("div", { class: "afk-bar" },
            h("span", { class: "afk-title" }, `${plural(about.rows.length, "row")}, ${plural(about.total, "token")}`),
            h("label", {}, "Signal ", select), jump, ...seek.map((x) => x.button), go, hand, h("span", { class: "afk-grow" }), chosen, clear),
          legend,
          ...about.notes.map((note) => h("div", { class: "afk-note" }, note)),
          scroller, card,
          h("details", { class: "afk-about", ontoggle: (event) => { if (event.target.open) context.ask("code"); } }, h("summary", {}, "as Python"), code), host, spoken);
        context.child("_child", host);

        // --- tokens ---
        const els = new Array(about.total);
        const holders = new Array(parts.length);
        const built = new Set();

        const observer = new IntersectionObserver((entries) => {
          for (const { isIntersecting, target } of entries) {
            if (!isIntersecting) continue;
            if (target.chunk !== undefined) make(target.chunk);
            else buildRow(target.rowIndex);
          }
        }, { root: scroller, rootMargin: "600px 0px" });
        context.end(() => observer.disconnect());

        // Rows and chunks far from the viewport are empty boxes of approximately their height.
        const firstPart = about.rows.map(() => parts.length);
        for (let k = parts.length - 1; k >= 0; k--) firstPart[parts[k].row] = k;
        const tall = (tokens) => Math.ceil(tokens / 12) * 25;
        const bodies = about.rows.map((row, r) => {
          const body = h("div", { class: "afk-row" });
          body.rowIndex = r;
          body.style.minHeight = `${32 + tall(row.n) + 10 * row.turns.length}px`;
          observer.observe(body);
          return body;
        });
        scroller.append(...bodies);
        function buildRow(r) {
          const body = bodies[r];
          if (body.firstChild) return;
          observer.unobserve(body);
          const row = about.rows[r];
          const head = h("div", { class: "afk-rowhead" }, h("b", { dir: "auto" }, row.id),
            h("span", { class: "afk-soft afk-num" }, `${row.reward === null ? "unscored" : `reward ${row.reward}`} · ${row.stop} · ${plural(row.n, "token")}, ${row.sampled.toLocaleString("en-US")} trained${row.start ? ` · from token ${row.start}` : ""}`));
          setAll(body, { role: "group", "aria-label": `trajectory ${row.id}` });
          body.append(head);
          body.style.minHeight = "";
          let p = firstPart[r];
          if (row.note) body.append(h("div", { class: "afk-note" }, row.note));
          row.turns.forEach(([turn, kind, author, first, last], t) => {
            const trained = data.mask(starts[r] + first);
            const lines = h("div", { class: "afk-lines" });
            body.append(h("div", { class: `afk-turn afk-${ICON[kind] ? kind : "prompt"}` },
              h("div", { class: "afk-gutter", title: `turn ${turn}: ${kind} by ${author}, ${plural(last - first, "token")}, mask ${trained ? 1 : 0}` },
                h("span", { class: "afk-badge", "aria-hidden": "true" }, ICON[kind] ?? "?"), h("span", { class: "afk-kind" }, `${turn} ${kind}`),
                h("span", { class: "afk-soft" }, `${author}${trained ? "" : " · mask 0"}`)),
              lines));
            for (; p < parts.length && parts[p].row === r && parts[p].turn === t; p++) {
              const holder = h("div", { class: "afk-chunk" });
              holder.chunk = p; // not `part`, which is a DOM property of every element
              holder.style.minHeight = `${tall(parts[p].last - parts[p].first)}px`;
              holders[p] = holder;
              lines.append(holder);
              observer.observe(holder);
            }
          });
        }

        function make(index) {
          if (built.has(index)) return;
          built.add(index);
          const { row, first, last } = parts[index];
          buildRow(row);
          const holder = holders[index];
          const fork = about.rows[row].parts;
          const fragment = document.createDocumentFragment();
          for (let i = first; i < last; i++) {
            if (head[i] !== i) continue;
            const [text, flags] = about.vocabulary[data.piece[i]];
            if (fork !== null && fork > 0 && i === starts[row] + fork) fragment.append(h("span", { class: "afk-fork" }, "⑂ first difference"));
            const token = document.createElement("span");
            token.className = "afk-tok";
            token.i = i;
            if (cells.has(i)) {
              token.append(...pictures([cells.get(i).picture]));
              setAll(token, { title: say(i) });
              setAll(token.firstChild, { draggable: "false" }); // dragging selects tokens
            } else if (plain(text)) token.textContent = text;
            else token.append(...marked(text));
            els[i] = token;
            paint(i);
            if (i > first && breakable(about.vocabulary[data.piece[i - 1]][0], text)) fragment.append(document.createElement("wbr"));
            fragment.append(token);
            if (flags & 2 && !cells.has(i)) fragment.append(document.createElement("br"));
          }
          holder.style.minHeight = "";
          holder.append(fragment);
          observer.unobserve(holder);
        }

        function paint(i) {
          const token = els[i];
          const name = model.get("signal");
          const flags = about.vocabulary[data.piece[i]][1];
          let side = "plain";
          let share = 0;
          if (name !== "mask") {
            const value = columns[name].at(i);
            // A value does not apply to a token that was not sampled, so it does not count as missing.
            if (value === null && !data.mask(i)) side = "off";
            else ({ side, share } = shade(value, signals[name]));
          } else side = data.mask(i) ? "trained" : "off";
          token.className = `afk-tok afk-${side}${flags & 1 ? " afk-special" : ""}${selected.has(i) ? " afk-sel" : ""}${i === cursor ? " afk-cur" : ""}`;
          if (share || token.share) token.style.setProperty("--h", `${Math.round(share * 100)}%`);
          token.share = share;
        }

        function ensure(i) {
          make(before(partStarts, head[i]));
          return els[head[i]];
        }

        // --- selection ---
        let selected = new Set();
        function readSelection() {
          const old = selected;
          selected = new Set();
          for (const [r, a, b] of model.get("_selected")) for (let i = a; i < b; i++) selected.add(starts[r] + i);
          for (const i of old) if (!selected.has(i) && els[i]) els[i].classList.remove("afk-sel");
          for (const i of selected) if (!old.has(i) && els[i]) els[i].classList.add("afk-sel");
          chosen.textContent = selected.size ? `${plural(selected.size, "token")} selected → view.selection` : "";
          clear.hidden = !selected.size;
        }
        function choose(from, to, add) {
          const row = before(starts, to);
          const lo = Math.max(head[Math.min(from, to)], starts[row]);
          const hi = Math.min(after(head[Math.max(from, to)]) - 1, starts[row] + about.rows[row].n - 1);
          const span = [row, lo - starts[row], hi + 1 - starts[row]];
          context.put("_selected", add ? joined(model.get("_selected"), span) : [span]);
        }
        function none() {
          context.put("_selected", []);
        }

        // --- one token ---
        let carded = -1;
        function show(i) {
          if (i === carded) return;
          carded = i;
          card.replaceChildren();
          if (i < 0) {
            card.append(h("span", { class: "afk-soft" }, "Hover over a token, or click and use the arrow keys, to see all its numbers here."));
            return;
          }
          const r = before(starts, i);
          const row = about.rows[r];
          card.classList.add(about.alternatives ? "afk-told2" : "afk-told1"); // reserves the height of the numbers, so that the content below does not move
          const [turn, kind, author] = row.turns.find(([, , , a, b]) => i - starts[r] >= a && i - starts[r] < b);
          card.append(h("div", { class: "afk-cardhead" },
            h("span", { class: "afk-tok afk-plain afk-big" }, say(i)),
            h("span", {}, `id ${data.id[i]} · token ${row.start + i - starts[r]} of `, h("bdi", {}, row.id), ` · turn ${turn}, ${kind} by ${author} · ${data.mask(i) ? "mask 1, trained" : "mask 0, not trained"}`)));
          const list = h("div", { class: "afk-numbers" });
          for (const signal of about.signals) {
            const value = columns[signal.name].at(i);
            const text = value !== null ? (signal.scale === "flag" ? (value > 0 ? "yes" : "no") : number(value)) : data.mask(i) ? "missing" : "–";
            list.append(h("span", { class: signal.name === model.get("signal") ? "afk-on" : null }, h("span", { class: "afk-soft" }, signal.label), h("b", {}, text)));
          }
          card.append(list);
          const others = data.alternatives(i);
          if (others.length) {
            const rank = others.findIndex((x) => x.id === data.id[i]) + 1;
            card.append(h("div", { class: "afk-alts" }, h("span", { class: "afk-soft" }, rank ? `sampled: rank ${rank}. Most probable here:` : `sampled: not among the ${others.length} most probable:`),
              ...others.map((x, k) => h("span", { class: k + 1 === rank ? "afk-on" : null }, h("span", { class: "afk-soft" }, `${k + 1}. `), h("code", {}, h("bdi", {}, about.vocabulary[x.piece][0])), ` ${percent(Math.exp(x.logprob))}`, k + 1 === rank ? " (sampled)" : ""))));
          }
        }
        function moveTo(i, { extend = false, block = "nearest" } = {}) {
          if (i < 0 || i >= about.total) return;
          i = head[i];
          const old = cursor;
          cursor = i;
          if (old >= 0 && els[old]) els[old].classList.remove("afk-cur");
          const token = ensure(i);
          token.classList.add("afk-cur");
          token.scrollIntoView({ block, inline: "nearest" });
          if (extend) choose(anchor < 0 ? i : anchor, i, false);
          else anchor = i;
          show(i);
          spoken.textContent = card.textContent;
        }

        // --- mouse ---
        const tokenOf = (event) => event.target.closest?.(".afk-tok")?.i ?? -1;
        scroller.addEventListener("pointerover", (event) => {
          const i = tokenOf(event);
          if (i >= 0) show(i);
        });
        scroller.addEventListener("pointerleave", () => show(cursor));
        scroller.addEventListener("pointerdown", (event) => {
          const i = tokenOf(event);
          if (i < 0 || event.button !== 0) return;
          const add = event.ctrlKey || event.metaKey;
          if (event.shiftKey && anchor >= 0) choose(anchor, i, add);
          else if (!add && selected.size === after(i) - i && selected.has(i)) none();
          else choose(i, i, add);
          const from = event.shiftKey && anchor >= 0 ? anchor : i;
          moveTo(i);
          anchor = from;
          dragging = true;
        });
        scroller.addEventListener("pointermove", (event) => {
          if (!dragging) return;
          const i = tokenOf(event);
          if (i >= 0 && i !== cursor) moveTo(i, { extend: true });
        });
        context.listen(window, "pointerup", () => { dragging = false; });

        // --- keys ---
        scroller.addEventListener("keydown", (event) => {
          const { key } = event;
          if (event.ctrlKey || event.metaKey || event.altKey) return;
          if (!about.total) return;
          const at = Math.max(0, cursor);
          const r = before(starts, at);
          const extend = event.shiftKey;
          if (key === "ArrowRight" || key === "ArrowLeft") moveTo(cursor < 0 ? 0 : Math.min(about.total - 1, key === "ArrowRight" ? after(at) : Math.max(0, at - 1)), { extend });
          else if (key === "ArrowDown" || key === "ArrowUp") moveTo(vertical(at, key === "ArrowDown" ? 1 : -1), { extend });
          else if (key === "Home") moveTo(starts[r], { extend });
          else if (key === "End") moveTo(starts[r] + about.rows[r].n - 1, { extend });
          else if (key === "PageDown" || key === "PageUp") moveTo(turnFrom(at, key === "PageDown" ? 1 : -1), { extend });
          else if (key === "Enter" || key === " ") choose(at, at, false);
          else if (key === "n") goTelling();
          else if (seek.some((x) => x.key === key)) goSought(seek.find((x) => x.key === key));
          else if (key === "Escape") none();
          else return;
          event.preventDefault();
        });
        function vertical(i, way) {
          const box = ensure(i).getBoundingClientRect();
          const x = box.left + box.width / 2;
          let best = i;
          let line = null;
          let far = Infinity;
          const next = (k) => (way > 0 ? after(k) : k ? head[k - 1] : -1);
          for (let k = next(i), n = 0; k >= 0 && k < about.total && n < 2000; k = next(k), n++) {
            const other = ensure(k).getBoundingClientRect();
            if (Math.abs(other.top - box.top) < 4) continue;
            if (line !== null && Math.abs(other.top - line) > 4) break;
            line = other.top;
            const away = Math.abs(other.left + other.width / 2 - x);
            if (away < far) [best, far] = [k, away];
          }
          return best;
        }
        function turnFrom(i, way) {
          const edges = about.rows.flatMap((row, r) => row.turns.map(([, , , first]) => starts[r] + first));
          const here = before(edges, i);
          if (way < 0 && i > edges[here]) return edges[here];
          return edges[Math.min(edges.length - 1, Math.max(0, here + way))];
        }
        let order = null; // sorted on demand: for 20,000 tokens sorting takes longer than drawing
        let place = -1;
        function telling() {
          const name = model.get("signal");
          if (name === "mask") return about.rows.flatMap((row, r) => row.turns.filter(([, kind]) => kind === "action" || kind === "forced").map(([, , , first]) => starts[r] + first));
          const x = signals[name];
          const col = columns[name];
          return x.scale === "flag" ? ranked(x, col).filter((i) => col.at(i) > 0) : ranked(x, col).slice(0, 50);
        }
        function goTelling() {
          order ??= telling();
          if (!order.length) return;
          place = (place + 1) % order.length;
          moveTo(order[place], { block: "center" });
        }
        function goSought(x) {
          const col = columns[x.name];
          x.order ??= ranked(signals[x.name], col).filter((i) => signals[x.name].scale !== "flag" || col.at(i) > 0).slice(0, 2000);
          if (x.name === "clipped") x.order.sort((a, b) => a - b);
          if (!x.order.length) {
            chosen.textContent = `no token found for "${x.button.textContent}"`;
            return;
          }
          // Clipped tokens are visited in text order from the cursor; other signals from the largest value on.
          if (x.name === "clipped") x.place = x.order.findIndex((i) => i > cursor);
          else x.place = (x.place + 1) % x.order.length;
          moveTo(x.order[Math.max(0, x.place)], { block: "center" });
        }
        for (const x of seek) x.button.addEventListener("click", () => goSought(x));
        let listed = false;
        function listTurns() {
          if (listed) return;
          listed = true;
          about.rows.slice(0, 200).forEach((row, r) => {
            go.append(h("optgroup", { label: row.id }, ...row.turns.map(([turn, kind, author, first]) => h("option", { value: String(starts[r] + first) }, `${turn} ${kind} by ${author}`))));
          });
        }
        go.addEventListener("pointerdown", listTurns);
        go.addEventListener("focus", listTurns);
        go.addEventListener("change", () => {
          if (go.value !== "") moveTo(Number(go.value), { block: "start" });
          go.value = "";
        });
        context.on("_code", () => { code.textContent = model.get("_code"); });
        jump.addEventListener("click", goTelling);
        clear.addEventListener("click", none);

        // --- signal and legend ---
        function swatch(side, share, text) {
          const box = h("span", { class: `afk-tok afk-swatch afk-${side}`, "aria-hidden": "true" }, "ab");
          box.style.setProperty("--h", `${share * 100}%`);
          return h("span", { class: "afk-key" }, box, text);
        }
        function drawLegend() {
          const name = model.get("signal");
          select.value = name;
          legend.replaceChildren();
          if (name === "mask") {
            for (const [kind, author, n, on] of about.authors) {
              legend.append(h("span", { class: "afk-key" },
                h("span", { class: `afk-legendturn afk-${ICON[kind] ? kind : "prompt"}` }, h("span", { class: `afk-tok afk-${on ? "trained" : "off"}` }, `${kind} by ${author}`)),
                `${plural(n, "token")}, ${on === n ? "mask 1" : on === 0 ? "mask 0" : `mask 1 on ${on.toLocaleString("en-US")}`}`));
            }
            jump.textContent = "Next action ▸";
            jump.disabled = !about.authors.some(([kind]) => kind === "action" || kind === "forced");
          } else {
            const x = signals[name];
            const tell = (v) => `${number(v)}${x.unit ? ` ${x.unit}` : ""}`;
            if (x.scale === "flag") legend.append(swatch("flag", 1, `yes: ${plural(x.set ?? 0, "token")}`), swatch("none", 0, `no: ${plural(x.n - (x.set ?? 0), "token")}`));
            else if (x.min === undefined) legend.append(h("span", {}, `no token has a finite ${x.label}`));
            else if (x.scale === "around") legend.append(swatch("low", 1, tell(x.lo)), swatch("none", 0, tell(x.middle)), swatch("high", 1, tell(x.hi)));
            else if (x.scale === "down") legend.append(swatch("down", 0, tell(x.hi)), swatch("down", 0.5, tell((x.lo + x.hi) / 2)), swatch("down", 1, tell(x.lo)));
            else legend.append(swatch("up", 0, tell(x.lo)), swatch("up", 0.5, tell((x.lo + x.hi) / 2)), swatch("up", 1, tell(x.hi)));
            legend.append(swatch("missing", 0, `missing: ${plural(x.missing, "token")}`), swatch("off", 0, "not sampled"));
            if (x.min !== undefined && x.scale !== "flag") {
              legend.append(h("span", { class: "afk-soft" }, `${plural(x.n, "number")}: ${number(x.min)} to ${number(x.max)}, mean ${number(x.mean)}${x.outside ? `; ${x.outside} beyond the scale` : ""}${x.infinite ? `; ${x.infinite} infinite` : ""}`));
            }
            if (x.says) legend.append(h("span", { class: "afk-soft" }, `${x.label}: ${x.says}`));
            jump.disabled = !(x.scale === "flag" ? x.set : x.n);
            jump.textContent = x.scale === "flag" ? `Next ${x.label} ▸` : { low: "Lowest ▸", high: "Highest ▸", far: "Farthest ▸" }[x.telling];
          }
          for (const x of seek) x.button.hidden = x.name === name; // another button does the same in this case
          place = -1;
          order = null;
        }
        function recolour() {
          drawLegend();
          for (const index of built) for (let i = parts[index].first; i < parts[index].last; i++) if (head[i] === i) paint(i);
          const at = carded;
          carded = -2;
          show(at);
        }
        select.addEventListener("change", () => {
          context.put("signal", select.value);
        });
        context.on("signal", recolour);
        context.on("_selected", readSelection);
        readSelection();
        if (bodies.length) buildRow(0);
        for (let i = 0, n = 0; i < parts.length && n < 300; i++) {
          make(i);
          n += parts[i].last - parts[i].first;
        }
        drawLegend();
        carded = -2;
        show(-1);
      },
    });
  },
};
