"""Settings of the PPO step, and its independence of the split into micro-batches."""

import dataclasses
import functools
import itertools
import json
import os
import random
from typing import Any, get_args

import agents
import errors
import pytest
import torch
from test_decoder import model
from test_trainer import leave
from torch import Tensor

import agentfly_kit as af
from agentfly_kit.batch.batch import join
from agentfly_kit.policy import cpu
from agentfly_kit.policy.value_head import Critic

LOSSES = ("ppo", "reinforce", "gspo", "gmpo", "sapo", "cispo", "dppo")


def trajectories(policy: af.Policy, count: int = 12, *, seed: int = 0, **options: Any) -> list[af.Trajectory]:
    """Chains of one to three actions at two temperatures, in groups of four, for options of `agents.trajectory`."""
    rng = random.Random(seed)
    options.setdefault("with_entropies", False)
    out = []
    for i in range(count):
        plan = [("task", rng.randint(2, 5))]
        for _ in range(1 + i % 3):
            plan += [("policy", rng.randint(1, 8)), ("tool", rng.randint(1, 6))]
        task = af.Task(f"t{i // 4}", ({"role": "user", "content": "?"},))
        each = {"sampling": af.Sampling(temperature=(1.0, 0.7)[i % 2])} | options
        out.append(
            agents.trajectory(
                policy, [plan[: -1 if i % 2 else None]], name=f"g{i // 4}/{i % 4}", task=task, reward=rng.gauss(0, 1),
                seed=100 * seed + i, **each,
            )
        )  # fmt: skip
    return out


def made(policy: af.Policy, count: int = 12, **options: Any) -> af.Batch:
    return af.collate(trajectories(policy, count, **options), af.advantages.grpo)


def example(seed: int, count: int = 12, **options: Any) -> tuple[af.Policy, af.Batch]:
    """Return a random policy and a batch for it."""
    policy = agents.random_policy(seed)
    return policy, made(policy, count, **options)


def judged(policy: af.Policy, batch: af.Batch) -> af.Batch:
    """Return the batch with values, returns and token-level advantages."""
    values = policy.score(batch, {"value"})["value"]
    adv, returns = af.advantages.gae(batch.token_rewards, values, batch.mask)
    return batch.replace(advantages=adv, returns=returns, values=values)


class Kept(torch.optim.SGD):
    """Record the gradients of every update and leave the weights unchanged."""

    def __init__(self, policy: af.Policy) -> None:
        super().__init__([p for p in policy.parameters() if p.requires_grad], lr=0.0)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for g in self.param_groups for p in g["params"]]
        self.seen.append(torch.cat([getattr(g, "full_tensor", g.clone)().flatten() for g in gradients]))


def gradient(policy: af.Policy, batch: af.Batch, **options: Any) -> tuple[Tensor, Any]:
    """Return the gradient of one update over the whole batch, and the statistics."""
    kept = Kept(policy)
    options = {"old_logprobs": "engine", "max_grad_norm": None} | options
    keywords = {name: options.pop(name) for name in ("reference", "detail", "seed") if name in options}
    stats = af.ppo_step(policy, kept, batch, af.PPOConfig(**options), **keywords)
    policy.version = 0
    return torch.cat(kept.seen), stats


def plain(policy: af.Policy, batch: af.Batch, function: Any, how: str, **options: Any) -> Tensor:
    """Compute the gradient by its definition: one padded forward pass of the whole model."""
    policy.model.zero_grad()
    logits = policy.model(input_ids=batch.ids, attention_mask=batch.attention.long(), use_cache=False).logits
    logp = torch.log_softmax(logits / batch.temperatures[:, None, None], -1)
    each = torch.zeros(batch.ids.shape)
    each[:, 1:] = logp[:, :-1].gather(-1, batch.ids[:, 1:, None])[..., 0]
    per_token = function(each, batch.logprobs, batch.advantages, batch.mask)
    more = {"trajectory_index": batch.trajectory_index} if how == "trajectory_mean" else {}
    loss = af.losses.aggregate(per_token, batch.mask, how, **more, **options)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]).clone()


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_its_definition(name: str) -> None:
    policy, batch = example(3)
    for how in get_args(af.losses.AggregateMode):
        options = {"denominator": 9.0} if how == "fixed" else {}
        wanted = plain(policy, batch, getattr(af.losses, name), how, **options)
        for micro in (1, 40, 10_000) if how == "seq_mean_token_mean" else (40,):
            got, stats = gradient(policy, batch, loss=name, aggregate={"how": how, **options}, micro_tokens=micro)
            agents.assert_same_gradient(got, wanted, how)
            assert stats.tokens == int(batch.mask.sum())


