"""TRL: equal tokens and losses, and TRL's trainers with the rows, agents and tools of this package."""

import asyncio
import math
import re
import warnings
from pathlib import Path
from typing import Any

import agents
import errors
import pandas as pd
import pytest
import torch
from recipes.base import RESPONSE_TEMPLATE
from recipes.calculator import Expression, Recipe
from test_ppo_settings import Kept, trajectories

import agentfly_kit as af
from agentfly_kit import trl as bridge

pytestmark = [
    pytest.mark.real,
    # Warnings of TRL and its requirements.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("trl")


def config(folder: Path, **options: Any) -> Any:
    from trl import GRPOConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOConfig(
            **{
                "output_dir": str(folder),
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "report_to": "none",
                "per_device_train_batch_size": 12,
                "num_generations": 4,
                "max_completion_length": 40,
                "save_strategy": "no",
                "disable_tqdm": True,
                **options,
            }
        )


def grpo_inputs(batch: af.Batch, pad: int) -> dict[str, torch.Tensor]:
    """Inputs of GRPOTrainer's loss: prompts padded on the left, completions on the right."""
    first = batch.mask.int().argmax(1)
    rows = len(batch)
    prompt_width, width = int(first.max()), int((batch.lengths - first).max())
    out = {
        name: torch.full((rows, size), fill)
        for name, size, fill in (
            ("prompt_ids", prompt_width, pad),
            ("prompt_mask", prompt_width, 0),
            ("completion_ids", width, pad),
            ("completion_mask", width, 0),
            ("tool_mask", width, 1),
        )
    }
    old = torch.zeros(rows, width)
    ref = torch.zeros(rows, width)
    each = torch.zeros(rows)
    for i in range(rows):
        p, n = int(first[i]), int(batch.lengths[i])
        out["prompt_ids"][i, prompt_width - p :] = batch.ids[i, :p]
        out["prompt_mask"][i, prompt_width - p :] = 1
        out["completion_ids"][i, : n - p] = batch.ids[i, p:n]
        out["completion_mask"][i, : n - p] = 1
        out["tool_mask"][i, : n - p] = batch.mask[i, p:n].long()
        old[i, : n - p] = torch.where(batch.mask[i, p:n], batch.logprobs[i, p:n], 0.0)
        if batch.ref_logprobs is not None:
            ref[i, : n - p] = torch.where(batch.mask[i, p:n], batch.ref_logprobs[i, p:n], 0.0)
        each[i] = batch.advantages[i][batch.mask[i]][0]
    out |= {"old_per_token_logps": old, "advantages": each, "num_items_in_batch": batch.mask.sum()}
    if batch.ref_logprobs is not None:
        out["ref_per_token_logps"] = ref
    return out


def grpo_trainer(policy: af.Policy, args: Any, **options: Any) -> Any:
    from trl import GRPOTrainer

    options.setdefault("reward_funcs", bridge.reward_func)
    options.setdefault("train_dataset", bridge.dataset(agents.tasks(8)))
    return GRPOTrainer(policy.model, processing_class=policy.chat.tokenizer, args=args, **options)


# --- rows ----------------------------------------------------------------------------------------


def test_sft_trains_exactly_the_masked_tokens(tmp_path: Path) -> None:
    """TRL's collator and loss agree with ours on the same rows."""
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    policy = af.Policy(af.tiny.model(seed=1), agents.chat())
    writer = Recipe(policy.chat)
    rows = [
        writer.demonstrate("solves", Expression(t))
        for t in ("2+3", "4*(5-6)", "12-7", "9*9+1", "3-(4-5)", "8", "7+7", "1-1")
    ]
    args = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=8, max_steps=25, learning_rate=3e-3, lr_scheduler_type="constant",
        adam_epsilon=1e-6,  # with 1e-8, Adam's first update amplifies the rounding of gradients near 0
        save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        policy.model, args=args, train_dataset=bridge.sft_dataset(rows), processing_class=policy.chat.tokenizer
    )
    collated = next(iter(trainer.get_train_dataloader()))
    order = [
        tuple(r[m].tolist()) for r, m in zip(collated["input_ids"], collated["attention_mask"].bool(), strict=True)
    ]
    batch = af.collate([rows[[tuple(r.ids.tolist()) for r in rows].index(row)] for row in order], imitate=True)
    ids, mask = batch.ids, batch.mask
    assert torch.equal(collated["labels"] != -100, mask)
    assert torch.equal(collated["labels"][mask], ids[mask])
    with torch.no_grad():
        policy.model.eval()
        theirs = trainer.compute_loss(policy.model, collated)
        ours = -policy.forward(ids, mask, torch.ones(len(ids))).logprob.mean()
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
    # One update of the same batch gives the same weights.
    copy = policy.copy()
    optimizer = torch.optim.AdamW(copy.model.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    stats = af.imitation_step(copy, optimizer, batch)
    assert stats.loss == pytest.approx(float(theirs), rel=1e-6, abs=1e-6)  # float32; the losses are about 3

    class Compare(TrainerCallback):  # type: ignore[misc]
        gap = math.inf

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                pairs = zip(policy.model.parameters(), copy.model.parameters(), strict=True)
                self.gap = max(float((a - b).abs().max()) for a, b in pairs)

    compare = Compare()
    trainer.add_callback(compare)
    trainer.train()
    assert compare.gap < 1e-5
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]


