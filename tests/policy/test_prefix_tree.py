"""Prefix sharing: results and gradients of separate rows, from fewer tokens."""

from types import SimpleNamespace
from typing import Any

import errors
import pytest
import torch
from agents import assert_same_gradient, random_policy
from test_decoder import GPT_NEO, WINDOWED, model, windowed

import agentfly_kit as af
from agentfly_kit.policy import forward


def branching(seed: int, count: int = 12, vocabulary: int = 400) -> Any:
    """Rows with common prefixes: some are equal, some are prefixes of others."""
    g = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    texts: list[list[int]] = []
    for i in range(count):
        kind = pick(0, 4) if texts else 0
        other = texts[pick(0, len(texts))] if texts else []
        tail = torch.randint(7, vocabulary, (pick(2, 9),), generator=g).tolist()
        texts.append(tail if kind == 0 else other if kind == 1 else other[: pick(1, len(other) + 1)] + tail)
        texts[-1] = texts[-1] if len(texts[-1]) > 1 else [*texts[-1], 7 + i]
    lengths = torch.tensor([len(t) for t in texts])
    ids = torch.zeros(count, int(lengths.max()), dtype=torch.int64)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
    mask = (torch.rand(ids.shape, generator=g) < 0.4) & (torch.arange(ids.shape[1])[None] < lengths[:, None])
    mask[:, 0] = False
    mask[torch.arange(count), lengths - 1] = True
    return SimpleNamespace(ids=ids, mask=mask, lengths=lengths, temperatures=torch.ones(count))


def alone(policy: af.Policy) -> af.Policy:
    """Make the policy compute every row separately."""
    policy._sharing_obstacle = "a test"
    return policy


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7, 1.3)], ids=["one", "several"])
@pytest.mark.parametrize("head", [True, "separate"])
def test_trees_give_the_results_of_rows(seed: int, temperatures: Any, head: Any) -> None:
    rows = branching(seed)
    rows.temperatures = torch.tensor([temperatures[i % len(temperatures)] for i in range(len(rows.ids))])
    found = []
    for own in (False, True):
        policy = random_policy(seed)
        policy = af.Policy(policy.model, policy.chat, value_head=head)
        with torch.no_grad():
            for p in policy.value_head.parameters():  # type: ignore[union-attr]
                p.add_(0.1)
        if own:
            alone(policy)
        got = policy.forward(rows.ids, rows.mask, rows.temperatures, entropy=True, value=True)
        weigh = torch.linspace(-1, 1, len(got.logprob))
        (got.logprob * weigh + got.entropy * weigh.flip(0) + got.value * weigh.square()).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found.append((got.logprob, got.entropy, got.value, got.hidden, gradient))
        assert bool(policy._sharing_obstacle) is own
    for grown, plain in zip(*found, strict=True):
        assert_same_gradient(grown.detach(), plain.detach())


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7, 1.3)], ids=["one", "several"])
def test_large_logits_are_computed_in_chunks(temperatures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = branching(0)
    rows.temperatures = torch.tensor([temperatures[i % len(temperatures)] for i in range(len(rows.ids))])
    found, sizes = [], []
    for chunk in (10**6, 3):
        policy = random_policy(0)
        monkeypatch.setattr(forward, "_MAX_LOGITS", chunk * policy.vocab_size)
        logits = policy.logits
        sizes.append([])
        monkeypatch.setattr(
            policy, "logits", lambda states, f=logits, to=sizes[-1]: (to.append(len(states)), f(states))[1]
        )
        got = policy.forward(rows.ids, rows.mask, rows.temperatures, entropy=True, sum_squared_probs=True)
        weigh = torch.linspace(-1, 1, len(got.logprob))
        (got.logprob * weigh + got.entropy * weigh.flip(0) + got.sum_squared_probs * weigh.square()).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found.append((got.logprob, got.entropy, got.sum_squared_probs, gradient))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole)
    once, chunks = sizes
    assert len(once) == 1 and once[0] <= int(rows.mask.sum()), "only trained tokens have logits"
    assert max(chunks) == 3 and sum(chunks) == 2 * once[0], "in the forward pass and again in the backward pass"


def test_only_distinct_tokens_are_computed() -> None:
    policy, rows = random_policy(0), branching(1, count=20)
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, given, out: seen.append(given[0].numel()))
    policy.score(rows, {"logprob"})
    seen.clear()  # discard the trial
    for part in policy.micro_batches(rows):
        policy.forward(rows.ids[part], rows.mask[part], rows.temperatures[part])
    assert sum(seen) < 0.7 * int(rows.lengths.sum()), (seen, rows.lengths)


@pytest.mark.parametrize("micro", [1, 30, 60, 10**6])
def test_micro_batches_of_trees_respect_the_token_limit(micro: int) -> None:
    policy, rows = random_policy(0), branching(2, count=24)
    some = torch.arange(0, 24, 2)
    parts = policy.micro_batches(rows, some, micro)
    assert sorted(torch.cat(parts).tolist()) == some.tolist()
    for part in parts:
        lengths = rows.lengths[part].tolist()
        distinct = {
            tuple(rows.ids[i, :k].tolist()) for i, n in zip(part, lengths, strict=True) for k in range(1, n + 1)
        }
        assert len(distinct) <= max(micro, *lengths), "only a row that is too long may exceed the limit"


