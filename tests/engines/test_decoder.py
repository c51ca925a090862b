"""The small models' own forward says what the modules say, and leaves everything else to them."""

from __future__ import annotations

from typing import Any

import dice
import numpy as np
import pytest
import torch
from agents import random_policy, shipped

from agentfly_kit.engines.local import decoder as module
from agentfly_kit.engines.local.decoder import FusedLlamaDecoder, reference_forward
from agentfly_kit.engines.local.kv_cache import KVCache


def model(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 90,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(family, **(shape | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.3)  # norms and biases too
    return made


@torch.inference_mode()
def both(made: Any, decoder: FusedLlamaDecoder, stamp: object = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two chunks and two steps by the modules and by the decoder."""
    ids = torch.randint(0, 90, (8, 42), generator=torch.Generator().manual_seed(1))
    outs: list[list[torch.Tensor]] = [[], []]
    for which in (0, 1):
        cache = KVCache(8, 48, 3)
        for start, stop in ((0, 5), (5, 12), (12, 13), (13, 14), (14, 15), (15, 16), (16, 17), (17, 40), (40, 41)):
            positions = torch.arange(start, stop)[None].expand(8, -1)
            mask = cache.prepare(torch.arange(8) if stop - start > 1 else 8, positions)
            given = (cache, ids[:, start:stop], positions, mask)
            outs[which].append(decoder(*given, stamp=stamp) if which else reference_forward(made.get_decoder(), *given))
    return torch.cat(outs[0], 1), torch.cat(outs[1], 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_it_says_what_the_modules_say(family: str, heads: int) -> None:
    made = model(family, num_key_value_heads=heads)
    decoder = FusedLlamaDecoder.try_build(made)
    assert decoder is not None
    theirs, ours = both(made, decoder)
    assert float((theirs - ours).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_token_comes_out_the_same_bit_for_bit_in_any_company(heads: int) -> None:
    made = model("qwen3", num_key_value_heads=heads, max_position_embeddings=512)
    decoder = FusedLlamaDecoder.try_build(made)
    assert decoder is not None
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 90, (24, 70), generator=generator)
    at = torch.randint(3, 60, (24,), generator=generator)
    at[:8] %= 40  # eight of them alone are given fewer keys than all together
    seen: list[torch.Tensor] = []
    for count, capacity, rows in (
        (24, 64, range(24)),
        (8, 64, range(8)),
        (16, 300, range(16)),
        (24, 300, range(23, -1, -1)),
    ):
        cache, order = KVCache(count, capacity, 3), torch.tensor(rows)
        context = torch.arange(64)[None].expand(count, -1)
        with torch.no_grad():
            decoder(cache, ids[order, :64], context, cache.prepare(torch.arange(count), context), stamp=0)
        far = torch.full((count, 1), capacity - 8)  # somebody's history is long: all look at as many keys
        far[:-1] = at[order][:-1, None]
        for positions in (at[order][:, None], far):
            mask = cache.prepare(count, positions)
            with torch.no_grad():
                out = decoder(cache, ids[order, 64:65], positions, mask, stamp=0)
            found = torch.full((24, out.shape[-1]), torch.nan)
            found[order[:-1]] = out[:-1, 0]
            seen.append(found)
    for other in seen[1:]:
        both = ~(seen[0].isnan().any(1) | other.isnan().any(1))
        assert int(both.sum()) >= 7
        assert torch.equal(seen[0][both], other[both])


@pytest.mark.parametrize("shapes", ["alike", "two kinds of layers"])
@torch.inference_mode()
def test_cache_holds_what_was_written(shapes: str) -> None:
    """Random writes, copies, swaps and growth, compared with one list of vectors per layer and slot."""
    rng = np.random.default_rng(dice.seed() + 7)
    heads = [2, 2, 2] if shapes == "alike" else [2, 1, 1]
    cache = KVCache(8, 20, 3)
    wanted: list[list[torch.Tensor]] = [[torch.zeros(2, n, 0, 4) for n in heads] for _ in range(8)]
    for step in range(150):
        what = rng.integers(5)
        if what == 0 and step > 20:
            cache.grow(int(rng.integers(8, cache.count + 4)) // 8 * 8, int(rng.integers(20, 20 + step)))
            wanted += [[torch.zeros(2, n, 0, 4) for n in heads] for _ in range(cache.count - len(wanted))]
        elif what in (1, 2):
            a, b = (int(i) for i in rng.choice(cache.count, 2, replace=False))
            if what == 1:
                cache.swap(a, b)
                wanted[a], wanted[b] = wanted[b], wanted[a]
            else:
                cache.copy(a, b, int(cache.length[a]))
                wanted[b] = wanted[a].copy()
        else:
            order = np.arange(8) if what == 3 else rng.choice(cache.count, 3, replace=False)
            width = 1 if what == 3 else int(rng.integers(1, 24))
            if int(cache.length[order].max()) + width > cache.capacity:
                cache.length[order] = 0
                for slot in order:
                    wanted[slot] = [torch.zeros(2, n, 0, 4) for n in heads]
            held = cache.length[order]
            positions = torch.as_tensor(held[:, None] + np.arange(width))
            mask = cache.prepare(8 if what == 3 else torch.as_tensor(order), positions)
            for layer, n in enumerate(heads):
                states = torch.as_tensor(rng.normal(size=(2, len(order), n, width, 4)).astype(np.float32))
                found = cache.update(states[0], states[1], layer)
                assert found[0].shape == found[1].shape == (len(order), n, mask.shape[-1], 4)
                for i, slot in enumerate(order):
                    wanted[slot][layer] = torch.cat([wanted[slot][layer], states[:, i]], 2)
                    for got, new in zip(found, wanted[slot][layer], strict=True):
                        assert torch.equal(got[i, :, : held[i] + width], new)
                        assert bool(got.isfinite().all())
            cache.length[order] = held + width


def test_another_stamp_or_a_change_that_torch_counts_brings_other_weights() -> None:
    made = model("qwen3")
    decoder = FusedLlamaDecoder.try_build(made)
    assert decoder is not None
    before, _ = both(made, decoder, stamp=1)
    torch._fused_sgd_(  # as a fused optimizer: torch does not count it
        [p.data for p in made.parameters()],
        [torch.ones_like(p) for p in made.parameters()],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.05,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    theirs, ours = both(made, decoder, stamp=2)
    assert float((theirs - before).abs().max()) > 1e-2
    assert float((theirs - ours).abs().max()) <= 1e-5 * float(theirs.abs().max())
    with torch.no_grad():
        made.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.5)
    theirs, ours = both(made, decoder, stamp=2)
    assert float((theirs - ours).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_the_shipped_policy_is_of_that_shape() -> None:
    assert FusedLlamaDecoder.try_build(shipped().model) is not None


def test_what_is_not_of_that_shape_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FusedLlamaDecoder.try_build(model("gemma", head_dim=12)) is None
    assert (
        FusedLlamaDecoder.try_build(
            model("qwen3", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
        )
        is None
    )
    assert FusedLlamaDecoder.try_build(model("llama", mlp_bias=True)) is None
    assert FusedLlamaDecoder.try_build(model("llama").to(torch.bfloat16)) is None
    hooked = model("qwen3")
    hooked.get_decoder().layers[0].mlp.register_forward_hook(lambda *given: given[2])
    assert FusedLlamaDecoder.try_build(hooked) is None
    monkeypatch.setattr(module, "_MAX_PARAMETERS", 1000)
    assert FusedLlamaDecoder.try_build(model("qwen3")) is None


def test_a_model_that_differs_on_a_trial_runs_itself() -> None:
    made = model("qwen3")
    made.get_decoder().layers[1].self_attn.scaling = 0.5  # somebody patched it
    assert FusedLlamaDecoder.try_build(made) is None


def test_an_adapter_is_left_to_the_modules() -> None:
    import peft

    policy = random_policy(3)
    adapted = peft.get_peft_model(
        policy.model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert FusedLlamaDecoder.try_build(adapted) is None