def test_sampled_rows_are_sft_rows_unchanged() -> None:
    rows = trajectories(agents.random_policy(1), 5)
    batch = af.collate(rows)
    data = bridge.sft_dataset(rows)
    for i, row in enumerate(data):
        n = len(row["input_ids"])
        assert row["input_ids"] == batch.ids[i, :n].tolist()
        assert [x != -100 for x in row["labels"]] == batch.mask[i, :n].tolist()


async def test_demonstrations_get_labels() -> None:
    """The action mask of demonstrations is 0, because no policy sampled their tokens."""
    (t,) = (await agents.scripted([agents.call("2+3"), "5"]).rollout(agents.tasks(1))).trajectories
    assert not t.action_mask.any()
    (row,) = bridge.sft_dataset([t])
    wanted = [t.turns[i].kind == "action" for i in t.turn_index]
    assert any(wanted)
    assert row["labels"] == [int(i) if m else -100 for i, m in zip(t.ids, wanted, strict=True)]
    assert bridge.sft_dataset([t], authors="script")[0] == row
    errors.check(
        lambda: bridge.sft_dataset([t], authors="policy"),
        af.errors.BatchError,
        "must have at least one token to label, got none in actions of policy;",
    )
    errors.check(
        lambda: bridge.sft_dataset([t.replace(turns=t.turns[:1])]),
        af.errors.BatchError,
        "got none in actions; omit this trajectory",
    )


# --- the loss ------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.0},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.05, "epsilon": 0.1, "epsilon_high": 0.3},
    "bnpo": {"loss_type": "bnpo", "beta": 0.02, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.6},
    "dapo with entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ppo_config_reproduces_the_loss_of_trl(name: str, tmp_path: Path) -> None:
    """The loss on the same batch agrees with TRL's to 1e-6, and the gradient to 1e-4 (relative)."""
    policy = af.Policy.load(
        agents.random_policy(3).save(tmp_path / "policy")
    )  # TRL loads its reference policy from here
    args = config(tmp_path, **SETTINGS[name])
    trainer = grpo_trainer(policy, args)
    batch = af.collate(trajectories(policy, 12, sampling=af.Sampling()), bridge.advantage(args))
    batch = batch.replace(ref_logprobs=agents.random_policy(4).score(batch, {"logprob"})["logprob"])
    policy.model.eval()
    trainer.current_gradient_accumulation_steps = 1
    policy.model.zero_grad()
    theirs = trainer._compute_loss(policy.model, grpo_inputs(batch, policy.chat.tokenizer.pad_token_id))
    theirs.backward()
    wanted = torch.cat([p.grad.flatten().clone() for p in policy.model.parameters()])
    kept = Kept(policy)
    step = bridge.ppo_config(args).replace(max_grad_norm=None, old_logprobs="engine", micro_tokens=60)
    stats = af.ppo_step(policy, kept, batch, step)
    assert stats.loss == pytest.approx(float(theirs), rel=1e-6, abs=1e-6)  # float32; the losses are about 3
    torch.testing.assert_close(kept.seen[0], wanted, rtol=1e-4, atol=1e-6)


