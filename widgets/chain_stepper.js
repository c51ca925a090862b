// Interactive stepping of one chain. Python determines which operations are available and performs them.

const LETTER = { prompt: "P", action: "A", observation: "O", forced: "F" };
export const KEYS = { s: "sample", a: "again", g: "greedy", r: "act", e: "run", w: "write", u: "undo", k: "fork", f: "finish" };

/** Current purpose of the text box: text for the model ("force"), a result for its action ("observe"), or null. */
export function composer(can) {
  if (can.force) return "force";
  return can.observe ? "observe" : null;
}

/** Samples grouped by "action" or "first" (the first token), the most frequent first, with the outcomes of each group. */
export function grouped(items, by) {
  const groups = new Map();
  items.forEach((item, i) => {
    const group = groups.get(item[by]) ?? { key: item[by], first: i, n: 0, good: 0, scored: 0 };
    groups.set(item[by], group);
    group.n += 1;
    group.scored += item.success !== null;
    group.good += item.success === true;
  });
  return [...groups.values()].sort((a, b) => b.n - a.n || a.first - b.first);
}

export default {
  initialize: keepPictures,
  render({ model, el, host }) {
    return mount({ model, el }, {
      label: "Chain stepper",
      build(context) {
        const { root } = context;
        root.classList.add("afk-stepper");
        const button = (text, key, title, act, name) =>
          h("button", { type: "button", title, "aria-keyshortcuts": key || null, "data-do": name ?? null, onclick: act }, text, key ? h("kbd", { "aria-hidden": "true" }, key) : "");

        const title = h("bdi", { class: "afk-title" });
        const status = h("span", { class: "afk-soft afk-num", role: "status" });
        const tabs = h("span", { class: "afk-tabs", role: "group", "aria-label": "Chains" });
        const codeButton = button("As code", "", "Python code that repeats these steps", () => context.ask("code"));
        const tokensButton = button("Tokens", "", "Show the tokens with all their values below", () => context.ask("tokens"));
        const below = belowBox(context, model, host, "Tokens of the chain at the time when this view was opened", () => tokensButton.focus());
        const result = h("div", { class: "afk-result" });
        const turns = h("div", { class: "afk-turns", tabindex: "0", role: "log", "aria-label": "Turns of the chain" });
        const bars = h("div", { class: "afk-bars", role: "group", "aria-label": "Next token, most probable first" });
        const barsTitle = h("div", { class: "afk-barstitle afk-num" });
        const toggle = h("input", { type: "checkbox" });
        const side = h("div", { class: "afk-side" }, h("div", { class: "afk-sidehead" }, h("label", {}, toggle, "next token"), barsTitle), bars);

        const act = {
          sample: button("Sample", "s", "Sample one action. Sampling again at the same turn draws another sample", () => context.ask("sample", false), "sample"),
          again: button("Another sample", "a", "Replace the last action with another sample", () => context.ask("again"), "again"),
          greedy: button("Greedy", "g", "Take the most probable token at each position", () => context.ask("sample", true), "sample"),
          act: button("Run the tools", "r", "Run the tool calls of the last action", () => context.ask("act"), "act"),
          run: button("Run to the end", "e", "Sample actions and run their tools until the chain ends", () => context.ask("run"), "run"),
          undo: button("Undo", "u", "Go back one turn or, after scoring, undo the scoring", () => context.ask("rewind", null), "rewind"),
          fork: button("Fork", "k", "Continue from here in a second chain", () => context.ask("fork"), "fork"),
          finish: button("Score", "f", "Score the ended chain and release its sandbox", () => context.ask("finish"), "finish"),
          cancel: button("Cancel", "Esc", "Cancel the running operation", () => context.ask("cancel"), "cancel"),
        };
        const howMany = h("input", { type: "number", min: "1", max: "1000", value: "16", "aria-label": "Number of samples", class: "afk-samplecount" });
        const toEnd = h("input", { type: "checkbox" });
        const drawMany = button("Draw samples", "", "Draw this many independent samples of the next action; the chain does not change",
          () => context.ask("samples", { n: Number(howMany.value) || 0, to_end: toEnd.checked }), "samples");
        // The buttons come first and are disabled rather than hidden, so that they never move.
        const bar = h("div", { class: "afk-tools", role: "toolbar", "aria-label": "Steps" },
          h("div", { class: "afk-steps" }, act.sample, act.again, act.greedy, act.act, act.run, act.undo, act.fork, act.finish, act.cancel),
          h("div", { class: "afk-steps" }, howMany, drawMany, h("label", {}, toEnd, "run each to its end and score it")));
        const samples = h("div", { class: "afk-samples", role: "region", "aria-label": "Samples of the next action", hidden: true });

        const words = h("textarea", { rows: 2, spellcheck: "false" });
        const wordsLabel = h("span", {});
        const write = button("", "", "Same as Ctrl+Enter in the text box", () => send(true));
        const leave = button("Write and let the policy continue", "", "The text is the beginning of the action; the policy writes the rest", () => send(false));
        const again = button("Keep the result", "", "Stop editing", () => { editing = false; words.value = ""; draw(); });
        const box = h("div", { class: "afk-composer" }, h("label", { class: "afk-block" }, wordsLabel, words), h("div", { class: "afk-row2" }, write, leave, again));
        const codeHolder = h("div", {});
        root.prepend(bar);
        root.append(h("div", { class: "afk-bar" }, title, status, context.waiting, h("span", { class: "afk-grow" }), tabs, tokensButton, codeButton), result,
          h("div", { class: "afk-main" }, turns, side), box, samples, codeHolder, below);

        let editing = false; // true while the text box holds a replacement for the results of the last calls
        let mode = null;
        function send(end) {
          const text = words.value;
          if (editing) context.ask("edit", text);
          else if (mode === "force") context.ask("force", { text, end });
          else if (mode === "observe") context.ask("observe", text);
          else return;
          editing = false;
          words.value = "";
        }
        words.addEventListener("keydown", (event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            send(true);
          } else if (event.key === "Escape") turns.focus();
        });

        // --- turns ---
        const drawn = []; // [JSON of the turn's state, element]: turns never change, so each is rendered once
        function call(c) {
          const line = h("div", { class: "afk-call" }, h("span", { class: "afk-callhead" }, h("b", { dir: "auto" }, c.name), " ", h("code", { dir: "auto" }, c.arguments)));
          if (c.unreadable !== null) line.append(h("div", { class: "afk-bad" }, `✕ could not be read: ${c.unreadable}`));
          if (c.ok !== null) {
            line.append(h("div", { class: c.ok ? "" : "afk-bad" }, c.ok ? "✓ " : "✕ failed: ", h("code", { class: "afk-said", dir: "auto" }, c.result),
              h("span", { class: "afk-soft afk-num" }, ` · ${brief(c.seconds)}${c.truncated ? ", truncated" : ""}`)));
          }
          if (c.error !== null) {
            line.append(h("details", {}, h("summary", {}, c.error), h("pre", {}, c.traceback || "no traceback")));
          }
          return line;
        }
        function turn(t, i) {
          const facts = [`by ${t.author}`];
          if (t.n !== null) facts.push(`${plural(t.n, "token")}, ${t.sampled ? "mask 1" : "mask 0"}`);
          if (t.logprob !== null) facts.push(`logprob ${t.logprob}`);
          if (t.reward !== null) facts.push(`reward ${t.reward}`);
          if (t.seconds > 0) facts.push(brief(t.seconds));
          if (t.stop && t.stop !== "stop") facts.push(`ended by ${t.stop}`);
          if (t.open) facts.push("unfinished: the policy continues");
          const back = h("button", { type: "button", class: "afk-small", title: "Rewind to the end of this turn", "aria-label": `Go back to turn ${i}`, onclick: () => context.ask("rewind", i) }, "↶ rewind");
          const edit = t.kind === "observation" && t.calls.length
            ? h("button", { type: "button", class: "afk-small afk-edit", title: "Replace the result", "aria-label": `Edit the result of turn ${i}`, onclick: () => startEdit(t) }, "Edit") : null;
          return h("div", { class: `afk-turn2 afk-${LETTER[t.kind] ? t.kind : "prompt"}` },
            h("div", { class: "afk-turnhead" }, h("span", { class: "afk-badge", "aria-hidden": "true" }, LETTER[t.kind] ?? "?"), h("b", {}, `${i} ${t.kind}`),
              h("span", { class: "afk-soft afk-num" }, facts.join(" · ")), h("span", { class: "afk-grow" }), edit, back),
            // Tool results are shown per call; the templated text that the model reads opens on a click.
            ...(t.kind === "observation" && t.calls.length
              ? [...t.calls.map(call), h("details", { class: "afk-told" }, h("summary", {}, "text that the model reads"), h("div", { class: "afk-text", dir: "auto" }, t.text))]
              : [h("div", { class: "afk-text", dir: "auto" }, t.text), ...t.calls.map(call)]), ...pictures(t.images));
        }
        function startEdit(t) {
          editing = true;
          words.value = t.plain;
          draw();
          words.focus();
        }
        function drawTurns(state) {
          const near = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
          const before = drawn.length;
          state.turns.forEach((t, i) => {
            const key = JSON.stringify(t);
            if (drawn[i]?.[0] === key) return;
            const node = turn(t, i);
            if (drawn[i]) drawn[i][1].replaceWith(node);
            else turns.append(node);
            drawn[i] = [key, node];
          });
          for (const [, node] of drawn.splice(state.turns.length)) node.remove();
          drawn.forEach(([, node], i) => {
            const last = i === drawn.length - 1;
            node.querySelector(":scope > .afk-turnhead > button:last-child").hidden = last || !state.can.rewind;
            const edit = node.querySelector(".afk-edit");
            if (edit) edit.hidden = !last || !state.can.edit;
          });
          if (near || drawn.length > before) turns.scrollTop = turns.scrollHeight;
        }

        // --- next token ---
        function drawBars() {
          const d = model.get("_distribution") ?? {};
          toggle.checked = model.get("top") > 0;
          const held = bars.contains(document.activeElement);
          bars.replaceChildren();
          barsTitle.textContent = d.entropy !== undefined ? `entropy ${d.entropy} nats` : "";
          if (d.why) bars.append(h("div", { class: "afk-soft" }, d.why));
          else if (!d.ids) bars.append(h("div", { class: "afk-soft" }, toggle.checked ? "The chain does not expect an action." : "Tick the box to request probabilities."));
          else {
            d.ids.forEach((id, i) => {
              const fill = h("span", { class: "afk-fill", "aria-hidden": "true" });
              fill.style.width = `${100 * d.probabilities[i]}%`;
              bars.append(h("button", {
                type: "button", class: "afk-next", title: `Write token ${id}${d.stops[i] ? ", which ends the action" : " and let the policy continue"}`,
                onclick: () => context.ask("force", { ids: [id], end: d.stops[i] }),
              }, fill, h("code", {}, h("bdi", {}, d.texts[i])), h("span", { class: "afk-num" }, percent(d.probabilities[i]))));
            });
          }
          if (held) turns.focus();
        }
        toggle.addEventListener("change", () => context.put("top", toggle.checked ? 20 : 0));

        // --- samples ---
        let by = "action";
        function share(n, total, tone) {
          const fill = h("span", { class: `afk-share ${tone}`, "aria-hidden": "true" });
          fill.style.width = `${(100 * n) / total}%`;
          return h("span", { class: "afk-track" }, fill);
        }
        function drawSamples() {
          const drawn = model.get("_samples") ?? {};
          samples.hidden = !drawn.items;
          samples.replaceChildren();
          if (!drawn.items) return;
          const total = drawn.items.length;
          const select = h("select", { "aria-label": "Group by" }, h("option", { value: "action" }, "by action"), h("option", { value: "first" }, "by first token"));
          select.value = by;
          select.addEventListener("change", () => {
            by = select.value;
            drawSamples();
            samples.querySelector("select").focus();
          });
          const groups = grouped(drawn.items, by);
          samples.append(h("div", { class: "afk-bar" }, h("b", { class: "afk-num" }, `${plural(total, "sample")} after `, h("bdi", {}, drawn.after)),
            h("span", { class: "afk-soft afk-num" }, `${groups.length} distinct · cost ${plural(drawn.tokens, "sampled token")}, ${brief(drawn.seconds)}`), select,
            h("span", { class: "afk-grow" }), h("button", { type: "button", class: "afk-small", onclick: () => { context.ask("drop_samples"); drawMany.focus(); } }, "Close")));
          const list = h("div", { class: "afk-hist", role: "list" });
          for (const group of groups) {
            list.append(h("div", { class: "afk-histrow", role: "listitem" }, h("b", { class: "afk-num" }, String(group.n)), share(group.n, total, ""),
              h("code", { dir: "auto" }, group.key), h("span", { class: "afk-soft afk-num" }, group.scored ? `✓ ${group.good} of ${group.scored}` : ""),
              h("button", { type: "button", class: "afk-small", "aria-label": `Open as a fork: ${group.key}`, title: "Open the first of these samples as a fork", onclick: () => context.ask("open_sample", group.first) }, "Open as fork")));
          }
          samples.append(list);
          const ended = drawn.items.filter((item) => item.outcome !== null);
          if (ended.length) {
            const outcomes = h("div", { class: "afk-hist", role: "list", "aria-label": "Outcomes" });
            for (const group of grouped(ended, "outcome")) {
              outcomes.append(h("div", { class: "afk-histrow", role: "listitem" }, h("b", { class: "afk-num" }, String(group.n)),
                share(group.n, total, group.good ? "afk-won" : "afk-lost"), h("span", {}, group.key)));
            }
            samples.append(h("div", { class: "afk-sub" }, h("b", {}, "outcomes")), outcomes);
          }
        }

        // --- rendering ---
        const put = (node, text) => {
          if (node.textContent !== text) node.textContent = text;
        };
        function draw() {
          const state = model.get("_state");
          if (!state?.can) return;
          const { can } = state;
          put(title, state.id);
          put(status, `action ${state.actions} of ${state.max_turns} · ${plural(state.tokens, "token")} · ${state.where}`);
          root.classList.toggle("afk-busy", state.busy);
          const many = state.chains.length > 1;
          tabs.hidden = !many;
          if (many) {
            tabs.replaceChildren(...state.chains.map((id, i) =>
              h("button", { type: "button", "aria-pressed": String(i === state.at), title: id, onclick: () => context.ask("switch", i) }, i === 0 ? "first" : `fork ${i}`)));
          }
          act.sample.disabled = act.greedy.disabled = drawMany.disabled = !can.sample;
          act.again.disabled = !can.again;
          act.run.disabled = !can.run;
          act.act.disabled = !can.act;
          act.undo.disabled = !can.rewind;
          act.fork.disabled = !can.fork;
          act.finish.disabled = !can.finish;
          act.cancel.disabled = !state.busy;
          if (editing && !can.edit) editing = false;
          mode = composer(can);
          const use = editing ? "edit" : mode;
          const pending = can.act;
          put(wordsLabel, { force: "Write an action for the model (mask 0)", edit: "Replacement for the result above", observe: pending ? "Or write the result of the calls" : "Reply as the user and continue" }[use] ?? "Nothing can be written now");
          put(write, { force: "Write it", edit: "Replace the result", observe: pending ? "Use as result" : "Answer" }[use] ?? "Write it");
          words.disabled = write.disabled = use === null;
          leave.disabled = use !== "force";
          again.disabled = use !== "edit";
          result.replaceChildren();
          result.hidden = state.result === null && state.error === null;
          if (state.result) {
            result.append(h("b", { class: "afk-num" }, state.result.reward === null ? "unscored" : `reward ${state.result.reward}`),
              h("span", { class: "afk-num" }, state.result.metrics.map(([k, v]) => `${k} ${v}`).join(" · ")), h("span", { class: "afk-soft", dir: "auto" }, state.result.says));
          }
          if (state.error) result.append(h("span", { class: "afk-bad" }, `✕ ${state.error}`));
          drawTurns(state);
        }
        let shown = model.get("_code")?.n ?? 0;
        context.on("_code", () => {
          const { n, text } = model.get("_code") ?? {};
          if (!n) return;
          if (n === shown) codeHolder.firstChild?.update(text);
          else codeHolder.replaceChildren(codeBox(text, () => { context.ask("code", false); codeButton.focus(); }));
          shown = n;
        });

        // --- keys: letter keys act like the buttons, except in text fields ---
        root.addEventListener("keydown", (event) => {
          if (event.ctrlKey || event.metaKey || event.altKey || /^(TEXTAREA|INPUT|SELECT)$/.test(event.target.tagName)) return;
          if (event.key === "Escape") {
            act.cancel.click();
            return;
          }
          const name = KEYS[event.key];
          if (!name) return;
          event.preventDefault();
          if (name === "write") words.focus();
          else act[name].click();
        });
        context.on("_state", draw);
        context.on("_samples", drawSamples);
        context.on("_distribution", drawBars);
        context.on("top", drawBars);
        draw();
        drawBars();
        drawSamples();
        requestAnimationFrame(() => { turns.scrollTop = turns.scrollHeight; }); // its height is known only now
      },
    });
  },
};