def long_rows() -> Any:
    """Five rows of 40 to 80 random tokens that share 30 or 55 of them; sampled from token 31 on."""
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(7, 90, (n,), generator=g) for n in (80, 10, 35, 45, 20)]
    rows = [rows[0], *(torch.cat([rows[0][:n], tail]) for n, tail in zip((30, 30, 30, 55), rows[1:], strict=True))]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    at = torch.arange(ids.shape[1])[None]
    mask = (at > 30) & (at < lengths[:, None])
    return SimpleNamespace(ids=ids, mask=mask, lengths=lengths, temperatures=torch.ones(5))


def assert_trees_equal_rows(policy: af.Policy, rows: Any) -> None:
    """Compare logprobs and gradients of prefix sharing with those of each row in a forward pass of its own."""
    policy.model.zero_grad()
    whole = policy.forward(rows.ids, rows.mask, rows.temperatures)
    whole.logprob.sum().backward()
    got = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad()
    expected = []
    for ids, mask, n in zip(rows.ids, rows.mask, rows.lengths.tolist(), strict=True):
        logp = torch.log_softmax(policy.model(input_ids=ids[None, :n], use_cache=False).logits[0], -1)
        expected.append(logp[:-1].gather(-1, ids[1:n, None])[:, 0][mask[1:n]])
    torch.cat(expected).sum().backward()
    torch.testing.assert_close(whole.logprob, torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.score(rows, {"logprob"})["logprob"][rows.mask], whole.logprob.detach())
    wanted = [p.grad for p in policy.model.parameters() if p.grad is not None]
    assert_same_gradient(*(torch.cat([g.flatten() for g in part]) for part in (got, wanted)))


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "sdpa") for family in (*WINDOWED, "llama")]
    + [(name, "eager") for name in ("mistral", "gpt_oss", "llama")],
)
def test_prefix_sharing_is_exact_for_every_kind_of_attention(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_MASKED_ATTENTION_COST", 1e-9)  # share wherever possible
    for window in (12, 33) if family == "mistral" else (16,):
        policy = af.Policy(windowed(family, window, attention), random_policy(0).chat)
        rows = long_rows()
        assert len(policy.micro_batches(rows)) == 1
        seen: list[int] = []
        policy.model.get_input_embeddings().register_forward_hook(
            lambda module, given, out, seen=seen: seen.append(given[0].numel())
        )
        assert_trees_equal_rows(policy, rows)
        assert seen[-1] < int(rows.lengths.sum()), "prefixes were not shared"
        assert "no prefix sharing" not in repr(policy)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba", {"state_size": 8}, "layers of type 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type 'conv'"),
        ("gpt_neo", GPT_NEO, "restricts attention by window_size"),
        (
            "llama4_text",
            WINDOWED["llama4_text"] | {"attn_temperature_tuning": True},
            "scales queries by their column",
        ),
        ("bloom", {"n_layer": 2, "n_head": 4}, "a trial raised ValueError"),  # counts positions in the mask
        ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 48}, "a trial gave hidden states that differ"),  # ALiBi
        ("flash", {}, "attention implementation 'flash_attention_2' takes no masks"),
    ],
)
def test_other_models_compute_rows_separately_and_show_why(
    family: str,
    changes: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "_MASKED_ATTENTION_COST", 1e-9)
    made = model("qwen2" if family == "flash" else family, **changes)
    policy, rows = af.Policy(made, random_policy(0).chat), long_rows()
    if family == "flash":
        made.config._attn_implementation = "flash_attention_2"
        policy.micro_batches(rows)
    else:
        assert_trees_equal_rows(policy, rows)
    assert "no prefix sharing: " in repr(policy) and reason in repr(policy)
    assert [r.message for r in caplog.records if reason in r.message and "without prefix sharing" in r.message]


def test_the_context_of_longrope_ends_where_its_rotation_changes() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    made = model("phi3", rope_parameters=rope, original_max_position_embeddings=64, pad_token_id=0)
    policy = af.Policy(made, random_policy(0).chat)
    assert policy.max_length == 64
    assert_refuses_long_rows(policy)


def test_rows_beyond_the_context_of_dynamic_rope_are_rejected() -> None:
    """One longer row changes the rotation of all rows that are computed with it."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert_refuses_long_rows(
        af.Policy(model("llama", rope_parameters=rope, max_position_embeddings=64), random_policy(0).chat)
    )


def assert_refuses_long_rows(policy: af.Policy) -> None:
    rows = branching(0, vocabulary=90)
    rows.ids = torch.nn.functional.pad(rows.ids, (0, 66 - rows.ids.shape[1]))
    rows.mask = torch.nn.functional.pad(rows.mask, (0, 66 - rows.mask.shape[1]))
    rows.lengths[0] = 65
    policy.score(rows)
    rows.lengths[0] = 66
    errors.check(
        lambda: policy.score(rows), af.errors.PolicyError, "rows must have at most 65 tokens, got 66, because"
    )
