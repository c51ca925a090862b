"""Policy: scores of given ids, the shift by one position, and files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agents
import errors
import pytest
import torch
from agents import fresh, random_policy, reference_logprobs
from waiting import blocking_until

import agentfly_kit as af
from agentfly_kit.policy import cpu
from agentfly_kit.policy.cpu import single_torch_thread
from agentfly_kit.policy.prefix_tree import split_by_token_budget


def rows(temperatures: tuple[float, ...] = (1.0, 0.7, 1.3)) -> Any:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([17, 9, 12])
    ids = torch.randint(7, 400, (3, 17), generator=generator)
    mask = torch.rand(3, 17, generator=generator) < 0.5
    attention = torch.arange(17)[None] < lengths[:, None]
    mask = mask & attention
    mask[:, 0] = False
    return SimpleNamespace(ids=ids * attention, mask=mask, lengths=lengths, temperatures=torch.tensor(temperatures))


def test_scores_predict_each_token_from_its_prefix() -> None:
    policy, batch = random_policy(0, value_head=True), rows()
    got = policy.score(batch, {"logprob", "entropy", "value", "hidden"})
    for i in range(3):
        n, at = int(batch.lengths[i]), batch.mask[i].nonzero()[:, 0].tolist()
        wanted, entropy = reference_logprobs(policy, batch.ids[i, :n].tolist(), at, float(batch.temperatures[i]))
        assert got["logprob"][i, at].tolist() == pytest.approx(wanted, abs=1e-5)
        assert got["entropy"][i, at].tolist() == pytest.approx(entropy, abs=1e-5)
        with torch.no_grad():
            states = policy.model.model(input_ids=batch.ids[i : i + 1, :n]).last_hidden_state[0]
            values = policy.value_head(states)[:, 0]  # type: ignore[misc]
        assert got["value"][i, at].tolist() == pytest.approx([float(values[t - 1]) for t in at], abs=1e-5)
        torch.testing.assert_close(got["hidden"][i, at], states[[t - 1 for t in at]], atol=1e-5, rtol=0)
    assert torch.isnan(got["logprob"][~batch.mask]).all()
    assert (got["hidden"][~batch.mask] == 0).all()


def test_scores_do_not_depend_on_the_split_or_the_padding() -> None:
    policy, batch = random_policy(1), rows()
    whole = policy.score(batch, {"logprob"})["logprob"]
    for micro in (1, 20, 40):
        torch.testing.assert_close(
            policy.score(batch, {"logprob"}, micro_tokens=micro)["logprob"],
            whole,
            atol=1e-5,
            rtol=1e-5,
            equal_nan=True,
        )
    wide = SimpleNamespace(**vars(batch))
    wide.ids = torch.cat([batch.ids, torch.full((3, 30), 5)], 1)
    wide.mask = torch.cat([batch.mask, torch.zeros(3, 30, dtype=torch.bool)], 1)
    torch.testing.assert_close(
        policy.score(wide, {"logprob"})["logprob"][:, :17], whole, atol=1e-5, rtol=1e-5, equal_nan=True
    )


def test_padding_is_determined_by_length() -> None:
    policy, batch = random_policy(1), rows()
    batch.ids[0, 3] = 0  # the pad id may also be a token
    at = batch.mask[0].nonzero()[:, 0].tolist()
    got = policy.score(batch, {"logprob"})["logprob"][0, at].tolist()
    assert got == pytest.approx(reference_logprobs(policy, batch.ids[0].tolist(), at)[0], abs=1e-5)


def test_micro_batches_contain_every_row_once() -> None:
    lengths = torch.tensor([5, 100, 7, 7, 64, 1])
    for tokens in (1, 14, 64, 1000):
        groups = split_by_token_budget(lengths, tokens)
        assert sorted(i for g in groups for i in g.tolist()) == list(range(6))
        assert all(len(g) == 1 or len(g) * int(lengths[g].max()) <= tokens for g in groups)


def test_save_and_load(tmp_path: Path) -> None:
    policy = random_policy(3, value_head=True)
    policy.version = 7
    folder = policy.save(tmp_path / "p")
    back = af.Policy.load(folder, value_head=True)
    assert back.fingerprint() == policy.fingerprint()
    assert (back.version, back.chat.stop_ids) == (7, policy.chat.stop_ids)
    assert back.chat.tokenizer.chat_template == policy.chat.tokenizer.chat_template
    assert af.Policy.load(folder).value_head is None
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "value" in name and "head" in name]  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("config.json", Path.unlink, "config.json"),
        ("model.safetensors", Path.unlink, "no file named model.safetensors"),
        ("tokenizer.json", Path.unlink, "tokenizer"),
        ("model.safetensors", lambda file: file.write_bytes(b"not this"), ""),
        ("policy.json", lambda file: file.write_text('{"format"'), "damaged: Expecting ':'"),
        ("policy.json", lambda file: file.write_bytes(b"\xff"), "damaged: 'utf-8'"),
        ("policy.json", lambda file: file.write_text("[]"), "damaged: expected an object, got a list"),
        ("generation_config.json", lambda file: file.write_text("{"), "damaged: "),
        ("adapter_config.json", lambda file: file.write_text(""), "damaged: "),
    ],
)
def test_missing_and_damaged_files_are_named(tmp_path: Path, name: str, damage: Any, says: str) -> None:
    folder = random_policy(3).save(tmp_path / "p")
    damage(folder / name)
    where = re.compile(f"(cannot load a policy from |{name}).*{says}")
    errors.check(lambda: af.Policy.load(folder), af.errors.PolicyError, where)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = random_policy(3).save(tmp_path / "p")
    header = json.dumps({"w": {"dtype": "F16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 41]}}).encode()
    large = len(header).to_bytes(8, "little") + header
    (folder / "consolidated.safetensors").write_bytes(large)  # the weights in another layout, which is not read
    af.Policy.load(folder, device="cpu")
    (folder / "model.safetensors").write_bytes(large)
    errors.check(
        lambda: af.Policy.load(folder, device="cpu"),
        af.errors.PolicyError,
        re.compile(r"cpu must have 4398.0 GB of memory for the weights of '.*', got "),
    )


def test_a_copy_is_independent() -> None:
    policy = fresh(value_head=True)
    twin = policy.copy()
    assert twin.fingerprint() == policy.fingerprint()
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert twin.fingerprint() != policy.fingerprint()
    assert " at 0x" not in repr(policy)


def test_the_last_user_restores_the_number_of_threads() -> None:
    """An engine's thread and an update use the policy during overlapping periods."""
    blocking_until(lambda: not cpu._thread_limit.users)  # an engine's thread exits after two idle seconds
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        one, two = single_torch_thread(random_policy(0)), single_torch_thread(random_policy(0))
        one.__enter__()
        two.__enter__()
        assert torch.get_num_threads() == 1
        one.__exit__(None, None, None)
        assert torch.get_num_threads() == 1, "another user remains"
        two.__exit__(None, None, None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sharing", [True, False])
def test_hidden_states_of_any_layer_are_those_of_the_model(sharing: bool) -> None:
    policy = fresh()
    if not sharing:
        policy._sharing_obstacle = "a test"
    batch = rows()
    layers = (0, 1, -1)
    got = policy.score(batch, {"hidden", "logprob"}, layers=layers)
    wanted = policy.model.model(input_ids=batch.ids, output_hidden_states=True).hidden_states
    wanted = torch.stack([wanted[i] for i in layers], -2)
    assert got["hidden"].shape == (*batch.ids.shape, 3, policy.width)
    for i, t in batch.mask.nonzero().tolist():
        torch.testing.assert_close(got["hidden"][i, t], wanted[i, t - 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.hidden(batch.ids, layers), wanted, atol=1e-4, rtol=1e-4)
    plain = policy.score(batch, {"hidden", "logprob"})
    assert plain["logprob"][batch.mask].equal(got["logprob"][batch.mask])  # the same bits
    assert plain["hidden"].equal(got["hidden"][..., -1, :])


def test_a_saved_policy_has_the_same_chat_wherever_it_is_loaded(tmp_path: Path) -> None:
    """Looked for: format, history, stop tokens and template options, in policies, engines and merged adapters.

    Found: history, stop tokens and options were lost by each; an engine of a policy also lost a second end token.
    """
    settings: dict[str, Any] = {"format": "react", "history": "append", "stop": ["7"], "options": {"brief": True}}
    model = random_policy().model
    chat = af.Chat(agents.chat().tokenizer, **settings)
    second = chat.encode("8")[0]
    model.generation_config.eos_token_id = [chat.tokenizer.eos_token_id, second]
    policy = af.Policy(model, chat)
    folder = policy.save(tmp_path / "p")
    wanted = settings | {"stop": ["7", "8"]}
    stops = (*chat.stop_ids, second)
    for loaded in (af.Policy.load(folder).chat, af.VLLMEngine(folder).chat, af.VLLMEngine(str(folder)).chat):
        assert (loaded.settings(), set(loaded.stop_ids)) == (wanted, set(stops))
    assert af.VLLMEngine(policy).chat is chat and af.VLLMEngine(policy).stop_ids == chat.stop_ids
    changed = af.Policy.load(folder, format="hermes", history="exact", options={})
    assert changed.chat.settings() == {"format": "hermes", "history": "exact", "stop": ["7", "8"], "options": {}}
    # A policy that an older version saved.
    (folder / "policy.json").write_text('{"format": "react", "version": 3}')
    older = af.Policy.load(folder)
    assert older.chat.settings() == {"format": "react", "history": "exact", "stop": ["8"], "options": {}}
    unsaved = af.Policy(model, af.Chat(chat.tokenizer, options={"now": object()}))
    errors.check(lambda: unsaved.save(tmp_path / "q"), TypeError, "object is not JSON serializable")
    assert not (tmp_path / "q").exists()
