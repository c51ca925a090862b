// Curves of a run as small charts that share one pointer. Ranges and numbers come from Python; here they are only drawn.

/** Pieces of a line: a gap where a number is missing or not finite. */
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

/** At most about 2 points a pixel column, its lowest and its highest: no spike is lost. */
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

/** Index of the step nearest to x, in sorted steps. */
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

/** A number on an axis, with no more digits than tell its neighbours apart. */
export function tick(value, step) {
  const size = Math.abs(value);
  if (size >= 10000) return `${Number((value / 1000).toPrecision(3))}k`.replace("-", "−");
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return (digits > 4 && value !== 0 ? value.toExponential(1) : value.toFixed(digits)).replaceAll("-", "−");
}

const HEIGHT = 108;
const PAD = { left: 44, right: 10, top: 8, bottom: 18 };

export default {
  render({ model, el }) {
    return mount({ model, el }, {
      label: "Training curves",
      build(context) {
        const { root } = context;
        root.classList.add("afk-trainview");
        const title = h("span", { class: "afk-title" });
        const progress = h("span", { class: "afk-progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": "0" }, h("span", {}));
        const where = h("span", { class: "afk-soft afk-num" });
        const clear = h("button", { type: "button", title: "Forget the step (key: Escape)" }, "Clear");
        const note = h("div", { class: "afk-note" });
        const grid = h("div", {
          class: "afk-charts", tabindex: "0", role: "application",
          "aria-label": "Charts by step. Arrow keys go from step to step, Enter picks one, Escape forgets it.",
        });
        const spoken = h("div", { class: "afk-spoken", "aria-live": "polite" });
        const key = h("div", { class: "afk-chartkey afk-soft" },
          s("svg", { width: "22", height: "10", "aria-hidden": "true" }, s("path", { d: "M1 7L11 3L21 6", class: "afk-line" })), "training, a step",
          s("svg", { width: "16", height: "16", "aria-hidden": "true" }, s("path", { d: "M8 1V15", class: "afk-whisker" }), s("circle", { cx: "8", cy: "8", r: "3.4", class: "afk-point" })), "evaluation with its interval");
        root.append(h("div", { class: "afk-bar" }, title, progress, h("span", { class: "afk-grow" }), where, clear), note, grid, key, spoken);

        let steps = new Int32Array(0);
        let cols = {};
        let charts = [];
        let pointed = -1; // index of the step under the pointer or the keys
        let width = 0;

        function read() {
          const buffers = model.get("_buffers");
          steps = typed(buffers.steps, Int32Array);
          cols = Object.fromEntries(Object.entries(buffers.columns ?? {}).map(([k, v]) => [k, column(v)]));
        }
        function head() {
          const { name, last, total, gone, n } = model.get("_about");
          title.textContent = name ? `Run ${name}` : "Run";
          progress.hidden = !total;
          if (total) {
            progress.setAttribute("aria-valuemax", total);
            progress.setAttribute("aria-valuenow", last ?? 0);
            progress.firstChild.style.width = `${(100 * Math.min(total, last ?? 0)) / total}%`;
          }
          note.textContent = gone ? "The run is gone: these are its last numbers." : n ? "" : "No step is recorded yet.";
          note.hidden = !note.textContent;
        }
        function build() {
          const { panels } = model.get("_about");
          charts = panels.map((panel) => {
            const value = h("span", { class: "afk-num afk-now" });
            const svg = s("svg", { height: HEIGHT, role: "img" });
            const box = h("div", { class: "afk-chart" },
              h("div", { class: "afk-charthead" }, h("span", { class: "afk-name" }, panel.label), h("span", { class: "afk-soft" }, panel.unit), value), svg);
            svg.addEventListener("pointermove", (event) => {
              if (!steps.length) return;
              const at = event.clientX - svg.getBoundingClientRect().left;
              point(nearest(steps, unx(at)));
            });
            svg.addEventListener("pointerleave", () => point(-1));
            svg.addEventListener("click", () => pick(pointed));
            return { box, svg, value, key: panel.key };
          });
          grid.replaceChildren(...charts.map((c) => c.box));
        }
        const span = () => [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)];
        const x = (step) => PAD.left + (width - PAD.left - PAD.right) * ((step - span()[0]) / (span()[1] - span()[0]));
        const unx = (at) => span()[0] + ((at - PAD.left) / (width - PAD.left - PAD.right)) * (span()[1] - span()[0]);

        function draw() {
          if (!charts.length) return;
          width = charts[0].svg.clientWidth || charts[0].box.clientWidth - 20;
          if (width < 60) return;
          const { panels } = model.get("_about");
          charts.forEach((chart, k) => {
            const panel = panels[k];
            const { svg } = chart;
            svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
            const y = (v) => PAD.top + (HEIGHT - PAD.top - PAD.bottom) * (1 - (v - panel.lo) / (panel.hi - panel.lo));
            svg.replaceChildren();
            if (!panel.n || !steps.length) {
              svg.append(s("text", { x: width / 2, y: HEIGHT / 2, class: "afk-ticktext", "text-anchor": "middle" }, steps.length ? "not recorded" : "no step yet"));
              svg.setAttribute("aria-label", `${panel.label}: not recorded`);
              return;
            }
            const marks = ticks(panel.lo, panel.hi, 3);
            const gap = marks.length > 1 ? marks[1] - marks[0] : 1;
            for (const v of marks) {
              svg.append(s("line", { x1: PAD.left, x2: width - PAD.right, y1: y(v), y2: y(v), class: v === 0 ? "afk-zero" : "afk-gridline" }),
                s("text", { x: PAD.left - 5, y: y(v) + 3.5, class: "afk-ticktext", "text-anchor": "end" }, tick(v, gap)));
            }
            const [a, b] = [steps[0], steps[steps.length - 1]];
            svg.append(s("text", { x: x(a), y: HEIGHT - 4, class: "afk-ticktext" }, String(a)));
            if (b > a) svg.append(s("text", { x: x(b), y: HEIGHT - 4, class: "afk-ticktext", "text-anchor": "end" }, String(b)));
            for (const run of segments(steps, cols[panel.key])) {
              const points = thin(run, width);
              if (points.length === 1) svg.append(s("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 2.2, class: "afk-dot" }));
              else svg.append(s("polyline", { points: points.map(([p, q]) => `${x(p).toFixed(1)},${y(q).toFixed(1)}`).join(" "), class: "afk-line" }));
            }
            if (panel.points) {
              for (let i = 0; i < steps.length; i++) {
                const value = cols[panel.points].at(i);
                if (value === null) continue;
                const [low, high] = [cols[panel.low].at(i), cols[panel.high].at(i)];
                const at = x(steps[i]);
                if (low !== null && high !== null) svg.append(s("path", { d: `M${at - 3} ${y(high)}H${at + 3}M${at} ${y(high)}V${y(low)}M${at - 3} ${y(low)}H${at + 3}`, class: "afk-whisker" }));
                svg.append(s("circle", { cx: at, cy: y(value), r: 3.2, class: "afk-point" }));
              }
            }
            if (panel.odd) svg.append(s("text", { x: width - PAD.right, y: PAD.top + 4, class: "afk-odd", "text-anchor": "end" }, `${plural(panel.odd, "number")} not finite`));
            chart.hair = s("line", { y1: PAD.top, y2: HEIGHT - PAD.bottom, class: "afk-hair" });
            chart.spot = s("circle", { r: 3.2, class: "afk-dot" });
            chart.y = y;
            svg.append(chart.hair, chart.spot);
            svg.setAttribute("aria-label", `${panel.label} from step ${a} to ${b}`);
          });
          readout();
        }
        /** Numbers in the heads: of the pointed step, else of the picked one, else the last. */
        function readout() {
          const { panels, last, total } = model.get("_about");
          const picked = model.get("step");
          const at = pointed >= 0 && pointed < steps.length ? pointed : picked !== null && picked !== undefined ? steps.indexOf(picked) : -1;
          charts.forEach((chart, k) => {
            const panel = panels[k];
            const col = cols[panel.key];
            let text;
            if (at >= 0) {
              text = number(col?.at(at));
              const ev = panel.points ? cols[panel.points]?.at(at) : null;
              if (ev !== null && ev !== undefined) {
                const [lo, hi] = [cols[panel.low].at(at), cols[panel.high].at(at)];
                text += ` · eval ${number(ev)}${lo !== null && hi !== null ? ` [${number(lo)}, ${number(hi)}]` : ""}`;
              }
            } else {
              let i = (col?.length ?? 0) - 1;
              while (i >= 0 && !col.has(i)) i--;
              text = i >= 0 ? number(col.at(i)) : "–";
            }
            chart.value.textContent = text;
            if (!chart.hair) return;
            chart.hair.style.display = at >= 0 ? "" : "none";
            const v = at >= 0 ? col.at(at) : null;
            chart.spot.style.display = v !== null && Number.isFinite(v) ? "" : "none";
            if (at >= 0) {
              chart.hair.setAttribute("x1", x(steps[at]));
              chart.hair.setAttribute("x2", x(steps[at]));
              if (v !== null && Number.isFinite(v)) {
                chart.spot.setAttribute("cx", x(steps[at]));
                chart.spot.setAttribute("cy", chart.y(v));
              }
            }
          });
          const of = total ? ` of ${total}` : "";
          where.textContent = at >= 0 ? `step ${steps[at]}${picked === steps[at] ? " · view.step" : ""}` : last === null || last === undefined ? "" : `step ${last}${of}`;
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
        }
        function forget() {
          pointed = -1;
          context.put("step", null);
          readout();
        }
        clear.addEventListener("click", forget);
        grid.addEventListener("keydown", (event) => {
          if (!steps.length || event.ctrlKey || event.metaKey || event.altKey) return;
          const picked = model.get("step");
          const at = pointed >= 0 ? pointed : picked !== null && picked !== undefined ? steps.indexOf(picked) : steps.length - 1;
          const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
          if (to !== undefined) point(Math.max(0, Math.min(steps.length - 1, to)));
          else if (event.key === "Enter" || event.key === " ") pick(at);
          else if (event.key === "Escape") forget();
          else return;
          spoken.textContent = `${where.textContent}: ${charts.map((c) => `${c.box.querySelector(".afk-name").textContent} ${c.value.textContent}`).join(", ")}`;
          event.preventDefault();
        });
        grid.addEventListener("blur", () => point(-1));

        read();
        build();
        head();
        context.on("_buffers", read);
        context.on("_about", () => {
          read();
          head();
          draw();
        });
        context.on("step", readout);
        // Drawn when the size is known, and again when it changes.
        const sized = new ResizeObserver(() => draw());
        sized.observe(grid);
        context.end(() => sized.disconnect());
      },
    });
  },
};
