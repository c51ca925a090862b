"""Assertions about the results of the tutorials, kept here because they would distract readers.

Each value is run as the last cell of its notebook by `test_runs_top_to_bottom` and benchmarks/bench_notebooks.py.
"""

import re
from pathlib import Path
from typing import Any

import nbformat

CHECKS = {
    "00_your_own_task": """
assert tasks.splits == {"test": 50, "train": 150}
assert perfect.reward == 1 and not perfect.action_mask.any()
assert before.success < 0.45 and after.success > 0.9 and swapped.success > 0.9 and changed > 0.8
assert again.success == after.success
assert len(broken.failed) == len(broken) == len(repaired) == 20 and repaired.summary()["success"] > 0.9
assert "careless: AttributeError" in broken.unscored_reason
af.TrainConfig(steps=200, lr=2e-5, lr_end=2e-6, evaluate_every=20)  # the settings of section 9
assert late.reward == 0.5 and clerk_after.success > clerk_before.success + 0.25
assert clerk_after.metrics["right"] > clerk_before.metrics["right"]
""",
    "01_quickstart": """
assert not {t.messages[-1]["content"] for t in tasks.train} & {t.messages[-1]["content"] for t in tasks.test}
assert len(shown.ids) == len(shown.action_mask) == len(shown.logprobs)
assert all(t.author == agent.name for t in shown.turns if t.sampled) and not shown.turns[0].sampled
assert stats.sampler_gap < 1e-4
assert len(run.records) == 24 and run.records[-1]["success"] > 0.8
assert first <= 0.35 and last >= 0.9 and len(difference.lost) < len(difference.gained)
""",
    "02_one_chain": """
import math
first = await agent.chain(task).distribution(top=2)
entropies = [-p * math.exp(p) for p in first.logprobs]
assert abs(sum(map(math.exp, first.logprobs)) - 0.964) < 1e-3
assert abs(sum(entropies) - 0.653) < 1e-3 and abs(first.entropy - 0.908) < 1e-3
assert len(samples) == 16 and len(plain) == 8 and len(rollout) == 24
""",
    "03_chat_templates": """
assert reports["tiny (ours)"].exact
if folder:
    rejected = [name for name, report in reports.items() if report.tool_results != "exact"]
    assert rejected == ["deepseekv3"]
    assert reports["qwen3"].thinking == "kept until a user speaks"
    assert reports["cohere"].tool_role == "user"
    assert reports["gptoss"].stops[:2] == ("<|return|>", "<|call|>")
    assert reports["qwen3_5_think"].generation_prompt.endswith("<think>\\n")
    assert sum(report.user_messages == "exact" for report in reports.values()) >= 5
    assert af.Chat(tokenizers["qwen3"], history="append").observation_ids([again])
    thinking = af.Chat(tokenizers["qwen3_5_think"])  # the prompt opened the tag, so this is thinking, not a call
    assert thinking.parse(thinking.encode("maybe <tool_call>\\n<function=f>\\n</function>\\n</tool_call>")).calls == ()
assert [t.kind for t in row.turns] == ["prompt", "forced", "action", "observation", "action"]
assert row.action_mask.tolist() == [t.kind == "action" for t in row.turns for _ in t.ids]
assert content in policy.chat.text(ids) and ids.count(policy.chat.stop_ids[0]) == 2
assert not policy.chat.drift(row)
assert policy.chat.drift(spelled.snapshot()).cause == "re-tokenisation"
assert policy.chat.drift(spaced.snapshot()).cause == "template"
""",
    "05_engines": """
assert gaps["LocalEngine"] <= 1e-5 and max(gaps.values()) <= 1e-4
assert len(gaps) == len(engines) and all(e.tokens == "exact" and e.logprobs == "yes" for e in engines.values())
assert all(s.ids == ids for s in samples.values())
assert (table.sub(table["LocalEngine"], axis=0).abs() <= 1e-4).all(axis=None)
assert stats.sampler_gap <= 1e-4 and stats.scalars()["sampler_gap"] == stats.sampler_gap
assert not t.action_mask.any() and {turn.author for turn in t.actions} == {"script"}
assert [t.stop for t in cut] == ["answered"] * 4 + ["run_turns"] and len(cut) + len(cut.not_run) == len(tasks)
""",
    "06_widgets": """
assert len(rollout) == 128
assert [turn.kind for turn in called.turns] == ["prompt", "action", "observation", "action"]
assert {"advantage", "ratio", "clipped", "prob_before", "prob_after", "sampler_gap"} <= set(ratios.signals)
assert list(lanes.selection.to_frame()["trajectory"]) == [going.partial.trajectories[0].id]
assert lanes.counts["done"] == 64
assert curves.steps == (1, 2, 3, 4, 5) and len(opened) == 64
last = both.to_frame()["success"].unstack("run").iloc[-1]
assert last["lr 2e-4"] > last["lr 2e-5"]
assert good.ok and good.observation == "27" and not refused.ok and refused.error is None
assert not (scores.to_frame()["change"] == "lost").any() and with_tools.flipped.empty  # exact answers are also near
assert chain.snapshot().final == "2"
assert "<script" not in picture._repr_html_() and len(picture._repr_html_()) < 100_000
""",
    "07_masked_ppo": """
assert kl["right"]["own tokens"] > kl["right"]["tokens after"]
assert kl["one late"]["tokens after"] > 20 * kl["one late"]["own tokens"]
assert (k["k1"] < 0).any() and (k["k3"] >= -1e-6).all()
assert abs(stats.policy_loss - loss.item()) < 1e-5
assert full.updates == 4 and full.value_loss > 0 and full.kl_reference >= 0
assert float(first_token) > 0
""",
    "08_algorithms": """
ends = {name: [statistics.fmean(c[-3:]) for c in runs] for name, runs in curves.items()}
starts = [c[0] for runs in curves.values() for c in runs]
assert max(starts) < 0.5 and all(min(ends[name]) > max(starts) for name in ("grpo", "dr_grpo", "rloo"))
assert all(success[-1] > success[0] for success in masked["with the mask"])
""",
    "09_conventions": """
middle = pushes.loc[4] / pushes.loc[1]
assert middle["grpo, sample std"] < 1.6 < 2.2 < middle["dr_grpo: none"]
assert (longer["skip"] - longer["skip"].iloc[0]).abs().max() < 1e-6
assert longer["step"].iloc[-1] < longer["step"].iloc[0] / 10
assert rows["mask"]["left out"] == rows["score"]["of them truncated"] > rows["mask"]["of them truncated"] == 0
assert moved["zero"] == 0 and moved["raw"] > 1e-4
""",
    "10_code": """
assert trajectory.reward == 1 and trajectory.stop == "env_done" and trajectory.metrics["runs"] == 1
assert grade.ok  # of the last program, which is the reference
assert all(t.reward == 1 - 0.02 * t.metrics["lines"] for t in scored if t.success)
assert before.success < 0.45 and after.success > 2 * before.success
assert after.metrics["submitted"] > before.metrics["submitted"]
""",
    "11_sql": """
assert expert.success == 1 and luck.success < 0.1
assert 0.15 < before.success < 0.45 and after.success > 2 * before.success
assert after.metrics["queries"] > 2 * before.metrics["queries"]
""",
    "12_search": """
assert expert.summary()["reward"] == 1 and luck.summary()["reward"] <= 0.3
assert before.success <= 0.4 and after.success >= 0.7 and after.metrics["found"] > before.metrics["found"]
""",
    "13_webshop": """
assert patient.metrics["options"] == 1 and hurried.metrics["options"] == 0
assert patient.reward > hurried.reward > 0
assert expert.summary()["reward"] >= 0.95 and luck.summary()["reward"] <= 0.1
assert before.success <= 0.4 and after.success >= 0.7 and after.metrics["options"] > before.metrics["options"]
""",
    "14_alfworld": """
assert house.won and house.done and house.plan == [] and house.invalid == 1
assert pool.snapshot().size == 16 and pool.snapshot().leased == 0
assert before.success < 0.35 and after.success > 0.5
""",
    "15_scienceworld": """
assert expert.reward == 1 and expert.metrics["score"] == 100 and luck.summary()["success"] == 0
assert {t.stop for t in guesses.trajectories} == {"env_done"} and 0.15 < guessing < 0.5
assert loss.item() < 0.1 and imitated.success > guessing + 0.15 and after.success > guessing + 0.15
assert all(record["unscored"] == 0 for record in run.records)
""",
    "18_imitate_and_distil": """
assert not first.action_mask.any() and batch.mask.any()
ends = {name: max(curve.values()) for name, curve in curves.items()}
assert ends["imitation"] > 0.85 and ends["rejection sampling"] > start + 0.3
assert ends["distillation"] > 0.85 * ends["imitation"]
assert float(gap[batch.mask].mean()) < 0
assert rarely < 0.1 and rare["distillation"][64] > 0.6
assert sum(rare["GRPO"].values()) < sum(rare["distillation"].values())
""",
    "19_credit": """
assert len(rows) >= 2 and (plain.row_index[rows].diff() == 1).all()
assert credit["broadcast"].nunique() == 1 and (credit["last"].iloc[:-1] == 0).all()
assert abs(credit["uniform"].sum() - credit["broadcast"].iloc[0]) < 1e-6
assert credit["per row"].abs().max() < credit["broadcast"].abs().max()
assert cosine["share of last rows"]["last"] == 1 > cosine["share of last rows"]["broadcast"]
assert all(cosine.loc["broadcast", name] < 0.9999 for name in ("last", "uniform", "geometric"))
assert cosine.loc["broadcast", "last"] == cosine.loc["broadcast", list(changes)].min()
assert sum(len(t.rows) == 1 for t in rollout) > 96 and "max_turns" in {t.stop for t in rollout if len(t.rows) == 6}
""",
    "16_any_agent": """
assert {len(t.rows) for t in rollout} == {1} and before.success <= 0.4 and after.success >= 0.7
assert {turn.author for t in chains for turn in t.actions} == {"planner", "worker"}
assert int(batch.mask.sum()) == sampled["worker"] > 0 and sampled["planner"] > 0
assert pair_after.success - pair_before.success >= 0.3
""",
    "20_agent_lightning": """
assert {turn.author for t in chains for turn in t.actions} == {"planner", "people", "things"}
assert len({len(t.actions) for t in chains}) > 3 and trained > 0 == pull["things"]
""",
    "21_real_model": """
assert without_tool.success <= 0.2 and with_tool.success <= 0.2 and with_tool.calls == 0
assert stats[-1].loss < 0.5 * stats[0].loss and len(run.records) == config.steps
if config.steps == 36:
    # Three seeds solved 0.82 to 0.83 of the last training problems, and 0.84 to 0.92 of those in other wordings.
    assert demonstrated.success <= 0.7 and sum(record["success"] for record in run.records[-8:]) / 8 > 0.7
""",
    "22_masksearch": """
assert hack["recall"] == 1 and hack["f1"] < 0.15 and bounds["searches"] == 1
assert results["mixed gaps"] >= max(results["no practice"], results["control: random searches"]) + 0.2
""",
    "23_mle_gym": """
assert results["after"] >= results["control"] + 0.3
assert set(curves) == set(evaluations) and chain.reward == 0
""",
    "31_servers": """
assert len(run.records) == 4 and not any(failed) and run.records[-1]["version"] == policy.version
if HAVE_VLLM:
    assert list(stale["state"]) == ["up", "stale"] and len(stale_warnings) == 1 == len(kill_warnings)
    assert [member.state for member in fleet.members] == ["up", "down"]
    lags = [record["lag"] for record in run.records]
    assert lags[0] == 0 and all(lag > 0 for lag in lags[1:])
""",
    "34_coding_agent": """
assert [t.reward for t in rollout] == [1, 0, 0] and [len(t.actions) for t in rollout] == [4, 4, 1]
assert {len(t.rows) for t in rollout} == {1} and (stopped.stop, stopped.reward) == ("timeout", 0)
assert probed.final.split() == (
    "its chain: 200 unknown key: 404 this machine: ConnectionRefusedError the internet: gaierror".split()
)
assert len(repairs.train) == 400 and not before.rollout.failed and not after.rollout.failed
known, new = ({(t.fields["bad"], t.fields["wrong"]) for t in some} for some in (repairs.train, repairs.test))
assert not known & new
""",
    "33_why_it_does_not_learn": """
assert not healthy.serious and run.diagnose()[0].name == "constant_reward"
assert repaired.summary()["success"] > 0
""",
    "32_images": """
assert prompts[0] == prompts[1] and max((a - b).abs().max() for a in table.values() for b in table.values()) > 1
assert before.success < 0.7 and by_kind(after).min() > 0.85
assert (found["ids"] == found["ids"].iloc[0]).all(axis=None)
assert (found["row keys"] - correct).abs().max(axis=None) < 1e-5
assert errors["row keys"].max() < 1e-4 and errors["ids"].max() > 1
""",
    "35_trl": """
for a, b in zip(their_log, our_log, strict=True):
    assert float(a["reward"]) == b["reward"] and abs(float(a["grad_norm"]) / b["grad_norm"] - 1) < 1e-3
assert difference.mean() < 0.05 * moved.mean()
""",
    "17_branches": """
assert {len(group) for group in rollout.groups} == {16} and made.P.between(0, 1).all() and control in sampled
assert abs(sum(weights) / len(tree.groups) - 1) < 1e-6
assert rollout.summary()["executed"] < sum(len(t.tool_calls) for t in rollout)
""",
    "25_tools_as_weights": """
assert apply(two, "remove", "gap") == one and len(two) == 2 and hash(apply(two, "remove", "gap")) == hash(one)
assert (await two["gap"].try_(a=7, b=30)).observation == "23"
assert longer.proposed.tolist() == [0.5, 0.4, 0.4, 0.6] and len(trace) == 3
assert sorted(learned.names) == sorted(NAMES) and unchanged == learned and EMPTY == af.ToolSet()
assert not os.path.exists("made") and results["reader, test"] > 0.7
""",
    "29_tptu": """
assert before["one-step"].success < after["one-step"].success < after["sequential"].success
assert results["calls, one-step, dependent"] == 1 < results["calls, sequential, dependent"]
""",
    "26_evoagent": """
assert alone == [FIRST] and 13 <= small.total() <= 37
assert len(set(population)) == len(population) and calls.total() < 1 + 11 * T * N + T
assert results["fittest agent, test"] > results["first agent, test"] + 0.2
""",
    "24_meco": """
assert sum(int(t.action_mask[len(t.turns[0].ids)]) for t in gate.rollout) == 0
assert abs(gate.success - success(corrected)) < 1e-6 and best_rates[0.1] >= best_rates[0.9]
assert says_call["test"].std() < 0.05
""",
    "27_conagents": """
assert set(attempts) == {1, 2, 3} and max(n for report in reports for n in report["attempts"]) == 3
assert results["no calibration"] < results["server only"] < both > results["review without advice"] and both > 0.8
assert table.reviews["no calibration"] == 0 < table.reviews["both"] < table.reviews["both, automatic"]
""",
    "30_apt": """
assert before.reward < 0.5 and after.reward > 0.8 and careful.reward == after.reward >= distracted.reward
assert found["memory"].turns == 1 < found["reflection"].turns <= 4 and len(memory) > 20 and scores[-1] == 1
""",
    "28_roles": """
assert {turn.author for t in before.rollout for turn in t.actions} == set(ROLES)
assert results["after"] > max(results["before"], results["no broadcast"]) + 0.2
assert all(len({turn.author for turn in t.actions if turn.row == i}) == 1 for t in before.rollout for i in range(3))
""",
}


def with_answers(notebook: Any) -> Any:
    """Return the notebook with every Python block of a folded answer as a cell after its exercise."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown" and "<details>" in cell.source:
            answers = re.findall(r"^```python\n(.*?)^```", cell.source, flags=re.DOTALL | re.MULTILINE)
            assert answers or "Exercise" not in cell.source, f"an exercise without an answer in Python: {cell.source}"
            cells += [nbformat.v4.new_code_cell(answer) for answer in answers]
    notebook.cells = cells
    return notebook


def complete(path: Path) -> Any:
    """Return a notebook with the answers to its exercises, and with the assertions of `CHECKS` at the end."""
    notebook = with_answers(nbformat.read(path, as_version=4))
    if path.stem in CHECKS:
        notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[path.stem]))
    return notebook
