"""Estimated memory of an update, compared with the peak that torch's profiler measures in `ppo_step`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import errors
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Idefics3Config, Qwen2Config

import agentfly_kit as af
from agentfly_kit.policy.adapter import with_lora
from agentfly_kit.policy.forward import LanguageModel


def config(width: int, layers: int, vocabulary: int) -> Any:
    return Qwen2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        intermediate_size=3 * width,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


def measured(
    config: Any, settings: af.PPOConfig, length: int, lora: int | None, dtype: str, accelerator: Any = None
) -> int:
    """Return the peak of an update with two micro-batches, of each process if there are several, in bytes."""
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    policy = af.Policy(model if lora is None else with_lora(model, lora), af.tiny.policy().chat)
    assert settings.micro_tokens is not None
    processes = 1 if accelerator is None else accelerator.num_processes
    if accelerator is not None:
        policy.shard(accelerator)
    generator, chains = torch.Generator().manual_seed(0), []
    for i in range(processes * 2 * settings.micro_tokens // length):
        ids = torch.randint(10, 500, (length,), generator=generator).tolist()
        mask, task = [0] + [1] * (length - 1), af.Task(str(i), ({"role": "user", "content": "?"},))
        chains.append(af.from_tokens(ids, mask, [-1.0] * length, task=task, chain=i, reward=0.0))
    batch, optimizer = af.collate(chains, [1.0] * len(chains)), af.adamw(policy, 1e-5)
    af.ppo_step(policy, optimizer, batch, settings)  # creates the optimizer's state
    optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        af.ppo_step(policy, optimizer, batch, settings)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    state = (value for values in optimizer.state.values() for value in values.values())
    held = (getattr(t, "_local_tensor", t) for t in (*policy.parameters(), *state))
    return peak + sum(t.numel() * t.element_size() for t in held)


SMALL = (128, 4, 2000)
CASES = {
    "1 million": (SMALL, {}, None, "float32"),
    "adapter": (SMALL, {}, 16, "float32"),
    "checkpointing": (SMALL, {"checkpointing": True}, None, "float32"),
    "bfloat16": (SMALL, {}, None, "bfloat16"),
    "autocast": (SMALL, {"autocast": "bfloat16", "checkpointing": True}, None, "float32"),
}


@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        pytest.param(((256, 4, 8000), {}, None, "float32"), marks=pytest.mark.long, id="5 million"),
        pytest.param(((640, 6, 16000), {}, None, "float32"), marks=pytest.mark.long, id="40 million"),
        pytest.param(((1024, 16, 49152), {}, None, "float32"), marks=pytest.mark.long, id="250 million"),
    ],
    ids=[*CASES, "5 million", "40 million", "250 million"],
)
def test_an_estimate_is_close_to_the_peak_of_an_update(case: Any) -> None:
    shape, options, lora, dtype = case
    found = af.estimate_memory(config(*shape), micro_tokens=512, length=256, dtype=dtype, lora=lora, **options)
    wanted = measured(config(*shape), af.PPOConfig(micro_tokens=512, **options), 256, lora, dtype)
    assert found.total == pytest.approx(wanted, rel=0.03)


def test_the_parts_of_an_estimate(tmp_path: Path) -> None:
    """The folder needs no weights, and a model of 2 billion parameters no memory."""
    large = Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=4,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    large.save_pretrained(tmp_path)
    full, adapted = (af.estimate_memory(tmp_path, dtype="bfloat16", lora=lora) for lora in (None, 16))
    assert (full.parameters, full.trained) == (2_022_229_504, 2_022_229_504)
    assert (full.weights, full.gradients, full.optimizer, full.step) == tuple(n * full.trained for n in (2, 2, 12, 4))
    assert adapted.trained == adapted.parameters - full.parameters < 0.01 * full.parameters
    assert adapted.total < 0.5 * full.total and adapted.weights >= full.weights
    assert str(adapted).startswith(f"MemoryEstimate({adapted.total / 1e9:.2f} GB for 2,0")


@pytest.mark.parametrize(("tokens", "wanted"), [(10, 1024), (5000, 5000), (10**6, 32768)])
def test_the_default_of_micro_tokens_fits_the_memory_of_a_gpu(
    tokens: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is a fake, because its memory must differ. The activations are those of the estimate."""
    model = AutoModelForCausalLM.from_config(config(*SMALL))
    memory = 4 * 160 * 4 * 128 * tokens
    monkeypatch.setattr(LanguageModel, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert LanguageModel(model, None).micro_tokens == wanted
    if wanted == tokens:
        assert af.estimate_memory(model.config, micro_tokens=tokens).activations < 0.4 * memory


test_errors = errors.rejected(
    *((lambda options=options: af.estimate_memory(config(*SMALL), **options), af.errors.SettingsError, text)
      for options, text in (
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"micro_tokens": 0}, "micro_tokens must be an integer of at least 1"),
        ({"lora": 0}, "lora must be an integer of at least 1 or None, got 0"),
        ({"dtype": "float16"}, "dtype must be one of 'float32', 'bfloat16', got 'float16'"),
      )),
)  # fmt: skip


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    errors.check(lambda: af.estimate_memory(tmp_path), af.errors.PolicyError, "must contain a config.json")
    (tmp_path / "config.json").write_text('{"model_type": "unheard", "auto_map": {"AutoConfig": "own.Config"}}')
    errors.check(lambda: af.estimate_memory(tmp_path), af.errors.PolicyError, "could not be read")
    errors.check(lambda: af.estimate_memory(Idefics3Config()), af.errors.PolicyError, "cannot be estimated")
    quantized = Qwen2Config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    errors.check(lambda: af.estimate_memory(quantized), af.errors.PolicyError, "quantized weights")


def test_long_rows_need_no_mask() -> None:
    """The activations are proportional to the number of tokens, and the config is not changed."""
    given = config(128, 2, 500)
    short, long = (af.estimate_memory(given, micro_tokens=8192, length=n, dtype="bfloat16") for n in (1024, 8192))
    assert long.activations == pytest.approx(short.activations, rel=0.01) and given.dtype is None
