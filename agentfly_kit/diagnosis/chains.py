"""Checks of finished chains: their tasks, prompts, tools, rewards and sampled tokens.

A check takes the evidence and returns the sentence, number and effect of a finding, or None.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from agentfly_kit.diagnosis.evidence import (
    OTHER_MODEL,
    Evidence,
    Result,
    centered,
    contains,
    correlation,
    is_numeric_answer,
    most_common,
    states,
    tool_names,
    unrelated,
)
from agentfly_kit.trajectories import UNSCORED_STOPS, Trajectory
from agentfly_kit.types import grouped, text_of

# Beginnings of tool calls in common formats. A text that contains one of them is unlikely to be an answer.
_CALL = re.compile(r'(?m)<tool_call|<function|<\|tool|<\|python_tag|\[TOOL_CALLS\]|"arguments"\s*:|^Action:')
# Mean entropy in nats per token below which equal rewards are attributed to it. Trials that failed had 0.02 to 0.05.
_CERTAIN = 0.06
# Minimum length of actions that are checked for repetition, and length of the n-grams that are counted, in tokens.
_LONG_ACTION, _NGRAM = 24, 4


def unscored(e: Evidence) -> Result:
    count, total = len(e.chains) - len(e.scored), len(e.chains)
    failed = any(t.error is not None or t.stop in UNSCORED_STOPS for t in e.chains)
    # Distillation needs no reward, so an update on chains without any reward or failure is intended.
    if count <= 0.05 * total or (count == total and not failed and (e.numbers or e.batch is not None)):
        return None
    share = count / total
    return f"{count} of {total} chains have no reward: {e.rollout.unscored_reason}.", share, 0.5 + share


def leaked_answer(e: Evidence) -> Result:
    if len(tasks := e.references) < 2:
        return None
    answers, prompts = tuple(tasks.values()), ["\n".join(min(e.starts[task])) for task in tasks]
    found = sum(map(contains, prompts, answers))
    # Short answers such as "yes" may occur in a prompt by chance. Subtract the matches with answers of other tasks.
    share = (found - sum(map(contains, prompts, (*answers[1:], answers[0])))) / len(tasks)
    text = f"The answer is in the prompt of {found} of {len(tasks)} tasks."
    return (text, share, 0.3 + share) if share >= 0.3 else None


def other_tokenizer(e: Evidence) -> Result:
    vocabularies = len({t.vocabulary for t in e.chains} - {None})
    gap = e.numbers.get("sampler_gap", 0.0)
    if vocabularies < 2 and e.foreign <= 0.05 * len(e.chains) and not gap > OTHER_MODEL:
        return None
    text = f"The chains have {vocabularies} vocabularies, {e.foreign} of {len(e.chains)} contain unknown ids"
    return f"{text}, and engine and policy disagree by up to {gap:.2g} nats on the same token.", gap, 1.0


def unknown_words(e: Evidence) -> Result:
    unknown = [word for word, is_split in e.prompt_words if is_split]
    if len(unknown) <= 0.3 * len(e.prompt_words):
        return None
    share = len(unknown) / len(e.prompt_words)
    text = f"The model does not know {len(unknown)} of {len(e.prompt_words)} words in the prompts"
    effect = 0.3 if any(t.success for t in e.chains) else 0.5 + share / 2
    return f"{text}, most often {most_common(unknown)}.", share, effect


def numeric_reference(e: Evidence) -> Result:
    right = [t for t, final, _ in e.answered if is_numeric_answer(final, t.task)]
    if len(right) < 2 or any(t.reward is None or t.reward > e.rewards.min() for t in right):
        return None
    text = (
        f"{len(right)} right answers earn no more than wrong ones; the reference is a number, but the answer is text."
    )
    return text, len(right) / len(e.chains), 1.0


def different_starts(e: Evidence) -> Result:
    several = [task for task, count in Counter(t.task.id for t in e.chains).items() if count > 1]
    results = {task for (task, calls), seen in e.first_results.items() if len(calls) == 1 < len(seen)}
    differ = sum(task in results or len(e.starts[task]) > 1 for task in several)
    if differ <= 0.3 * len(several):
        return None
    text = (
        f"In {differ} of {len(several)} tasks, the chains start with different texts or get different first results."
    )
    return text, differ / len(several), 0.5 + differ / len(several)


def same_start(e: Evidence) -> Result:
    by_calls = grouped(e.first_results, lambda key: key[1])
    shared = {calls: [e.first_results[key] for key in keys] for calls, keys in by_calls.items() if len(keys) > 1}
    texts = set[tuple[str, ...]]().union(*e.starts.values())
    if len(e.starts) < 2 or len(texts) > 1 or any(len(set.union(*seen)) > 1 for seen in shared.values()):
        return None
    # Without text from the environment or several results to compare, the tasks may differ in ways that chains do not
    # show.
    if sum(len(calls) == 1 for calls in shared) < 3 and min(texts)[-1:] == (text_of(e.chains[0].task.messages[-1]),):
        return None
    return f"All {len(e.starts)} tasks start with the same text, and equal calls get equal results.", 1.0, 1.0


def reversed_reward(e: Evidence) -> Result:
    r = correlation(e.within_groups(e.rewards), e.within_groups(e.right))
    text = f"Right answers earn less than wrong ones (correlation {r:+.2f} within groups)."
    return (text, r, 1.0) if r < -0.5 and len(e.scored) >= 8 and not length_reward(e) else None


def lenient_reward(e: Evidence) -> Result:
    high = [unrelated(*pair) for t, *pair in e.answered if t.reward is not None and t.reward > e.rewards.max() / 2]
    wrong, total = sum(high), len(high)
    # Equal rewards are another finding. If no answer resembles its reference, the field contains something else.
    equal = all(len({t.reward for t in group}) <= 1 for group in e.groups)
    if equal or wrong < 3 or not 0.1 < wrong / total < 0.95:
        return None
    text = f"{wrong} of {total} answers with a high reward share no word with the reference answer."
    return text, wrong / total, 0.5 + wrong / total


def ignored_results(e: Evidence) -> Result:
    told = [
        states(final, answer)
        for t, final, answer in e.answered
        if any(call.result is not None and contains(call.result.observation, answer) for call in t.tool_calls)
    ]
    ignored, total = len(told) - sum(told), len(told)
    if total < 4 or ignored <= 0.5 * total:
        return None
    text = f"In {ignored} of {total} chains, a tool returned the reference answer, but the final answer is different."
    return text, ignored / total, 0.3 + ignored / total


def gibberish(e: Evidence) -> Result:
    if not e.uncertainty > 1.5:
        return None
    text = f"The sampled tokens have a mean entropy of {e.uncertainty:.2f} nats, so the texts are nearly random."
    return text, e.uncertainty, e.uncertainty / 3


def failing_tools(e: Evidence) -> Result:
    failed = [str(result.error) for result in e.results if result.error is not None]
    if not failed or len(failed) <= 0.05 * len(e.results):
        return None
    share = len(failed) / len(e.results)
    text = f"{len(failed)} of {len(e.results)} tool calls raised an unexpected exception: {most_common(failed)}."
    return text, share, 0.5 + share


def unparsed_calls(e: Evidence) -> Result:
    problems: list[str] = []
    total = 0
    for t in e.chains:
        known = tool_names(t)
        for turn in t.actions:
            total += len(turn.tool_calls)
            if turn.stop == "length":  # the token limit may have cut off a call
                continue
            problems += [call.error for call in turn.tool_calls if call.error is not None]
            names = [call.name for call in turn.tool_calls if call.error is None]
            problems += [f"there is no tool named {name!r}" for name in names if name not in known]
            if t.tools and not turn.tool_calls and (found := _CALL.search(turn.text)):
                total += 1
                problems.append(f"a call was treated as an answer: {turn.text[found.start() :]}"[:100])
    if len(problems) <= 0.2 * total:
        return None
    text = f"{len(problems)} of {total} tool calls could not be run; most often: {most_common(problems)}."
    return text, len(problems) / total, len(problems) / total


def rejected_calls(e: Evidence) -> Result:
    refused = [result.observation for result in e.results if not result.ok and result.error is None]
    if len(e.results) < 4 or len(refused) <= 0.4 * len(e.results):
        return None
    text = f"{len(refused)} of {len(e.results)} tool calls were refused; most often: {most_common(refused)}."
    return text, len(refused) / len(e.results), len(refused) / len(e.results)


def long_observations(e: Evidence) -> Result:
    return _truncation(e, long=True)


def truncated(e: Evidence) -> Result:
    return _truncation(e, long=False)


def _truncation(e: Evidence, long: bool) -> Result:
    cut = [t for t in e.chains if t.truncated]
    if len(cut) <= 0.1 * len(e.chains):
        return None
    stop, count = Counter(t.stop for t in cut).most_common(1)[0]
    text = f"{len(cut)} of {len(e.chains)} chains were truncated, {count} of them by {stop}"
    # Observations that did not fit into the context have no token ids, so measure all lengths in characters.
    turns = [turn for t in cut for turn in t.turns if turn.kind != "prompt"] if stop == "context_full" else []
    sizes = [sum(len(text_of(m)) for m in turn.messages) or len(turn.text) for turn in turns]
    seen = [(size, turn) for size, turn in zip(sizes, turns, strict=True) if turn.kind == "observation"]
    share = sum(size for size, _ in seen) / max(1, sum(sizes))
    if long != (share > 0.6):
        return None
    if long:
        names = [call.name for _, turn in seen for call in turn.tool_calls] or ["the environment"]
        text += f"; {share:.0%} of their text after the prompt is tool output, mostly from {most_common(names)}"
    # Assume that all truncated chains would succeed without the limit. The effect is their share of the successes.
    failed = sum(not t.success for t in cut)
    effect = failed / max(1, failed + sum(bool(t.success) for t in e.scored))
    return f"{text}.", len(cut) / len(e.chains), effect


def collapsed_entropy(e: Evidence) -> Result:
    def sampled(t: Trajectory) -> Any:
        return tuple(turn.ids or turn.text for turn in t.turns if turn.kind == "action")

    same = sum(len({sampled(t) for t in group}) == 1 for group in e.flat_groups)
    if same <= 0.3 * len(e.groups):
        return _certain(e)
    text = (
        f"In {same} of {len(e.groups)} groups, all chains and rewards are the same "
        f"(mean entropy {e.uncertainty:.2g} nats per token)."
    )
    return text, same / len(e.groups), 0.1 + same / len(e.groups)


def _certain(e: Evidence) -> Result:
    """Return the finding if low entropy explains why most groups have equal rewards, many of them without success."""
    equal, entropy = e.numbers.get("equal_groups", 0.0), e.numbers.get("entropy", math.nan)
    # Lower bound on the fraction of groups with equal rewards and without success, used if no chains are given
    failed = equal - e.numbers.get("success", 0.0)
    if e.groups:
        equal = sum(len({t.reward for t in group}) == 1 for group in e.groups) / len(e.groups)
        failed, entropy = len(e.flat_groups) / len(e.groups), e.uncertainty
    if not (0.5 < equal < 1 and failed > 0.3 and entropy < _CERTAIN):  # if equal is 1, the reward is constant
        return None
    text = f"In {equal:.0%} of the groups, all rewards are equal, because the policy is certain of nearly every token"
    return f"{text} (mean entropy {entropy:.2g} nats).", equal, 0.1 + equal


def repetition(e: Evidence) -> Result:
    long = [turn.ids for turn in e.actions if turn.ids is not None and len(turn.ids) >= _LONG_ACTION]
    distinct = [len({ids[k : k + _NGRAM] for k in range(len(ids) - _NGRAM + 1)}) / len(ids) for ids in long]
    loops = sum(share < 0.4 for share in distinct)
    if loops <= 0.1 * len(e.actions):
        return None
    text = f"{loops} of {len(e.actions)} actions repeat the same few tokens."
    return text, loops / len(e.actions), 0.3 + loops / len(e.actions)


def length_reward(e: Evidence) -> Result:
    if len(e.scored) < 8:
        return None
    keys = [(t.group, right) for t, right in zip(e.scored, e.right, strict=True)]
    tokens = [sum(len(turn.ids or turn.text) for turn in t.turns if turn.kind == "action") for t in e.scored]
    within, rest = e.within_groups(e.rewards), centered(e.rewards, keys)
    found: list[tuple[float, float]] = []
    for lengths, least in ((tokens, 0.9), ([len(t.final or "") for t in e.scored], 0.95)):
        # Right answers may require long chains, so compare right chains only with right ones, and wrong with wrong.
        r = correlation(rest, centered(lengths, keys))
        found.append((rest.var() / max(within.var(), 1e-12) * r**2, r if abs(r) >= least else 0.0))
        # If a reward with more than a few values always grows with the length, it does not depend on right answers.
        r = correlation(within, e.within_groups(lengths)) if len(set(e.rewards)) > 3 else 0.0
        found.append((r**2, r if abs(r) > 0.99 else 0.0))
    share, r = map(float, max(((share, r) for share, r in found if r), default=(0.0, 0.0)))
    text = f"The length of the chain or answer explains {share:.0%} of the reward differences (correlation {r:+.2f})."
    return (text, share, 0.2 + share) if share >= 0.3 else None


def dropped(e: Evidence) -> Result:
    reasons = [t.dropped for t in e.scored if t.dropped is not None]
    if len(reasons) <= 0.5 * len(e.chains):
        return None
    text = f"{len(reasons)} of {len(e.chains)} chains were left out, most often: {most_common(reasons)}."
    return text, len(reasons) / len(e.chains), len(reasons) / len(e.chains)


def duplicate_component(e: Evidence) -> Result:
    varied = [name for name, values in e.components.items() if len(set(values)) > 1]
    same = max(grouped(varied, e.components.__getitem__).values(), key=len, default=[])
    text = f"{' and '.join(same)} were equal in all {len(e.scored)} chains."
    return (text, len(same), 0.3) if len(same) > 1 else None


def constant_component(e: Evidence) -> Result:
    constant = [f"{name} was {values[0]:g}" for name, values in e.components.items() if len(set(values)) == 1]
    text = f"{', '.join(constant)} in all {len(e.scored)} chains{' of this step' if e.records else ''}."
    return (text, len(constant), 0.2) if constant and len(e.components) > 1 else None


def constant_reward(e: Evidence) -> Result:
    varied = sum(len({t.final for t in group}) > 1 for group in e.groups)
    solved = all(t.success for t in e.scored) and varied <= 0.5 * len(e.groups)
    if len(e.scored) < 4 or len({t.reward for t in e.scored}) != 1 or solved:
        return None
    value = float(e.scored[0].reward or 0.0)
    text = f"All {len(e.scored)} scored chains have the reward {value:g}; the answers differ in {varied} groups."
    return text, value, 1.0


def no_signal(e: Evidence) -> Result:
    failed = len(e.flat_groups)
    if failed <= 0.3 * len(e.groups):
        return None
    text = f"In {failed} of {len(e.groups)} groups, all chains have the same reward, without success."
    return text, failed / len(e.groups), 0.9 * failed / len(e.groups)


def no_calls(e: Evidence) -> Result:
    if not any(t.tools for t in e.chains) or any(turn.tool_calls for turn in e.actions):
        return None
    failed = sum(not t.success for t in e.chains) / len(e.chains)
    return f"No tool was called in {len(e.chains)} chains.", 0.0, 0.7 * failed


def solved(e: Evidence) -> Result:
    solved = sum(all(t.success for t in group) for group in e.groups)
    if solved <= 0.6 * len(e.groups):
        return None
    return f"In {solved} of {len(e.groups)} groups, all chains succeed.", solved / len(e.groups), 0.3
