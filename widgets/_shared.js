// Prepended to every widget's source. The pure functions come first; they are tested with node, without a page.

/** Copy a buffer into a typed array, because a typed view on it would require an alignment that it may not have. */
export function typed(buffer, Type) {
  if (!buffer) return new Type(0);
  const view = buffer.buffer ? buffer : new DataView(buffer);
  return new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

/** Reader of a column: `at(i)` is the i-th number, or null if it is missing. */
export function column(packed) {
  const values = typed(packed?.values, Float32Array);
  const bits = typed(packed?.present, Uint8Array);
  const has = (i) => i >= 0 && i < values.length && ((bits[i >> 3] >> (i & 7)) & 1) === 1;
  return { length: values.length, has, at: (i) => (has(i) ? values[i] : null) };
}

/** Format a number in the same way in all views. A missing number becomes a dash. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size < 1e-4 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("e+", "e").replaceAll("-", "−");
}

/** Format a probability as a percentage. */
export function percent(p) {
  if (p >= 0.9995) return "100 %";
  if (p < 0.0005) return "<0.1 %";
  return `${(100 * p).toFixed(1)} %`;
}

export function plural(n, noun) {
  return `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;
}

/** Format seconds: 4.3 s, 45 s, 3 min 20 s, 2 h 5 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

/** Format seconds as `duration` does, but in milliseconds below one second: 12 ms. */
export function brief(seconds) {
  return seconds !== null && seconds !== undefined && seconds < 0.995 ? `${Math.round(1000 * seconds)} ms` : duration(seconds);
}

/** About `n` evenly spaced round numbers within [lo, hi]. */
export function ticks(lo, hi, n = 4) {
  if (!(hi > lo)) return [lo];
  const raw = (hi - lo) / n;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const out = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i++) out.push(Number((i * step).toPrecision(12)));
  return out;
}

/** The reason why a run in this state cannot be paused or stopped, or "" if it can. */
export const idle = (state) => ({ "not started": "The run has not started; await it in a cell", stopping: "The run is stopping" })[state] ?? (/^(running|paused|between rollouts)$/.test(state) ? "" : "The run has ended");

/** Convert text to nodes. Parts between backticks become code elements. */
export const prose = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** Split text into readable parts and invisible characters, which are shown as their code points. */
export function readable(text) {
  return text.split(/([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb])/u)
    .map((part, i) => (i % 2 ? { hidden: `‹U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›` } : { text: part }))
    .filter((part) => part.hidden || part.text);
}

/** Width in pixels that the longest name needs without the common prefix. Lengths are numbers of characters. */
export function laneWidth(lengths, prefix = 0) {
  const longest = lengths.reduce((most, n) => Math.max(most, n), 0) - (prefix ?? 0);
  return `${Math.round(8 * Math.max(7, Math.min(28, longest))) + 6}px`;
}

/** Range of list rows near the visible window: [first, last + 1]. */
export function near(top, height, row, n, margin = 6) {
  const first = Math.max(0, Math.min(n, Math.floor(top / row) - margin));
  return [first, Math.max(first, Math.min(n, Math.ceil((top + height) / row) + margin))];
}

// --- saved pictures ---

const LIVE = "application/vnd.jupyter.widget-view+json";

/** Content of a notebook in which each view is replaced by its latest picture, as HTML. */
export function withPictures(content, pictures) {
  const saved = (output) => {
    const view = output.metadata?.agentfly_kit?.view;
    if (!view || !output.data?.[LIVE] || !output.data["text/html"]) return output;
    const { [LIVE]: _, ...data } = output.data;
    return { ...output, data: { ...data, "text/html": pictures.get(view) ?? data["text/html"] } };
  };
  return { ...content, cells: content.cells.map((cell) => (cell.outputs ? { ...cell, outputs: cell.outputs.map(saved) } : cell)) };
}

/**
 * Save the views of a notebook as pictures, and show them live again when the page is reloaded.
 *
 * JupyterLab and Notebook 7 prefer the live form of an output, which is an error message once the kernel is gone. So the
 * saved notebook gets only the HTML; the open page does not change. Nothing is done in other front ends, whose widget
 * manager has no `context`.
 */
export function keepPictures({ model }) {
  const manager = model.widget_manager;
  const notebook = manager?.context?.model;
  if (typeof notebook?.toJSON !== "function" || !notebook.cells) return;
  const key = Symbol.for("agentfly_kit.pictures");
  if (!notebook[key]) {
    const pictures = (notebook[key] = new Map());
    const toJSON = notebook.toJSON;
    notebook.toJSON = function () {
      return withPictures(toJSON.call(this), pictures);
    };
  }
  model.on("msg:custom", (message) => {
    if (message?.kind !== "picture") return;
    notebook[key].set(message.view, message.html);
    notebook.dirty = true;
  });
  // After the page is reloaded, the kernel's models are restored, but the saved outputs contain pictures. Models
  // that were restored from a file have no kernel, so their pictures stay.
  for (const cell of notebook.cells) {
    for (const { metadata, data } of cell.outputs?.toJSON() ?? []) {
      const id = metadata?.agentfly_kit?.view;
      if (id && !data[LIVE] && manager.has_model(id)) manager.get_model(id).then((found) => found.comm_live && showLive(notebook, cell.outputs, id), () => {});
    }
  }
}

function showLive(notebook, outputs, id) {
  const dirty = notebook.dirty;
  for (let i = 0; i < outputs.length; i++) {
    const output = outputs.get(i).toJSON();
    if (output.metadata?.agentfly_kit?.view !== id || output.data[LIVE]) continue;
    outputs.set(i, { ...output, data: { [LIVE]: { version_major: 2, version_minor: 0, model_id: id }, ...output.data } });
  }
  notebook.dirty = dirty;
}

// --- page ---

// Identifies the browser window, because Python tells all pages of a view which trait one of them has set.
const WINDOW = (globalThis[Symbol.for("agentfly_kit.window")] ??= crypto.randomUUID?.() ?? String(Math.random()));
const PATIENCE = 1000; // number of milliseconds before an unanswered click is reported

const marks = (text) => readable(text).map((part) => (part.hidden ? h("span", { class: "afk-ctl" }, part.hidden) : part.text));

/** Create an element. Text is inserted as text, never parsed as HTML. */
export function h(name, attributes = {}, ...children) {
  const el = document.createElement(name);
  setAll(el, attributes);
  el.append(...children.filter((c) => c !== null && c !== undefined));
  return el;
}

/** Elements for images given as [source, description]. The source is empty if there is no preview. */
export function pictures(list) {
  return (list ?? []).map(([src, alt]) => (src ? h("img", { src, alt, class: "afk-img" }) : h("span", { class: "afk-soft" }, alt)));
}

export function s(name, attributes = {}, ...children) {
  const el = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAll(el, attributes);
  el.append(...children);
  return el;
}

function setAll(el, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else el.setAttribute(key, value === true ? "" : value);
  }
}

/** Set up a view: frame, notice, isolation of keys, removal of listeners, and open and close messages to Python. */
export function mount({ model, el }, { label, build }) {
  const began = performance.now();
  const page = `${WINDOW} ${Math.random()}`;
  const root = h("div", { class: "afk", role: "group", "aria-label": label, "data-lm-suppress-shortcuts": "true" });
  const notice = h("div", { class: "afk-notice", role: "alert" });
  const stale = h("div", { class: "afk-stale", role: "status", hidden: true });
  const ends = [];
  const waiting = h("span", { class: "afk-waiting", role: "status" });
  const losses = [];
  const clicks = new Map(); // requests that Python has not begun to handle, with their timers
  function answered(click) {
    clearTimeout(clicks.get(click));
    clicks.delete(click);
    if (!clicks.size) waiting.textContent = "";
  }
  function dead(what = "restarted") {
    stale.textContent = `kernel ${what}: this view shows the last state that it received. Run its cell again.`;
    stale.hidden = false;
    [...clicks.keys()].forEach(answered);
    for (const f of losses) f();
  }
  const receive = (message) => {
    if (message?.kind === "begun") answered(message.click);
    if (message?.kind === "set" && !message.page.startsWith(WINDOW)) model.set(message.name, message.value);
  };
  model.on("msg:custom", receive);
  ends.push(() => model.off("msg:custom", receive), () => [...clicks.keys()].forEach(answered));
  // The widget manager triggers this event on every model after a kernel restart, but sets no CSS class.
  const restarted = () => dead();
  model.on("comm_live_update", restarted);
  ends.push(() => model.off("comm_live_update", restarted));
  // It triggers no event if the kernel dies or is shut down. Front ends without `context` show their own message.
  const session = model.widget_manager?.context?.sessionContext;
  const ended = (_, status) => { if (/^(autorestarting|dead)$/.test(status)) dead("died"); };
  const removed = (_, change) => { if (!change.newValue) dead("shut down"); };
  session?.statusChanged?.connect(ended);
  session?.kernelChanged?.connect(removed);
  ends.push(() => { session?.statusChanged?.disconnect(ended); session?.kernelChanged?.disconnect(removed); });
  const context = {
    root,
    /** Element that shows "waiting for the kernel" if a request stays unanswered for more than a second. */
    waiting,
    /** True if the kernel that created this view is gone. */
    stale: () => !stale.hidden,
    /** Call f when the kernel is gone. */
    lost: (f) => losses.push(f),
    /** Listen to a trait until the view is removed. */
    on(name, f) {
      const event = `change:${name}`;
      model.on(event, f);
      ends.push(() => model.off(event, f));
    },
    /** Listen on an element that outlives the view, such as window. */
    listen(target, name, f, options) {
      target.addEventListener(name, f, options);
      ends.push(() => target.removeEventListener(name, f, options));
    },
    end: (f) => ends.push(f),
    /**
     * Set a trait here and in Python. save_changes is not used: while a cell awaits, the kernel does not report idle
     * for its messages, and the widget manager then blocks all later ones. Custom messages are never blocked.
     */
    put(name, value) {
      model.set(name, value);
      send("set", { name, value });
    },
    /** Replace the content of `host` by the widget whose model id is in a trait. */
    child(trait, host) {
      let shown = null;
      let count = 0;
      async function draw() {
        const mine = ++count;
        shown?.remove();
        shown = null;
        host.replaceChildren();
        const id = model.get(trait);
        if (!id) return;
        try {
          const view = await model.widget_manager.create_view(await model.widget_manager.get_model(id));
          if (mine !== count) view.remove();
          else host.append((shown = view).el);
        } catch {
          if (mine === count) host.textContent = "This view no longer exists. Open it again.";
        }
      }
      context.on(trait, draw);
      ends.push(() => {
        count++;
        shown?.remove();
      });
      draw();
    },
    /** Request an action from Python: call the view's `_do_<name>(value)` on the notebook's event loop. */
    ask(name, value = null) {
      const n = `${page}-${++asked}`;
      if (stale.hidden) clicks.set(n, setTimeout(() => { waiting.textContent = "waiting for the kernel …"; }, PATIENCE));
      send("do", { name, value, n });
    },
  };
  let asked = 0;
  function send(kind, more = {}) {
    try {
      model.send({ kind, page, ...more });
    } catch {
      dead("ended"); // the connection to the kernel was lost
    }
  }
  const showNotice = () => {
    notice.textContent = model.get("_notice") ?? "";
    notice.hidden = !notice.textContent;
  };
  // Arrow and letter keys are notebook shortcuts, so keys pressed in a view must not reach the notebook. Notebook 7 sees
  // keys before this listener does, but ignores them if the focused element has the attribute that is set below.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  root.addEventListener("focusin", (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
  root.append(stale, notice);
  try {
    build(context);
  } catch (error) {
    console.warn(error);
    root.append(h("div", { class: "afk-note" }, `This view cannot be shown here: ${error.message ?? error}. Run its cell again.`));
  }
  showNotice();
  context.on("_notice", showNotice);
  el.append(root);
  send("open");
  // For benchmarks: time from the arrival of the data to the first rendering.
  requestAnimationFrame(() => setTimeout(() => performance.measure(`afk ${label}`, { start: began, end: performance.now() })));
  return () => {
    for (const end of ends) end();
    send("close");
    root.remove();
  };
}

/**
 * A virtualized list of `n` rows of equal height: only those near the visible window have elements. `fill(box, i)`
 * renders row i into an element, which is reused for other rows. The list handles the navigation keys.
 */
export function windowed({ row, label, fill, move, multi = false }) {
  const id = `afk${Math.random().toString(36).slice(2, 8)}`;
  const space = h("div", { class: "afk-space", role: "presentation" });
  const el = h("div", { class: "afk-window", role: "listbox", tabindex: "0", "aria-label": label, "aria-multiselectable": multi ? "true" : null }, space);
  const made = new Map(); // row -> element
  const spare = [];
  const list = { el, n: 0, cursor: -1, draw, show };
  function draw() {
    space.style.height = `${list.n * row}px`;
    const [first, last] = near(el.scrollTop, el.clientHeight || 400, row, list.n);
    for (const [i, box] of made) {
      if (i >= first && i < last) continue;
      made.delete(i);
      spare.push(box);
    }
    for (let i = first; i < last; i++) {
      let box = made.get(i);
      if (!box) {
        box = spare.pop() ?? h("div", { class: "afk-item", role: "option" });
        made.set(i, box);
        box.style.transform = `translateY(${i * row}px)`;
        box.style.height = `${row}px`;
        box.id = `${id}-${i}`;
        box.row = i;
        box.setAttribute("aria-posinset", i + 1);
        if (box.parentNode !== space) space.append(box);
      }
      box.setAttribute("aria-setsize", list.n);
      box.classList.toggle("afk-cursor", i === list.cursor);
      fill(box, i);
    }
    for (const box of spare.splice(0)) box.remove();
    if (made.has(list.cursor)) el.setAttribute("aria-activedescendant", `${id}-${list.cursor}`);
    else el.removeAttribute("aria-activedescendant");
  }
  /** Move the cursor to row i and scroll it into view. */
  function show(i) {
    if (!list.n) return;
    list.cursor = Math.max(0, Math.min(list.n - 1, i));
    const top = list.cursor * row;
    if (top < el.scrollTop) el.scrollTop = top;
    else if (top + row > el.scrollTop + el.clientHeight) el.scrollTop = top + row - el.clientHeight;
    draw();
  }
  let planned = false;
  el.addEventListener("scroll", () => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      draw();
    });
  });
  el.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(el.clientHeight / row) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) show(list.cursor < 0 ? 0 : list.cursor + step);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(list.n - 1);
    else return;
    event.preventDefault();
    move?.(list.cursor, event);
  });
  return list;
}

/** A box with code. The code is selected and, if the browser permits, copied to the clipboard. */
export function codeBox(code, close) {
  const area = h("textarea", { class: "afk-code", readonly: true, spellcheck: "false", "aria-label": "Code", rows: Math.min(14, code.split("\n").length + 1) });
  area.value = code;
  const said = h("span", { class: "afk-soft", role: "status" }, "");
  const box = h("div", { class: "afk-codebox" },
    h("div", { class: "afk-bar" }, h("b", {}, "Code for a cell"), said, h("span", { class: "afk-grow" }), h("button", { type: "button", onclick: () => { box.remove(); close?.(); } }, "Close")), area);
  const copy = async () => {
    area.select();
    try {
      await navigator.clipboard.writeText(code);
      said.textContent = "copied";
    } catch {
      said.textContent = "press Ctrl+C to copy";
    }
  };
  queueMicrotask(() => { area.focus(); copy(); });
  /** Replace the code that is shown. */
  box.update = (text) => {
    if (area.value === text) return;
    area.value = text;
    area.rows = Math.min(14, text.split("\n").length + 1);
    said.textContent = "";
  };
  return box;
}

/** Show another widget, given by a serialized trait ("IPY_MODEL_..."), in an element. Returns a function to remove it. */
export function child(host, ref, el) {
  const gone = new AbortController();
  const failed = (error) => { if (!gone.signal.aborted) el.replaceChildren(h("div", { class: "afk-note" }, `This view cannot be shown here: ${error.message ?? error}`)); };
  if (!host?.getWidget) failed(new Error("the front end needs anywidget 0.11"));
  else host.getWidget(ref.replace(/^IPY_MODEL_/, "anywidget:")).then((widget) => { if (!gone.signal.aborted) return widget.render({ el, signal: gone.signal }); }).catch(failed);
  return () => { gone.abort(); el.replaceChildren(); };
}

/** Replace the content of `el` by the view that Python opened below this view. See the Python class Opener. */
export function showBelow(context, model, host, el, changed = () => {}) {
  let takeAway = null;
  function draw() {
    takeAway?.();
    const ref = model.get("_below");
    changed(ref);
    takeAway = ref ? child(host, ref, el) : null;
  }
  context.on("_below", draw);
  context.end(() => takeAway?.());
  draw();
}

/** A box for the view opened below this view. It has a title and a Close button, which calls `back` to return the focus. */
export function belowBox(context, model, host, title, back) {
  const place = h("div", {});
  const leave = h("button", { type: "button", class: "afk-small", onclick: () => { context.ask("leave"); back(); } }, "Close");
  const box = h("div", { class: "afk-below", hidden: true }, h("div", { class: "afk-bar" }, h("b", {}, title), h("span", { class: "afk-grow" }), leave), place);
  showBelow(context, model, host, place, (ref) => { box.hidden = !ref; });
  context.on("_below", () => { if (!box.hidden) leave.scrollIntoView?.({ block: "nearest" }); });
  return box;
}

/** Bar for the chain picked in a list: buttons to open the chain, and the opened view. See the class ChainsView. */
export function chainBar(context, model, host, back) {
  const name = h("bdi", {});
  const button = (text, title, what) => h("button", { type: "button", class: "afk-small", title, onclick: () => context.ask(what) }, text);
  const stepper = button("Stepper", "", "chain_stepper");
  const bar = h("div", { class: "afk-bar", role: "group", "aria-label": "Selected chain" }, h("b", {}, name), h("span", { class: "afk-soft" }, "→ view.selection"),
    button("Tokens", "Show the tokens with all their values", "chain_tokens"), stepper, button("As Python", "Python code that loads this trajectory and continues from it", "chain_code"),
    h("span", { class: "afk-grow" }), h("button", { type: "button", class: "afk-small", onclick: () => { context.ask("chain_leave"); back.focus(); } }, "Close"));
  const code = h("div", {});
  const below = h("div", { class: "afk-child" });
  const box = h("div", { class: "afk-below", hidden: true }, bar, code, below);
  function draw() {
    const picked = model.get("_chain");
    box.hidden = !picked?.id;
    if (box.hidden) code.replaceChildren();
    name.textContent = picked?.name ?? "";
    stepper.disabled = !picked?.agent;
    stepper.title = picked?.agent ? "Continue, rewind or edit the chain in the stepper" : "Pass agent= to this view to open chains in the stepper";
  }
  let shown = model.get("_cell")?.n ?? 0;
  context.on("_chain", draw);
  context.on("_cell", () => {
    const { n, text } = model.get("_cell") ?? {};
    if (!n || n === shown) return;
    shown = n;
    code.replaceChildren(codeBox(text, () => bar.querySelector("button").focus()));
  });
  draw();
  showBelow(context, model, host, below);
  return box;
}
