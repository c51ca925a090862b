"""The KV cache, and the fused decoder of small models compared with the modules of the model."""

import itertools
from typing import Any

import dice
import numpy as np
import pytest
import torch
from agents import shipped
from torch.overrides import TorchFunctionMode

from agentfly_kit.engines.local import decoder as module
from agentfly_kit.engines.local.decoder import FusedLlamaDecoder, _modules_forward
from agentfly_kit.engines.local.kv_cache import KVCache
from agentfly_kit.policy.attention import masked_states, shared_keys, unsupported_attention


def model(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **(shape | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.3)  # including norms and biases
    return made


# Models whose layers attend to part of the context, with the config options needed besides the window.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"pad_token_id": 0},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 12},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},  # with attention sinks
    "llama4_text": {
        "num_local_experts": 2, "intermediate_size_mlp": 80, "head_dim": 12, "no_rope_layers": [1, 1, 0],
        "attn_temperature_tuning": False,
    },
}  # fmt: skip
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = EXPERTS | {
    "kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_NEO = {"num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": 16}
# Further families in docs/models.md that need more config options than the defaults of `model`.
FAMILIES: dict[str, dict[str, Any]] = WINDOWED | {
    "gemma2": {
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 12,
        "sliding_window": 16,
    },
    "gemma4_text": {"final_logit_softcapping": 3.0, "head_dim": 12, "sliding_window": 16},
    "granite": {
        "logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
    },
    "granitemoe": {"logits_scaling": 6.0, "num_local_experts": 4},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 16},
    "hyperclovax": {"logits_scaling": 3.0},
    "qwen3_moe": EXPERTS, "glm4_moe": EXPERTS,
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm4_moe_lite": LATENT, "youtu": LATENT, "minicpm3": LATENT,
    "deepseek_v32": LATENT,
    "kimi_linear": LATENT | RECURRENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "qwen3_5_text": RECURRENT, "qwen3_next": RECURRENT | EXPERTS, "olmo_hybrid": RECURRENT,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 96, "lm_head_multiplier": 0.5},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_headdim": 12, "n_mamba_heads": 8,
        "mamba_d_state": 8, "mamba_ngroups": 1, "num_key_value_heads": 4, "attention_head_dim": 24,
        "chunk_size": 16,
    },
    "granitemoehybrid": MAMBA | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
        "shared_intermediate_size": 48, "logits_scaling": 3.0,
    },
    "nemotron_h": EXPERTS | {
        "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "head_dim": 12,
        "moe_shared_expert_intermediate_size": 16,
    },
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"attention_hidden_size": 48}, "gpt_neo": GPT_NEO, "bloom": {"n_layer": 2, "n_head": 4},
}  # fmt: skip


def windowed(family: str, window: int, attention: str) -> Any:
    """Return a model whose layers have windows or chunks of length `window`, if the family supports them."""
    limit = {} if family == "llama" else {"attention_chunk_size" if "llama4" in family else "sliding_window": window}
    attention = "eager" if family == "gpt_oss" else attention
    return model(family, **limit, **WINDOWED.get(family, {}), attn_implementation=attention)


def fused(made: Any) -> FusedLlamaDecoder | None:
    return FusedLlamaDecoder.try_build(made.get_decoder())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((theirs - ours).abs().max()) <= 1e-5 * float(theirs.abs().max())


