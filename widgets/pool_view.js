// Tiles of sandboxes. Elements are reused between updates, because up to ten updates per second arrive.

const SIGN = { leased: "●", idle: "○", starting: "◐", resetting: "◑", closing: "✕", empty: "·" };
const BANDS = ["leased", "starting", "idle"];
const COUNTS = { leased: "leased", idle: "idle", starting: "starting", resetting: "resetting", waiting: "waiting", recycled: "recycled", dead: "died", failed_starts: "failed starts" };
const HINTS = { recycled: "Number of times that a sandbox was reset for its next lease", dead: "Sandboxes that were found dead or could not be reset; they are replaced" };

/** Sandboxes in the order of their ids, followed by the slots without a sandbox unless the pool is closed. */
export function tiles(state) {
  const lanes = state.lanes.map(([id, name, owner, uses, age, turn, hand]) => ({ key: `s${id}`, id, name, owner, uses, age, turn, hand: hand ? "this view" : "" })).sort((a, b) => a.id - b.id);
  for (let k = 0; !state.closed && lanes.length < state.counts.size; k++) lanes.push({ key: `e${k}`, id: null, name: "empty", owner: null, uses: 0, age: null, turn: null, hand: "" });
  return lanes;
}

/** One row per owner, the longest lease first. */
export function owners(state) {
  const by = new Map();
  for (const lane of tiles(state)) {
    if (lane.name !== "leased" || lane.owner === null) continue;
    const row = by.get(lane.owner) ?? { owner: lane.owner, ids: [], age: null, turns: [], hands: [] };
    by.set(lane.owner, row);
    row.ids.push(lane.id);
    if (lane.age !== null) row.age = Math.max(row.age ?? 0, lane.age);
    if (lane.turn !== null) row.turns.push(lane.turn);
    if (lane.hand) row.hands.push(lane.hand);
  }
  return [...by.values()].sort((a, b) => (b.age ?? 0) - (a.age ?? 0));
}

/** Leased, starting and idle shares of the pool's size over time, as stacked polygons in a box of `w` x `h`. */
export function bands(history, w, h, span, now) {
  if (!history.length) return [];
  const x = (t) => w * (1 - Math.min(span, now - t) / span);
  const out = [];
  let floor = history.map(() => 0);
  for (const name of BANDS) {
    const top = history.map((p, i) => floor[i] + (p.size ? p[name] / p.size : 0));
    const up = [];
    const down = [];
    history.forEach((p, i) => {
      // A state lasts until the next point, so the curves are step functions.
      const until = i + 1 < history.length ? history[i + 1].t : now;
      up.push([x(p.t), h - top[i] * h], [x(until), h - top[i] * h]);
      down.push([x(p.t), h - floor[i] * h], [x(until), h - floor[i] * h]);
    });
    out.push({ name, points: [...up, ...down.reverse()] });
    floor = top;
  }
  return out;
}

/** Split a name into two parts. Only the first may be truncated, because the last word distinguishes chains of a run. */
export function ends(name) {
  const tail = /[-:.\s_]([^-:.\s_]{1,14})$/u.exec(name)?.[1] ?? "";
  return [name.slice(0, name.length - tail.length), tail];
}

/** Selection after a click on a number. A plain click selects only it, Ctrl toggles it, Shift selects from `anchor` to it. */
export function picked(selected, ids, id, anchor, { add = false, range = false } = {}) {
  const [a, b] = [ids.indexOf(anchor), ids.indexOf(id)];
  if (range && a >= 0) return [...new Set([...(add ? selected : []), ...ids.slice(Math.min(a, b), Math.max(a, b) + 1)])];
  if (add) return selected.includes(id) ? selected.filter((x) => x !== id) : [...selected, id];
  return [id];
}

/** The actions available for the sandbox with this number. */
export function actions(state, id) {
  const lane = state.closed || state.gone ? undefined : state.lanes.find((each) => each[0] === id);
  const name = lane?.[1];
  const mine = Boolean(lane?.[6]);
  const settled = name === "leased" || name === "idle";
  const taken = state.lanes.filter((each) => each[6]).length;
  return { take: !state.closed && !state.gone && taken < Math.max(1, state.counts.size - 1), reset: settled, close: Boolean(name) && name !== "closing", give_back: mine };
}

