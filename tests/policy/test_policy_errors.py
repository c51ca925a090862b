"""Arguments that a policy rejects."""

from __future__ import annotations

from typing import Any

import errors
import torch
from agents import fresh, random_policy, shipped
from test_policy import rows

from agentfly_kit.errors import AlignmentError, PolicyError, SettingsError
from agentfly_kit.policy.policy import Policy

CHAT = "model must be a torch.nn.Module and chat an af.Chat, got "
LAYERS = "layers must be a non-empty list of layers from -3 to 2"


def scored_at_0() -> Any:
    batch = rows()
    batch.mask[1, 0] = True
    return random_policy().score(batch, {"logprob"})


@errors.table(
    (scored_at_0, AlignmentError, "position 0"),
    (lambda: random_policy().score(rows(), {"logits"}), SettingsError, "must be a non-empty subset of"),
    (lambda: random_policy().score(rows(), {"value"}), PolicyError, "load the policy with value_head=True"),
    (lambda: random_policy().score(rows(), {"logprob"})["entropy"], KeyError, "entropy"),
    *((lambda n=n: fresh().score(rows(), {"hidden"}, layers=n), SettingsError, LAYERS) for n in ((), (3,), (-4,))),
    (lambda: Policy.load("./none"), PolicyError, "must be a folder written by Policy.save or a hub name"),
    (lambda: Policy.load("none", dtype="float33"), SettingsError, "its name, or 'auto', got 'float33'"),
    (lambda: Policy.load("none", dtype=torch.int64), SettingsError, "got torch.int64"),
    (lambda: Policy.load("none", device="gpu"), SettingsError, "usable by torch on this machine, got 'gpu': "),
    (lambda: Policy.load("none", device="cuda:77"), SettingsError, "got 'cuda:77': "),
    (lambda: Policy.load("none", device=1.5), SettingsError, "got 1.5: "),
    (lambda: Policy.load("none", value_head="apart"), SettingsError, "must be True, False or 'separate', got 'apart'"),
    (lambda: Policy(shipped().model, shipped().chat.tokenizer), SettingsError, CHAT),
    (lambda: Policy("name", shipped().chat), SettingsError, "; af.Policy.load(name_or_folder) creates"),
    (lambda: random_policy().load_state(shipped().state()), PolicyError, "state must have the weights "),
    (
        lambda: random_policy().load_state(random_policy(value_head=True).state()),
        PolicyError,
        "'value_head.bias' is in the state or the policy, but not in both",
    ),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)
