"""`diagnose`, which searches a rollout, a batch and training statistics for reasons why a policy does not learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.batch import Batch
from agentfly_kit.diagnosis import chains, updates
from agentfly_kit.diagnosis.evidence import Evidence, Result
from agentfly_kit.diagnosis.findings import Finding, Findings
from agentfly_kit.errors import SettingsError, check_instance
from agentfly_kit.ppo.stats import Stats

# Findings that are symptoms if an update was too large or the prompts contain unknown words, because texts are then
# random.
_RANDOM_TEXTS = ("gibberish", "unparsed_calls", "rejected_calls", "long_observations", "truncated", "ignored_results",
                 "collapsed_entropy", "repetition", "length_reward")  # fmt: skip


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
        SettingsError: If there is nothing to examine, an argument has the wrong type, or `batch` contains chains that
            are not in `rollout`.
    """
    if (batch, stats, records) == (None, None, ()) and hasattr(rollout, "diagnose"):
        return cast(Findings, rollout.diagnose())
    for name, value, of in (("rollout", rollout, Rollout), ("batch", batch, Batch), ("stats", stats, Stats)):
        check_instance(name, value, of | None, f"a {of.__name__} or None")
    if not rollout and batch is None and stats is None and not records:
        raise SettingsError("diagnose needs a rollout with at least one chain, a batch, stats or records, got none")
    rollout = rollout or Rollout(())
    known = {t.id for t in rollout}
    others = [t.id for t in batch.trajectories if t.id not in known] if batch is not None and known else []
    if others:
        raise SettingsError(f"`batch` must contain only chains of `rollout`, got {others[0]!r}")
    numbers = stats.scalars() if stats is not None else dict(records[-1]) if records else {}
    evidence = Evidence(rollout, batch, stats, numbers, tuple(records))
    found: list[tuple[Finding, bool]] = []
    for check, is_symptom, widget, remedy in _CHECKS:
        if (result := check(evidence)) is not None:
            sentence, number, effect = result
            finding = Finding(check.__name__, sentence, number, remedy, widget, min(1.0, effect))
            found.append((finding, is_symptom))
    at_random = any(finding.name in ("policy_moved", "unknown_words") and finding.serious for finding, _ in found)

    def rank(item: tuple[Finding, bool]) -> tuple[bool, bool, float]:
        after = item[1] or (at_random and item[0].name in _RANDOM_TEXTS)
        # Effects are rough estimates. Round them so that nearly equal effects are reported in the order of checks.
        return not item[0].serious, item[0].serious and after, -round(item[0].effect, 1)

    return Findings(finding for finding, _ in sorted(found, key=rank))


