// Scores of saved trajectories under a reward that is being edited. All numbers are computed in Python.

/** Rows with one kind of change, all changed rows, or all rows. */
export function chosen(rows, filter) {
  if (filter === "all") return rows;
  return rows.filter((row) => (filter === "changed" ? row[5] !== "same" : row[5] === filter));
}

/** Width of a bar in percent of the largest count. */
export function widths(bars) {
  const most = Math.max(1, ...bars.flatMap(([, a, b]) => [a, b]));
  return bars.map(([, a, b]) => [(100 * a) / most, (100 * b) / most]);
}

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: "Score saved trajectories again",
      build(context) {
        const { root } = context;
        root.classList.add("afk-rewardform");
        const title = h("span", { class: "afk-title" });
        const say = h("span", { class: "afk-soft afk-num", role: "status" });
        const again = h("button", { type: "button" }, "Score again");
        const cancel = h("button", { type: "button" }, "Cancel");
        const numbers = h("div", { class: "afk-scores afk-num" });
        const chart = h("table", { class: "afk-tally afk-num" });
        const errors = h("div", {});
        const filter = h("select", { "aria-label": "Trajectories shown" });
        const table = h("table", { class: "afk-flips" });
        const scroll = h("div", { class: "afk-flipbox", tabindex: "0", role: "region", "aria-label": "Trajectories with recorded and new rewards" }, table);
        const detail = h("div", { class: "afk-card", role: "region", "aria-label": "Selected trajectory", "aria-live": "polite" });
        const source = h("pre", { class: "afk-code", tabindex: "0" });
        root.append(
          h("div", { class: "afk-bar" }, title, say, h("span", { class: "afk-grow" }), again, cancel),
          numbers, chart, errors,
          h("div", { class: "afk-bar afk-foot" }, h("label", {}, "Show ", filter), h("span", { class: "afk-soft" }, "Run the cell of the reward again to update the scores.")),
          scroll, detail, chainBar(context, model, host, scroll), h("details", { class: "afk-about" }, h("summary", {}, "source of the reward"), source));
        let drawnFilter = "";

        function draw() {
          const x = model.get("_about");
          if (!x.old) return;
          title.textContent = x.name;
          source.textContent = x.source;
          const pair = (name, key) => h("span", { title: key === "success" ? x.hint : null }, h("span", { class: "afk-soft" }, name), " ", h("b", {}, x.old[key]), x.scored ? " → " : null, x.scored ? h("b", { class: "afk-now2" }, x.new[key]) : null,
            x.scored && x.last[key] !== undefined && x.last[key] !== x.new[key] ? h("span", { class: "afk-soft" }, ` (previously ${x.last[key]})`) : null);
          numbers.replaceChildren(h("span", { class: "afk-soft" }, `${x.n.toLocaleString("en-US")} ${x.n === 1 ? "trajectory" : "trajectories"}`), pair("mean reward", "mean"), pair("success", "success"), pair("unscored", "unscored"));
          const sizes = widths(x.bars);
          chart.replaceChildren(
            h("caption", { class: "afk-spoken" }, "Histogram of recorded and new rewards"),
            h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "reward"), h("th", { scope: "col" }, h("i", { class: "afk-was", "aria-hidden": "true" }), " recorded"), h("th", { scope: "col" }, h("i", { class: "afk-isnow", "aria-hidden": "true" }), " now"))),
            h("tbody", {}, ...x.bars.map(([label, a, b], i) => {
              const cell = (n, share, name) => {
                const bar = h("i", { class: name, "aria-hidden": "true" });
                bar.style.width = `${share.toFixed(1)}%`;
                return h("td", {}, h("span", { class: "afk-barbox" }, bar), h("span", { class: "afk-many" }, n.toLocaleString("en-US")));
              };
              return h("tr", {}, h("th", { scope: "row" }, label), cell(a, sizes[i][0], "afk-was"), x.scored ? cell(b, sizes[i][1], "afk-isnow") : h("td", { class: "afk-soft" }, "–"));
            })));
          errors.replaceChildren(...x.errors.map(([text, n]) => h("div", { class: "afk-notice" }, `${plural(n, "chain")} unscored: ${text}`)));
          const was = filter.value || "changed";
          const changed = x.tally.reduce((sum, [k, , n]) => sum + (k === "same" ? 0 : n), 0);
          filter.replaceChildren(h("option", { value: "changed" }, `changed (${changed})`), ...x.tally.map(([k, words, n]) => h("option", { value: k }, `${words} (${n})`)), h("option", { value: "all" }, `all (${x.n})`));
          filter.value = was;
          drawRows();
        }
        function drawRows() {
          const x = model.get("_about");
          const words = Object.fromEntries(x.tally.map(([k, text]) => [k, text]));
          const rows = chosen(x.rows, filter.value);
          const total = filter.value === "all" ? x.n : x.tally.reduce((sum, [k, , n]) => sum + ((filter.value === "changed" ? k !== "same" : k === filter.value) ? n : 0), 0);
          const picked = model.get("_detail")?.id;
          table.replaceChildren(
            h("thead", {}, h("tr", {}, ...["change", "reward", "trajectory", "question", "final"].map((t) => h("th", { scope: "col" }, t)))),
            h("tbody", {}, ...rows.map(([id, label, task, a, b, k, final]) => h("tr", { class: id === picked ? "afk-on" : null },
              h("td", { class: `afk-k-${k}` }, words[k]), h("td", { class: "afk-num" }, `${a} → ${b}`),
              h("td", {}, h("button", { type: "button", class: "afk-link", title: "Show details", onclick: () => context.ask("look", id) }, h("bdi", { title: id }, label.slice(x.prefix ?? 0)))),
              h("td", { dir: "auto" }, ...marks(task)), h("td", { dir: "auto", class: "afk-code" }, ...marks(final))))),
            rows.length < total || !rows.length ? h("caption", { class: "afk-soft" }, !x.scored ? (model.get("busy") ? "The scores are being computed." : "Not scored yet.") : rows.length ? `the first ${rows.length} of ${total}; form.to_frame() has all` : filter.value === "changed" ? "Nothing changed." : "None.") : "");
          drawnFilter = filter.value;
        }
        function drawDetail() {
          const x = model.get("_detail");
          detail.hidden = !x?.id;
          if (detail.hidden) return;
          const line = (name, text, mono) => h("div", { class: "afk-pair" }, h("span", { class: "afk-soft" }, name), h("span", { dir: "auto", class: mono ? "afk-code" : null }, ...marks(text)));
          detail.replaceChildren(h("div", { class: "afk-cardhead" }, h("b", {}, h("bdi", {}, x.id)), h("span", { class: "afk-soft" }, "→ form.picked")),
            line("question", x.task), x.fields ? line("task", x.fields, true) : "", line("final", x.final ?? "(no answer)", true), line("recorded", x.old), x.new ? line("now", x.new) : "",
            x.traceback ? h("details", {}, h("summary", {}, "traceback"), h("pre", { class: "afk-code", tabindex: "0" }, x.traceback)) : "");
          drawRows();
        }
        function drawBusy() {
          const busy = model.get("busy");
          const [done, total] = model.get("_progress");
          const { seconds, scored } = model.get("_about");
          again.hidden = busy;
          cancel.hidden = !busy;
          say.textContent = busy ? `scoring ${done ? `${done} of ${plural(total, "group")}` : "…"}` : scored && seconds !== null ? `scored in ${brief(seconds)}` : "";
        }
        filter.addEventListener("change", () => {
          if (filter.value !== drawnFilter) drawRows();
        });
        again.addEventListener("click", () => context.ask("score"));
        cancel.addEventListener("click", () => context.ask("cancel"));
        context.on("_about", () => {
          draw();
          drawBusy();
        });
        context.on("busy", () => {
          drawBusy();
          drawRows();
        });
        context.on("_progress", drawBusy);
        context.on("_detail", drawDetail);
        draw();
        drawBusy();
        drawDetail();
      },
    });
  },
};