@torch.inference_mode()
def both(made: Any, decoder: FusedLlamaDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states of the same chunks and decode steps from the modules and from the fused decoder."""
    ids = torch.randint(0, 90, (8, 42), generator=torch.Generator().manual_seed(1))

    def states(forward: Any) -> torch.Tensor:
        cache, parts = KVCache(8, 48), []
        for start, stop in itertools.pairwise((0, 5, 12, 13, 14, 15, 16, 17, 40, 41)):
            positions = torch.arange(start, stop)[None].expand(8, -1)
            rows = torch.arange(8) if stop - start > 1 else 8
            parts.append(forward(cache, rows, ids[:, start:stop], positions, 0))
        return torch.cat(parts, 1)

    return states(_modules_forward(made.get_decoder())), states(decoder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("smallest", [0, 1 << 24])
def test_fused_states_equal_those_of_the_modules(
    family: str, heads: int, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_PACKED_PARAMETERS", smallest)
    made = model(family, num_key_value_heads=heads)
    theirs, ours = both(made, fused(made))
    assert_close(ours, theirs)


def test_adapters_and_hooks_take_effect_at_once() -> None:
    made = with_adapter()
    decoder = fused(made)
    states = []

    def redraw() -> None:
        torch.cat([p.data.normal_(std=0.1).flatten() for name, p in made.named_parameters() if "lora_" in name])

    for change in (
        redraw,
        lambda: [m.scale_layer(2.0) for m in made.modules() if hasattr(m, "lora_A")],
        made.merge_adapter,
        made.unmerge_adapter,
        lambda: made.add_adapter("second", made.peft_config["default"]),
        lambda: made.set_adapter("second"),
        lambda: (
            made.add_adapter("third", with_adapter(use_dora=True).peft_config["default"]),
            made.set_adapter("third"),
            redraw(),
        ),
        made.base_model.disable_adapter_layers,
        lambda: made.get_decoder().layers[0].mlp.register_forward_hook(lambda *given: given[2] * 2),
    ):
        change()
        theirs, ours = both(made, decoder)
        assert_close(ours, theirs)
        states.append(ours)
    changed = [float((a - b).abs().max()) > 0.01 for a, b in itertools.pairwise(states)]
    assert changed == [True, False, False, False, True, True, True, True]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "starcoder2"])
def test_attention_does_not_repeat_the_keys_of_grouped_heads(family: str) -> None:
    """The hidden states must be bitwise identical to those with the "sdpa" attention of transformers."""
    trunk, seen = windowed(family, 16, "sdpa").get_decoder(), []

    class RecordKeys(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                seen.append(args[1].shape[1])
            return func(*args, **(kwargs or {}))

    def states(forward: Any) -> torch.Tensor:
        cache, parts = KVCache(8, 48), []
        for start, stop in ((0, 17), (17, 40), (40, 41), (41, 42)):
            positions = torch.arange(start, stop)[None].expand(8, -1)
            with RecordKeys():
                parts.append(forward(cache, 8, ids[:, start:stop], positions))
        return torch.cat(parts, 1)

    def repeating(cache: KVCache, rows: int, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = cache.prepare(rows, positions)
        keys = torch.arange(mask.shape[-1])[None]
        return masked_states(trunk, tokens, positions, mask, keys, cache).last_hidden_state

    ids = torch.randint(0, 90, (8, 42), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = states(repeating)
        assert 4 in seen, "transformers no longer repeats the keys; remove shared_keys"
        seen.clear()
        found = states(lambda *given: _modules_forward(trunk)(*given, 0))
    assert set(seen) == {2}
    # For single tokens, transformers repeats no keys from 5.24 on, and rounds differently.
    assert torch.equal(found[:, :40], expected[:, :40])
    assert_close(found, expected)
    assert trunk.config._attn_implementation == "sdpa"


def test_gradients_and_padding_masks_are_those_of_transformers_while_an_engine_samples() -> None:
    """An engine changes a setting of the model during its forward passes, while another thread may train the model."""
    made = model("qwen3")
    ids = torch.arange(40).reshape(2, 20)
    padding = torch.ones_like(ids)
    padding[0, :6] = 0

    def run() -> list[torch.Tensor]:
        made.zero_grad()
        logits = made(input_ids=ids, attention_mask=padding, use_cache=False).logits
        logits[:, 6:].square().sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in made.parameters())]

    expected = run()
    with shared_keys(made.config):
        found = run()
        assert not unsupported_attention(made.get_decoder())
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shapes", ["alike", "two kinds of layers"])
@torch.inference_mode()
def test_the_cache_returns_what_was_written(shapes: str) -> None:
    """Compare random writes, copies, swaps and growth with one list of vectors per layer and slot."""
    rng = np.random.default_rng(dice.seed() + 7)
    heads = [2, 2, 2] if shapes == "alike" else [2, 1, 1]
    cache = KVCache(8, 20)
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


def test_the_shipped_policy_is_supported() -> None:
    assert fused(shipped().model) is not None


def with_hook() -> Any:
    made = model("qwen3")
    made.get_decoder().layers[0].mlp.register_forward_hook(lambda *given: given[2])
    return made


def with_another_scale() -> Any:
    made = model("qwen3")
    made.get_decoder().layers[1].self_attn.scaling = 0.5  # only a test forward pass detects this
    return made


def with_adapter(**options: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model("qwen3"), config)


@pytest.mark.parametrize(
    "build",
    [
        lambda: model("gemma", head_dim=12),
        lambda: model("qwen3", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        lambda: windowed("qwen2", 16, "sdpa"),
        lambda: model("llama", mlp_bias=True),
        lambda: model("llama").to(torch.bfloat16),
        with_hook,
        with_another_scale,
        lambda: with_adapter(use_dora=True),
    ],
)
def test_unsupported_models_are_not_fused(build: Any) -> None:
    assert fused(build()) is None


def test_large_models_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PARAMETERS", 1000)
    assert fused(model("qwen3")) is None
