"""`diagnose`: planted faults are named, healthy rollouts are not, and bad input is rejected."""

import dataclasses
import html
import importlib.util
import math
from pathlib import Path
from typing import Any

import agents
import errors
import numpy as np
import pytest
import torch
from paths import ROOT

import agentfly_kit as af


def _bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_diagnose", ROOT / "benchmarks" / "bench_diagnose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCH = _bench()


def names(findings: af.Findings) -> list[str]:
    return [finding.name for finding in findings]


def trajectory(name: str, reward: float | None, group: str = "g", **changes: Any) -> af.Trajectory:
    """Return a chain of one sampled action, with the given changes of the action or the trajectory."""
    task = af.Task(
        group, ({"role": "user", "content": changes.pop("prompt", "What is 1+1?")},), changes.pop("fields", {})
    )
    ids = changes.pop("ids", (5, 6, 7))
    text = changes.pop("text", name)
    entropies = (changes.pop("entropy", 0.5),) * len(ids)
    calls, stop = changes.pop("calls", ()), changes.pop("stop", "answered")
    turns = [
        af.Turn("prompt", "task", (1, 2), messages=task.messages),
        af.Turn("action", "policy", ids, True, (-0.5,) * len(ids), entropies, versions=(0,) * len(ids), text=text,
             messages=({"role": "assistant", "content": text},), tool_calls=calls,
             stop="length" if stop == "turn_tokens" else "stop"),
    ]  # fmt: skip
    if calls:
        turns.append(af.Turn("observation", "tool", (3,), tool_calls=calls))
    return af.Trajectory(name, task, group, 0, tuple(turns), stop, reward, **changes)


def rollout(*trajectories: af.Trajectory) -> af.Rollout:
    return af.Rollout.from_trajectories(trajectories)


def healthy() -> list[af.Trajectory]:
    return [
        trajectory(f"{group}/{i}", float(i % 3 == 0), group, ids=(5, 6, 7 + i), text=f"answer {i}")
        for group in "abcd" for i in range(6)
    ]  # fmt: skip


# --- input -----------------------------------------------------------------------------------------


def diagnosed_with_others() -> af.Findings:
    chains = healthy()
    return af.diagnose(rollout(*chains[:3]), af.collate(chains[3:], af.advantages.grpo))


test_errors = errors.rejected(
    (lambda: af.diagnose(None), af.errors.SettingsError, "diagnose needs a rollout with at least one chain, a batch"),
    (lambda: af.diagnose(None, records=[]), af.errors.SettingsError, "diagnose needs a rollout"),
    (lambda: af.diagnose(3), af.errors.SettingsError, "rollout must be a Rollout or None, got 3"),  # type: ignore[arg-type]
    (lambda: af.diagnose(None, batch=[]), af.errors.SettingsError, "batch must be a Batch or None, got []"),  # type: ignore[arg-type]
    (lambda: af.diagnose(None, stats={}), af.errors.SettingsError, "stats must be a Stats or None, got {}"),  # type: ignore[arg-type]
    (lambda: af.diagnose(af.Rollout(())), af.errors.SettingsError, "at least one chain"),
    (diagnosed_with_others, af.errors.SettingsError, "`batch` must contain only chains of `rollout`, got 'a/3'"),
)  # fmt: skip


def test_a_rollout_without_scored_chains_is_a_finding() -> None:
    found = af.diagnose(rollout(*(trajectory(f"t{i}", None, stop="error") for i in range(4))))
    assert names(found) == ["unscored"] and found[0].number == 1.0 and found[0].serious
    assert "4 of 4 chains have no reward" in found[0].sentence


def test_a_healthy_rollout_has_no_findings_and_is_not_changed() -> None:
    chains = healthy()
    given, batch = rollout(*chains), af.collate(chains, af.advantages.grpo)
    before = batch.mask.clone(), batch.advantages.clone()
    assert af.diagnose(given, batch) == af.Findings() == af.diagnose(given, batch)
    assert given == rollout(*chains) and torch.equal(before[0], batch.mask)
    assert torch.equal(before[1].nan_to_num(9), batch.advantages.nan_to_num(9))
    assert repr(af.diagnose(given)) == "nothing was found" and "nothing was found" in af.diagnose(given)._repr_html_()


