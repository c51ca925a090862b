"""HTML representations of public objects in notebooks, with inline styles for light and dark themes.

All text is escaped in this module, so that the output of models and tools is never interpreted as HTML.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentfly_kit._display import printable, public_values, short_repr
from agentfly_kit.types import images_of, text_of

if TYPE_CHECKING:
    from agentfly_kit._doctor import Diagnosis
    from agentfly_kit.agent.agent import Agent
    from agentfly_kit.agent.rollout import Rollout, RolloutDiff, Trajectories
    from agentfly_kit.agent.runner import RolloutHandle
    from agentfly_kit.batch.batch import Batch
    from agentfly_kit.chat.drift import Drift
    from agentfly_kit.chat.report import ChatReport
    from agentfly_kit.diagnosis.findings import Findings
    from agentfly_kit.engines.fleet import Fleet
    from agentfly_kit.evaluation import Evaluation
    from agentfly_kit.images import Image
    from agentfly_kit.policy.policy import Policy
    from agentfly_kit.pool.pool import Pool
    from agentfly_kit.ppo.stats import Stats
    from agentfly_kit.rewards import Reward, RewardSet, Score
    from agentfly_kit.samples import Distribution
    from agentfly_kit.sandboxes.sql import SQLResult
    from agentfly_kit.tasks import Tasks
    from agentfly_kit.tools.tool import Tool, ToolSet
    from agentfly_kit.trainer.loop import TrainRun
    from agentfly_kit.trainer.run_dir import Run
    from agentfly_kit.trainer.runs import Runs
    from agentfly_kit.trajectories import Group, Trajectory
    from agentfly_kit.types import Task, ToolCall

# --- parts -----------------------------------------------------------------------------------------

# Styles that JupyterLab applies to tables by default, but other front ends do not.
LEFT = "text-align:left;vertical-align:top;padding:2px 8px"
RIGHT = "text-align:right;vertical-align:top;padding:2px 8px"
TABLE = "<table style='border-collapse:collapse'>"
_SHORT = 32  # maximum number of characters of a cell's text that are kept on one line
CODE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


class Code(str):
    """Text to show in a table cell in a monospace font, with line breaks preserved."""


def escape_control_chars(text: str, limit: int) -> str:
    """Truncate the text to `limit` characters and show non-printable characters as code points."""
    if len(text) > limit:
        kept = re.sub(r"<\|?/?\w*\|?$", "", text[:limit])  # without an incomplete token such as <|im_end|>
        text = f"{kept}… ({len(text):,} characters)"
    return printable(text)


def escape(text: Any, limit: int = 400) -> str:
    return html.escape(escape_control_chars(str(text), limit), quote=True)


def cell(value: Any, limit: int = 400) -> str:
    """Return a table cell. Numbers are right-aligned, text is left-aligned, and None and NaN are shown as a dash."""
    if value is None or (isinstance(value, float) and value != value):
        return f"<td style='{RIGHT}'>–</td>"
    if isinstance(value, bool):
        return f"<td style='{LEFT}'>{'yes' if value else 'no'}</td>"
    if isinstance(value, int):
        return f"<td style='{RIGHT}'>{value:,}</td>"
    if isinstance(value, float):
        return f"<td style='{RIGHT}'>{value:.4g}</td>"
    if isinstance(value, Code):
        # Keep tokens such as <|im_end|> on one line, although CODE allows line breaks inside words.
        text = re.sub(r"&lt;\|?/?\w+\|?&gt;", r"<span style='white-space:nowrap'>\g<0></span>", escape(value, limit))
        return f"<td style='{LEFT}'><code style='{CODE}'>{text}</code></td>"
    width = "white-space:nowrap" if len(str(value)) <= _SHORT else "min-width:16em"
    return f"<td style='{LEFT};{width}'>{escape(value, limit)}</td>"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def heading(text: Any) -> str:
    return f"<div style='font-weight:bold;margin:2px 0 4px'>{escape(text, 600)}</div>"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]], limit: int = 400, max_rows: int = 50) -> str:
    """Return a table whose headings are aligned like their columns. If `head` is empty, there are no headings."""
    given = iter(rows)
    cells = [list(row) for row in itertools.islice(given, max_rows)]
    more = sum(1 for _ in given)
    right = [any(is_number(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    top = "".join(
        f"<th style='{RIGHT if aside else LEFT}'>{escape(name)}</th>" for name, aside in zip(head, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(cell(value, limit) for value in row)}</tr>" for row in cells)
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f"{TABLE}{top}<tbody>{body}</tbody></table>{_more(more)}"


def _more(count: int, what: str = "more") -> str:
    return f"<p>and {count:,} {what}</p>" if count > 0 else ""


def definition_table(title: Any, pairs: Mapping[str, Any], limit: int = 400) -> str:
    """Return a heading and a table with one row per name and value; all values, including numbers, are left-aligned."""
    formatted = {
        k: f"{v:,}" if is_number(v) and isinstance(v, int) else f"{v:.4g}" if is_number(v) else v
        for k, v in pairs.items()
    }
    return heading(title) + table((), formatted.items(), limit)


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"


# --- records ---------------------------------------------------------------------------------------


def task(task: Task) -> str:
    content = table(("role", "content"), ((m["role"], Code(text_of(m))) for m in task.messages), 2000)
    out = heading(f"Task {task.id}") + content + _pictures(images_of(task.messages))
    if task.fields:
        values = {name: Code(_as_text(value)) for name, value in task.fields.items()}
        out += details(f"fields: {', '.join(task.fields)}", table((), values.items()), is_open=True)
    return out


def tasks(tasks: Tasks) -> str:
    fields = tasks.fields[:6]
    rows = [
        (
            task.id,
            split or "",
            text_of(task.messages[-1]),
            *(_as_text(task.fields[name]) if name in task.fields else "" for name in fields),
        )
        for task, split in list(zip(tasks._tasks, tasks._splits, strict=True))[:10]
    ]
    return heading(tasks) + table(("id", "split", "question", *fields), rows, 120) + _more(len(tasks) - 10)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def token_distribution(distribution: Distribution) -> str:
    d = distribution
    rows = (
        (str(i), Code(repr(text)), f"{math.exp(lp):.4f}")
        for i, text, lp in zip(d.ids, d.texts, d.logprobs, strict=True)
    )
    return table(("id", "token", "probability"), rows) + f"<p>entropy {d.entropy:.3f} nats</p>"


def sql_result(result: SQLResult) -> str:
    out = ""
    if result.columns:
        out = heading(f"{len(result.rows):,} rows" + (", truncated" if result.truncated else ""))
        out += table(result.columns[:20], (row[:20] for row in result.rows), 200, max_rows=20)
    if result.error or not result.columns:
        out += f"<pre>{escape(result.error or repr(result), 2000)}</pre>"
    return out


def tool_call(call: ToolCall) -> str:
    result = call.result
    state = "unreadable" if call.error else "not run" if result is None else "ok" if result.ok else "failed"
    state += ", truncated" if result is not None and result.truncated else ""
    content = call.error or ("" if result is None else result.observation)
    arguments = ", ".join(f"{k}={v!r}" for k, v in call.arguments.items())
    row = (call.name or "?", Code(arguments), state, Code(content), None if result is None else result.seconds)
    pictures = "" if result is None else _pictures(result.images)
    return table(("call", "arguments", "", "result", "seconds"), [row], 2000) + pictures + _tracebacks([call])


def _pictures(images: Iterable[Image]) -> str:
    return "".join(image.html for image in itertools.islice(images, 4))


def _tracebacks(calls: Sequence[ToolCall]) -> str:
    failed = [(c.name, c.result.error) for c in calls if c.result is not None and c.result.error is not None]
    return "".join(
        details(f"{name}: {error}", f"<pre>{escape(error.traceback or str(error), 4000)}</pre>")
        for name, error in failed[:5]
    )


_TURN_COLOURS = {"prompt": "#8884", "action": "#2a82", "observation": "#28c2", "forced": "#c822"}


def trajectory(trajectory: Trajectory) -> str:
    several, left, limit = len(trajectory.rows) > 1, f"<th style='{LEFT}'>", 50
    rows = "".join(
        f"<tr><td style='{RIGHT}'>{i}</td>{f'<td style={RIGHT!r}>{turn.row}</td>' if several else ''}"
        f"<td style='{LEFT}'>{turn.kind}</td><td style='{LEFT}'>{escape(turn.author)}</td>"
        f"<td style='{RIGHT}'>{'–' if turn.ids is None else len(turn.ids)}</td>"
        f"<td style='text-align:left;background:{_TURN_COLOURS[turn.kind]}'><code style='white-space:pre-wrap'>"
        f"{escape(turn.text)}</code>{_pictures(images_of(turn.messages))}</td></tr>"
        for i, turn in enumerate(trajectory.turns[:limit])
    )
    more = _more(len(trajectory.turns) - limit, "more turns")
    return (
        f"<p><b>{escape(trajectory.id)}</b>: {escape(trajectory.explain())}</p>"
        f"{TABLE}<thead><tr><th></th>{'<th>row</th>' if several else ''}{left}kind</th>{left}author</th>"
        f"<th>tokens</th>{left}text</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{more}" + _tracebacks(trajectory.tool_calls)
    )


def group(group: Group) -> str:
    rows = ((t.chain, t.reward, t.stop, len(t.actions), t.explain()) for t in group.trajectories[:50])
    head = ("chain", "reward", "stop", "actions", "explanation")
    return heading(group) + table(head, rows) + _more(len(group) - 50)


def trajectories(trajectories: Trajectories) -> str:
    rows = ((t.id, t.reward, t.explain()) for t in trajectories[:8])  # `explain` is slow for long texts
    return table(("chain", "reward", "explanation"), rows) + _more(len(trajectories) - 8)


def rollout(rollout: Rollout) -> str:
    numbers = rollout.summary()
    summary = table(tuple(numbers), [numbers.values()]) if numbers else ""
    return heading(rollout) + summary + details("the first chains", trajectories(rollout.trajectories))


def rollout_diff(diff: RolloutDiff, limit: int = 8) -> str:
    """Return the chains that succeed in only one of two rollouts, up to `limit` for each rollout.

    The two texts of a pair are shown one below the other, because two columns would be too wide for a notebook.
    """

    def show(pair: tuple[Trajectory, Trajectory]) -> str:
        task, first = pair[0].task, diff.first_difference(*pair)
        texts = [Code(t.turns[first].text if first is not None and first < len(t.turns) else "") for t in pair]
        rewards = " → ".join("–" if t.reward is None else f"{t.reward:.4g}" for t in pair)
        where = "no difference" if first is None else f"first difference in turn {first}"
        about = f"{escape(text_of(task.messages[-1]), 200)} (reward {rewards}, {where})"
        title = f"<p style='margin:8px 0 2px'><b>{escape(f'{task.id}/{pair[0].chain}')}</b>: {about}</p>"
        return title + table((), zip(("before", "after"), texts, strict=True), 200)

    lists = "".join(
        details(
            f"{name}: {len(pairs)}" + (f", the first {limit}" if len(pairs) > limit else ""),
            "".join(map(show, pairs[:limit])),
            is_open=True,
        )
        for name, pairs in (("gained", diff.gained), ("lost", diff.lost))
        if pairs
    )
    note = "<p>� replaces bytes that are not a complete UTF-8 character</p>" if "�" in lists else ""
    return heading(diff) + (lists or "<p>no chain changed its outcome</p>") + note


def batch(batch: Batch) -> str:
    from agentfly_kit.batch.batch import drop_counts

    numbers = {
        "rows": len(batch),
        "width": batch.ids.shape[1],
        "tokens": int(batch.lengths.sum()),
        "action tokens": int(batch.mask.sum()),
        "mean reward": float(batch.rewards.mean()),
    }
    dropped = table(("dropped because", "trajectories"), drop_counts(batch.dropped).items()) if batch.dropped else ""
    return heading(batch) + table(tuple(numbers), [numbers.values()]) + dropped


_HEADLINE_STATS = (
    "loss", "approx_kl", "clip_fraction", "entropy", "grad_norm", "ratio_max", "sampler_gap", "reward_mean",
)  # fmt: skip


def stats(stats: Stats) -> str:
    numbers = stats.scalars()
    headline = {name: numbers[name] for name in _HEADLINE_STATS if name in numbers}
    title = f"Stats of a step (updates: {stats.updates}, rows: {stats.rows}, tokens: {stats.tokens:,})"
    whole = details("all numbers", table(("stat", "value"), numbers.items()))
    return heading(title) + table(tuple(headline), [headline.values()]) + whole


def evaluation(evaluation: Evaluation) -> str:
    summary = evaluation.summary()
    return heading(evaluation) + table((), (summary | evaluation.metrics | summary).items())


def drift(drift: Drift) -> str:
    if not drift:
        return f"<p>no drift: re-encoding gives the same {drift.tokens} tokens</p>"

    def tokens(texts: Sequence[str]) -> str:
        first, *others = [f"<code>{escape(repr(text))}</code>" for text in texts] or ["(nothing)"]
        return " ".join([f"<b>&#9654; {first}</b>", *others])

    cells = {
        "before": f"<code>{escape(repr(drift.before))}</code>",
        "the row": tokens(drift.row_tokens),
        "re-encoded": tokens(drift.encoded_tokens),
    }
    rows = "".join(
        f"<tr><td style='{LEFT}'>{name}</td><td style='{LEFT}'>{content}</td></tr>" for name, content in cells.items()
    )
    where = f"at token {drift.index} of {drift.tokens} ({escape(drift.turn)})"
    return f"<p><b>{escape(drift.cause)}</b> {where}: {escape(drift.why)}</p>{TABLE}<tbody>{rows}</tbody></table>"


# --- agents, tools, rewards, runs ------------------------------------------------------------------


def agent(agent: Agent) -> str:
    shown = {
        "engine": repr(agent.engine),
        "chat": repr(agent.chat),
        "tools": Code("\n".join(map(repr, agent.tools)) or "none"),
        "reward": Code("\n".join(map(repr, agent.reward)) if agent.reward else "none: chains stay unscored"),
        "sampling": repr(agent.sampling),
        "pools": Code("\n".join(map(repr, agent.pools)) or "none"),
    }
    names = [f.name for f in dataclasses.fields(agent) if not f.name.startswith("_") and f.name not in shown]
    others = {name: value for name in names if (value := getattr(agent, name)) is not None}
    return definition_table("Agent", shown | {k: getattr(v, "__name__", v) for k, v in others.items()}, 2000)


def rollout_handle(handle: RolloutHandle) -> str:
    progress = handle.snapshot()
    states = ("queued", "waiting", "sampling", "sandbox", "tool", "scoring", "done", "failed", "cancelled")
    counts = {state: n for state in states if (n := progress.count(state))}
    return definition_table(handle, {**counts, "seconds": progress.seconds})


def tool(tool: Tool[..., Any]) -> str:
    """Return the HTML of a tool, listing its visible and hidden parameters."""
    from agentfly_kit.tools.schema import type_name

    parameters = tool.schema["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    rows = [
        (name, Code(type_name(schema)), name in required, schema.get("description", ""))
        for name, schema in properties.items()
    ]
    arguments = table(("argument", "type", "required", "description"), rows) if rows else ""
    sources = {name: injected.source for name, injected in tool._hidden.items()}
    hidden = definition_table("hidden from the model", sources) if sources else ""
    return heading(f"Tool {tool.name}{tool._arguments.signature}") + _paragraph(tool.description) + arguments + hidden


def _paragraph(text: str) -> str:
    return f"<p style='white-space:pre-wrap;margin:2px 0'>{escape(text, 2000)}</p>"


def tool_set(tools: ToolSet) -> str:
    rows = ((tool.name, Code(tool._arguments.signature), tool.description.split("\n")[0]) for tool in tools)
    return table(("tool", "arguments", "description"), rows)


def reward(reward: Reward[..., Any]) -> str:
    sources = {
        name: injected.source.replace("field", "field of the task") for name, injected in reward._hidden.items()
    }
    doc = _paragraph(inspect.getdoc(reward.function) or "")
    return heading(reward) + doc + table(("parameter", "source"), sources.items())


def reward_set(rewards: RewardSet) -> str:
    rows = ((r.name, float(r.weight), r.per, ", ".join(r._hidden)) for r in rewards)
    return table(("reward", "weight", "per", "parameters"), rows)


def reward_trace(trace: Score) -> str:
    rows = [("argument", key, Code(repr(value))) for key, value in trace.arguments.items()]
    rows += [("metric", key, Code(f"{value:g}")) for key, value in trace.metrics.items() if key != trace.name]
    rows += [("extra", key, Code(repr(value))) for key, value in trace.extras.items()]
    rows += [("turn reward", str(turn), Code(f"{value:g}")) for turn, value in trace.turn_rewards.items()]
    failed = f"<pre>{escape(trace.error.traceback or str(trace.error), 4000)}</pre>" if trace.error else ""
    value = "unscored" if trace.reward is None else f"{trace.reward:g}"
    return heading(f"{trace.name}: {value}") + table(("", "name", "value"), rows) + failed


def chat_report(report: ChatReport) -> str:
    values = {
        name.replace("_", " "): Code(value if isinstance(value, str) and "<" not in value else repr(value))
        for name, value in vars(report).items()
    }
    return table((), values.items())


_SHAPE = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "vocabulary": "vocab_size",
    "context length": "max_position_embeddings",
}  # fmt: skip


def policy(policy: Policy) -> str:
    model = policy.model.get_base_model() if policy.has_adapter else policy.model
    config = model.config.get_text_config()
    given = {name: getattr(config, key, None) for name, key in _SHAPE.items()}
    shape = {name: size for name, size in given.items() if isinstance(size, int)}
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    heads = {"ValueHead": "a linear head", "Critic": "a separate critic"}
    value = heads.get(type(policy.value_head).__name__, "none")
    numbers = {"parameters": policy.size, "trainable": trainable, **shape, "value": value, "version": policy.version}
    return definition_table(policy, {**numbers, "device": str(policy.device), "chat": repr(policy.chat)})


def pool(pool: Pool[Any]) -> str:
    s = pool.snapshot()
    rows = [(box.id, box.state, box.owner, box.uses, round(s.time - box.since, 1)) for box in s.sandboxes[:100]]
    out = heading(pool) + table(("sandbox", "state", "leased by", "leases", "seconds in state"), rows)
    if s.waiters:
        out += f"<p>waiting: {escape(', '.join(s.waiters[:20]))}</p>"
    return out + (f"<p>the last start failed: {escape(s.error, 1000)}</p>" if s.error else "")


def fleet(fleet: Fleet) -> str:
    rows = [(m.name, m.state, m.running, len(m.sessions), m.gap, m.reason) for m in fleet.members]
    return heading(fleet) + table(("engine", "state", "running", "chains", "gap in nats", "reason"), rows)


_KEY_METRICS = (
    "step", "success", "reward", "eval_success", "approx_kl", "clip_fraction", "entropy", "grad_norm", "turns",
    "seconds",
)  # fmt: skip


def run(run: Run | TrainRun, limit: int = 6) -> str:
    """Return HTML showing the most important metrics of the last `limit` steps."""
    names = [name for name in _KEY_METRICS if any(name in record for record in run.records)]
    rows = [[record.get(name) for name in names] for record in run.records[-limit:]]
    more = f"<p>the last {limit} of {len(run.records)} steps</p>" if len(run.records) > limit else ""
    return heading(run) + (table(names, rows) if rows else "<p>no steps yet</p>") + more


def runs(runs: Runs) -> str:
    """Return a table with the results and differing settings of runs, and a list of unreadable folders."""
    columns = ["run", *runs.different, *(c for c in runs.frame.columns if c in runs.RESULTS)]
    rows = [
        [row["run"], *(row.get(c) for c in columns[1:])]
        for row in runs.frame.reset_index(names="run").to_dict("records")
    ]
    unreadable = table((), runs.unreadable.items()) if runs.unreadable else ""
    return heading(runs) + (table(columns, rows) if rows else "<p>no runs</p>") + unreadable


def diagnosis(diagnosis: Diagnosis) -> str:
    rows = [(f.mark, f.what, f.state, Code(f.advice)) for f in diagnosis.findings]
    return table(("", "component", "status", "command"), rows)


def findings(findings: Findings) -> str:
    if not findings:
        return heading("nothing was found")
    rows = [(f.effect, f.name, f.sentence, f.remedy, f.widget) for f in findings]
    return table(("effect", "finding", "what was found", "remedy", "evidence"), rows)


_RENDERERS: dict[str, Callable[[Any], str]] = {
    "Agent": agent, "Batch": batch, "ChatReport": chat_report, "Diagnosis": diagnosis, "Drift": drift,
    "Evaluation": evaluation, "Findings": findings, "Fleet": fleet, "Group": group, "Policy": policy, "Pool": pool,
    "Reward": reward, "RewardSet": reward_set, "SQLResult": sql_result, "Score": reward_trace, "Rollout": rollout,
    "RolloutDiff": rollout_diff, "RolloutHandle": rollout_handle, "Run": run, "Runs": runs, "Stats": stats,
    "Task": task, "Tasks": tasks, "Distribution": token_distribution, "Tool": tool, "ToolCall": tool_call,
    "ToolSet": tool_set, "TrainRun": run, "Trajectory": trajectory, "Trajectories": trajectories,
    "Chain": lambda chain: trajectory(chain.snapshot()), "Image": lambda image: image.full_html,
}  # fmt: skip


def to_html(value: object) -> str:
    """Return the HTML of a public object. Instances of a subclass are shown like instances of the base class.

    The class is looked up by name instead of being imported, so that displaying a task does not import torch.
    """
    for cls in type(value).__mro__:
        if cls.__name__ in _RENDERERS:
            with contextlib.suppress(Exception):  # an attribute may be missing; use the generic table below
                return _RENDERERS[cls.__name__](value)
    shown = public_values(value).items()
    return definition_table(
        repr(value), {name: Code(each if isinstance(each, str) else short_repr(each)) for name, each in shown}, 1000
    )
