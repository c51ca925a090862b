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
def both(
    made: Any, decoder: FusedLlamaDecoder, stamp: object = 0, slab: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two chunks and two steps by the modules and by the decoder."""
    ids = torch.randint(0, 90, (8, 42), generator=torch.Generator().manual_seed(1))
    outs: list[list[torch.Tensor]] = [[], []]
    for which in (0, 1):
        cache = KVCache(8, 48, 3, slab=slab)
        for start, stop in ((0, 5), (5, 12), (12, 13), (13, 14), (14, 15), (15, 16), (16, 17), (17, 40), (40, 41)):
            positions = torch.arange(start, stop)[None].expand(8, -1)
            mask = cache.prepare(torch.arange(8) if stop - start > 1 else 8, positions)
            given = (cache, ids[:, start:stop], positions, mask)
            outs[which].append(decoder(*given, stamp=stamp) if which else reference_forward(made.get_decoder(), *given))
    return torch.cat(outs[0], 1), torch.cat(outs[1], 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("slab", [None, 16, 64])
def test_it_says_what_the_modules_say(family: str, heads: int, slab: int | None) -> None:
    made = model(family, num_key_value_heads=heads)
    decoder = FusedLlamaDecoder.try_build(made)
    assert decoder is not None
    theirs, ours = both(made, decoder, slab=slab)
    assert float((theirs - ours).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("slab", [None, 16, 64])
def test_one_token_comes_out_the_same_bit_for_bit_in_any_company(heads: int, slab: int | None) -> None:
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
        cache, order = KVCache(count, capacity, 3, slab=slab), torch.tensor(rows)
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
def test_slots_in_slabs_hold_what_slots_in_one_piece_hold(shapes: str) -> None:
    rng = np.random.default_rng(dice.seed() + 7)
    heads = [2, 2, 2] if shapes == "alike" else [2, 1, 1]
    caches = [KVCache(8, 20, 3, slab=slab) for slab in (None, 16, 32)]
    for step in range(150):
        count = caches[0].count
        what = rng.integers(5)
        if what == 0 and step > 20:
            given = (int(rng.integers(8, count + 4)) // 8 * 8, int(rng.integers(20, 20 + step)))
            for cache in caches:
                cache.grow(*given)
        elif what == 1:
            a, b = (int(i) for i in rng.integers(0, count, 2))
            for cache in caches:
                cache.swap(a, b)
        elif what == 2:
            a, b = (int(i) for i in rng.choice(count, 2, replace=False))
            length = int(caches[0].length[a])
            for cache in caches:
                cache.copy(a, b, length)
        else:
            front = what == 3
            width = 1 if front else int(rng.integers(1, 24))
            order = np.arange(8) if front else rng.choice(count, 3, replace=False)
            held = caches[0].length[order]
            if int(held.max()) + width > caches[0].capacity:
                for cache in caches:
                    cache.length[order] = 0
                held = held * 0
            positions = torch.as_tensor(held[:, None] + np.arange(width))
            states = [torch.as_tensor(rng.normal(size=(2, len(order), n, width, 4)).astype(np.float32)) for n in heads]
            for cache in caches:
                mask = cache.prepare(8 if front else torch.as_tensor(order), positions)
                for layer, (keys, values) in enumerate(states):
                    if front and step % 2:
                        both = torch.cat([keys[:, :, 0], values[:, :, 0]], 1)
                        found = [
                            torch.cat(part, 1).reshape(8, heads[layer], -1, 4) for part in cache.append(both, layer)
                        ]
                    else:
                        found = list(cache.update(keys, values, layer))
                    for got, new in zip(found, (keys, values), strict=True):
                        assert got.shape[2] == mask.shape[-1]
                        for i, row in enumerate(held):
                            assert torch.equal(got[i, :, row : row + width], new[i])
                cache.length[order] = held + width
                for slot, row in zip(order, held, strict=True):
                    cache.ids[slot, row : row + width] = step
        # All that anyone may ask for is there, and nothing behind it is no number.
        longest = int(caches[0].length.max())
        if not longest:
            continue
        seen = []
        for cache in caches:
            cache.prepare(torch.arange(cache.count), torch.full((cache.count, 1), longest - 1))
            parts = []
            for layer, (block, first) in enumerate(cache._layer_location):
                for kind in (0, 1):
                    held_all = cache._blocks[block][:, first + kind]
                    whole = torch.cat([held_all[i, :, :, tokens] for i, tokens in cache._slab_ranges(0, longest)], 2)
                    assert bool(whole.isfinite().all()), layer
                    for slot in range(cache.count):
                        parts.append(whole[slot, :, : int(cache.length[slot])].reshape(-1))
            seen.append(torch.cat(parts))
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_a_slab_is_a_multiple_of_what_one_forward_looks_at() -> None:
    with pytest.raises(ValueError, match="slab=20"):
        KVCache(8, 32, 1, slab=20)


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