def test_rollouts_of_text_engines_are_examined() -> None:
    def text_only(t: af.Trajectory) -> af.Trajectory:
        changes: dict[str, Any] = {
            "ids": None,
            "sampled": False,
            "logprobs": None,
            "entropies": None,
            "versions": None,
        }
        return t.replace(turns=tuple(dataclasses.replace(turn, **changes) for turn in t.turns))

    assert names(af.diagnose(rollout(*map(text_only, healthy())))) == []


# --- checks ----------------------------------------------------------------------------------------


def test_calls_that_do_not_parse() -> None:
    bad = af.ToolCall("c", "", {}, af.ToolResult(False, "not JSON"), error="the tool call is not valid JSON")
    good = af.ToolCall("c", "add", {}, af.ToolResult(True, "2"))
    found = af.diagnose(
        rollout(
            *(
                t.replace(turns=trajectory("x", 0, calls=(bad if i % 2 else good,)).turns)
                for i, t in enumerate(healthy())
            )
        )
    )
    assert found[0].name == "unparsed_calls" and found[0].number == 0.5
    assert "12 of 24 tool calls could not be run; most often: 'the tool call is not valid JSON'" in found[0].sentence
    # Calls that were run but failed, because of the tool and of the model.
    for name, error in (("failing_tools", af.Failure("tool", "KeyError", "'x'", "")), ("rejected_calls", None)):
        failed = af.ToolCall("c", "add", {}, af.ToolResult(False, "no such x", error=error))
        found = af.diagnose(rollout(*(trajectory(f"t{i}", i % 2, calls=(failed,)) for i in range(4))))
        assert name in names(found) and "4 of 4 tool calls" in found[names(found).index(name)].sentence, found
    # Calls in another format are taken for answers.
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    chains = [trajectory(f"t{i}", 0.0, text='<tool_call>{"name": "add"}', tools=tools) for i in range(4)]
    assert "treated as an answer" in af.diagnose(rollout(*chains))[0].sentence
    # A call that is cut off by the limit on tokens is due to the limit.
    chains = [trajectory(f"t{i}", 0.0, calls=(bad,), stop="turn_tokens") for i in range(4)]
    assert af.diagnose(rollout(*chains))[0].name == "truncated"


def test_answers_in_the_prompt_are_compared_with_chance() -> None:
    def asked(template: str, answers: list[Any]) -> list[str]:
        chains = []
        for i, answer in enumerate(answers):
            given = {"prompt": template.format(answer), "fields": {"answer": answer}}
            chains += [trajectory(f"{i}/{k}", float(k), f"task{i}", text=str(k), **given) for k in (0, 1)]
        return names(af.diagnose(rollout(*chains)))

    assert asked("What is it? ({})", ["Oslo", "Bergen", "Rome", "Paris"]) == ["leaked_answer"]
    assert asked("How many? ({})", [12, 34, 56, 78]) == ["leaked_answer"]
    assert asked("Is it yes or no?", ["yes", "no", "yes", "no"]) == []
    assert asked("What is the capital?", ["Oslo", "Bergen", "Rome", "Paris"]) == []


def test_constant_rewards_are_distinguished_from_solved_tasks() -> None:
    solved = [trajectory(f"{g}{i}", 1.0, g, ids=(i, 2), text="7") for g in "ab" for i in range(4)]
    assert names(af.diagnose(rollout(*solved))) == ["solved"]
    same = [trajectory(f"{g}{i}", 1.0, g, ids=(i, 2), text=f"{i}") for g in "ab" for i in range(4)]
    assert names(af.diagnose(rollout(*same)))[0] == "constant_reward"


