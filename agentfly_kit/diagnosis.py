"""`diagnose`, which searches a rollout, a batch and training statistics for reasons why a policy does not learn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from agentfly_kit._evidence import (
    Chains,
    Finding,
    Findings,
    centered,
    contains,
    correlation,
    is_numeric_answer,
    most_common,
    states,
    tool_names,
    unrelated,
)
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.trajectories import UNSCORED_STOPS, Trajectory

# Beginnings of tool calls in common formats. A text that contains one of them is unlikely to be an answer.
_CALL = re.compile(r'(?m)<tool_call|<function|<\|tool|<\|python_tag|\[TOOL_CALLS\]|"arguments"\s*:|^Action:')
# Minimum length of actions that are checked for repetition, and length of the n-grams that are counted, in tokens.
_LONG_ACTION, _NGRAM = 24, 4
# Findings that are symptoms if an update was too large or the prompts are unknown, because the texts are then random.
_RANDOM_TEXTS = ("gibberish", "unparsed_calls", "rejected_calls", "long_observations", "truncated", "ignored_results",
                 "collapsed_entropy", "repetition", "length_reward")  # fmt: skip
# Difference between the logprobs of engine and policy, in nats, above which they cannot be weights of the same model.
_OTHER_MODEL = 5.0


def diagnose(
    rollout: Any,
    batch: Batch | None = None,
    stats: Stats | None = None,
    *,
    records: Sequence[Mapping[str, float]] = (),
) -> Findings:
    """Find reasons why a policy does not learn. The arguments are not modified.

    Args:
        rollout: Chains of one training step; or a run, whose last step and records are examined; or None.
        batch: Batch collated from these chains, whose mask and advantages are checked.
        stats: Statistics of the update. With `ppo_step(detail=True)`, the tokens that changed most are also reported.
        records: Records of the training steps so far, oldest first. The last record is used if `stats` is None.

    Returns:
        The findings, sorted by estimated effect. Serious causes, such as unparsed calls, come before their symptoms.

    Raises:
        SettingsError: If there is nothing to examine, an argument has the wrong type, or `batch` has other chains.
    """
    if (batch, stats, records) == (None, None, ()) and hasattr(rollout, "diagnose"):
        return cast(Findings, rollout.diagnose())
    for name, value, of in (("rollout", rollout, Rollout), ("batch", batch, Batch), ("stats", stats, Stats)):
        if value is not None and not isinstance(value, of):
            raise SettingsError(f"{name} must be a {of.__name__} or None, got {type(value).__name__}")
    if not rollout and batch is None and stats is None and not records:
        raise SettingsError("diagnose needs a rollout with at least one chain, a batch, stats or records, got none")
    rollout = rollout or Rollout(())
    known = {t.id for t in rollout}
    others = [t.id for t in batch.trajectories if t.id not in known] if batch is not None and known else []
    if others:
        raise SettingsError(f"`batch` must contain only chains of `rollout`, got {others[0]!r}")
    numbers = stats.scalars() if stats is not None else dict(records[-1]) if records else {}
    evidence = _Evidence(rollout.trajectories, rollout, batch, numbers, stats, tuple(records))
    found: list[tuple[Finding, bool]] = []
    for check, is_symptom, widget, remedy in _CHECKS:
        if (result := check(evidence)) is not None:
            sentence, number, effect = result
            name = check.__name__.removeprefix("_")
            finding = Finding(name, sentence, number, remedy, widget, min(1.0, effect))
            found.append((finding, is_symptom))
    at_random = any(finding.name in ("policy_moved", "unknown_words") and finding.serious for finding, _ in found)

    def rank(item: tuple[Finding, bool]) -> tuple[bool, bool, float]:
        after = item[1] or (at_random and item[0].name in _RANDOM_TEXTS)
        # Effects are rough estimates. Round them so that nearly equal effects are reported in the order of checks.
        return not item[0].serious, item[0].serious and after, -round(item[0].effect, 1)

    return Findings(finding for finding, _ in sorted(found, key=rank))


@dataclass(frozen=True)
class _Evidence(Chains):
    rollout: Rollout
    batch: Batch | None
    numbers: Mapping[str, float]
    stats: Stats | None
    records: tuple[Mapping[str, float], ...]


# --- checks for causes -----------------------------------------------------------------------------

# Result of a check: sentence, number and effect of the finding, or None if there is nothing to report.
_Result: TypeAlias = tuple[str, float, float] | None


def _unscored(e: _Evidence) -> _Result:
    count, total = len(e.chains) - len(e.scored), len(e.chains)
    failed = any(t.error is not None or t.stop in UNSCORED_STOPS for t in e.chains)
    # Distillation needs no reward, so an update on chains without any reward or failure is intended.
    if count <= 0.05 * total or (count == total and not failed and (e.numbers or e.batch is not None)):
        return None
    share = count / total
    return f"{count} of {total} chains have no reward: {e.rollout.unscored_reason}.", share, 0.5 + share


def _wrong_mask(e: _Evidence) -> _Result:
    if e.batch is None:
        return None
    foreign = missing = total = 0
    rows = list(zip(e.batch.trajectories, e.batch.rows, e.batch.mask.numpy(), strict=True))
    trained = {t.turns[i].author for t, row, mask in rows for i in set(row.turn_index[mask[: len(row)]].tolist())}
    for _, row, mask in rows:
        # Do not count tokens of other authors as missing, because `collate(authors=)` intentionally excludes them.
        written = row.written_by if e.batch.imitation else row.sampled_by
        wanted = written(*trained)
        foreign += int((mask[: len(row)] & ~written()).sum())
        missing += int((wanted & ~mask[: len(row)]).sum())
        total += int(wanted.sum())
    share = (foreign + missing) / max(1, total)
    left_out = f"leaves out {missing} of {total} of their tokens"
    text = f"The batch trains {foreign} tokens outside of the actions and {left_out}."
    return (text, share, 0.5 + share) if share > 0.01 else None


def _leaked_answer(e: _Evidence) -> _Result:
    if len(tasks := e.references) < 2:
        return None
    answers, prompts = tuple(tasks.values()), ["\n".join(min(e.starts[task])) for task in tasks]
    found = sum(map(contains, prompts, answers))
    # Short answers such as "yes" may occur in a prompt by chance. Subtract the matches with answers of other tasks.
    share = (found - sum(map(contains, prompts, (*answers[1:], answers[0])))) / len(tasks)
    text = f"The answer is in the prompt of {found} of {len(tasks)} tasks."
    return (text, share, 0.3 + share) if share >= 0.3 else None


def _other_tokenizer(e: _Evidence) -> _Result:
    vocabularies = len({t.vocabulary for t in e.chains} - {None})
    gap = e.numbers.get("sampler_gap", 0.0)
    if vocabularies < 2 and e.foreign <= 0.05 * len(e.chains) and not gap > _OTHER_MODEL:
        return None
    text = f"The chains have {vocabularies} vocabularies, {e.foreign} of {len(e.chains)} contain ids outside of it"
    return f"{text}, and engine and policy disagree by up to {gap:.2g} nats on the same token.", gap, 1.0


def _unknown_words(e: _Evidence) -> _Result:
    unknown = [word for word, is_split in e.prompt_words if is_split]
    if len(unknown) <= 0.3 * len(e.prompt_words):
        return None
    share = len(unknown) / len(e.prompt_words)
    text = f"The model does not know {len(unknown)} of {len(e.prompt_words)} words of the prompts"
    effect = 0.3 if any(t.success for t in e.chains) else 0.5 + share / 2
    return f"{text}, most often {most_common(unknown)}.", share, effect


def _numeric_reference(e: _Evidence) -> _Result:
    right = [t for t, final, _ in e.answered if is_numeric_answer(final, t.task)]
    if len(right) < 2 or any(t.reward is None or t.reward > e.rewards.min() for t in right):
        return None
    text = f"{len(right)} right answers earn no more than wrong ones; "
    text += "the reference is a number, the answer is a text."
    return text, len(right) / len(e.chains), 1.0


def _different_starts(e: _Evidence) -> _Result:
    several = [task for task, count in Counter(t.task.id for t in e.chains).items() if count > 1]
    results = {task for (task, _), seen in e.first_results.items() if len(seen) > 1}
    differ = sum(task in results or len(e.starts[task]) > 1 for task in several)
    if differ <= 0.3 * len(several):
        return None
    chains = f"The chains of {differ} of {len(several)} tasks"
    text = f"{chains} start with different texts, or get different first results."
    return text, differ / len(several), 0.5 + differ / len(several)


def _same_start(e: _Evidence) -> _Result:
    results: dict[Any, list[set[str]]] = {}
    for (_, call), seen in e.first_results.items():
        results.setdefault(call, []).append(seen)
    shared = [seen for seen in results.values() if len(seen) > 1]
    texts = set[tuple[str, ...]]().union(*e.starts.values())
    if len(e.starts) < 2 or len(texts) > 1 or any(len(set.union(*seen)) > 1 for seen in shared):
        return None
    # Without text from the environment or several results to compare, the tasks may differ in something not shown.
    if len(shared) < 3 and min(texts)[-1:] == (e.chains[0].task.messages[-1]["content"],):
        return None
    return f"All {len(e.starts)} tasks start with the same text, and equal calls get equal results.", 1.0, 1.0


def _reversed_reward(e: _Evidence) -> _Result:
    r = correlation(e.within_groups(e.rewards), e.within_groups(e.right))
    text = f"Right answers earn less than wrong ones (correlation {r:+.2f} within groups)."
    return (text, r, 1.0) if r < -0.5 and len(e.scored) >= 8 and not _length_reward(e) else None


def _lenient_reward(e: _Evidence) -> _Result:
    high = [unrelated(*pair) for t, *pair in e.answered if t.reward is not None and t.reward > e.rewards.max() / 2]
    wrong, total = sum(high), len(high)
    # Equal rewards are another finding. If no answer resembles its reference, the field contains something else.
    equal = all(len({t.reward for t in group}) <= 1 for group in e.groups)
    if equal or wrong < 3 or not 0.1 < wrong / total < 0.95:
        return None
    text = f"{wrong} of {total} answers with a high reward share no word with the reference answer."
    return text, wrong / total, 0.5 + wrong / total


def _ignored_results(e: _Evidence) -> _Result:
    told = [
        states(final, answer)
        for t, final, answer in e.answered
        if any(call.result is not None and contains(call.result.observation, answer) for call in t.tool_calls)
    ]
    ignored, total = len(told) - sum(told), len(told)
    if total < 4 or ignored <= 0.5 * total:
        return None
    text = f"In {ignored} of {total} chains that a tool gave the reference answer, the final answer is another one."
    return text, ignored / total, 0.3 + ignored / total


def _gibberish(e: _Evidence) -> _Result:
    if not e.uncertainty > 1.5:
        return None
    text = f"The sampled tokens have a mean entropy of {e.uncertainty:.2f} nats: the texts are nearly random."
    return text, e.uncertainty, e.uncertainty / 3


def _failing_tools(e: _Evidence) -> _Result:
    failed = [str(result.error) for result in e.results if result.error is not None]
    if not failed or len(failed) <= 0.05 * len(e.results):
        return None
    share = len(failed) / len(e.results)
    text = f"{len(failed)} of {len(e.results)} tool calls raised an unexpected exception: {most_common(failed)}."
    return text, share, 0.5 + share


def _unparsed_calls(e: _Evidence) -> _Result:
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
                problems.append(f"a call was taken for an answer: {turn.text[found.start() :]}"[:100])
    if len(problems) <= 0.2 * total:
        return None
    text = f"{len(problems)} of {total} tool calls could not be run; most often: {most_common(problems)}."
    return text, len(problems) / total, len(problems) / total


def _rejected_calls(e: _Evidence) -> _Result:
    refused = [result.observation for result in e.results if not result.ok and result.error is None]
    if len(e.results) < 4 or len(refused) <= 0.4 * len(e.results):
        return None
    text = f"{len(refused)} of {len(e.results)} tool calls were refused; most often: {most_common(refused)}."
    return text, len(refused) / len(e.results), len(refused) / len(e.results)


def _long_observations(e: _Evidence) -> _Result:
    return _truncation(e, long=True)


def _truncated(e: _Evidence) -> _Result:
    return _truncation(e, long=False)


def _truncation(e: _Evidence, long: bool) -> _Result:
    cut = [t for t in e.chains if t.truncated]
    if len(cut) <= 0.1 * len(e.chains):
        return None
    stop, count = Counter(t.stop for t in cut).most_common(1)[0]
    text = f"{len(cut)} of {len(e.chains)} chains were truncated, {count} of them by {stop}"
    # Observations that did not fit into the context have no token ids, so measure all lengths in characters.
    turns = [turn for t in cut for turn in t.turns if turn.kind != "prompt"] if stop == "context_full" else []
    sizes = [sum(len(str(m.get("content") or "")) for m in turn.messages) or len(turn.text) for turn in turns]
    seen = [(size, turn) for size, turn in zip(sizes, turns, strict=True) if turn.kind == "observation"]
    share = sum(size for size, _ in seen) / max(1, sum(sizes))
    if long != (share > 0.6):
        return None
    if long:
        names = [call.name for _, turn in seen for call in turn.tool_calls] or ["the environment"]
        text += f"; {share:.0%} of their text after the prompt is tool output, most often of {most_common(names)}"
    # Assume that all truncated chains would succeed without the limit. The effect is their share of the successes.
    failed = sum(not t.success for t in cut)
    effect = failed / max(1, failed + sum(bool(t.success) for t in e.scored))
    return f"{text}.", len(cut) / len(e.chains), effect


def _collapsed_entropy(e: _Evidence) -> _Result:
    def sampled(t: Trajectory) -> Any:
        return tuple(turn.ids or turn.text for turn in t.turns if turn.kind == "action")

    same = sum(len({sampled(t) for t in group}) == 1 for group in e.flat_groups)
    if same <= 0.3 * len(e.groups):
        return None
    entropy = f"mean entropy {e.uncertainty:.2g} nats per token"
    text = f"In {same} of {len(e.groups)} groups all chains and rewards are the same ({entropy})."
    return text, same / len(e.groups), 0.1 + same / len(e.groups)


def _repetition(e: _Evidence) -> _Result:
    long = [turn.ids for turn in e.actions if turn.ids is not None and len(turn.ids) >= _LONG_ACTION]
    distinct = [len({ids[k : k + _NGRAM] for k in range(len(ids) - _NGRAM + 1)}) / len(ids) for ids in long]
    loops = sum(share < 0.4 for share in distinct)
    if loops <= 0.1 * len(e.actions):
        return None
    text = f"{loops} of {len(e.actions)} actions repeat the same few tokens."
    return text, loops / len(e.actions), 0.3 + loops / len(e.actions)


def _length_reward(e: _Evidence) -> _Result:
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
    text = f"The length of chain or answer decides {share:.0%} of the differences of rewards (correlation {r:+.2f})."
    return (text, share, 0.2 + share) if share >= 0.3 else None


def _reversed_advantages(e: _Evidence) -> _Result:
    if e.batch is None or e.batch.advantages[e.batch.mask].isnan().any():
        return None
    advantages = e.batch.advantages.nanmean(1).double().numpy()
    r = correlation(centered(e.batch.rewards.double().numpy(), e.batch.groups.tolist()), advantages)
    text = f"The advantages fall with the reward (correlation {r:+.2f} within groups)."
    return (text, r, 1.0) if r < -0.3 else None


def _sampler_gap(e: _Evidence) -> _Result:
    gap = e.numbers.get("sampler_gap", 0.0)
    text = f"Engine and policy disagree by up to {gap:.2g} nats on the same token."
    return (text, gap, gap) if 0.1 < gap <= _OTHER_MODEL else None


def _policy_moved(e: _Evidence) -> _Result:
    kl, clipped = e.numbers.get("approx_kl", 0.0), e.numbers.get("clip_fraction", 0.0)
    if e.stats is not None and e.stats.detail is not None:
        change = e.stats.detail["logprob_after"] - e.stats.detail["logprob_before"]
        kl = max(kl, float(np.nanmean(np.expm1(change) - change)))
    steps = [(kl, e.numbers), *((record.get("approx_kl", 0.0), record) for record in e.records)]
    worst, step = max(steps, key=lambda pair: pair[0])
    if worst <= 0.3 and clipped <= 0.5:
        return None
    when = f" at most, by {kl:.2g} in the last step" if worst > kl else ""
    lr = f" at lr {step['lr']:.2g}" if "lr" in step else ""
    moved = f"{worst:.2g} nats per token{lr}{when}"
    text = f"An update moved the policy by {moved}; {clipped:.0%} of the ratios were clipped."
    # Even healthy updates reach estimates of 0.7 nats, because a few tokens dominate the mean.
    return text, worst, max(worst / 2, clipped)


def _dropped(e: _Evidence) -> _Result:
    reasons = [t.dropped for t in e.scored if t.dropped is not None]
    if len(reasons) <= 0.5 * len(e.chains):
        return None
    text = f"{len(reasons)} of {len(e.chains)} chains were left out, most often: {most_common(reasons)}."
    return text, len(reasons) / len(e.chains), len(reasons) / len(e.chains)


def _duplicate_component(e: _Evidence) -> _Result:
    by: dict[tuple[float, ...], list[str]] = {}
    for name, values in e.components.items():
        if len(set(values)) > 1:
            by.setdefault(values, []).append(name)
    same = max(by.values(), key=len, default=[])
    text = f"{' and '.join(same)} were equal in all {len(e.scored)} chains."
    return (text, len(same), 0.3) if len(same) > 1 else None


def _constant_component(e: _Evidence) -> _Result:
    names = [name for name, values in e.components.items() if len(set(values)) == 1]
    text = f"{', '.join(names)} never varied in {len(e.scored)} chains."
    return (text, len(names), 0.2) if names and len(e.components) > 1 else None


def _moved_tokens(e: _Evidence) -> _Result:
    detail, batch = (e.stats.detail, e.stats.batch) if e.stats else (None, None)
    if detail is None or batch is None:
        return None
    change = np.nan_to_num(np.abs(detail["logprob_after"] - detail["logprob_before"]))
    places = [divmod(int(i), change.shape[1]) for i in np.argsort(change, axis=None)[:-4:-1]]
    texts = ", ".join(f"{batch.rows[i].token_texts[j]!r} ({detail['ratio'][i, j]:.2f})" for i, j in places)
    return f"The tokens that moved most, with their ratios: {texts}.", float(change.max()), 0.05


# --- checks for symptoms ---------------------------------------------------------------------------


def _constant_reward(e: _Evidence) -> _Result:
    varied = sum(len({t.final for t in group}) > 1 for group in e.groups)
    solved = all(t.success for t in e.scored) and varied <= 0.5 * len(e.groups)
    if len(e.scored) < 4 or len({t.reward for t in e.scored}) != 1 or solved:
        return None
    value = float(e.scored[0].reward or 0.0)
    text = f"All {len(e.scored)} scored chains have the reward {value:g}; the answers differ in {varied} groups."
    return text, value, 1.0


def _no_signal(e: _Evidence) -> _Result:
    failed = len(e.flat_groups)
    if failed <= 0.3 * len(e.groups):
        return None
    text = f"In {failed} of {len(e.groups)} groups all chains have the same reward, without success."
    return text, failed / len(e.groups), 0.9 * failed / len(e.groups)


def _no_calls(e: _Evidence) -> _Result:
    if not any(t.tools for t in e.chains) or any(turn.tool_calls for turn in e.actions):
        return None
    failed = sum(not t.success for t in e.chains) / len(e.chains)
    return f"No tool was called in {len(e.chains)} chains.", 0.0, 0.7 * failed


def _solved(e: _Evidence) -> _Result:
    solved = sum(all(t.success for t in group) for group in e.groups)
    if solved <= 0.6 * len(e.groups):
        return None
    return f"In {solved} of {len(e.groups)} groups all chains succeed.", solved / len(e.groups), 0.3


_CHAINS, _CHAIN, _BATCH = "w.TrajectoryView(rollout)", "w.TokenView(rollout[0])", "w.TokenView(batch)"
# Each entry consists of a check, a flag that is True if the finding is usually a symptom of another one, a widget and a
# remedy. The checks follow the data flow; findings with nearly equal effects are reported in this order.
_CHECKS: tuple[tuple[Callable[[_Evidence], _Result], bool, str, str], ...] = (
    (_other_tokenizer, False, _CHAIN,
     "Engine, chat and policy must have one tokenizer and one model; policy.chat and af.LocalEngine(policy) do."),
    (_unscored, False, "w.TrajectoryView(rollout.failed)",
     "Such chains are never trained on. Repair the reward or the host, and rerun rollout.failed.tasks."),
    (_wrong_mask, False, _BATCH, "Keep the mask that collate made; collate(authors=) selects those of a role."),
    (_leaked_answer, False, _CHAIN,
     "Remove it from the messages, the first observation or before_chain, unless the task is to extract it."),
    (_unknown_words, False, _CHAIN,
     "Use the tasks of the policy (af.tiny.list()), make one with af.tiny.learner(words, ...), or load a large model."),
    (_numeric_reference, False, _CHAINS,
     "Make the field a text, such as str(answer), or compare numbers in the reward; test it with await reward.try_()."),
    (_different_starts, False, _CHAINS, "Make all random choices of reset with its seed, which a group shares."),
    (_same_start, False, _CHAINS, "Use the fields of the task or the seed in reset, or give each task another prompt."),
    (_reversed_reward, False, _CHAINS, "Check the sign of the reward."),
    (_gibberish, False, _CHAIN, "Sample at temperature 1; engine, policy and tokenizer must belong together."),
    (_failing_tools, False, _CHAINS,
     "Repair the tool: await call.rerun() raises its exception. af.ToolError is for mistakes of the model."),
    (_unparsed_calls, False, _CHAINS,
     "Use the names and the format that the model writes, af.Chat(tokenizer, format=...), or imitate calls first."),
    (_rejected_calls, False, _CHAINS, "Compare the arguments with the schema; its description can give an example."),
    (_long_observations, False, _CHAIN, "Return less from the tool, or set @af.tool(max_chars=...)."),
    (_truncated, False, _CHAINS, "Raise the limit: Sampling(max_tokens=), Agent(max_turns=), the context length."),
    (_ignored_results, False, _CHAIN,
     "Check that the prompt of the next action contains the result, or imitate chains that use it."),
    (_collapsed_entropy, False, _CHAINS,
     "Sample at temperature 1. After a collapse, start from an earlier policy, with a smaller lr or an entropy_coef."),
    (_repetition, False, _CHAINS, "Start from an earlier policy with a smaller lr, or filter such chains."),
    (_length_reward, False, _CHAINS, "Reduce the weight of the length, or apply it only to chains that succeed."),
    (_lenient_reward, False, _CHAINS, "Compare whole answers in the reward, and test it with wrong ones."),
    (_reversed_advantages, False, _BATCH, "Check the sign of the estimator."),
    (_sampler_gap, False, _BATCH,
     "Send the weights to the engine (await engine.update(policy)), use the same precision, or set correction=."),
    (_policy_moved, False, "w.TrainView(run)", "Lower lr by a factor of 3 to 10, or set target_kl=0.05."),
    (_dropped, False, _CHAINS, "Relax TrainConfig(filters=), or replace the groups with refill=."),
    (_duplicate_component, False, _CHAINS, "If both are parts of the reward, it counts twice."),
    (_constant_component, False, _CHAINS, "A constant part of the reward has no effect; check that it can vary."),
    (_moved_tokens, False, "w.TokenView(stats)", "Check that these tokens should be credited."),
    (_constant_reward, True, _CHAINS,
     "Score the chain of an expert (await reward.try_(trajectory)). If it earns more, the tasks are too hard."),
    (_no_signal, True, _CHAINS,
     "Use larger groups, easier tasks, a reward with partial credit, or TrainConfig(refill=)."),
    (_no_calls, True, _CHAIN, "Check that the prompt shows the tools, or imitate chains with calls first."),
    (_solved, True, _CHAINS, "Little is left to learn; use harder tasks."),
)  # fmt: skip
