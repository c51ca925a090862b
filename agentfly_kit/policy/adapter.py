"""LoRA adapters of a policy. This module is imported only when a policy has an adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from agentfly_kit.errors import SettingsError


def with_lora(model: Any, lora: int | Mapping[str, Any]) -> Any:
    """Return a model with a LoRA adapter; see `Policy.load`."""
    from peft import LoraConfig, get_peft_model

    options = {"r": lora, "lora_alpha": 2 * lora} if isinstance(lora, int) else dict(lora)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.0} | options
    decoder, vision = model.get_decoder(), options.pop("vision", False)
    names = [name for name, module in model.named_modules() if module is decoder]
    if hasattr(model, "get_image_features") and not vision and names:  # exclude layers outside the decoder
        options = {"exclude_modules": rf"(?!{re.escape(names[0])}\.).*"} | options
    if options["lora_dropout"]:
        raise SettingsError("lora_dropout must be 0; dropout makes the trained and the sampled distribution differ")
    # Initialize the adapter reproducibly, without changing the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**options))


# Initializations that leave the base model unchanged, also when a saved adapter is loaded.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


def check_adapter(model: Any) -> None:
    """Raise SettingsError if the base model is not frozen or the adapter cannot be merged into its weights."""
    config = model.active_peft_config
    if (bias := getattr(config, "bias", "none")) != "none":
        raise SettingsError(f'lora bias must be "none", got {bias!r}, which would train biases of reference()')
    if (init := getattr(config, "init_lora_weights", True)) not in _INITIALIZATIONS:
        allowed = ", ".join(map(repr, _INITIALIZATIONS))
        raise SettingsError(f"init_lora_weights must be one of {allowed}, got {init!r}, which changes reference()")
    plain = model.get_base_model()
    ends = (plain.get_input_embeddings(), plain.get_output_embeddings())
    changed = [type(module).__name__ for module in ends if any(p.requires_grad for p in module.parameters())]
    tied = bool(getattr(plain.config.get_text_config(), "tie_word_embeddings", False))
    if changed and (tied or getattr(config, "modules_to_save", None)):
        raise SettingsError(
            "lora must not include the embedding or lm_head "
            + ("of a model that ties them, because merged weights would be wrong" if tied else "in modules_to_save")
        )