def answers(reward: Any, reference: str = "12", **changes: Any) -> list[af.Trajectory]:
    """Return the chains of four tasks, each with right and wrong answers of different lengths, scored by `reward`."""
    finals = [reference, "7", "eighty", reference, f"it is {reference}", "no idea at all"]
    return [
        trajectory(f"{g}/{i}", float(reward(final)), g, text=final, ids=tuple(range(i + 2)),
                   fields={"answer": reference}, **changes)
        for g in "abcd" for i, final in enumerate(finals)
    ]  # fmt: skip


SUM = af.ToolCall("c", "add", {"x": 5}, af.ToolResult(True, "12"))


def other(vocabulary: str) -> Any:
    return [t.replace(vocabulary=vocabulary) for t in healthy()[:3]]


def played(text: str, **changes: Any) -> list[af.Trajectory]:
    """Return chains of an expert, who writes the answer. No policy sampled them."""
    chains = [
        trajectory(f"{g}/{i}", 0.5 + (g == "a") / 4, g, text=text, fields={"answer": g}, **changes)
        for g in "abcd"
        for i in "01"
    ]
    return [
        t.replace(turns=(t.turns[0], dataclasses.replace(t.turns[1], sampled=False, text=t.group,
                                                         messages=({"role": "assistant", "content": t.group},))))
        for t in chains
    ]  # fmt: skip


