"""Checkpoints in the layout of transformers, and the policies of a run."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import errors
import pytest
import torch
from test_trainer import SMALL, TASKS, learner, leave, numbers, start

import agentfly_kit as af
from agentfly_kit.trainer import loop

EVALUATED = SMALL.replace(evaluate_every=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[af.TrainRun, list[str]]:
    """Return a run that keeps all policies, and the fingerprints of its weights, by step."""
    policy, seen = learner(), [learner().fingerprint()]
    run = start(tmp_path_factory.mktemp("runs") / "all", policy, SMALL.replace(keep="all"))

    async def go() -> None:
        async for _ in run:
            seen.append(policy.fingerprint())

    asyncio.run(go())
    return run, seen


def test_transformers_loads_a_checkpoint_with_the_same_logits(trained: tuple[af.TrainRun, list[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = trained
    folder = run.run.checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.policy.model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).chat_template == run.policy.chat.tokenizer.chat_template
    assert model.generation_config.eos_token_id == run.policy.model.generation_config.eos_token_id
    assert torch.load(folder / "state.pt", weights_only=True)["policy"] == {}, "no weight is stored twice"


def test_the_policy_of_each_step(trained: tuple[af.TrainRun, list[str]]) -> None:
    run, seen = trained
    folder = af.Run(run.path)
    for policy in (folder.policy(), af.Policy.load(run.path), af.Policy.load(run.path / "checkpoint")):
        assert (policy.version, policy.chat.format.name) == (run.policy.version, run.policy.chat.format.name)
        assert policy.fingerprint() == seen[-1]
    assert [folder.policy(step).fingerprint() for step in (1, 2, 3, 4)] == seen[1:]
    assert folder.policy(4, value_head=True).value_head is not None
    errors.check(
        lambda: folder.policy(9),
        af.errors.RunError,
        "the policy of step 9, got policies of steps 1, 2, 3, 4; see TrainConfig(keep",
    )
    errors.check(lambda: folder.policy(best=True), af.errors.RunError, "best=True needs a run with evaluations")
    assert not list((run.path / "policies").rglob("state.pt")), "no state of the optimizer"
    errors.check(
        af.Run(run.path / "rollouts").policy,
        af.errors.RunError,
        "must contain a checkpoint, got policies of steps none",
    )


async def test_the_best_policy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, seen = learner(), [""]
    success = iter([0.25, 0.75, 0.5, 0.75])
    real = loop.make_record

    def record(*args: Any) -> dict[str, float]:
        return real(*args) | {"eval_success": next(success)}

    monkeypatch.setattr(loop, "make_record", record)
    run = start(tmp_path / "run", policy, EVALUATED, eval_tasks=TASKS[:1])
    async for _ in run:
        seen.append(policy.fingerprint())
    assert run.run.policy(best=True).fingerprint() == seen[2], "the first of two equal steps"
    assert [p.name for p in (tmp_path / "run" / "policies").iterdir()] == ["step-00002"]
    assert run.run.policy(3).fingerprint() == seen[3], "the checkpoint before the last one"


async def test_policies_after_the_last_checkpoint_are_deleted_on_resume(tmp_path: Path) -> None:
    config = SMALL.replace(keep="all", checkpoint_every=4)
    await leave(start(tmp_path / "run", learner(), config), "break", 2)
    (tmp_path / "run" / "policies").mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "run" / "policies" / "step-00003")
    run = start(tmp_path / "run", learner(), config)
    async for _ in run:
        assert "step-00003" not in {p.name for p in (tmp_path / "run" / "policies").iterdir()}
        break
    af.Run(tmp_path / "run").claim({}, resume=False)
    assert not (tmp_path / "run" / "policies").exists()


async def test_an_adapter_is_saved_in_the_layout_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = learner().save(tmp_path / "base")
    policy = af.Policy.load(base, lora=2, value_head=True)
    config = SMALL.replace(steps=2, advantage="gae")
    await leave(start(tmp_path / "run", policy, config), "break", 1)
    resumed = af.Policy.load(base, lora=2, value_head=True)
    await start(tmp_path / "run", resumed, config)
    whole = af.Policy.load(base, lora=2, value_head=True)
    await start(tmp_path / "whole", whole, config)
    assert resumed.fingerprint() == whole.fingerprint()
    loaded = af.Run(tmp_path / "run").policy(value_head=True)
    assert loaded.state().keys() == whole.state().keys()
    assert all(torch.equal(value, whole.state()[name]) for name, value in loaded.state().items())
    assert loaded.version == whole.version
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "checkpoint").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, whole.model(ids).logits)
    shutil.rmtree(base)
    errors.check(
        af.Run(tmp_path / "run").policy, af.errors.PolicyError, re.compile(r"cannot load a policy from .*base")
    )


async def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    await leave(start(tmp_path / "run", learner()), "break", 1)
    other = learner()
    deeper = type(other.model)(
        other.model.config.__class__(**other.model.config.to_dict() | {"intermediate_size": 24})
    )
    folder = tmp_path / "run" / "checkpoint"
    deeper.save_pretrained(folder)
    policy = learner()
    await errors.check(
        lambda: start(tmp_path / "run", policy),
        af.errors.RunError,
        re.compile(r"state must have the weights of this policy, but the shape of '.*' is .*delete"),
    )
    assert policy.fingerprint() == learner().fingerprint()
    assert (folder / "state.pt").exists()


async def test_damaged_files_of_a_checkpoint(tmp_path: Path) -> None:
    await leave(start(tmp_path / "run", learner()), "break", 1)
    folder = tmp_path / "run" / "checkpoint"
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    await errors.check(
        lambda: start(tmp_path / "run", learner()),
        af.errors.RunError,
        re.compile(r"checkpoint cannot be read \(.*\); delete"),
    )
    errors.check(
        lambda: af.Policy.load(tmp_path / "run"),
        af.errors.PolicyError,
        re.compile(r"cannot load a policy from .*checkpoint."),
    )
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").unlink()
    errors.check(
        lambda: af.Policy.load(folder),
        af.errors.PolicyError,
        re.compile(r"must contain a config.json \(a model\) or an adapter_config.json"),
    )
    for name in ("checkpoint", "checkpoint.before"):
        shutil.rmtree(tmp_path / "run" / name)
    errors.check(
        lambda: af.Policy.load(tmp_path / "run"), af.errors.PolicyError, re.compile(r"got the run .* without one")
    )


def test_arguments_of_transformers(tmp_path: Path) -> None:
    folder = learner().save(tmp_path / "p")
    policy = af.Policy.load(folder, attn_implementation="eager", device_map="cpu")
    assert policy.model.config._attn_implementation == "eager"
    assert policy.fingerprint() == learner().fingerprint()
    errors.check(lambda: af.Policy.load(folder, nonsense=1), af.errors.PolicyError, "nonsense")
    assert json.loads((folder / "policy.json").read_text())["format"] == policy.chat.format.name


async def test_a_complete_run_continues_with_more_steps(tmp_path: Path) -> None:
    """The added iterations equal those of a longer run, and the schedule of another learning rate covers them."""
    constant = SMALL.replace(lr_end=None, steps=2, lr_warmup=3)
    folder = tmp_path / "run"
    await start(folder, config=constant)
    # Nothing is added.
    other = constant.replace(lr=5e-4)
    errors.check(lambda: start(folder, config=other), af.errors.RunMismatch, "config.lr: was 0.001, now 0.0005")
    operational = {"max_concurrency": 7, "evaluate_every": 0, "checkpoint_every": 3, "keep": "all"}
    longer = await start(folder, config=constant.replace(steps=4, **operational))
    whole = await start(config=constant.replace(steps=4))
    assert longer.resumed_from == 2 and longer.policy.fingerprint() == whole.policy.fingerprint()
    assert numbers(longer) == numbers(whole)

    added = constant.replace(steps=7, lr=4e-4, lr_end=2e-4)
    run = start(folder, config=added)
    async for step in run:
        if step.step == 5:
            break
    # The run is not complete.
    eight = added.replace(steps=8)
    errors.check(lambda: start(folder, config=eight), af.errors.RunMismatch, "config.steps: was 7, now 8")
    await start(folder, config=added)
    assert [r["lr"] for r in af.Run(folder).records] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 4e-4, 3e-4, 2e-4])


def test_a_run_without_settings_is_another_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": "agentfly_kit.run", "version": 3, "id": "0", "fingerprint": {}}')
    errors.check(lambda: start(tmp_path), af.errors.RunMismatch, "not in the folder's run")
