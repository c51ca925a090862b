"""Settings, arguments and batches that the steps of PPO and of imitation reject."""

import dataclasses
import functools
import math
from importlib.resources import files
from typing import Any

import agents
import errors
import pytest
import torch
from agents import trajectory
from test_ppo_settings import Kept, made, trajectories

import agentfly_kit as af

POLICY = agents.random_policy(3)
DATA = str(files("agentfly_kit._data").joinpath("policies", "calculator"))
BATCH = made(POLICY, 8, noise=0.0, with_entropies=True, version=0)
TWO = trajectories(POLICY, 2)
SHOWN = [
    af.tiny.demonstration(agents.chat(), [{"role": "user", "content": text}, {"role": "assistant", "content": "3"}])
    for text in ("1+2", "2+1")
]


@pytest.fixture(autouse=True, scope="module")
def _unchanged() -> Any:
    before = POLICY.fingerprint()
    yield
    assert (POLICY.fingerprint(), POLICY.version) == (before, 0)


def stepped(batch: af.Batch = BATCH, **settings: Any) -> Any:
    return af.ppo_step(POLICY, af.adamw(POLICY), batch, af.PPOConfig(**settings))


def changed(**tensors: Any) -> Any:
    return stepped(BATCH.replace(**tensors))


def foreign_ids() -> Any:
    ids = BATCH.ids.clone()
    ids[0, 0] = 400
    return changed(ids=ids)


def half() -> af.Policy:
    return af.Policy(POLICY.copy().model.half(), POLICY.chat)


def unlike_a_loss(logprobs: Any, old: Any, adv: Any, mask: Any) -> Any:
    return logprobs.mean()


