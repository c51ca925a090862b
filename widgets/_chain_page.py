"""Content of a ChainStepper: data for the page, and HTML for the static form."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from agentfly_kit.integrations.html import escape_control_chars
from agentfly_kit.types import text_of

from ._chain_code import result_text
from ._format import count, escape, number, picture, pictures, sendable, tag
from ._tokens import visible

# Maximum number of characters shown per text.
_TEXT = 12_000


def allowed_operations(chain: Any) -> dict[str, bool]:
    """Return a dict with the name of each operation and True if the chain currently allows the operation."""
    open = not chain.closed
    calls, stop, leaf = bool(chain.pending_calls), chain.stop, chain.turn
    complete = leaf.kind in ("action", "forced") and bool(leaf.messages)
    return {
        "sample": open and stop is None and not calls and not chain.user_due,
        "act": open and stop is None and calls,
        "force": open and stop is None and not calls and not chain.user_due,
        "observe": open and complete and stop in (None, "answered", "turn_tokens"),
        "edit": open and leaf.kind == "observation" and bool(leaf.tool_calls),
        "rewind": open and len(chain.turns) > 1,
        "run": open and stop is None,
        "fork": open,
        "finish": open and stop is not None,
    }


def chain_state(chains: list[Any], at: int, doing: str, again: bool, spare: bool) -> dict[str, Any]:
    """Return the data that the page shows.

    Args:
        chains: The chains of the stepper.
        at: Index of the displayed chain.
        doing: The running operation; "" if none is running.
        again: True if the displayed chain ends with an action, or its next action was sampled and then undone.
        spare: True if the scoring of the displayed chain can be undone.
    """
    chain = chains[at]
    done = chain.trajectory
    tokens = sum(len(turn.ids or ()) for turn in chain.turns)
    can = allowed_operations(chain)
    can["again"] = again and (can["sample"] or (can["rewind"] and chain.turn.kind == "action"))
    can["rewind"] = can["rewind"] or spare
    says = "" if done is None else done.explain()
    if done is not None:
        where = "finished"
        if not can["rewind"]:
            says += (
                " Undo is unavailable because the chain held a sandbox when it was scored, or was scored in a cell."
            )
    elif chain.closed:
        where = "closed without a score"
    elif doing:
        where = doing
    elif chain.busy:
        where = "running in a cell"
    elif chain.stop:
        where = f"stopped: {chain.stop}"
    else:
        where = f"waiting for {'its tools' if chain.pending_calls else 'an action'}"
    return {
        "id": sendable(chain.id),
        "task": sendable(chain.task.id),
        "where": where,
        "busy": bool(doing),
        "actions": chain.actions,
        "max_turns": chain.agent.max_turns,
        "tokens": tokens,
        "stop": chain.stop,
        "error": None if chain.error is None else sendable(str(chain.error))[:2000],
        "chains": [sendable(c.id) for c in chains],
        "at": at,
        "can": {name: allowed and not doing for name, allowed in can.items()},
        "turns": [turn_state(turn) for turn in chain.turns],
        "result": None if done is None else {
            "reward": None if done.reward is None else number(float(done.reward)),
            "metrics": [[escape_control_chars(k, 60), number(float(v))] for k, v in done.metrics.items()],
            "says": escape_control_chars(says, 1000),
        },
    }  # fmt: skip


def turn_state(turn: Any) -> dict[str, Any]:
    return {
        "kind": turn.kind,
        "author": escape_control_chars(turn.author, 60),
        "n": None if turn.ids is None else len(turn.ids),
        "sampled": bool(turn.sampled),
        "open": turn.kind == "forced" and not turn.messages,
        "text": escape_control_chars(turn.text, _TEXT),
        "plain": sendable(result_text(turn))[:_TEXT] if turn.kind == "observation" else "",
        "calls": [call_state(call) for call in turn.tool_calls],
        "images": pictures(turn.messages),
        "reward": None if turn.reward is None else number(float(turn.reward)),
        "stop": turn.stop,
        "seconds": float(turn.seconds),
        "logprob": None if not turn.logprobs else number(math.fsum(turn.logprobs)),
    }


def call_state(call: Any) -> dict[str, Any]:
    result = call.result
    return {
        "name": escape_control_chars(call.name or "?", 80),
        "arguments": escape_control_chars(json.dumps(call.arguments, ensure_ascii=False, default=repr), 2000),
        "unreadable": None if call.error is None else escape_control_chars(call.error, 500),
        "ok": None if result is None else bool(result.ok),
        "result": None if result is None else escape_control_chars(result.observation, _TEXT),
        "error": None if result is None or result.error is None else escape_control_chars(str(result.error), 2000),
        "traceback": ""
        if result is None or result.error is None
        else escape_control_chars(result.error.traceback, 6000),
        "seconds": 0.0 if result is None else float(result.seconds),
        "truncated": bool(result is not None and result.truncated),
    }


# --- samples as data ------------------------------------------------------------------------------


def histogram(chain: Any, samples: Any) -> dict[str, Any]:
    """Return the action, the first token and the outcome of each sample, as data for the page."""
    n = len(chain.turns)
    return {
        "after": f"turn {n - 1} ({chain.turn.kind}) of {sendable(chain.id)}",
        "tokens": sum(len(turn.ids or ()) for t in samples for turn in t.turns[n:] if turn.kind == "action"),
        "seconds": samples.seconds,
        "items": [_sample(t, t.turns[n] if len(t.turns) > n else None) for t in samples],
    }


def _sample(t: Any, turn: Any) -> dict[str, Any]:
    first, action = "∅", f"no action: {t.stop}"
    if turn is not None:
        calls = [
            f"{c.name}({json.dumps(c.arguments, ensure_ascii=False, default=repr)})"
            for c in turn.tool_calls
            if not c.error
        ]
        texts = turn.token_texts or (turn.text,)
        first = visible(texts[0], 40)
        answer = text_of(turn.messages[-1]) if turn.messages and turn.stop == "stop" else ""
        action = " ".join(calls) or answer or turn.text
    outcome = None
    if t.reward is not None or t.error is not None:
        reward = "unscored" if t.reward is None else f"reward {number(float(t.reward))}"
        outcome = f"{'' if t.success is None else '✓ ' if t.success else '✕ '}{reward}, {t.stop}"
    return {
        "first": first, "action": escape_control_chars(action, 300), "outcome": outcome, "success": t.success,
    }  # fmt: skip


# --- the static form -----------------------------------------------------------------------------


def page(state: dict[str, Any], samples: dict[str, Any], title: str) -> str:
    head = f" · {state['where']}, {count(state['tokens'], 'token')} (when this was saved)"
    out = [tag("div", tag("b", escape(title)), escape(head), style="margin:2px 0 6px")]
    if state["result"] is not None:
        out.append(tag("div", escape(state["result"]["says"])))
    left = 60_000
    rows = []
    for i, turn in enumerate(state["turns"]):
        text = turn["text"][:3000]
        left -= len(text.encode()) + 300
        if left < 0:
            rows.append(
                f"<tr><td></td><td>{count(len(state['turns']) - i, 'turn')} left out of this static view</td></tr>"
            )
            break
        who = f"{i} {turn['kind']} by {turn['author']}" + ("" if turn["n"] is None else f", {turn['n']} tokens")
        calls = "".join(
            tag(
                "div",
                escape(
                    f"→ {c['name']} {c['arguments'][:500]}"
                    + ("" if c["ok"] is None else " · ok" if c["ok"] else " · failed")
                ),
            )
            for c in turn["calls"]
        )
        shown = "".join(picture(*each) for each in turn["images"])
        left -= len(shown)
        cell = "text-align:left;white-space:pre-wrap;font-family:monospace"
        rows.append(
            f'<tr><td style="text-align:left">{escape(who)}</td>'
            f'<td style="{cell}">{escape(text)}{calls}{shown}</td></tr>'
        )
    out.append(f"<table><tbody>{''.join(rows)}</tbody></table>")
    if samples:
        items = samples["items"]
        out.append(
            tag(
                "div",
                escape(
                    f"{count(len(items), 'sample')} after {samples['after']}, {count(samples['tokens'], 'token')}:"
                ),
                style="margin-top:8px",
            )
        )
        kinds = Counter((item["action"], item["outcome"] or "") for item in items).most_common(20)
        table = "".join(
            f'<tr><td>{n}</td><td style="text-align:left"><code>{escape(action)}</code></td>'
            f"<td>{escape(outcome)}</td></tr>"
            for (action, outcome), n in kinds
        )
        out.append(
            "<table><thead><tr><th>samples</th><th>action</th><th>outcome</th></tr></thead>"
            f"<tbody>{table}</tbody></table>"
        )
    return tag("div", *out)