_CHAINS, _CHAIN, _BATCH = "w.TrajectoryView(rollout)", "w.TokenView(rollout[0])", "w.TokenView(batch)"
# Each entry consists of a check, a flag that is True if the finding is usually a symptom of another one, a widget and a
# remedy. The checks follow the data flow; findings with nearly equal effects are reported in this order.
_CHECKS: tuple[tuple[Callable[[Evidence], Result], bool, str, str], ...] = (
    (
        chains.other_tokenizer,
        False,
        _CHAIN,
        "Use the same tokenizer and model in engine, chat and policy, as in af.LocalEngine(policy) and policy.chat.",
    ),
    (
        chains.unscored,
        False,
        "w.TrajectoryView(rollout.failed)",
        "Such chains are never trained on. Repair the reward or the host, and rerun rollout.failed.tasks.",
    ),
    (
        updates.wrong_mask,
        False,
        _BATCH,
        "Do not change the mask of collate; collate(authors=) selects the actions of a role.",
    ),
    (
        chains.leaked_answer,
        False,
        _CHAIN,
        "Remove the answer from messages, first observation and before_chain, unless the task is to extract it.",
    ),
    (
        chains.unknown_words,
        False,
        _CHAIN,
        "Use the tasks of the policy (af.tiny.list()), train one with af.tiny.learner(words, ...), or load a large "
        "model.",
    ),
    (
        chains.numeric_reference,
        False,
        _CHAINS,
        "Store the answer as text, str(answer), or compare numbers in the reward; test the reward with "
        "await reward.try_().",
    ),
    (
        chains.different_starts,
        False,
        _CHAINS,
        "In reset, make all random choices with its seed, which a group shares.",
    ),
    (
        chains.same_start,
        False,
        _CHAINS,
        "Use the fields of the task or the seed in reset, or give each task a different prompt.",
    ),
    (chains.reversed_reward, False, _CHAINS, "Check the sign of the reward."),
    (chains.gibberish, False, _CHAIN, "Sample at temperature 1; engine, policy and tokenizer must belong together."),
    (
        chains.failing_tools,
        False,
        _CHAINS,
        "Repair the tool: await call.rerun() raises its exception. Use af.ToolError for mistakes of the model.",
    ),
    (
        chains.unparsed_calls,
        False,
        _CHAINS,
        "Use the names and the format that the model writes, af.Chat(tokenizer, format=...), or imitate calls first.",
    ),
    (
        chains.rejected_calls,
        False,
        _CHAINS,
        "Compare the arguments with the schema; the tool's description can give an example.",
    ),
    (
        chains.long_observations,
        False,
        _CHAIN,
        "Return shorter results from the tool, or set @af.tool(max_chars=...).",
    ),
    (
        chains.truncated,
        False,
        _CHAINS,
        "Raise the limit: Sampling(max_tokens=), Agent(max_turns=), the context length.",
    ),
    (
        chains.ignored_results,
        False,
        _CHAIN,
        "Check that the prompt of the next action contains the result, or imitate chains that use it.",
    ),
    (
        chains.collapsed_entropy,
        False,
        _CHAINS,
        "Sample at temperature 1. After imitation, imitate fewer or more varied demonstrations; after a collapse, "
        "start from an earlier policy, with a smaller lr or an entropy_coef.",
    ),
    (chains.repetition, False, _CHAINS, "Start from an earlier policy with a smaller lr, or filter such chains."),
    (
        chains.length_reward,
        False,
        _CHAINS,
        "Reduce the weight of the length, or apply it only to chains that succeed.",
    ),
    (chains.lenient_reward, False, _CHAINS, "Compare whole answers in the reward, and test it with wrong ones."),
    (updates.reversed_advantages, False, _BATCH, "Check the sign of the estimator."),
    (
        updates.sampler_gap,
        False,
        _BATCH,
        "Send the weights to the engine (await engine.update(policy)), use the same precision, or set correction=.",
    ),
    (updates.policy_moved, False, "w.TrainView(run)", "Lower lr by a factor of 3 to 10, or set target_kl=0.05."),
    (chains.dropped, False, _CHAINS, "Relax TrainConfig(filters=), or replace the groups with refill=."),
    (chains.duplicate_component, False, _CHAINS, "If both are parts of the reward, the same number counts twice."),
    (
        chains.constant_component,
        False,
        _CHAINS,
        "A constant part of the reward has no effect; check that it can vary.",
    ),
    (updates.moved_tokens, False, "w.TokenView(stats)", "Check that these tokens deserve credit."),
    (
        chains.constant_reward,
        True,
        _CHAINS,
        "Score the chain of an expert (await reward.try_(trajectory)). If it earns more, the tasks are too hard.",
    ),
    (
        chains.no_signal,
        True,
        _CHAINS,
        "Use larger groups, easier tasks, a reward with partial credit, or TrainConfig(refill=).",
    ),
    (
        updates.no_rise,
        True,
        "w.TrainView(run)",
        "In this order: if most groups have equal rewards, use larger groups, other tasks or refill=; if approx_kl is "
        "below 0.001, raise lr; if no chain of a task succeeds, imitate good chains first.",
    ),
    (chains.no_calls, True, _CHAIN, "Check that the prompt shows the tools, or imitate chains with calls first."),
    (chains.solved, True, _CHAINS, "Little is left to learn; use harder tasks."),
)