def test_clip_options_reach_the_loss() -> None:
    policy, batch = example(3)
    got, _ = gradient(policy, batch, loss="gspo", clip=0.1, clip_high=0.3)
    wanted = plain(policy, batch, functools.partial(af.losses.gspo, clip=0.1, clip_high=0.3), "token_mean")
    agents.assert_same_gradient(got, wanted)


def test_clip_fraction_counts_tokens_without_gradient() -> None:
    policy, batch = example(3, noise=0.5)
    _, stats = gradient(policy, batch, clip=0.1, micro_tokens=50, detail=True)
    now = policy.score(batch, {"logprob"})["logprob"]
    wanted = af.losses.clipped(now, batch.logprobs, batch.advantages, batch.mask, 0.1)[batch.mask].float()
    assert 0.1 < stats.clip_fraction < 0.9
    assert stats.clip_fraction == pytest.approx(float(wanted.mean()), abs=1e-6)
    assert (stats.detail["clipped"][batch.mask] == wanted.numpy()).all()
    assert stats.approx_kl == pytest.approx(float(af.losses.approx_kl(now, batch.logprobs, batch.mask)), rel=1e-4)


# --- all terms together -------------------------------------------------------------------------


@pytest.mark.parametrize("head", [True, "separate"])
def test_all_terms_together_do_not_depend_on_the_split(head: Any) -> None:
    policy = af.Policy(agents.random_policy(6).model, agents.chat(), value_head=head)
    torch.manual_seed(0)
    weight = policy.value_head.head.weight if isinstance(policy.value_head, Critic) else policy.value_head.weight
    torch.nn.init.normal_(weight, std=0.1)
    batch = judged(policy, made(policy, version=0))
    reference = agents.random_policy(7)
    options: dict[str, Any] = {
        "reference": reference, "kl_coef": 0.1, "kl_kind": "k3+", "entropy_coef": 0.02, "value_clip": 0.1,
        "correction": {"level": "sequence", "cap": 5.0}, "old_logprobs": "recompute",
    }  # fmt: skip
    whole, one = gradient(policy, batch, micro_tokens=10_000, **options)
    for micro in (1, 60):
        parts, many = gradient(policy, batch, micro_tokens=micro, **options)
        agents.assert_same_gradient(parts, whole)
        for name in ("loss", "policy_loss", "value_loss", "kl_reference", "approx_kl", "effective_sample_size"):
            assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-4, abs=1e-6), name
    again, _ = gradient(policy, batch, checkpointing=True, **options)
    agents.assert_same_gradient(again, whole)


def test_gradients_of_the_last_update_are_freed_before_a_forward_pass() -> None:
    policy = agents.random_policy()
    forward, held = policy.forward, []

    def observed(*args: Any, **options: Any) -> Any:
        held.append([p.grad is not None for p in policy.model.parameters()])
        return forward(*args, **options)

    policy.forward = observed  # type: ignore[method-assign]
    af.ppo_step(policy, af.adamw(policy), made(policy), af.PPOConfig(minibatch=4, epochs=2, old_logprobs="engine"))
    assert len(held) > 2 and not any(map(any, held))


def test_a_separate_critic_gives_the_policy_no_gradient() -> None:
    policy = af.Policy(agents.random_policy(6).model, agents.chat(), value_head="separate")
    batch = judged(policy, made(policy))
    none = batch.replace(advantages=torch.zeros(batch.ids.shape))
    kept = Kept(policy)
    af.ppo_step(policy, kept, none, af.PPOConfig(old_logprobs="engine", max_grad_norm=None))
    own = sum(p.numel() for p in policy.model.parameters())
    assert not kept.seen[0][:own].any() and kept.seen[0][own:].any()
    assert [len(g["params"]) > 0 for g in af.adamw(policy).param_groups] == [True] * 3