@errors.table(
    (lambda: stepped(epochs=0), af.errors.SettingsError, "epochs must be an integer of at least 1, got 0"),
    (
        lambda: stepped(minibatch=0),
        af.errors.SettingsError,
        "minibatch must be an integer of at least 1",
    ),
    (lambda: stepped(old_logprobs="new"), af.errors.SettingsError, "got 'new'"),
    (lambda: stepped(kl_coef=0.1), af.errors.SettingsError, "needs reference="),
    (lambda: stepped(kl_coef=-0.1), af.errors.SettingsError, "kl_coef must be a finite number of at least 0"),
    (
        lambda: stepped(entropy_coef=-0.1),
        af.errors.SettingsError,
        "entropy_coef must be a finite number of at least 0",
    ),
    (lambda: stepped(aggregate="mean"), af.errors.SettingsError, "aggregate must be one of 'token_mean'"),
    (lambda: stepped(aggregate="fixed"), af.errors.SettingsError, "denominator"),
    (lambda: stepped(clip=-1.0), af.errors.SettingsError, "clip"),
    (lambda: stepped(correction={"roof": 2.0}), af.errors.SettingsError, "roof"),
    (lambda: stepped(correction="row"), af.errors.SettingsError, "level"),
    (lambda: stepped(autocast="float16"), af.errors.SettingsError, "autocast must be one of 'bfloat16', None"),
    (lambda: stepped(loss="best"), af.errors.SettingsError, "got 'best'"),
    (lambda: stepped(loss="sapo", clip=0.2), TypeError, "clip"),
    (lambda: stepped(loss="cispo", dual_clip=3.0), TypeError, "dual_clip"),
    (lambda: stepped(loss=af.losses.ppo, clip=0.2), af.errors.SettingsError, "functools.partial"),
    (
        lambda: af.PPOConfig(loss=functools.partial(af.losses.sapo, tau=0)),
        af.errors.SettingsError,
        "tau must be a finite number above 0, got 0",
    ),
    (
        lambda: stepped(loss=lambda logp, adv, mask: adv),
        af.errors.SettingsError,
        "a function of (logprobs, old_logprobs,",
    ),
    (lambda: stepped(loss=unlike_a_loss), af.errors.SettingsError, "one loss per token, without a mean"),
    (lambda: af.ppo_step(POLICY.model, None, BATCH), af.errors.SettingsError, "policy must be a"),
    (lambda: af.ppo_step(POLICY, Kept(POLICY), TWO), af.errors.SettingsError, "batch must be a"),
    (
        lambda: af.ppo_step(POLICY.copy(), af.adamw(POLICY), BATCH),
        af.errors.SettingsError,
        "must update parameters of this policy",
    ),
    (lambda: stepped(af.collate(BATCH.trajectories)), af.errors.BatchError, "batch must have finite advantages"),
    (
        lambda: changed(advantages=BATCH.advantages + math.inf),
        af.errors.BatchError,
        "batch must have finite advantages",
    ),
    (
        lambda: changed(mask=BATCH.mask * 0.5),
        af.errors.AlignmentError,
        "mask must be a bool tensor, got torch.float32",
    ),
    (
        lambda: changed(mask=BATCH.mask.long()),
        af.errors.AlignmentError,
        "mask must be a bool tensor, got torch.int64",
    ),
    (lambda: changed(mask=torch.ones_like(BATCH.mask)), af.errors.AlignmentError, "mask must be False "),
    (
        lambda: changed(logprobs=BATCH.logprobs * math.nan),
        af.errors.AlignmentError,
        "must be finite where the mask is 1",
    ),
    (lambda: changed(logprobs=BATCH.logprobs.abs() + 1), af.errors.AlignmentError, "logprobs must not be above 0"),
    (lambda: changed(logprobs=BATCH.logprobs[:, :-1]), af.errors.AlignmentError, "logprobs must have the shape"),
    (
        lambda: changed(temperatures=BATCH.temperatures[:-1]),
        af.errors.AlignmentError,
        "must have the shape (8,), got (7,)",
    ),
    (
        lambda: changed(temperatures=BATCH.temperatures * 0),
        af.errors.AlignmentError,
        "above 0; the first violation is at [0]",
    ),
    (lambda: changed(versions=BATCH.versions[:-1]), af.errors.AlignmentError, "versions must have the shape"),
    (lambda: changed(rewards=BATCH.rewards + math.inf), af.errors.AlignmentError, "rewards must be finite"),
    (lambda: changed(ids=BATCH.ids - 500), af.errors.AlignmentError, "ids must not be negative"),
    (foreign_ids, af.errors.BatchError, "token ids must be below 400"),
    (lambda: af.shaped_rewards(BATCH, 0.1), af.errors.BatchError, "ref_logprobs"),
    (lambda: af.adamw(POLICY, 0.0), af.errors.SettingsError, "lr must be a finite number above 0"),
    (lambda: af.adamw(POLICY, -1.0), af.errors.SettingsError, "lr must be a finite number above 0"),
    (lambda: af.adamw(POLICY, math.nan), af.errors.SettingsError, "lr must be a finite number above 0"),
    (lambda: af.adamw(POLICY, math.inf), af.errors.SettingsError, "lr must be a finite number above 0"),
    (lambda: af.Policy(POLICY.model, agents.chat(), value_head="apart"), af.errors.SettingsError, "'separate'"),
    (lambda: af.Policy.load(DATA, lora={"r": 4, "lora_dropout": 0.1}), af.errors.SettingsError, "lora_dropout"),
    # Adapters whose base model is not frozen, or that cannot be merged. The shipped policies tie their embeddings.
    *(
        (lambda given=given: af.Policy.load(DATA, lora={"r": 2, **given}), af.errors.SettingsError, text)
        for given, text in (
            ({"bias": "all"}, "bias must be \"none\", got 'all'"),
            ({"bias": "lora_only"}, "got 'lora_only'"),
            ({"init_lora_weights": "pissa"}, "got 'pissa'"),
            ({"init_lora_weights": "pissa_niter_2"}, "got 'pissa_niter_2'"),
            ({"init_lora_weights": "olora"}, "got 'olora'"),
            ({"target_modules": ["q_proj", "lm_head"]}, "of a model that ties them"),
            ({"target_modules": ["embed_tokens"]}, "of a model that ties them"),
            ({"modules_to_save": ["lm_head"]}, "lora must not include the embedding or lm_head"),
        )
    ),
    (lambda: af.adamw(half()), af.errors.SettingsError, "must not have trainable weights of type float16"),
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
async def test_steps(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)


def textual() -> Any:
    (shown, _) = SHOWN
    return shown.replace(turns=tuple(dataclasses.replace(turn, ids=None) for turn in shown.turns))


def imitated(**settings: Any) -> Any:
    batch = af.collate(SHOWN[:1], imitate=True)
    return af.imitation_step(POLICY, af.adamw(POLICY), batch, af.PPOConfig(**settings))


PLAN = [[("task", 1), ("WHITE", 2), ("BLACK", 2)]]


test_batches = errors.rejected(
    (lambda: af.collate(TWO, "grpo"), af.errors.SettingsError, "one number per trajectory, got 'grpo'"),
    (lambda: af.collate(TWO, truncated="fine"), af.errors.SettingsError, "'penalty'"),
    (lambda: af.collate(TWO, [1.0, 2.0, 3.0]), af.errors.AlignmentError, "advantages must have the shape (2,)"),
    (lambda: af.collate(TWO, af.advantages.grpo, per="token"), af.errors.SettingsError, "got 'token'"),
    (lambda: af.collate(trajectory(None, PLAN), authors="GREY"), af.errors.BatchError, "got 'GREY'"),
    (lambda: af.collate(trajectory(None, PLAN), authors=()), af.errors.BatchError, "got ()"),
    (
        lambda: af.collate(trajectory(None, PLAN, turn_rewards={0: 1.0})),
        af.errors.BatchError,
        "turn 0 has a reward of 1, but",
    ),
    (lambda: af.collate(SHOWN, imitate="expert"), af.errors.BatchError, "got 'expert'"),
    (lambda: af.collate(SHOWN, imitate=()), af.errors.BatchError, "names of authors of actions ('script'), got "),
    (lambda: af.collate(SHOWN, imitate=""), af.errors.BatchError, "names of authors of actions ('script'), got "),
    (
        lambda: af.collate(SHOWN, imitate=True, authors="policy"),
        af.errors.SettingsError,
        "must be None with imitate=True",
    ),
    (
        lambda: af.collate(SHOWN, [0.0, 0.0], imitate=True),
        af.errors.EmptyBatch,
        "weights must be above 0 for at least one",
    ),
    (
        lambda: af.collate(SHOWN, [1.0, math.nan], imitate=True),
        af.errors.AlignmentError,
        "must be finite numbers of at least 0",
    ),
    (
        lambda: af.collate(SHOWN, [1.0, -1.0], imitate=True),
        af.errors.AlignmentError,
        "must be finite numbers of at least 0",
    ),
    (
        lambda: af.collate(SHOWN, [1.0, math.inf], imitate=True),
        af.errors.AlignmentError,
        "must be finite numbers of at least 0",
    ),
    (lambda: af.collate(textual(), imitate=True), af.errors.BatchError, "must have token ids"),
    (
        lambda: stepped(af.collate(SHOWN, imitate=True)),
        af.errors.BatchError,
        "use imitation_step for a batch of collate",
    ),
    (
        lambda: af.imitation_step(POLICY, af.adamw(POLICY), BATCH),
        af.errors.BatchError,
        "batch must be created by collate",
    ),
    (
        lambda: imitated(kl_coef=0.1),
        af.errors.SettingsError,
        "kl_coef has no effect on imitation; leave it at 0.0, got 0.1",
    ),
    (
        lambda: af.imitate(POLICY, SHOWN, authors=[]),
        af.errors.BatchError,
        "names of authors of actions ('script'), got ",
    ),
    (
        lambda: af.imitate(POLICY, SHOWN, lr=math.inf),
        af.errors.SettingsError,
        "lr must be a finite number above 0, got inf",
    ),
)
