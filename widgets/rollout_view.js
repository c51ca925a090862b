// One line per chain. Up to ten updates per second arrive as buffers; only visible lines have elements.

// A chain in state "done" is shown as "succeeded", "done" (no success) or "unscored" (no reward).
export const STATES = ["queued", "waiting", "sampling", "sandbox", "tool", "scoring", "done", "failed", "cancelled", "succeeded", "unscored"];
const SIGN = { queued: "·", waiting: "◌", sampling: "●", sandbox: "◔", tool: "◆", scoring: "★", succeeded: "✓", done: "○", unscored: "?", failed: "✕", cancelled: "⊘" };
const WORD = { queued: "not started", sandbox: "waiting for a sandbox", tool: "running a tool", done: "no success", unscored: "no reward" };
const SHORT = { ...WORD, sandbox: "needs a sandbox" }; // for the line of a chain
const OVER = new Set(["succeeded", "done", "unscored", "failed", "cancelled"]);
const BANDS = ["succeeded", "done", "unscored", "failed", "cancelled", "scoring", "tool", "sandbox", "sampling", "waiting"];
const CHIPS = ["queued", "waiting", "sampling", "sandbox", "tool", "scoring", "succeeded", "done", "unscored", "failed", "cancelled"];
const RANK = { queued: 1, failed: 2, unscored: 2, succeeded: 3, done: 3, cancelled: 4 }; // 0: running

/**
 * Rows to show: those with a state in `only`, or all if it is empty. The order `how` is "place" (task order), "running"
 * (running chains, then queued, failed and finished ones) or "longest" (the same, the longest in their state first).
 */
export function order(state, since, only, how) {
  const out = [];
  for (let i = 0; i < state.length; i++) if (!only.size || only.has(STATES[state[i]])) out.push(i);
  const rank = (i) => RANK[STATES[state[i]]] ?? 0;
  if (how === "longest") out.sort((a, b) => rank(a) - rank(b) || since[a] - since[b] || a - b);
  else if (how === "running") out.sort((a, b) => rank(a) - rank(b) || a - b);
  return out;
}

/** The filled fraction of a reward's bar. The bar covers the range of all rewards, and at least 0 to 1. */
export function gauge(reward, low, high) {
  const [lo, hi] = [Math.min(0, low), Math.max(1, high)];
  return (reward - lo) / (hi - lo);
}