def test_bfloat16_weights_are_the_rounded_weights_of_an_update_in_float32() -> None:
    policy = af.Policy(agents.random_policy().model.to(torch.bfloat16), agents.random_policy().chat)
    own = list(policy.model.parameters())
    exact = [p.detach().float() for p in own]
    before, optimizer = [p.clone() for p in exact], af.adamw(policy, 1e-6)
    plain = torch.optim.AdamW(exact, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    torch.manual_seed(0)
    for i in range(6):
        for p, q in zip(own, exact, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        optimizer.step()
        plain.step()
        assert all(torch.equal(p, q.bfloat16()) for p, q in zip(own, exact, strict=True)), i
        if i == 2:  # another process goes on
            state, optimizer = optimizer.state_dict(), af.adamw(policy, 1e-6)
            optimizer.load_state_dict(state)
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in own if p.grad is not None)
    assert sum(int((p != q).sum()) for p, q in zip(exact, before, strict=True)) > 0.9 * sum(p.numel() for p in exact)
    with torch.no_grad():
        own[0].fill_(1.0)  # weights that were assigned since the last step are not those of the optimizer's copy
    optimizer.step()
    assert (own[0] - 1).abs().max() < 0.01


@pytest.mark.parametrize("emulated", [True, False])
def test_a_cpu_that_emulates_bfloat16_warns_once_before_the_step(
    emulated: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Any
) -> None:
    features = {"avx2": True, "avx512_bf16": not emulated, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    cpu.warn_if_bfloat16_is_slow.cache_clear()
    policy, batch = example(6, 2)
    errors.check(
        lambda: af.ppo_step(policy, af.adamw(policy), batch, af.PPOConfig(autocast="bfloat16", kl_coef=0.1)),
        af.errors.SettingsError,
        "reference=",
    )
    assert not recwarn, "settings are checked first"
    for _ in range(2):
        af.ppo_step(policy, af.adamw(policy), batch, af.PPOConfig(autocast="bfloat16"))
    af.Policy.load(policy.save(tmp_path), dtype="bfloat16")
    for times in (1, 2):
        texts = [str(w.message) for w in recwarn if "bfloat16" in str(w.message)]
        assert len(texts) == times * emulated
        assert all("no instructions for bfloat16" in text and "autocast=None" in text for text in texts)
        cpu.warn_if_bfloat16_is_slow.cache_clear()
        af.Policy(policy.model.to(torch.bfloat16), policy.chat)
    cpu.warn_if_bfloat16_is_slow.cache_clear()


@pytest.mark.parametrize("family", ["opt", "falcon"])
def test_checkpointing_leaves_dropout_off_in_layers_that_call_it(family: str) -> None:
    """Also looked at: biogpt, which calls dropout in its layers too; gpt2 and gpt_neox, which have modules for it."""
    options = {"word_embed_proj_dim": 48, "ffn_dim": 80, "dropout": 0.5, "hidden_dropout": 0.5}
    policy = af.Policy(model(family, **options), agents.chat())
    batch, calls = made(policy), []
    gradient(policy, batch)  # the first forward pass is preceded by trials
    norm = policy.decoder.get_submodule("h.0.input_layernorm" if family == "falcon" else "layers.0.final_layer_norm")
    norm.register_forward_hook(lambda *_: calls.append(1))
    wanted, once = gradient(policy, batch)[0], len(calls)
    agents.assert_same_gradient(gradient(policy, batch, checkpointing=True)[0], wanted)
    assert len(calls) == 3 * once, "the layers were not computed again"


def test_checkpointing_and_autocast_leave_the_model_as_it_was() -> None:
    policy = agents.random_policy(6)
    before = [m.training for m in policy.model.modules()]
    batch = made(policy)
    whole, exact = gradient(policy, batch)
    kept, _ = gradient(policy, batch, checkpointing=True)
    agents.assert_same_gradient(kept, whole)
    half, stats = gradient(policy, batch, autocast="bfloat16", old_logprobs="auto")
    full, _ = gradient(policy, batch, old_logprobs="recompute")
    assert torch.nn.functional.cosine_similarity(half, full, dim=0) > 0.95
    assert stats.sampler_gap > 1e-4  # so the old logprobs were recomputed in bfloat16
    assert stats.ratio_max == pytest.approx(1.0, abs=0.03) and exact.ratio_max > 1.1
    assert [m.training for m in policy.model.modules()] == before
    assert all(p.dtype == torch.float32 for p in policy.parameters())


# --- KL ------------------------------------------------------------------------------------------


def test_shaped_rewards_match_their_formula() -> None:
    policy, reference = agents.random_policy(1), agents.random_policy(2)
    batch = made(policy, 4, noise=0.0)
    ref = reference.score(batch, {"logprob"})["logprob"]
    shaped = af.shaped_rewards(batch.replace(ref_logprobs=ref), 0.1)
    for i in range(len(batch)):
        for t in range(batch.ids.shape[1]):
            if batch.mask[i, t]:
                wanted = batch.token_rewards[i, t] - 0.1 * (batch.logprobs[i, t] - ref[i, t])
                assert float(shaped[i, t]) == pytest.approx(float(wanted), abs=1e-6)
            else:
                assert torch.isnan(shaped[i, t])


def test_a_kl_in_the_reward_is_reported_and_not_added() -> None:
    policy, reference = agents.random_policy(1), agents.random_policy(2)
    batch = made(policy)
    none, _ = gradient(policy, batch)
    reported, stats = gradient(policy, batch, kl_coef=0.5, kl_in="reward", reference=reference)
    agents.assert_same_gradient(reported, none)
    ref = reference.score(batch, {"logprob"})["logprob"]
    mean = af.losses.kl(batch.logprobs, ref, "k3", batch.mask).sum() / batch.mask.sum()
    assert stats.kl_reference == pytest.approx(float(mean), rel=1e-5)
    added, _ = gradient(policy, batch.replace(ref_logprobs=ref), kl_coef=0.5)
    scored, _ = gradient(policy, batch, kl_coef=0.5, reference=reference)
    agents.assert_same_gradient(added, scored)
    assert not torch.allclose(added, none)


# --- correction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights_are_trainer_over_sampler(level: str) -> None:
    policy, batch = example(1, noise=0.4)
    now = policy.score(batch, {"logprob"})["logprob"]
    weights = af.losses.importance_weights(now, batch.logprobs, batch.mask, level=level)  # type: ignore[arg-type]

    def weighed(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
        return af.losses.ppo(logp, now, adv, mask) * weights

    wanted = plain(policy, batch, weighed, "token_mean")
    got, stats = gradient(policy, batch, old_logprobs="recompute", correction=level, detail=True)
    agents.assert_same_gradient(got, wanted)
    ess = float(af.losses.effective_sample_size(weights, batch.mask, level=level))  # type: ignore[arg-type]
    assert 0 < stats.effective_sample_size < 1 and stats.effective_sample_size == pytest.approx(ess, rel=1e-5)
    torch.testing.assert_close(torch.tensor(stats.detail["weight"])[batch.mask], weights[batch.mask])


def test_correction_can_mask() -> None:
    policy, batch = example(1, noise=2.0)
    _, stats = gradient(
        policy, batch, old_logprobs="recompute", correction={"cap": 1.5, "floor": 0.7, "beyond": "mask"}, detail=True
    )
    weights = torch.tensor(stats.detail["weight"])[batch.mask]
    assert (weights == 0).any() and ((weights == 0) | ((weights >= 0.7) & (weights <= 1.5))).all()


def test_truncated_sampling_needs_a_correction() -> None:
    policy = agents.random_policy(1)
    cut = trajectories(policy, noise=0.0, sampling=af.Sampling(top_p=0.9))
    errors.check(lambda: af.collate(cut, af.advantages.grpo), af.errors.BatchError, "top-p")
    batch = af.collate(cut, af.advantages.grpo, allow_truncated_sampling=True)
    assert batch.kept_mass is not None and torch.isnan(batch.kept_mass[~batch.mask]).all()
    errors.check(lambda: gradient(policy, batch), af.errors.BatchError, "correction must be 'token' or 'sequence'")
    _, stats = gradient(policy, batch, correction="token", detail=True)
    # The engine's logprobs equal the policy's, so the weight is the kept mass.
    torch.testing.assert_close(torch.tensor(stats.detail["weight"])[batch.mask], batch.kept_mass[batch.mask])
    lost = [t.replace(turns=tuple(dataclasses.replace(turn, kept_mass=None) for turn in t.turns)) for t in cut]
    errors.check(
        lambda: af.collate(lost, af.advantages.grpo, allow_truncated_sampling=True),
        af.errors.BatchError,
        "did not record",
    )


# --- truncation ----------------------------------------------------------------------------------


def test_truncated_chains_can_be_penalized() -> None:
    policy = agents.random_policy(1)
    ended, cut = trajectories(policy, 4), trajectories(policy, 4, stop="max_turns")
    group = [t.replace(group="g", id=f"{t.id}-{t.stop}") for t in (*ended, *cut)]
    plain_batch = af.collate(group, af.advantages.grpo)
    batch = af.collate(group, af.advantages.grpo, truncated="penalty", penalty=2.0)
    torch.testing.assert_close(batch.rewards, plain_batch.rewards - 2.0 * batch.truncated)
    wanted = af.advantages.grpo(batch.rewards, [0] * 8)
    torch.testing.assert_close(torch.stack([batch.advantages[i][batch.mask[i]][0] for i in range(8)]), wanted)


def test_bootstrap_values_follow_the_last_token() -> None:
    for head in (True, "separate"):
        policy = af.Policy(agents.random_policy(6).model, agents.chat(), value_head=head)  # type: ignore[arg-type]
        weight = policy.value_head.head.weight if isinstance(policy.value_head, Critic) else policy.value_head.weight
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
        batch = made(policy)
        ends = policy.bootstrap_values(batch, micro_tokens=40)
        for i in range(len(batch)):
            n = int(batch.lengths[i])
            longer = torch.cat([batch.ids[i : i + 1, :n], torch.zeros(1, 1, dtype=torch.int64)], 1)
            mask = torch.zeros(1, n + 1, dtype=torch.bool)
            mask[0, n] = True
            with torch.no_grad():
                value = policy.forward(longer, mask, torch.ones(1), value=True).value
            assert float(ends[i]) == pytest.approx(float(value), abs=1e-5)


# --- joining -------------------------------------------------------------------------------------


def test_joined_batches_equal_one_batch() -> None:
    policy = agents.random_policy(1)
    every = trajectories(policy, 12)
    parts = [af.collate(part, af.advantages.grpo) for part in (every[:4], every[4:])]
    both, whole = join(parts), af.collate(every, af.advantages.grpo)
    exact = ("ids", "mask", "attention", "lengths", "rewards", "groups", "trajectory_index", "versions", "truncated")
    for name in exact:
        assert torch.equal(getattr(both, name), getattr(whole, name)), name
    for name in ("logprobs", "advantages", "token_rewards"):
        torch.testing.assert_close(getattr(both, name), getattr(whole, name), equal_nan=True)
    assert both.returns is None and len(both) == 12


# --- LoRA ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("peft")
    return agents.shipped().copy().save(tmp_path_factory.mktemp("policy"))


def test_an_adapter_finds_its_base_from_any_folder(
    saved: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the base was relative to the working directory. One may also be relative to the adapter."""
    monkeypatch.chdir(saved.parent)
    policy = af.Policy.load(saved.name, lora=4)
    folder = policy.save(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    assert af.Policy.load(folder).fingerprint() == policy.fingerprint()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = os.path.relpath(saved, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert af.Policy.load("adapter").fingerprint() == policy.fingerprint()


def test_an_adapter_is_trained_and_its_base_is_the_reference(saved: Any, tmp_path: Any) -> None:
    policy = af.Policy.load(saved, lora=4)
    assert "adapter" in repr(policy)
    base = agents.shipped()
    batch = made(base, 8, noise=0.0)
    reference = policy.reference()
    torch.testing.assert_close(
        reference.score(batch, {"logprob"})["logprob"], base.score(batch, {"logprob"})["logprob"], equal_nan=True
    )
    frozen = {k: v.clone() for k, v in policy.model.state_dict().items() if "lora_" not in k}
    stats = af.ppo_step(
        policy, af.adamw(policy, 1e-2), batch, af.PPOConfig(kl_coef=0.01, epochs=3), reference=reference
    )
    assert stats.kl_reference > 0
    assert all(torch.equal(v, frozen[k]) for k, v in policy.model.state_dict().items() if k in frozen)
    moved = policy.score(batch, {"logprob"})["logprob"]
    kept = reference.score(batch, {"logprob"})["logprob"]
    torch.testing.assert_close(kept, base.score(batch, {"logprob"})["logprob"], equal_nan=True)
    assert float((moved - kept)[batch.mask].abs().max()) > 0.1
    # On disk: the adapter alone, and the merged model for engines without adapters.
    again = af.Policy.load(policy.save(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    torch.testing.assert_close(again.score(batch, {"logprob"})["logprob"], moved, equal_nan=True)
    merged = af.Policy.load(policy.merged().save(tmp_path / "merged"))
    torch.testing.assert_close(
        merged.score(batch, {"logprob"})["logprob"], moved, equal_nan=True, rtol=1e-4, atol=1e-4
    )
    assert set(policy.state()) == {k for k in policy.model.state_dict() if "lora_" in k}
    other = af.Policy.load(saved, lora=4)
    other.load_state(policy.state())
    assert other.fingerprint() == policy.fingerprint()
    errors.check(lambda: other.load_state(base.state()), af.errors.PolicyError, "the same value_head= and lora=")


async def test_an_engine_samples_with_the_adapter(saved: Any) -> None:
    policy = af.Policy.load(saved, lora=4)
    af.ppo_step(policy, af.adamw(policy, 1e-2), made(agents.shipped(), 8, noise=0.0))
    rollout = await agents.agent(policy).rollout(agents.tasks(2), group_size=2)
    batch = af.collate(rollout)
    scored = policy.score(batch, {"logprob"})["logprob"]
    assert float((scored - batch.logprobs)[batch.mask].abs().max()) < 1e-4


def test_a_critic_is_saved_in_its_own_file(tmp_path: Any) -> None:
    policy = af.Policy(agents.shipped().copy().model, agents.chat(), value_head="separate")
    batch = judged(policy, made(policy))
    af.ppo_step(policy, af.adamw(policy, 1e-3), batch, af.PPOConfig(old_logprobs="engine"))
    folder = policy.save(tmp_path)
    again = af.Policy.load(folder, value_head="separate")
    assert again.fingerprint() == policy.fingerprint() and "separate critic" in repr(again)
    errors.check(lambda: af.Policy.load(folder, value_head=True), af.errors.PolicyError, "shared trunk")
    assert af.Policy.load(folder).value_head is None


# --- through the loop ----------------------------------------------------------------------------

SMALL = af.TrainConfig(steps=2, tasks_per_step=2, group_size=4, minibatch=None, epochs=1, seed=3)


def learner(**settings: Any) -> tuple[Any, af.Policy]:
    policy = agents.fresh(value_head=settings.pop("value_head", False))
    return agents.agent(policy, **settings), policy


async def test_a_kl_in_the_reward_is_summed_over_the_row_for_outcomes() -> None:
    agent, policy = learner()
    run = af.train(agent, policy, agents.tasks(4), SMALL.replace(kl_coef=0.2, kl_in="reward"))
    rollout = await agent.rollout(agents.tasks(2), group_size=4)
    builder = run._updater.batch_builder
    builder.reference = agents.random_policy(1)
    batch = builder.build(rollout, 0.2)
    ref = builder.reference.score(batch, {"logprob"})["logprob"]
    whole = torch.where(batch.mask, batch.logprobs - ref, 0.0).sum(1)
    wanted = af.advantages.grpo(batch.rewards - 0.2 * whole, batch.groups)
    first = torch.stack([batch.advantages[i][batch.mask[i]][0] for i in range(len(batch))])
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.ref_logprobs, ref, equal_nan=True)
    # An estimator of token rewards receives the penalty per token.
    builder.config = builder.config.replace(advantage="reinforce_plus_plus", whiten=False)
    batch = builder.build(rollout, 0.2)
    wanted = af.advantages.reinforce_plus_plus(
        torch.where(batch.mask, af.shaped_rewards(batch.replace(ref_logprobs=ref), 0.2), 0.0),
        batch.mask,
        whiten=False,
    )
    torch.testing.assert_close(batch.advantages[batch.mask], wanted[batch.mask])


async def test_truncated_chains_bootstrap_from_the_value() -> None:
    agent, policy = learner(value_head=True, max_turns=1)
    torch.nn.init.normal_(policy.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    config = SMALL.replace(advantage="gae", truncated="bootstrap", whiten=False)
    run = af.train(agent, policy, agents.tasks(4), config)
    rollout = await agent.rollout(agents.tasks(4), group_size=4)
    batch = run._updater.batch_builder.build(rollout, 0.0)
    assert batch.truncated.any() and not batch.truncated.all()
    ends = torch.where(batch.truncated, policy.bootstrap_values(batch), 0.0)
    rewards = torch.where(batch.mask, batch.token_rewards, 0.0)
    values = policy.score(batch, {"value"})["value"]
    wanted = af.advantages.gae(rewards, values, batch.mask, lam=0.95, bootstrap=ends)[0]
    torch.testing.assert_close(batch.advantages[batch.mask], wanted[batch.mask])
    without = af.advantages.gae(rewards, values, batch.mask, lam=0.95)[0]
    differs = (wanted - without).abs().amax(1) > 1e-4
    assert torch.equal(differs, batch.truncated)


async def test_the_kl_coefficient_adapts_and_is_restored(tmp_path: Any) -> None:
    agent, policy = learner()
    config = SMALL.replace(steps=3, kl_coef=0.1, kl_target=1e-3, kl_horizon=100, lr=1e-3, lr_end=None)
    seen = []
    async for step in af.train(agent, policy, agents.tasks(4), config, run=tmp_path / "a"):
        seen.append((step.record["kl_coef"], step.record["kl_reference"]))
    for (coef, kl), (after, _) in itertools.pairwise(seen):
        assert after == pytest.approx(af.losses.adaptive_kl_coef(coef, kl, target=1e-3, steps=8, horizon=100))
    assert seen[0][0] == 0.1 and seen[1][0] < 0.1
    await leave(af.train(*learner(), agents.tasks(4), config, run=tmp_path / "b"), "break", 1)
    again = await af.train(*learner(), agents.tasks(4), config, run=tmp_path / "b")
    assert [r["kl_coef"] for r in again.records] == [coef for coef, _ in seen]


async def test_top_p_can_be_trained_on_with_a_correction() -> None:
    agent, policy = learner(sampling=af.Sampling(max_tokens=32, top_p=0.9))
    config = SMALL.replace(steps=1, correction="token", loss="cispo", autocast=None, checkpointing=True)
    async for step in af.train(agent, policy, agents.tasks(4), config):
        assert 0 < step.stats.effective_sample_size == step.record["effective_sample_size"] <= 1


def test_a_weighted_kl_is_the_kl_times_the_ratio() -> None:
    policy, reference = agents.random_policy(1), agents.random_policy(2)
    batch = made(policy)
    ref = reference.score(batch, {"logprob"})["logprob"]

    def both(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.where(mask, logp - old, 0.0).exp()
        return af.losses.ppo(logp, old, adv, mask) + 0.3 * ratio * af.losses.kl(logp, ref, "k3", mask)

    wanted = plain(policy, batch, both, "token_mean")
    got, _ = gradient(policy, batch.replace(ref_logprobs=ref), kl_coef=0.3, kl_weighted=True, micro_tokens=50)
    agents.assert_same_gradient(got, wanted)