export default {
  initialize: keepPictures,
  render({ model, el }) {
    return mount({ model, el }, {
      label: "Pool of sandboxes",
      build(context) {
        const { root } = context;
        root.classList.add("afk-poolview");
        const title = h("span", { class: "afk-title" });
        const what = h("span", { class: "afk-soft" });
        const counts = h("div", { class: "afk-counts afk-num" });
        const note = h("div", { class: "afk-note" });
        const grid = h("div", { class: "afk-tiles", tabindex: "0", role: "listbox", "aria-multiselectable": "true", "aria-label": "Sandboxes. Arrow keys move and select, Shift extends, Space adds one, a selects all, Escape clears." });
        const chosenText = h("span", { class: "afk-soft", role: "status" });
        const codeHolder = h("div", {});
        const asPython = h("button", { type: "button", class: "afk-small", title: "Python code for this view and its selection", onclick: () => context.ask("code") }, "As Python");
        const clear = h("button", { type: "button", class: "afk-small", title: "Clear the selection (key: Escape)", onclick: () => choose([]) }, "Clear");
        const pickedBar = h("div", { class: "afk-hands afk-pickedbar" }, chosenText, asPython, clear);
        const queue = h("div", { class: "afk-queue" });
        const strip = s("svg", { class: "afk-strip", role: "img", preserveAspectRatio: "none", viewBox: "0 0 600 40" });
        const stripTitle = h("div", { class: "afk-soft afk-stripnote" }, h("span", {}, "60 s ago"), h("span", { class: "afk-stripkey" }, ...BANDS.map((name) => h("span", {}, h("i", { class: `afk-s-${name}`, "aria-hidden": "true" }), name)), h("span", {}, "as fractions of the size")), h("span", {}, "now"));
        const table = h("div", { class: "afk-owners", tabindex: "0", role: "region" });
        const pick = h("select", { "aria-label": "Sandbox to act on" });
        const act = (name, text, title) => h("button", { type: "button", class: "afk-small", title, onclick: () => { context.ask(name, chosen()); put(done, name === "take" ? "requested a sandbox" : `requested: ${text.toLowerCase()} #${chosen()}`); } }, text);
        const does = {
          take: act("take", "Take", "Lease a sandbox for use as view.held[number]. If the pool has several, at least one stays available to chains"),
          give_back: act("give_back", "Release", "Release the sandbox leased here"),
          reset: act("reset", "Reset", "Reset the sandbox. A chain that holds it loses it and is not scored"),
          close: act("close", "Close", "Destroy and replace the sandbox. A chain that holds it loses it and is not scored"),
        };
        const done = h("span", { class: "afk-soft", role: "status" });
        const hands = h("div", { class: "afk-hands", role: "group", "aria-label": "Manual control" }, h("span", {}, "Manual control:"), does.take, pick, does.reset, does.close, does.give_back, done);
        const tabs = Object.fromEntries(["sandboxes", "owners", "events"].map((name) => [name, h("button", { type: "button", onclick: () => { context.put("_tab", name); mode(); } }, name[0].toUpperCase() + name.slice(1))]));
        root.append(h("div", { class: "afk-bar" }, title, what, h("span", { class: "afk-grow" }), h("span", { role: "group", "aria-label": "Table shown" }, ...Object.values(tabs).flatMap((tab) => [tab, " "]))),
          note, h("div", { class: "afk-bar afk-sub" }, counts), grid, table, pickedBar, hands, codeHolder, queue, strip, stripTitle);
        function mode() {
          const tab = model.get("_tab");
          grid.hidden = tab !== "sandboxes";
          table.hidden = !grid.hidden;
          table.setAttribute("aria-label", tab === "events" ? "Events" : "Leases by owner");
          for (const [name, button] of Object.entries(tabs)) button.setAttribute("aria-pressed", String(name === tab));
          draw();
        }
        /** Fill the table with rows of cells. Columns named in `right` hold numbers and are aligned to the right. */
        function drawTable(names, right, rows, empty) {
          const side = (i) => (right.includes(names[i]) ? "afk-num afk-right" : null);
          table.replaceChildren(!rows.length ? h("div", { class: "afk-soft" }, empty) : h("table", {},
            h("thead", {}, h("tr", {}, ...names.map((name, i) => h("th", { scope: "col", class: side(i) }, name)))),
            h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, i) => h("td", { class: side(i) }, cell)))))));
        }
        const since = () => (performance.now() - sentAt) / 1000;
        function drawOwners(state) {
          const held = (ids) => h("button", { type: "button", class: "afk-link", title: "Select the sandboxes of this owner", onclick: () => choose(ids) }, ids.map((id) => `#${id}`).join(" "));
          drawTable(["owner", "sandboxes", "time", "turn", "leased by"], ["time", "turn"], owners(state).map((r) => [h("bdi", {}, r.owner), held(r.ids), r.age === null ? "" : duration(r.age + since()), r.turns.join(" "),
            r.hands.length ? h("span", { class: "afk-hand" }, r.hands[0]) : "chain or code"]), "Nothing is leased.");
        }
        function drawEvents(state) {
          drawTable(["ago", "sandbox", "event", "owner", "reason"], ["ago"], state.events.map(([age, id, kind, owner, detail]) => [duration(age + since()), id === null ? "" : `#${id}`, kind, h("bdi", {}, owner ?? ""), detail]), "No events. Events are listed if a sandbox dies, fails to start or is replaced, or a request is refused.");
        }

        const numbers = {};
        for (const [name, text] of Object.entries(COUNTS)) {
          const value = h("b", {}, "0");
          counts.append(h("span", { class: `afk-count afk-s-${name}`, title: HINTS[name] }, value, ` ${text}`));
          numbers[name] = value;
        }
        const polygons = BANDS.map((name) => {
          const polygon = s("polygon", { class: `afk-s-${name}` });
          strip.append(polygon);
          return polygon;
        });

        /** The number chosen in the list, or null. */
        const chosen = () => (pick.value ? Number(pick.value) : null);
        function allow() {
          const can = context.stale() ? {} : actions(model.get("_state"), chosen());
          for (const [name, node] of Object.entries(does)) if (node.disabled !== !can[name]) node.disabled = !can[name];
          does.give_back.hidden = !can.give_back;
        }
        function list(state) {
          const lanes = tiles(state).filter((t) => t.id !== null);
          const was = pick.value;
          lanes.forEach((t, i) => {
            const option = pick.options[i] ?? pick.appendChild(h("option", {}));
            if (option.value !== String(t.id)) option.value = String(t.id);
            put(option, `#${t.id} ${t.name}${t.owner ? `, ${t.owner}` : ""}`);
          });
          while (pick.options.length > lanes.length) pick.options[pick.options.length - 1].remove();
          if (was && pick.value !== was && lanes.some((t) => String(t.id) === was)) pick.value = was;
          pick.disabled = !lanes.length;
          hands.hidden = state.closed;
          allow();
        }
        pick.addEventListener("change", allow);

        // --- selection by click or keys; the buttons act on the sandbox under the cursor ---
        let cursor = null; // number of a sandbox
        let anchor = null;
        const numbersShown = () => tiles(model.get("_state")).filter((t) => t.id !== null).map((t) => t.id);
        function choose(numbers) {
          context.put("_selected", numbers);
        }
        function go(id, { add = false, range = false } = {}) {
          cursor = id;
          pick.value = String(id);
          allow();
          choose(picked(model.get("_selected"), numbersShown(), id, anchor, { add, range }));
          if (!range) anchor = id;
        }
        function drawSelected() {
          const all = new Set(model.get("_selected"));
          let n = 0;
          for (const { box, data } of made.values()) {
            const on = data.id !== null && all.has(data.id);
            n += on;
            if (box.getAttribute("aria-selected") !== String(on)) box.setAttribute("aria-selected", String(on));
            box.classList.toggle("afk-at", data.id !== null && data.id === cursor);
          }
          const at = made.get(`s${cursor}`);
          if (at) grid.setAttribute("aria-activedescendant", at.box.id);
          else grid.removeAttribute("aria-activedescendant");
          pickedBar.hidden = !n;
          put(chosenText, n ? `${n} selected → view.selection` : "");
        }
        grid.addEventListener("click", (event) => {
          const box = event.target.closest(".afk-tile");
          const id = [...made.values()].find((each) => each.box === box)?.data.id ?? null;
          if (id !== null) go(id, { add: event.ctrlKey || event.metaKey, range: event.shiftKey });
        });
        grid.addEventListener("keydown", (event) => {
          if (event.ctrlKey || event.metaKey || event.altKey) return;
          const ids = numbersShown();
          const columns = Math.max(1, getComputedStyle(grid).gridTemplateColumns.split(" ").length);
          const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -ids.length, End: ids.length }[event.key];
          if (!ids.length) return;
          if (step !== undefined) {
            const at = ids.indexOf(cursor);
            const id = ids[at < 0 ? 0 : Math.max(0, Math.min(ids.length - 1, at + step))];
            go(id, { range: event.shiftKey });
            made.get(`s${id}`)?.box.scrollIntoView({ block: "nearest" });
          } else if (event.key === " " && cursor !== null) go(cursor, { add: true });
          else if (event.key === "a") choose(ids);
          else if (event.key === "Escape") choose([]);
          else return;
          event.preventDefault();
        });
        context.on("_selected", drawSelected);
        let codeShown = model.get("_code")?.n ?? 0;
        context.on("_code", () => {
          const { n, text } = model.get("_code") ?? {};
          if (!n || n === codeShown) return;
          codeShown = n;
          codeHolder.replaceChildren(codeBox(text, () => asPython.focus()));
        });

        const made = new Map();
        const own = `afkp${Math.random().toString(36).slice(2, 8)}`;
        let sentAt = performance.now();
        let history = [];
        let waits = []; // elements that show for how long a request has been waiting

        function tile(key) {
          const sign = h("span", { class: "afk-sign", "aria-hidden": "true" });
          const id = h("span", { class: "afk-id afk-num" });
          const word = h("span", { class: "afk-word" });
          const time = h("span", { class: "afk-time afk-num afk-soft" });
          const ownerHead = h("span", { class: "afk-ownerhead" });
          const ownerTail = h("span", {});
          const owner = h("bdi", { class: "afk-owner" }, ownerHead, ownerTail);
          const turn = h("span", { class: "afk-soft afk-num" });
          const hand = h("span", { class: "afk-hand", title: "leased with the Take button of this view", hidden: true });
          const box = h("div", { class: "afk-tile", role: "option", "aria-selected": "false", id: `${own}-${key}` }, h("div", { class: "afk-tilehead" }, sign, id, word, time), owner, h("div", { class: "afk-holder" }, turn, hand));
          const parts = { box, sign, id, word, time, owner, ownerHead, ownerTail, turn, hand, was: "" };
          made.set(key, parts);
          return parts;
        }
        const put = (node, text) => {
          if (node.textContent !== text) node.textContent = text;
        };
        function draw() {
          const state = model.get("_state");
          if (!state?.counts) return;
          put(title, `${state.sandbox_type} pool`);
          put(what, `size ${state.counts.size} · ${state.closed ? "closed" : `isolation ${state.isolation ?? "as available"}`}`);
          for (const [name, node] of Object.entries(numbers)) put(node, state.counts[name].toLocaleString("en-US"));
          put(note, state.closed ? "This pool is closed." : state.gone ? "The pool no longer exists; this is its last state." : state.error ? `The last start failed: ${state.error}` : "");
          note.hidden = !note.textContent;
          if (model.get("_tab") === "owners") drawOwners(state);
          else if (model.get("_tab") === "events") drawEvents(state);
          list(state);
          if (state.closed) grid.hidden = true;
          const seen = new Set();
          let last = null;
          for (const t of tiles(state)) {
            seen.add(t.key);
            const parts = made.get(t.key) ?? tile(t.key);
            parts.data = t;
            if (parts.was !== t.name) {
              parts.was = t.name;
              parts.box.className = `afk-tile afk-s-${t.name}`;
              if (t.id === null) parts.box.setAttribute("aria-disabled", "true");
              put(parts.sign, SIGN[t.name] ?? "?");
              put(parts.word, t.name === "empty" ? "not started" : t.name);
            }
            put(parts.id, t.id === null ? "" : `#${t.id}`);
            const [head, tail] = ends(t.owner ?? "");
            put(parts.ownerHead, head);
            put(parts.ownerTail, tail);
            if (parts.owner.title !== (t.owner ?? "")) parts.owner.title = t.owner ?? "";
            put(parts.hand, t.hand);
            parts.hand.hidden = !t.hand;
            put(parts.turn, t.turn !== null ? (/^\d/.test(t.turn) ? `turn ${t.turn}` : t.turn) : t.id !== null && t.owner === null ? plural(t.uses, "lease") : "");
            parts.box.title = t.id === null ? "no sandbox has been started in this slot" : `sandbox ${t.id}: ${t.name}${t.owner ? `, held by ${t.owner}${t.hand ? ` (${t.hand})` : ""}` : ""}, ${plural(t.uses, "lease")} so far`;
            const next = last ? last.nextSibling : grid.firstChild;
            if (next !== parts.box) grid.insertBefore(parts.box, next);
            last = parts.box;
          }
          for (const [key, parts] of made) {
            if (seen.has(key)) continue;
            parts.box.remove();
            made.delete(key);
          }
          const shown = state.queue.slice(0, 12);
          const rest = state.counts.waiting - shown.length;
          queue.hidden = state.closed;
          waits = shown.map(([, seconds]) => ({ seconds, node: h("span", { class: "afk-soft afk-num" }) }));
          queue.replaceChildren(
            h("b", {}, state.counts.waiting ? `${state.counts.waiting} waiting, served in this order: ` : "no requests are waiting"),
            ...shown.map(([owner], i) => h("span", { class: "afk-waiter", title: owner }, h("span", {}, `${i + 1} `), h("bdi", {}, owner), waits[i].node)),
            rest > 0 ? ` and ${rest} more` : "");
          drawSelected();
          history.push({ t: performance.now() / 1000, ...state.counts });
          tick();
        }
        /** Replace the history with the kernel's history, which is kept when a page closes. */
        function fill() {
          const now = performance.now() / 1000;
          const points = model.get("_history").map(([ago, leased, starting, idle, size]) => ({ t: now - ago, leased, starting, idle, size }));
          if (points.length) history = [...points, { t: now, ...model.get("_state").counts }];
          tick();
        }
        /** Advance the displayed times between updates, unless the kernel is gone. */
        function tick() {
          if (context.stale()) return allow();
          const now = performance.now();
          const passed = (now - sentAt) / 1000;
          const frozen = model.get("_state")?.gone || model.get("_state")?.closed;
          for (const { data, time } of made.values()) {
            put(time, data.age === null || data.name === "idle" ? "" : duration(data.age + (frozen ? 0 : passed)));
          }
          for (const { seconds, node } of waits) put(node, seconds === null ? "" : duration(seconds + (frozen ? 0 : passed)));
          while (history.length > 2 && history[1].t < now / 1000 - 60) history.shift();
          if (history.length > 700) history.splice(1, history.length - 700);
          bands(history, 600, 40, 60, now / 1000).forEach(({ points }, i) => polygons[i].setAttribute("points", points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ")));
          const c = model.get("_state")?.counts;
          if (c) strip.setAttribute("aria-label", `now ${c.leased} leased, ${c.starting} starting, ${c.idle} idle of ${c.size}`);
        }
        const timer = setInterval(tick, 500);
        context.end(() => clearInterval(timer));
        context.on("_state", () => {
          sentAt = performance.now();
          draw();
        });
        context.on("_tab", mode);
        context.on("_history", fill);
        mode();
      },
    });
  },
};