def started(texts: list[str], prompt: str = "Play.") -> list[af.Trajectory]:
    """Return two chains of each of two tasks, whose environments write `texts` at their start."""
    chains = [trajectory(f"{i}", float(i % 2), "ab"[i // 2], ids=(i,), text=f"{i}", prompt=prompt) for i in range(4)]
    return [
        t.replace(turns=(dataclasses.replace(t.turns[0], messages=({"role": "user", "content": text},)), t.turns[1]))
        for t, text in zip(chains, texts, strict=True)
    ]


def looked(seen: list[str]) -> list[af.Trajectory]:
    """Return chains in which the result of the first call is "Done." and that of the second is one of `seen`."""
    results = [[("go", "Done."), ("look", text)] for text in seen]
    calls = [tuple(af.ToolCall("", name, {}, result=af.ToolResult(True, text)) for name, text in r) for r in results]
    return [
        t.replace(turns=(*t.turns, dataclasses.replace(t.turns[0], kind="observation", tool_calls=made)))
        for t, made in zip(started(["Room 1"] * 4), calls, strict=True)
    ]


@pytest.mark.parametrize(
    ("chains", "wanted"),
    [
        (answers(lambda final: "12" in final), []),
        (answers(lambda final: -("12" in final)), ["reversed_reward"]),
        (answers(len), ["length_reward"]),
        # A penalty on the length is reported as such, although right answers are shorter here.
        (answers(lambda final: -len(final)), ["length_reward"]),
        (answers(lambda final: final != "eighty"), ["lenient_reward"]),
        (answers(lambda final: ("12" in final) + 0.25 * ("7" in final)), []),  # partial credit
        (answers(lambda final: final != "eighty", reference="B"), ["lenient_reward"]),
        (answers(lambda final: "1/2" in final, reference="1/2"), []),
        (answers(lambda final: "12" in final, calls=(SUM,)), []),
        ([t.replace(turns=(*t.turns[:1], *trajectory("x", 0, text="7", calls=(SUM,), ids=(i,)).turns[1:]))
          for i, t in enumerate(answers(lambda final: final == "12"))], ["ignored_results"]),
        ([*healthy(), *other("a")], []),
        ([*healthy(), *other("a"), *other("b")], ["other_tokenizer"]),
        (played("answer"), []),
        (started(["Room 1", "Room 1", "Room 2", "Room 2"]), []),
        (started(["Room 1", "Room 2", "Room 3", "Room 4"]), ["different_starts"]),
        (started(["Room 1"] * 4), ["same_start"]),
        (looked(["Cat", "Cat", "Dog", "Dog"]), []),
        (looked(["Cat"] * 4), ["same_start"]),
        (started(["Play."] * 4), []),  # the state may be hidden
    ],
)  # fmt: skip
def test_rewards_environments_and_tokenizers_are_compared_with_the_answers(chains: Any, wanted: list[str]) -> None:
    """A wrong sign was reported as a reward for length, and another tokenizer as stale weights.

    Also examined: partial credit, penalties on length, references that are not answers, chains of players, tasks with
    the same prompt and hidden states.
    """
    assert names(af.diagnose(rollout(*chains)).serious)[:1] == wanted


async def test_imitated_and_distilled_chains_are_healthy() -> None:
    """The mask of an imitation contains actions that no policy sampled, and distillation needs no reward."""
    policy = agents.fresh()
    chains = await af.envs.calculator.expert(policy).rollout(agents.tasks(4), group_size=2)
    batch = af.collate(chains, imitate=True)
    stats = af.imitation_step(policy, af.adamw(policy, 1e-3), batch)
    assert not af.diagnose(chains, batch, stats).serious
    wrong = af.diagnose(chains, batch.replace(mask=batch.attention & (torch.arange(batch.ids.shape[1]) > 0)))
    assert wrong[0].name == "wrong_mask"
    unscored = rollout(*(t.replace(reward=None) for t in healthy()))
    assert not af.diagnose(unscored, records=[{"approx_kl": 0.0}]).serious
    assert names(af.diagnose(unscored)) == ["unscored"]


def test_repetition_gibberish_and_identical_chains() -> None:
    loops = [t.replace(turns=trajectory("x", 0, ids=(5, 6) * 20 + (i,)).turns) for i, t in enumerate(healthy())]
    assert names(af.diagnose(rollout(*loops))) == ["repetition"]
    noise = [t.replace(turns=trajectory("x", 0, ids=(i, 1), entropy=4.0).turns) for i, t in enumerate(healthy())]
    assert names(af.diagnose(rollout(*noise))) == ["gibberish"]
    same = [t.replace(turns=trajectory("x", 0).turns, reward=0.0) for t in healthy()]
    assert names(af.diagnose(rollout(*same)))[0] == "collapsed_entropy"


def test_components_that_are_constant_or_equal() -> None:
    chains = [
        t.replace(metrics={"exact": t.reward or 0.0, "again": t.reward or 0.0, "format": 1.0, "success": 1.0})
        for t in healthy()
    ]
    found = af.diagnose(rollout(*chains))
    assert {"duplicate_component", "constant_component"} <= set(names(found)) and not found.serious
    assert "again and exact were equal" in found[0].sentence


def test_dropped_chains() -> None:
    found = af.diagnose(rollout(*(t.replace(dropped="too long" if i % 4 else None) for i, t in enumerate(healthy()))))
    assert (
        names(found) == ["dropped"] and "18 of 24 chains" in found[0].sentence and "'too long'" in found[0].sentence
    )


def test_masks_of_selected_authors_are_not_wrong() -> None:
    def roles(t: af.Trajectory) -> af.Trajectory:
        second = dataclasses.replace(t.turns[1], author="critic", ids=(9, 9, 9))
        return t.replace(turns=(*t.turns, second))

    chains = [roles(t) for t in healthy()]
    assert af.diagnose(rollout(*chains), af.collate(chains, af.advantages.grpo, authors="policy")) == af.Findings()
    batch = af.collate(chains, af.advantages.grpo)
    cut = batch.mask & (torch.arange(batch.ids.shape[1]) != 3)
    found = af.diagnose(rollout(*chains), batch.replace(mask=cut))
    assert names(found) == ["wrong_mask"] and found[0].number == pytest.approx(1 / 6)


def test_numbers_of_the_update_and_of_earlier_records() -> None:
    quiet = {"approx_kl": 0.05, "clip_fraction": 0.1, "sampler_gap": 0.001, "lr": 3e-4}
    assert af.diagnose(None, records=[quiet]) == af.Findings()
    assert names(af.diagnose(None, records=[quiet | {"approx_kl": 2.0}, quiet])) == ["policy_moved"]
    assert names(af.diagnose(None, records=[quiet | {"sampler_gap": 0.8}])) == ["sampler_gap"]
    # The learning rate is that of the largest update, which comes before its consequences.
    loops = [
        trajectory(f"{g}{i}", 0.0, g, ids=(5, 6) * 20 + (i,), stop="turn_tokens") for g in "ab" for i in range(4)
    ]
    found = af.diagnose(rollout(*loops), records=[quiet | {"approx_kl": 8.0, "lr": 0.1}, quiet])
    assert names(found)[0] == "policy_moved" and "8 nats per token at lr 0.1 at most" in found[0].sentence
    assert names(af.diagnose(rollout(*loops), records=[quiet]))[0] == "truncated"


def imitated(groups: list[tuple[int, int]], entropy: float) -> af.Rollout:
    """Return a rollout with (successes, size) for each group."""
    return rollout(
        *(trajectory(f"{g}/{i}", float(i < right), f"g{g}", ids=(5, 6, 7 + i), text=f"answer {i}", entropy=entropy)
          for g, (right, size) in enumerate(groups) for i in range(size))
    )  # fmt: skip


def steps(*success: float, se: float = 0.08, **more: float) -> list[dict[str, float]]:
    return [{"step": i, "success": s, "success_se": se if s else 0.0} | more for i, s in enumerate(success, 1)]


SHARP = [(0, 4)] * 8 + [(4, 4)] * 3 + [(2, 4)] * 5
LARGE = {"approx_kl": 0.25, "lr": 6e-4, "entropy": 0.1}


@pytest.mark.parametrize(
    ("chains", "records", "name", "sentence", "remedy"),
    [
        # Imitation left an entropy of .03 or .05, so that most groups had equal rewards.
        (imitated(SHARP, 0.03), [], "collapsed_entropy", "69% of the groups, all rewards are", "more varied demo"),
        (None, steps(0.34, entropy=0.03, equal_groups=0.69), "collapsed_entropy", "entropy 0.03", "more varied demo"),
        (imitated([(0, 8)] * 5 + [(6, 8)] * 3, 0.05), [], "collapsed_entropy", "62% of the groups", "more varied demo"),
        (imitated(SHARP, 0.1), [], "no_signal", "8 of 16 groups", "larger groups"),  # the tasks are too hard
        # The first update was too large.
        (None, steps(0.25, 0.0, **LARGE), "policy_moved", "by 0.25 nats per token at lr 0.0006; then success "
         "fell from 0.25 to 0.00", "Lower lr"),
        (None, [steps(0.19, **LARGE)[0], steps(0.19, 0.11, entropy=0.31)[1]], "policy_moved", "0.10 to 0.31 nats",
         "Lower lr"),
        (None, steps(0.25, 0.0, 0.3, **LARGE), None, "", ""),  # success has recovered
        (None, steps(0.25, 0.15, **LARGE), None, "", ""),  # not significant
        # Success of 14 steps.
        (None, steps(*[0.34, 0.36] * 7, equal_groups=0.7, approx_kl=5e-4), "no_rise", "from 0.35 (steps 1 to 4) to "
         "0.35 (steps 11 to 14), +0.00 ± 0.11; in the last, 70% of the groups had equal rewards, approx_kl 0.0005.",
         "raise lr"),
        (None, steps(*[0.5] * 7, *[0.2] * 7), "no_rise", "Success fell from 0.50", "raise"),
        (None, steps(*[0.2] * 7, *[0.4] * 7), None, "", ""),
        (None, steps(*[0.95] * 14), None, "", ""),
        (None, steps(*[0.3] * 6, se=0.2), None, "", ""),  # a rise would not be significant
        (None, steps(*[0.3] * 5), None, "", ""),
    ],
)  # fmt: skip
def test_failed_trials_are_explained(chains: Any, records: Any, name: Any, sentence: str, remedy: str) -> None:
    """A pretrained model did not learn word problems in the first six trials; see docs/log.md."""
    found = af.diagnose(chains, records=records)
    assert names(found)[:1] == [name] * bool(name)
    assert all(sentence in f.sentence and remedy in f.remedy and len(repr(f)) < 400 for f in found[:1])


def test_a_number_is_compared_with_a_text() -> None:
    def compared(answer: Any, reward: Any) -> list[str]:
        finals = ["12", "7", "12.0", "80"]
        chains = [trajectory(f"{g}/{i}", float(reward(final)), g, text=final, ids=(i, 1), fields={"answer": answer})
                  for g in "ab" for i, final in enumerate(finals)]  # fmt: skip
        return names(af.diagnose(rollout(*chains)).serious)

    assert compared(12, lambda final: final == 12)[:1] == ["numeric_reference"]
    assert compared(12.0, lambda final: final == 12)[:1] == ["numeric_reference"]
    assert "numeric_reference" not in compared("12", lambda final: 0)
    assert compared(12, lambda final: float(final) == 12) == []


async def test_words_that_a_tiny_policy_does_not_know() -> None:
    agent = af.envs.lookup.agent(af.tiny.policy("lookup"))
    asked = af.tasks_from(
        [{"question": f"Which mountain has {i} climbers?", "answer": "K2", "world": 0} for i in "ab"]
    )
    found = af.diagnose(await agent.rollout(asked, 4))
    assert found[0].name == "unknown_words" and "words in the prompts, most often " in found[0].sentence
    known = await agent.rollout(af.load_tasks("lookup").train[:4], 4)
    assert "unknown_words" not in names(af.diagnose(known))


# --- real steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["constant reward", "another tool name", "few tokens", "lr x 100"])
async def test_planted_faults_are_named_first(fault: str) -> None:
    wanted = next(name for family, planted, name in BENCH.CASES if (family, planted) == ("calculator", fault))
    found = af.diagnose(*await BENCH.planted("calculator", fault))
    assert found[0].name == wanted and found[0].serious
    assert all(
        f.sentence.endswith(".") and f.remedy and f.widget.startswith("w.") and math.isfinite(f.number) for f in found
    )
    assert html.escape(found[0].sentence) in found._repr_html_()
    assert not any("`" in f.remedy for f in found), "tables and views show plain text"


@pytest.mark.long
async def test_planted_faults_of_other_families() -> None:
    cases = [case for case in BENCH.CASES if case[0] in ("lookup", "search")]
    first = [af.diagnose(*await BENCH.planted(family, fault))[0].name for family, fault, _ in cases]
    assert sum(name == wanted for name, (*_, wanted) in zip(first, cases, strict=True)) >= len(cases) - 1, first
    assert not await BENCH.healthy("train", "lookup", 3)


async def test_the_tokens_that_moved_most_are_named() -> None:
    policy = agents.fresh()
    chains = await agents.agent(policy).rollout(agents.tasks(4), group_size=4)
    batch = af.collate(chains, lambda rewards, groups: torch.linspace(-1, 1, len(rewards)))
    stats = af.ppo_step(policy, af.adamw(policy, 3e-4), batch, detail=True)
    found = {f.name: f for f in af.diagnose(chains, batch, stats)}
    change = np.nanmax(np.abs(stats.detail["logprob_after"] - stats.detail["logprob_before"]))
    assert found["moved_tokens"].number == pytest.approx(float(change))


async def test_runs_are_diagnosed_live_and_from_their_folder(tmp_path: Path) -> None:
    policy = agents.fresh()
    agent = agents.agent(policy).replace(reward=BENCH.half)
    config = af.TrainConfig(steps=2, tasks_per_step=2, group_size=4, save_rollouts=True)
    run = af.train(agent, policy, agents.tasks(4), config, run=tmp_path / "run")
    errors.check(run.diagnose, af.errors.SettingsError, "at least one chain")
    await run
    assert af.diagnose(run)[0].name == "constant_reward"
    assert af.Run(tmp_path / "run").diagnose()[0].name == "constant_reward"
