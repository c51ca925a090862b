"""Arguments that a policy rejects."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import errors
import huggingface_hub
import pytest
from agents import fresh, random_policy, shipped
from test_decoder import FAMILIES, model
from test_policy import rows

import agentfly_kit as af
from agentfly_kit.envs import retrieval

CHAT = "model must be a torch.nn.Module and chat an af.Chat, got "
LAYERS = "layers must be a non-empty list of layers from -3 to 2"


def scored_at_0() -> Any:
    batch = rows()
    batch.mask[1, 0] = True
    return random_policy().score(batch, {"logprob"})


def sharded(model: Any, **attributes: Any) -> af.Policy:
    vars(model).update(attributes)
    return af.Policy(model, shipped().chat).shard(SimpleNamespace(num_processes=2))


test_errors = errors.rejected(
    (scored_at_0, af.errors.AlignmentError, "position 0"),
    (lambda: random_policy().score(rows(), {"logits"}), af.errors.SettingsError, "must be a non-empty subset of"),
    (lambda: random_policy().score(rows(), {"value"}), af.errors.PolicyError, "load the policy with value_head=True"),
    (lambda: random_policy().score(rows(), {"logprob"})["entropy"], KeyError, "entropy"),
    *(
        (lambda n=n: fresh().score(rows(), {"hidden"}, layers=n), af.errors.SettingsError, LAYERS)
        for n in ((), (3,), (-4,))
    ),
    (
        lambda: af.Policy.load("./none"),
        af.errors.PolicyError,
        "must be a folder written by Policy.save or a hub name",
    ),
    (lambda: af.Policy.load("calculator"), af.errors.PolicyError, "use af.tiny.policy('calculator')"),
    (
        lambda: af.Policy.load("none", value_head="apart"),
        af.errors.SettingsError,
        "must be True, False or 'separate', got 'apart'",
    ),
    (lambda: af.Policy(shipped().model, shipped().chat.tokenizer), af.errors.SettingsError, CHAT),
    (
        lambda: af.Policy(model("qwen3", vocab_size=393), shipped().chat),
        af.errors.PolicyError,
        "a tokenizer that uses token 395 and a model with 393 tokens",
    ),
    (lambda: af.Policy("name", shipped().chat), af.errors.SettingsError, "; af.Policy.load(name_or_folder) creates"),
    (lambda: random_policy().load_state(shipped().state()), af.errors.PolicyError, "state must have the weights "),
    (
        lambda: random_policy().load_state(random_policy(value_head=True).state()),
        af.errors.PolicyError,
        "the shape of 'value_head.bias' is None in the policy and (1,) in the state",
    ),
    (
        lambda: sharded(random_policy().model.half()),
        af.errors.SettingsError,
        "a sharded policy must have float32 or bfloat16 weights",
    ),
    (
        lambda: sharded(random_policy().model, hf_device_map={"": "cpu"}),
        af.errors.SettingsError,
        "device_map must not be given to Policy.load for a policy that is sharded",
    ),
)


@pytest.mark.parametrize("family", ["minicpm3", "xlstm"])
def test_logits_that_are_scaled_or_capped_in_an_unknown_way_are_rejected_early(family: str) -> None:
    """Small weights give logits that a cap does not change. Also looked at: all causal models of transformers."""
    made = model(family, **FAMILIES.get(family, {}))
    for p in made.parameters():
        p.data.mul_(1e-3)
    for use in (af.LocalEngine, af.adamw, lambda policy: policy.score(rows(), {"logprob"})):
        errors.check(lambda use=use: use(af.Policy(made, shipped().chat)), af.errors.PolicyError, "only scaled (")


@pytest.mark.parametrize(
    "load",
    [
        af.Policy.load,
        lambda folder: af.VLLMEngine(folder).vocab_size,
        lambda folder: af.VLLMEngine(folder).chat,
        retrieval.embedding,
    ],
)
def test_code_in_the_folder_of_a_model_is_not_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks whether to run it, and an answer of "y" ran it. Looked for: every `from_pretrained`."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoModel": "code.Model"}
    names["AutoTokenizer"] = ["code.Tokenizer", None]
    config = {"model_type": "unknown", "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass")
    errors.check(lambda: load(str(tmp_path)), Exception, re.compile(r"code|trust_remote_code"))
    assert (asked, (tmp_path / "ran").exists()) == ([], False)


def test_a_hub_name_fails_at_once_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    text = "'nowhere/none' is not a folder, and cannot be downloaded, because hub.invalid is unknown here"
    errors.check(lambda: af.Policy.load("nowhere/none"), af.errors.PolicyError, text)