def test_advantages_equal_those_of_trl(tmp_path: Path) -> None:
    rewards = torch.tensor([0.001, 0.0, 0.0, 0.001, 1.0, 0.0, 0.5, 1.0])
    groups = [0] * 4 + [1] * 4
    got = bridge.advantage(config(tmp_path))(rewards, groups)
    grid = rewards.view(2, 4)  # the formula in _generate_and_score_completions
    wanted = (grid - grid.mean(1, keepdim=True)) / (grid.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(got, wanted.flatten())
    assert bridge.advantage(config(tmp_path, scale_rewards="none")) is af.advantages.dr_grpo


def test_settings_without_a_counterpart_are_rejected(tmp_path: Path) -> None:
    for options, message in (
        ({"loss_type": "vespo"}, "vespo"),
        ({"top_entropy_quantile": 0.8}, "top_entropy_quantile"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "dapo"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "sequence"),
    ):
        errors.check(
            lambda: bridge.ppo_config(config(tmp_path, **options)), af.errors.SettingsError, re.compile(message)
        )
    errors.check(
        lambda: bridge.advantage(config(tmp_path, scale_rewards="batch")), af.errors.SettingsError, "scale_rewards"
    )


# --- an agent inside GRPOTrainer -----------------------------------------------------------------


def test_grpo_trainer_trains_on_chains_of_an_agent(tmp_path: Path) -> None:
    policy = agents.fresh()
    tasks = agents.tasks(8)
    agent = agents.agent(policy, max_turns=2)
    args = config(tmp_path, max_steps=3, learning_rate=1e-3, temperature=1.0, logging_steps=1)
    trainer = grpo_trainer(
        policy, args, train_dataset=bridge.dataset(tasks), rollout_func=bridge.rollout_func(agent, tasks)
    )
    seen: list[Any] = []
    inner = trainer._compute_loss

    def watch(model: Any, inputs: Any) -> Any:
        seen.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return inner(model, inputs)

    trainer._compute_loss = watch
    before = policy.fingerprint()
    trainer.train()
    assert policy.fingerprint() != before
    assert policy.version == 2  # the version of the last rollout follows TRL's step count
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 3
    for inputs in seen:
        # Tool results are part of the completion but are not trained.
        assert (inputs["tool_mask"] * inputs["completion_mask"]).sum() < inputs["completion_mask"].sum()


def test_chains_are_returned_in_the_order_of_the_prompts() -> None:
    agent = agents.played(lambda task, turn: f"said {task.id}")
    wanted = agents.tasks(3)
    order = [wanted[i] for i in (2, 2, 0, 1, 1, 0, 2)]
    chains = bridge._sample_trajectories(agent, order, 0, True)
    assert [t.task.id for t in chains] == [task.id for task in order]
    assert len({t.id for t in chains}) == 7


def test_an_unscored_chain_has_no_gradient() -> None:
    """TRL would use reward 0. Here the chain gets the mean of its group, and none of its tokens is trained."""

    @af.reward
    def broken(answer: str, final: str | None, trajectory: Any) -> float:
        if trajectory.chain == 1:
            raise RuntimeError("our side")
        return float(trajectory.chain)

    agent = agents.played(["an answer"]).replace(reward=broken)
    columns = bridge._rollout_columns(bridge._sample_trajectories(agent, [agents.tasks(1)[0]] * 4, 0, True), 0)
    assert columns["agent_reward"] == [0.0, pytest.approx(5 / 3), 2.0, 3.0]
    assert [any(mask) for mask in columns["env_mask"]] == [True, False, True, True]
    assert all(
        len(a) == len(b) == len(c)
        for a, b, c in zip(*(columns[k] for k in ("completion_ids", "logprobs", "env_mask")), strict=True)
    )


def test_a_compacted_chain_is_rejected() -> None:
    def compact(chain: Any) -> None:
        if chain.actions == 1 and chain.turn.row == 0:
            chain.compact("so far so good")

    agent = agents.played([agents.call("1+1"), "2"], before_turn=compact)
    chains = bridge._sample_trajectories(agent, [agents.tasks(1)[0]], 0, True)
    errors.check(
        lambda: bridge._rollout_columns(chains, 0),
        af.errors.SettingsError,
        "compacted into 2 rows, but TRL needs one row per completion",
    )


def test_a_rollout_func_that_does_not_match_the_trainer_is_rejected(tmp_path: Path) -> None:
    policy, other = agents.fresh(), agents.fresh()
    tasks = agents.tasks(4)
    trainer = grpo_trainer(policy, config(tmp_path, temperature=0.7))
    prompts = [list(tasks[0].messages)] * 4
    errors.check(
        lambda: bridge.rollout_func(agents.agent(other), tasks)(prompts, trainer),
        af.errors.SettingsError,
        "the model that TRL trains",
    )
    errors.check(
        lambda: bridge.rollout_func(agents.agent(policy), tasks)(prompts, trainer), af.errors.SettingsError, "0.7"
    )
    errors.check(
        lambda: bridge.rollout_func(agents.agent(policy).replace(sampling=af.Sampling(0.7)), tasks[1:])(
            prompts, trainer
        ),
        af.errors.SettingsError,
        "no task has this prompt",
    )
    twin = af.Task("twin", tasks[0].messages, {"answer": "another"})
    errors.check(
        lambda: bridge.rollout_func(agents.agent(policy), [*tasks, twin]), af.errors.SettingsError, "same prompt"
    )


def test_tasks_that_differ_in_earlier_calls_are_told_apart() -> None:
    """Also looked at: names, thinking and ids of calls, and keys that a dataset adds to the other rows."""

    def asked(name: str, **more: Any) -> af.Task:
        function = {"name": "calculator", "arguments": more.pop("arguments", {"expression": "1+1"})}
        calls = [{"id": more.pop("id", "c"), "type": "function", "function": function}]
        called = {"role": "assistant", "content": "", "tool_calls": calls, **more}
        told = {"role": "tool", "content": "2", "tool_call_id": calls[0]["id"], "name": "calculator"}
        return af.Task(name, ({"role": "user", "content": "1+1?"}, called, told), {"answer": name})

    tasks = [
        asked("a"),
        asked("b", arguments={"expression": "2"}),
        asked("c", thinking="hm"),
        asked("d", arguments={"other": "2"}),
        asked("e", id="other"),
        *agents.tasks(1),
    ]
    known = {bridge._prompt_key(task.messages): task for task in tasks}
    bridge.rollout_func(agents.agent(), tasks)
    assert [bridge._find_task(known, row["prompt"]) for row in bridge.dataset(tasks)] == tasks


# --- TRL's own loop ------------------------------------------------------------------------------


def test_completion_tables_of_trl_are_read(tmp_path: Path) -> None:
    """Tables that TRL writes while it rolls out with its own loop, a tool and two rewards."""

    async def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example "3*(4+5)".
        """
        return str((await agents.calculator.try_(expression=expression)).observation)

    def exact(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [float(c[-1].get("content") == a) for c, a in zip(completions, answer, strict=True)]

    def short(completions: Any, **kwargs: Any) -> list[float | None]:
        return [0.25, None] * (len(completions) // 2)

    policy = agents.fresh()
    policy.chat.tokenizer.response_template = RESPONSE_TEMPLATE
    try:
        args = config(
            tmp_path,
            max_steps=2,
            temperature=1.0,
            max_completion_length=96,
            logging_steps=1,
            max_tool_calling_iterations=3,
            log_completions=True,
        )
        trainer = grpo_trainer(policy, args, tools=[calculator], reward_funcs=[exact, short])
        trainer.train()
    finally:
        policy.chat.tokenizer.response_template = None
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 2
    assert any(entry.get("tools/call_frequency", 0) > 0 for entry in logged)
    assert all(entry.get("tools/failure_frequency", 0) == 0 for entry in logged)
    rollout = af.read_rollouts(tmp_path / "completions")
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "completions").iterdir())]
    assert list(af.read_rollouts(pd.concat(tables))) == list(rollout)
    assert len(rollout) == 24 and [len(group) for group in rollout.groups] == [4] * 6
    assert {t.group.partition(":")[0] for t in rollout} == {"step 1", "step 2"}
    for t in rollout:
        rewards = {name: value for name, value in t.metrics.items() if name != "advantage"}
        assert t.reward == sum(rewards.values()) and len(t.metrics) == len(rewards) + 1 and rewards.get("short", 0.25)
        assert t.turns[0].kind == "prompt" and t.task.messages[-1]["content"].startswith("What is")
    called = [call for t in rollout for call in t.tool_calls]
    assert called and all(set(call.arguments) <= {"expression"} and call.result for call in called), called


def test_a_dataset_has_the_fields_that_all_tasks_have() -> None:
    data = bridge.dataset(agents.tasks(3))
    assert data.column_names == ["prompt", "answer"]
    assert data[0]["prompt"] == list(agents.tasks(3)[0].messages)
    errors.check(lambda: bridge.dataset([]), af.errors.SettingsError, "at least one task")


# --- learning ------------------------------------------------------------------------------------


async def learned(policy: Any, tasks: list[Any]) -> float:
    """Return the sampled success on held-out tasks."""
    agent = agents.agent(policy)
    found = await af.evaluate(agent, tasks, seeds=(7,))
    await agent.engine.close()
    return found.success


@pytest.mark.long
def test_trl_learns_as_well_as_train(tmp_path: Path) -> None:
    """20 updates of 64 chains bring the calculator from .28 to .9, with TRL's trainer and with `train`."""
    every = agents.tasks(160 + 64, seed=3)
    known, held = every[:160], every[160:]
    steps, lr = 20, 3e-4

    mine = agents.fresh()
    settings = af.TrainConfig(
        steps=steps, tasks_per_step=8, group_size=8, minibatch=None, epochs=1, lr=lr, lr_end=None,
        checkpoint_every=steps,
    )  # fmt: skip
    asyncio.run(af.train(agents.agent(mine), mine, known, settings))
    ours = asyncio.run(learned(mine, held))

    policy = agents.fresh()
    agent = agents.agent(policy)
    args = config(
        tmp_path,
        max_steps=steps,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        per_device_train_batch_size=64,
        num_generations=8,
        temperature=1.0,
        max_completion_length=256,
        max_tool_calling_iterations=3,
        shuffle_dataset=False,
        logging_steps=1,
    )
    trainer = grpo_trainer(
        policy, args, train_dataset=bridge.dataset(known), rollout_func=bridge.rollout_func(agent, known)
    )
    trainer.train()
    policy.model.eval()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    theirs = asyncio.run(learned(policy, held))
    print(f"TRL {theirs:.3f}, ours {ours:.3f}; TRL's rewards {rewards[0]:.2f} ... {rewards[-1]:.2f}")
    assert len(rewards) == steps
    assert rewards[0] < 0.5
    assert ours > 0.85
    assert theirs > 0.85
    assert abs(ours - theirs) < 0.12
