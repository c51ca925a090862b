// Small charts of a run's curves with a shared pointer. Python computes ranges and numbers; this file draws them.

/** Segments of a line, with gaps where a number is missing or not finite. */
export function segments(steps, col) {
  const out = [];
  let run = null;
  for (let i = 0; i < steps.length; i++) {
    const value = col.at(i);
    if (value === null || !Number.isFinite(value)) {
      run = null;
      continue;
    }
    if (!run) out.push((run = []));
    run.push([steps[i], value]);
  }
  return out;
}

/** Keep only the lowest and the highest point of each pixel column, so that no spike is lost. */
export function thin(points, pixels) {
  if (points.length <= pixels * 2) return points;
  const out = [];
  const size = points.length / pixels;
  for (let k = 0; k < pixels; k++) {
    const part = points.slice(Math.floor(k * size), Math.floor((k + 1) * size));
    if (!part.length) continue;
    let lo = part[0];
    let hi = part[0];
    for (const p of part) {
      if (p[1] < lo[1]) lo = p;
      if (p[1] > hi[1]) hi = p;
    }
    out.push(...(lo === hi ? [lo] : lo[0] < hi[0] ? [lo, hi] : [hi, lo]));
  }
  return out;
}

/** Segments of a band: lists of [step, low, high] without gaps, at most `pixels` points in total. */
export function ribbon(steps, low, high, pixels) {
  const out = [];
  let run = null;
  const stride = Math.max(1, Math.ceil(steps.length / pixels));
  for (let i = 0; i < steps.length; i += stride) {
    const [a, b] = [low.at(i), high.at(i)];
    if (a === null || b === null || !Number.isFinite(a) || !Number.isFinite(b)) {
      run = null;
      continue;
    }
    if (!run) out.push((run = []));
    run.push([steps[i], a, b]);
  }
  return out;
}

/** Index of the step that is nearest to x. `steps` are sorted. */
export function nearest(steps, x) {
  let lo = 0;
  let hi = steps.length - 1;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (steps[mid] < x) lo = mid + 1;
    else hi = mid;
  }
  return lo > 0 && x - steps[lo - 1] <= steps[lo] - x ? lo - 1 : lo;
}

/** Format a number on an axis with just enough digits to distinguish neighbouring labels. */
export function tick(value, step) {
  const size = Math.abs(value);
  if (size >= 10000) return `${Number((value / 1000).toPrecision(3))}k`.replace("-", "−");
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return (digits <= 4 ? value.toFixed(digits) : value === 0 ? "0" : value.toExponential(1)).replaceAll("-", "−");
}

/** Width in pixels of the longest axis label, including its distances to the axis and to the edge. */
export function margin(labels) {
  return Math.max(30, 10 + 6.4 * Math.max(0, ...labels.map((text) => text.length)));
}

