"""Python code that reproduces a chain, for a notebook cell."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from agentfly_kit.types import images_of, text_of

# Number of seeds that are tried for each fork to find the fork that sampled an action.
_ATTEMPTS = 300


def _named(thing: Any) -> str | None:
    """Return an expression for the notebook's variable or list element that contains the object, or None."""
    names = {k: v for k, v in vars(sys.modules["__main__"]).items() if not k.startswith("_") and k.isidentifier()}
    for name, value in names.items():
        if value is thing:
            return name
    for name, value in names.items():
        if isinstance(value, list | tuple) and len(value) < 10_000:
            for i, item in enumerate(value):
                if item is thing:
                    return f"{name}[{i}]"
    return None


def code(chain: Any) -> str:
    """Return code for a cell that reproduces the chain."""
    agent, path = chain.agent, list(chain.turns)
    lines: list[str] = []
    name = _named(agent) or "agent"
    origin = chain.origin
    first = 1
    if origin is not None:
        source = _named(origin) or f"next(t for t in rollout if t.id == {origin.id!r})"
        lines.append(f"chain = {name}.chain({source})")
        first = sum(any(turn is t for t in origin.turns) for turn in path)
        if first < len(origin.turns):
            lines.append(f"chain.rewind(to={first - 1})")
    else:
        task = _named(chain.task)
        if task is None:
            t = chain.task
            if images_of(t.messages):
                lines.append(f"task = next(t.task for t in rollout if t.task.id == {t.id!r})")
            else:
                lines.append(f"task = af.Task({t.id!r}, {t.messages!r}, {t.fields!r})")
            task = "task"
        lines.append(f"chain = {name}.chain({task})")
    if any(turn.kind == "action" for turn in path) and not agent.engine.reproducible:
        lines.insert(0, "# this engine does not guarantee the same samples")
    # Each fork has its own seeds, so the first action sampled with a fork's seed shows where the fork was made.
    places = _places(chain)
    at, index = 0, sum(1 for turn in path[:first] if turn.kind in ("action", "forced") and turn.messages)
    for turn in path[first:]:
        if turn.kind == "action":
            seeded = _find_seed(chain, places, at, index, turn.seed)
            if seeded is not None:
                lines += [_fork(place) for place in places[at + 1 : seeded[0] + 1]]
                at, attempt = seeded
                greedy = turn.kept_mass is not None and turn.logprobs is not None and not agent.sampling.greedy
                greedy = greedy and turn.kept_mass == tuple(math.exp(lp) for lp in turn.logprobs)
                given = ["greedy=True"] * greedy + [f"attempt={attempt}"] * (attempt > 0)
                lines.append(f"await chain.sample({', '.join(given)})")
            else:
                lines.append("# sampled with an unknown seed, so its ids are given here, with mask 0")
                lines.append(f"chain.force({list(turn.ids or ())!r}, author={turn.author!r})")
        elif turn.kind == "forced":
            said = _said(chain, turn)
            more = "" if turn.messages else ", end=False"
            more += "" if turn.author == "person" else f", author={turn.author!r}"
            lines.append(f"chain.force({said!r}{more})")
        elif turn.author == "template":  # added automatically when the chat re-renders the history
            continue
        elif turn.kind == "prompt":  # a new row that begins with a compacted context
            more = "" if turn.author == "hook" else f", author={turn.author!r}"
            lines.append(f"chain.compact({list(turn.messages)!r}{more})")
        elif turn.author == "tool":
            lines.append("await chain.act()")
            lines += [f"chain.observe({text_of(m)!r})" for m in turn.messages if m.get("role") == "user"]
        else:
            more = "" if turn.author == "person" else f", author={turn.author!r}"
            lines.append(f"chain.observe({result_text(turn)!r}{more})")
        index += turn.kind in ("action", "forced") and bool(turn.messages)
    lines += [_fork(place) for place in places[at + 1 :]]
    if chain.trajectory is not None:
        lines.append("trajectory = await chain.finish()")
    return "\n".join(lines)


def _places(chain: Any) -> list[str]:
    """Return the fork names of the chain and its ancestors, oldest first, such as "", ".1" and ".1.2".

    The first name is that of the original chain. Forks at the end of the list are omitted if they sample with the same
    seeds as their parents.
    """
    base, _, rest = chain.key.fork.rpartition("~")
    head = base + "~" if base or chain.key.fork.startswith("~") else ""
    parts = rest.split(".")[1:]
    names = [head + "".join(f".{p}" for p in parts[:k]) for k in range(len(parts) + 1)]
    while len(names) > 1 and _seed(chain, names[-1], 0) == _seed(chain, names[-2], 0):
        names.pop()
    return names


def _find_seed(chain: Any, places: list[str], at: int, index: int, seed: int | None) -> tuple[int, int] | None:
    """Find the fork in `places[at:]` that samples with this seed. Return (index in `places`, `attempt`) or None."""
    for i in range(at, len(places)):
        for attempt in range(_ATTEMPTS):
            if seed == _seed(chain, places[i], index, attempt):
                return i, attempt
    return None


def _seed(chain: Any, fork: str, index: int, attempt: int = 0) -> int:
    """Return the seed of action `index` in the chain's ancestor named `fork`."""
    key = chain.seed_key
    if fork != chain.key.fork:
        continued = chain.origin_key is not None and fork.endswith("~")
        key = chain.origin_key if continued else dataclasses.replace(chain.key, fork=fork)
    return int(key.seed(chain.agent.seed, chain.task.id, index, attempt))


def _fork(place: str) -> str:
    number = int(place.rsplit(".", 1)[1])
    return f"chain = await chain.fork({'' if number == 1 else f'number={number}'})"


def _said(chain: Any, turn: Any) -> str | list[int]:
    """Return the text of the turn if it encodes to exactly the turn's token ids, otherwise the token ids."""
    ids, chat = list(turn.ids or ()), chain.agent.chat
    whole = ids[:-1] if turn.messages and ids and ids[-1] == chat.stop_ids[0] else ids
    text: str = chat.text(whole)
    return text if text and list(chat.encode(text)) == whole else ids


def result_text(turn: Any) -> str:
    """Return the text to pass to `observe` for this observation."""
    for call in turn.tool_calls:
        if call.result is not None:
            return str(call.result.observation)
    return "\n".join(text_of(m) for m in turn.messages)