/** Nonempty shares of the total as [name, from, to] in 0..1, finished chains first. */
export function shares(counts, total) {
  const out = [];
  let at = 0;
  for (const name of BANDS) {
    const n = counts[name] ?? 0;
    if (!n || !total) continue;
    out.push([name, at / total, (at + n) / total]);
    at += n;
  }
  return out;
}

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: "Chains of a rollout",
      build(context) {
        const { root } = context;
        root.classList.add("afk-rolloutview");
        const title = h("span", { class: "afk-title" }, "rollout");
        const what = h("span", { class: "afk-soft afk-num afk-facts2", role: "status" });
        const pause = h("button", { type: "button", onclick: () => context.ask(model.get("_about")?.state === "paused" ? "resume" : "pause") }, "Pause");
        const stop = h("button", { type: "button", onclick: () => context.ask("stop") }, "Stop");
        const note = h("div", { class: "afk-note" });
        const chips = h("div", { class: "afk-chips afk-num", role: "group", "aria-label": "Show only chains in these states" });
        const progress = h("div", { class: "afk-progress", role: "progressbar", "aria-label": "Finished chains", "aria-valuemin": "0" });
        const how = h("select", { "aria-label": "Order" }, h("option", { value: "running" }, "running chains first"), h("option", { value: "place" }, "in the order of the tasks"), h("option", { value: "longest" }, "longest in their state first"));
        const shown = h("span", { class: "afk-soft afk-num" });
        const only = new Set();
        let data = null;
        let rows = [];
        let sentAt = performance.now();

        const chip = {};
        for (const name of CHIPS) {
          const n = h("b", {}, "0");
          chip[name] = {
            n, box: h("button", { type: "button", class: `afk-chip afk-r-${name}`, "aria-pressed": "false", onclick: () => {
              if (!only.delete(name)) only.add(name);
              chip[name].box.setAttribute("aria-pressed", String(only.has(name)));
              list.el.scrollTop = 0;
              draw();
            } }, h("span", { class: "afk-sign", "aria-hidden": "true" }, SIGN[name]), " ", n, ` ${WORD[name] ?? name}`),
          };
          chips.append(chip[name].box);
        }
        const segments = Object.fromEntries(BANDS.map((name) => {
          const box = h("span", { class: `afk-seg afk-r-${name}` });
          progress.append(box);
          return [name, box];
        }));
        const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
        const list = windowed({
          row: 24,
          label: "Chains. Arrow keys move, Enter opens the tokens of a chain, Space selects it.",
          fill(box, at) {
            const i = rows[at];
            if (!box.parts) {
              const span = (name) => h("span", { class: name });
              box.parts = { sign: span("afk-sign"), id: h("bdi", { class: "afk-lane" }), word: span("afk-word"), dots: span("afk-dots"), time: span("afk-time afk-num"), gauge: h("span", { class: "afk-gauge", "aria-hidden": "true" }, h("span", {})), detail: h("bdi", { class: "afk-soft afk-what" }) };
              box.parts.dots.setAttribute("aria-hidden", "true");
              box.parts.clock = document.createTextNode("");
              box.parts.time.append(box.parts.clock, box.parts.gauge);
              box.append(box.parts.sign, box.parts.id, box.parts.word, box.parts.dots, box.parts.time, box.parts.detail);
            }
            const { sign, id, word, dots, clock: time, gauge: bar, detail } = box.parts;
            const name = STATES[data.state[i]];
            const about = model.get("_about");
            box.className = `afk-item afk-r-${name}${at === list.cursor ? " afk-cursor" : ""}`;
            put(sign, SIGN[name]);
            put(id, (data.names[i] ?? "").slice(about.prefix ?? 0));
            put(word, SHORT[name] ?? name);
            const turn = data.turn[i];
            const limit = about.max_turns;
            put(dots, limit <= 12 ? "▪".repeat(Math.min(turn, limit)) + "▫".repeat(Math.max(0, limit - turn)) : `${turn}/${limit}`);
            const moving = !OVER.has(name) && name !== "queued";
            const now = data.seconds + (ticking() ? (performance.now() - sentAt) / 1000 : 0);
            put(time, moving ? duration(Math.max(0, now - data.since[i])) : "");
            const reward = data.reward.at(i);
            bar.style.display = OVER.has(name) && reward !== null ? "" : "none";
            if (reward !== null) bar.firstChild.style.width = `${100 * gauge(reward, about.rewards?.[0] ?? 0, about.rewards?.[1] ?? 1)}%`;
            const text = model.get("_details")[data.detail[i]] ?? "";
            put(detail, OVER.has(name) ? `${reward === null ? "unscored" : `reward ${number(reward)}`}${text ? ` · ${text}` : ""}` : text);
            box.setAttribute("aria-label", `${data.names[i]}: ${WORD[name] ?? name}, ${plural(turn, "action")} of ${limit}${detail.textContent ? `, ${detail.textContent}` : ""}`);
            box.title = box.getAttribute("aria-label");
          },
        });
        const ticking = () => !context.stale() && /running|paused|stopping/.test(model.get("_about")?.state ?? "") && !model.get("_about")?.gone;
        root.append(h("div", { class: "afk-bar" }, title, what, h("span", { class: "afk-row2" }, pause, stop)), note, progress, chips,
          h("div", { class: "afk-bar afk-sub" }, h("label", {}, "Show ", how), shown), list.el, chainBar(context, model, host, list.el));

        function read() {
          const b = model.get("_buffers");
          if (!b?.state) return;
          if (data && data.names !== model.get("_names")) list.cursor = -1; // other chains
          if (data?.names !== model.get("_names")) list.el.style.setProperty("--lane", laneWidth(model.get("_names").map((name) => name.length), model.get("_about")?.prefix));
          data = { names: model.get("_names"), state: typed(b.state, Uint8Array), turn: typed(b.turn, Int16Array), since: typed(b.since, Float32Array), detail: typed(b.detail, Uint16Array), reward: column(b.reward), seconds: model.get("_about")?.seconds ?? 0 };
        }
        function draw() {
          const about = model.get("_about");
          if (!about?.counts) return;
          put(title, about.step ? `rollout of ${about.step}` : "rollout");
          const over = [...OVER].reduce((n, name) => n + about.counts[name], 0);
          const lost = context.stale() && /^(running|paused|stopping)$/.test(about.state);
          const facts = [lost ? `was ${about.state}` : about.state, `${over.toLocaleString("en-US")} of ${plural(about.total, "chain")} ended`, duration(about.seconds)];
          if (about.rate !== null) facts.push(about.rate);
          if (about.left !== null && !lost) facts.push(`about ${duration(about.left)} left`);
          if (about.reward !== null) facts.push(`mean reward ${about.reward}`);
          put(what, facts.join(" · "));
          put(pause, about.state === "paused" ? "Resume" : "Pause");
          const why = idle(about.gone || context.stale() ? "done" : about.state);
          pause.disabled = stop.disabled = why !== "";
          [pause.title, stop.title] = [why, why || "Stop the running chains; finished ones are kept"];
          note.replaceChildren(...prose(about.gone ? "The run no longer exists; this is its last state." : about.hint));
          note.hidden = !note.textContent;
          for (const name of CHIPS) {
            const n = about.counts[name];
            put(chip[name].n, n.toLocaleString("en-US"));
            chip[name].box.classList.toggle("afk-zero", n === 0);
          }
          setAll(progress, { "aria-valuemax": about.total, "aria-valuenow": over });
          const now = Object.fromEntries(shares(about.counts, about.total).map(([name, a, b]) => [name, b - a]));
          for (const name of BANDS) segments[name].style.width = `${100 * (now[name] ?? 0)}%`;
          if (!data) return;
          const current = rows[list.cursor];
          rows = order(data.state, data.since, only, how.value);
          list.n = rows.length;
          list.cursor = current === undefined ? -1 : rows.indexOf(current); // follow the chain
          put(shown, only.size ? `${plural(rows.length, "chain")} shown` : "");
          list.el.classList.toggle("afk-empty", rows.length === 0);
          list.draw();
        }
        let planned = 0;
        function changed() {
          sentAt = performance.now();
          read();
          // Names, buffers and counts arrive in one message but trigger several change events.
          if (!planned) planned = requestAnimationFrame(() => { planned = 0; draw(); });
        }
        for (const name of ["_about", "_buffers", "_names", "_details"]) context.on(name, changed);
        how.addEventListener("change", draw);
        context.lost(draw);
        const ask = (what, at) => { if (data && at >= 0 && rows[at] !== undefined) context.ask(what, data.names[rows[at]]); };
        list.el.addEventListener("click", (event) => {
          const box = event.target.closest?.(".afk-item");
          if (!box) return;
          list.show(box.row);
          ask("chain", box.row);
        });
        list.el.addEventListener("dblclick", () => ask("chain_tokens", list.cursor));
        list.el.addEventListener("keydown", (event) => {
          if (event.ctrlKey || event.metaKey || event.altKey) return;
          if (event.key === "Enter") ask("chain_tokens", list.cursor);
          else if (event.key === " ") ask("chain", list.cursor);
          else return;
          event.preventDefault();
        });
        const timer = setInterval(() => { if (data && ticking()) list.draw(); }, 500);
        context.end(() => { clearInterval(timer); cancelAnimationFrame(planned); });
        read();
        draw();
        requestAnimationFrame(() => list.draw());
      },
    });
  },
};