const HEIGHT = 108;
const PAD = { left: 44, right: 10, top: 8, bottom: 18 };
const LINES = 6; // line styles in the style sheet: hue and dashes

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: "Training curves",
      build(context) {
        const { root } = context;
        root.classList.add("afk-trainview");
        const title = h("span", { class: "afk-title" });
        const progress = h("span", { class: "afk-progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": "0" }, h("span", {}));
        const where = h("span", { class: "afk-soft afk-num" });
        const clear = h("button", { type: "button", title: "Clear the step (key: Escape)" }, "Clear");
        const pause = h("button", { type: "button" }, "Pause");
        const stop = h("button", { type: "button" }, "Stop after this step");
        const state = h("span", { class: "afk-soft", role: "status" });
        const note = h("div", { class: "afk-note" });
        const grid = h("div", {
          class: "afk-charts", tabindex: "0", role: "application",
          "aria-label": "Charts by step. Arrow keys move between steps, Enter selects one and lists its trajectories, Escape clears.",
        });
        const spoken = h("div", { class: "afk-spoken", "aria-live": "polite" });
        const key = h("div", { class: "afk-chartkey afk-soft" });
        const more = h("button", { type: "button", class: "afk-showmore", onclick: () => (grid.classList.toggle("afk-all"), head()) });
        const metrics = h("details", { class: "afk-steplist", hidden: true });
        const list = h("div", { class: "afk-steplist", hidden: true });
        root.append(h("div", { class: "afk-bar" }, title, progress, state, pause, stop, h("span", { class: "afk-grow" }), where, clear), note, grid, more, key, metrics, list, chainBar(context, model, host, list), spoken);

        let runs = []; // { steps, cols } per run
        let steps = []; // union of the steps of all runs
        let charts = [];
        let shape = "";
        let pointed = -1; // index in `steps` of the step under the pointer or keyboard cursor
        let width = 0;

        function read() {
          runs = (model.get("_buffers").runs ?? []).map((run) => ({
            steps: typed(run.steps, Int32Array),
            cols: Object.fromEntries(Object.entries(run.columns ?? {}).map(([k, v]) => [k, column(v)])),
          }));
          steps = [...new Set(runs.flatMap((run) => [...run.steps]))].sort((a, b) => a - b);
        }
        const nameOf = (i) => model.get("_about").runs[i]?.name || `run ${i + 1}`;
        /** Style of line l of n in run r. In a chart with several runs and lines, the hue identifies the line. */
        const style = (r, l = 0, n = 1) => `afk-hue${(n > 1 ? l : r) % LINES} afk-dash${(runs.length > 1 ? r : l) % LINES}`;
        const sample = (look) => s("svg", { width: "26", height: "10", "aria-hidden": "true" }, s("path", { d: "M1 6H25", class: `afk-line ${look}` }));
        const recorded = (key) => key && runs.some((run) => [...run.steps].some((_, i) => run.cols[key]?.has(i)));
        function head() {
          const about = model.get("_about");
          const single = about.runs.length === 1 ? about.runs[0] : null;
          title.textContent = single ? (single.name ? `Run ${single.name}` : "Run") : plural(about.runs.length, "run");
          const total = single?.total;
          progress.hidden = !total;
          if (total) {
            setAll(progress, { "aria-valuemax": total, "aria-valuenow": single.last ?? 0 });
            progress.firstChild.style.width = `${(100 * Math.min(total, single.last ?? 0)) / total}%`;
          }
          // With several runs, only the states of unfinished runs are shown.
          const named = (run, i, text) => (single ? text : `${nameOf(i)}: ${text}`);
          const notes = about.runs.map((run, i) => (run.gone ? named(run, i, "The run no longer exists; these are its last numbers.") : run.detail && (single || run.state !== "not started") ? named(run, i, run.detail) : null)).filter(Boolean);
          notes.push(...about.runs.flatMap((run, i) => (run.finding ? [named(run, i, `Finding: ${run.finding}`)] : [])));
          if (!steps.length) notes.unshift("No steps have been recorded yet.");
          note.replaceChildren(...notes.map((text) => h("div", {}, ...prose(text))));
          note.hidden = !notes.length;
          const { can, ended, paused, stopping } = about.control;
          pause.hidden = stop.hidden = !can && !ended;
          pause.textContent = paused ? "Resume" : "Pause";
          const live = can && !context.stale();
          pause.disabled = !live;
          stop.disabled = !live || stopping;
          pause.title = live ? "" : idle(about.runs.some((run) => run.state === "not started") ? "not started" : "done");
          stop.title = pause.title || (stopping && idle("stopping")) || "Complete the current step, then stop. Await the run again to continue it";
          const lost = (run) => context.stale() && /^(running|paused|stopping)$/.test(run.state);
          const states = about.runs.map((run, i) => [lost(run) ? "interrupted" : run.state, run.word && !run.gone ? named(run, i, lost(run) ? `was ${run.word}` : run.word) : ""]);
          state.replaceChildren(...states.filter(([, text]) => text).map(([name, text]) => h("span", { class: `afk-state afk-state-${name.replace(" ", "-")}` }, text)));
          const one = (...parts) => h("span", {}, ...parts); // keeps a line sample and its label together
          key.replaceChildren(...(single
            ? [one(sample(style(0)), "training")]
            : about.runs.map((run, i) => one(sample(style(i)), h("b", {}, h("bdi", {}, nameOf(i))), ` ${plural(run.n, "step")}`))),
          ...(about.panels.some((p) => recorded(p.bandLow))
            ? [h("span", { title: "Computed as if all chains of the step were independent" }, s("svg", { width: "22", height: "12", "aria-hidden": "true" }, s("rect", { x: 0, y: 1, width: 22, height: 10, class: "afk-band" })), "95 % interval for the mean of a step")] : []),
          ...(about.panels.some((p) => recorded(p.points))
            ? [one(s("svg", { width: "16", height: "16", "aria-hidden": "true" }, s("path", { d: "M8 1V15", class: "afk-whisker" }), s("circle", { cx: "8", cy: "8", r: "3.4", class: "afk-point" })), "evaluation, with its interval if recorded")] : []));
          const n = about.panels.filter((panel) => panel.more).length;
          more.hidden = !n;
          more.textContent = grid.classList.contains("afk-all") ? "Fewer charts" : plural(n, "more chart");
        }
        function build() {
          const { panels } = model.get("_about");
          const now = JSON.stringify(panels.map((p) => [p.label, p.unit, p.lines, p.more]));
          if (now === shape) return;
          shape = now;
          charts = panels.map((panel) => {
            const value = h("span", { class: "afk-num afk-now" });
            const svg = s("svg", { height: HEIGHT, role: "img" });
            const box = h("div", { class: `afk-chart${panel.more ? " afk-more" : ""}` },
              h("div", { class: "afk-charthead" }, h("span", { class: "afk-name", title: panel.hint || null }, panel.label), h("span", { class: "afk-soft" }, panel.unit), value), svg);
            svg.addEventListener("pointermove", (event) => {
              if (!steps.length) return;
              const at = event.clientX - svg.getBoundingClientRect().left;
              point(nearest(steps, unx(at)));
            });
            svg.addEventListener("pointerleave", () => point(-1));
            svg.addEventListener("click", () => pick(pointed));
            return { box, svg, value };
          });
          grid.replaceChildren(...charts.map((c) => c.box));
        }
        /** Table of the metrics without a chart. */
        function drawMetrics() {
          const { metrics: rows } = model.get("_about");
          const cells = (name, values) => h("tr", {}, ...values.map((text) => h(name, {}, h("bdi", {}, text))));
          metrics.hidden = !rows.length;
          metrics.replaceChildren(h("summary", {}, "other reward metrics"), h("div", { class: "afk-listbox", tabindex: "0", role: "region", "aria-label": "Metrics without a chart" },
            h("table", {}, h("thead", {}, cells("th", ["metric", "run", "first", "last"])), h("tbody", {}, ...rows.map((row) => cells("td", row))))));
        }
        const span = () => [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)];
        const x = (step) => PAD.left + (width - PAD.left - PAD.right) * ((step - span()[0]) / (span()[1] - span()[0]));
        const unx = (at) => span()[0] + ((at - PAD.left) / (width - PAD.left - PAD.right)) * (span()[1] - span()[0]);
        const xy = (a, b) => `${a.toFixed(1)},${b.toFixed(1)}`;

        function draw() {
          if (!charts.length) return;
          width = charts[0].svg.clientWidth || charts[0].box.clientWidth - 20;
          if (width < 60) return;
          const { panels } = model.get("_about");
          charts.forEach((chart, k) => chart.box.classList.toggle("afk-several", runs.length * panels[k].lines.length > 1));
          const axes = panels.map((panel) => {
            const marks = ticks(panel.lo, panel.hi, 3);
            const gap = marks.length > 1 ? marks[1] - marks[0] : (panel.hi - panel.lo) / 3 || 1;
            return marks.map((v) => [v, tick(v, gap)]);
          });
          PAD.left = margin(axes.flat().map(([, text]) => text)); // one margin, so that the steps are aligned
          charts.forEach((chart, k) => {
            const panel = panels[k];
            const { svg } = chart;
            svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
            const y = (v) => PAD.top + (HEIGHT - PAD.top - PAD.bottom) * (1 - (v - panel.lo) / (panel.hi - panel.lo));
            svg.replaceChildren();
            if (!panel.n || !steps.length) {
              svg.append(s("text", { x: width / 2, y: HEIGHT / 2, class: "afk-ticktext", "text-anchor": "middle" }, panel.error ? "failed" : steps.length ? "not recorded" : "no step yet"), s("title", {}, panel.error));
              svg.setAttribute("aria-label", `${panel.label}: not recorded`);
              chart.hair = null;
              return;
            }
            for (const [v, text] of axes[k]) {
              svg.append(s("line", { x1: PAD.left, x2: width - PAD.right, y1: y(v), y2: y(v), class: v === 0 ? "afk-zero" : "afk-gridline" }),
                s("text", { x: PAD.left - 5, y: y(v) + 3.5, class: "afk-ticktext", "text-anchor": "end" }, text));
            }
            const [a, b] = [steps[0], steps[steps.length - 1]];
            svg.append(s("text", { x: x(a), y: HEIGHT - 4, class: "afk-ticktext" }, String(a)));
            if (b > a) svg.append(s("text", { x: x(b), y: HEIGHT - 4, class: "afk-ticktext", "text-anchor": "end" }, String(b)));
            // Bands are drawn below all lines.
            if (panel.bandLow) runs.forEach(({ steps: own, cols }, r) => {
              for (const part of ribbon(own, cols[panel.bandLow], cols[panel.bandHigh], width)) {
                const edge = [...part.map(([t, , v]) => xy(x(t), y(v))), ...part.toReversed().map(([t, v]) => xy(x(t), y(v)))];
                svg.append(s("polygon", { points: edge.join(" "), class: `afk-band ${style(r)}` }));
              }
            });
            runs.forEach(({ steps: own, cols }, r) => {
              panel.lines.forEach(({ key }, l) => {
                const look = style(r, l, panel.lines.length);
                for (const part of segments(own, cols[key])) {
                  const points = thin(part, width);
                  if (points.length === 1) svg.append(s("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 2.2, class: `afk-dot ${look}` }));
                  else svg.append(s("polyline", { points: points.map(([p, q]) => xy(x(p), y(q))).join(" "), class: `afk-line ${look}` }));
                }
              });
              if (!panel.points) return;
              for (let i = 0; i < own.length; i++) {
                const value = cols[panel.points].at(i);
                if (value === null) continue;
                const [low, high] = [cols[panel.low]?.at(i) ?? null, cols[panel.high]?.at(i) ?? null];
                const at = x(own[i]);
                const hue = runs.length > 1 ? ` ${style(r)}` : "";
                if (low !== null && high !== null) svg.append(s("path", { d: `M${at - 3} ${y(high)}H${at + 3}M${at} ${y(high)}V${y(low)}M${at - 3} ${y(low)}H${at + 3}`, class: `afk-whisker${hue}` }));
                svg.append(s("circle", { cx: at, cy: y(value), r: 3.2, class: `afk-point${hue}` }));
              }
            });
            if (panel.odd) svg.append(s("text", { x: width - PAD.right, y: PAD.top + 4, class: "afk-odd", "text-anchor": "end" }, plural(panel.odd, "non-finite value")));
            chart.hair = s("line", { y1: PAD.top, y2: HEIGHT - PAD.bottom, class: "afk-hair" });
            chart.spots = runs.map((_, r) => panel.lines.map((_, l) => s("circle", { r: 3.2, class: `afk-dot ${style(r, l, panel.lines.length)}` })));
            chart.y = y;
            svg.append(chart.hair, ...chart.spots.flat());
            svg.setAttribute("aria-label", `${panel.label} from step ${a} to ${b}`);
          });
          readout();
        }
        const placed = () => {
          const picked = model.get("step");
          return pointed >= 0 && pointed < steps.length ? pointed : picked !== null && picked !== undefined ? steps.indexOf(picked) : -1;
        };
        /** Show numbers in the chart headers: those of the step under the pointer, of the picked step, or of the last step. */
        function readout() {
          const about = model.get("_about");
          const picked = model.get("step");
          const at = placed();
          charts.forEach((chart, k) => {
            const panel = about.panels[k];
            const said = runs.flatMap(({ steps: own, cols }, r) => panel.lines.map(({ key, label }, l) => {
              const col = cols[key];
              let i = at >= 0 ? own.indexOf(steps[at]) : (col?.length ?? 0) - 1;
              if (at < 0) while (i >= 0 && !col.has(i)) i--;
              const v = i >= 0 ? col?.at(i) ?? null : null;
              let text = number(v);
              const ev = at >= 0 && panel.points && i >= 0 ? cols[panel.points]?.at(i) : null;
              if (ev !== null && ev !== undefined) {
                const [lo, hi] = [cols[panel.low]?.at(i) ?? null, cols[panel.high]?.at(i) ?? null];
                text += ` · eval ${number(ev)}${lo !== null && hi !== null ? ` [${number(lo)}, ${number(hi)}]` : ""}`;
              }
              if (chart.hair) {
                const spot = chart.spots[r][l];
                const show = at >= 0 && v !== null && Number.isFinite(v);
                spot.style.display = show ? "" : "none";
                if (show) {
                  setAll(spot, { cx: x(steps[at]), cy: chart.y(v) });
                }
              }
              const name = panel.lines.length > 1 ? h("bdi", { class: "afk-soft" }, label || `line ${l + 1}`) : null;
              return { look: style(r, l, panel.lines.length), name, text };
            }));
            if (said.length < 2) chart.value.replaceChildren(said[0]?.text ?? "–");
            else chart.value.replaceChildren(...said.map(({ look, name, text }) => h("span", { class: "afk-saidby" }, sample(look), name, text)));
            if (!chart.hair) return;
            chart.hair.style.display = at >= 0 ? "" : "none";
            if (at >= 0) {
              setAll(chart.hair, { x1: x(steps[at]), x2: x(steps[at]) });
            }
          });
          const single = about.runs.length === 1 ? about.runs[0] : null;
          const last = steps[steps.length - 1];
          where.textContent = at >= 0 ? `step ${steps[at]}${picked === steps[at] ? " · view.step" : ""}` : last === undefined ? "" : `step ${last}${single?.total ? ` of ${single.total}` : ""}`;
          clear.hidden = picked === null || picked === undefined;
        }
        function point(i) {
          if (i === pointed) return;
          pointed = i;
          readout();
        }
        function pick(i) {
          if (i < 0 || i >= steps.length) return;
          context.put("step", steps[i]);
          const which = runs.findIndex((run) => run.steps.includes(steps[i]));
          context.ask("open", { step: steps[i], run: which });
        }
        function forget() {
          pointed = -1;
          context.put("step", null);
          list.hidden = true;
          if (model.get("_chain")?.id) context.ask("chain_leave");
          readout();
        }
        clear.addEventListener("click", forget);
        pause.addEventListener("click", () => context.ask(model.get("_about").control.paused ? "resume" : "pause"));
        stop.addEventListener("click", () => context.ask("stop"));
        grid.addEventListener("keydown", (event) => {
          if (!steps.length || event.ctrlKey || event.metaKey || event.altKey) return;
          const at = placed() >= 0 ? placed() : steps.length - 1;
          const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
          if (to !== undefined) point(Math.max(0, Math.min(steps.length - 1, to)));
          else if (event.key === "Enter" || event.key === " ") pick(at);
          else if (event.key === "Escape") forget();
          else return;
          spoken.textContent = `${where.textContent}: ${charts.filter((c) => c.box.checkVisibility()).map((c) => `${c.box.querySelector(".afk-name").textContent} ${c.value.textContent}`).join(", ")}`;
          event.preventDefault();
        });
        grid.addEventListener("blur", () => point(-1));

        // --- the trajectories of a step ---
        function drawList() {
          const x = model.get("_list");
          list.hidden = x?.step === undefined || model.get("step") === null;
          if (list.hidden) return;
          const which = h("select", { "aria-label": "Run" }, ...runs.map((_, i) => h("option", { value: i }, nameOf(i))));
          which.value = String(x.run);
          which.hidden = runs.length < 2;
          which.addEventListener("change", () => context.ask("open", { step: x.step, run: Number(which.value) }));
          list.replaceChildren(
            h("div", { class: "afk-bar" }, h("b", {}, `Step ${x.step}`), which, h("span", { class: "afk-soft", role: "status" }, x.note || `${x.total.toLocaleString("en-US")} ${x.total === 1 ? "trajectory" : "trajectories"} → view.rollout${x.rows.length < x.total ? `; the first ${x.rows.length}` : ""}`)),
            x.rows.length ? h("div", { class: "afk-listbox", tabindex: "0", role: "region", "aria-label": `trajectories of step ${x.step}` },
              h("table", {}, h("thead", {}, h("tr", {}, ...["trajectory", "reward", "stop", "actions", "tokens", "question", "final"].map((t) => h("th", { scope: "col", class: /^(reward|actions|tokens)$/.test(t) ? "afk-num" : null }, t)))),
                h("tbody", {}, ...x.rows.map(([id, question, reward, why, actions, tokens, final]) => h("tr", {},
                  h("td", {}, h("button", { type: "button", class: "afk-link", title: "Show its tokens below", onclick: () => context.ask("chain_tokens", id) }, h("bdi", { title: id }, id.slice(x.prefix ?? 0)))),
                  h("td", { class: "afk-num" }, reward), h("td", {}, why), h("td", { class: "afk-num" }, String(actions)), h("td", { class: "afk-num" }, tokens === null ? "–" : String(tokens)),
                  h("td", { dir: "auto" }, ...marks(question)), h("td", { dir: "auto", class: "afk-code" }, ...marks(final ?? "–"))))))) : "");
        }
        function update() {
          read();
          build();
          head();
          drawMetrics();
          draw();
        }
        update();
        drawList();
        context.lost(head);
        context.on("_list", drawList);
        context.on("_about", update);
        context.on("step", () => {
          readout();
          drawList();
        });
        // Drawn once the size is known, and again whenever it changes.
        const sized = new ResizeObserver(() => draw());
        sized.observe(grid);
        context.end(() => sized.disconnect());
      },
    });
  },
};
