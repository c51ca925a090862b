"""Tiny models of several architectures, written as GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
# Architecture in the file -> model type in transformers and settings that differ between the two.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # the only size of the published models, and not read by transformers
    "gemma3": ("gemma3_text", {"head_dim": 64, "sliding_window": 512}),
    "phi3": ("phi3", {}),
}
KINDS = gguf.GGMLQuantizationType


def tiny_model(architecture: str, width: int = 64, *, seed: int = 0) -> Any:
    """Return a random model with two layers; SmolLM and Gemma tie the output to the embedding, as here."""
    model_type, settings = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(vocabulary(architecture)),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=architecture in ("llama", "gemma3"),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **settings,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are otherwise all ones or zeros
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.half().float())
    return model


def vocabulary(architecture: str) -> list[str]:
    """Return the tokens: bytes in the notation of GPT-2, or characters and bytes in that of sentencepiece."""
    if architecture not in ("gemma3", "phi3"):
        from tokenizers.pre_tokenizers import ByteLevel

        return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab"]
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127))]


def write(
    file: Path,
    architecture: str = "llama",
    kind: str = "F16",
    *,
    template: str | None = CHATML,
    eos: int = 2,
    skip: str = "-",
    extra: dict[str, str] | None = None,
) -> Any:
    """Write a tiny model, and return it.

    Args:
        file: The file.
        architecture: Name of the architecture in the file.
        kind: Quantization of the matrices. Q4_K and Q6_K, which gguf cannot quantize, are blocks of random bytes.
        template: Chat template; None writes none.
        eos: Id of the end token in the metadata.
        skip: Part of the names of the tensors that are left out.
        extra: Further metadata with strings as values.
    """
    model = tiny_model(architecture, 256 if kind.endswith("_K") else 64)
    config, tokens = model.config, vocabulary(architecture)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    for name, value in (extra or {}).items():
        writer.add_string(name, value)
    sentencepiece = architecture in ("gemma3", "phi3")
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    if sentencepiece:
        writer.add_token_scores([float(-i) for i in range(len(tokens))])
    else:
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if template is not None:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    for name, parameter in model.named_parameters():
        value = _in_file(architecture, name, parameter.detach(), config)
        stem, suffix = name.rsplit(".", 1)
        if skip in name:
            continue
        _add(writer, f"{names.get_name(stem)}.{suffix}", value.numpy(), kind if value.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _in_file(architecture: str, name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight as llama.cpp stores it: rotary dimensions interleaved, norms of Gemma with their offset."""
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    return value + 1 if architecture == "gemma3" and name.endswith("norm.weight") else value


def _add(writer: Any, name: str, value: np.ndarray, kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, value)
    elif kind == "F16":
        writer.add_tensor(name, value.astype(np.float16))
    elif kind in ("Q4_K", "Q6_K"):
        block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
        rows, columns = value.shape
        data = np.random.default_rng(value.size).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        scales = slice(0, 4) if kind == "Q4_K" else slice(-2, None)
        data[..., scales] = np.full((scales == slice(0, 4)) + 1, 1e-3, np.float16).view(np.uint8)
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=KINDS[kind])
    else:
        writer.add_tensor(name, gguf.quantize(value, KINDS[kind]), raw_dtype=KINDS[kind])
