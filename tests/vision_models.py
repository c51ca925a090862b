"""Tiny vision models with random weights, their processors, and images."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import PIL.Image
import torch
from tokenizers import AddedToken

import agentfly_kit as af
from agentfly_kit.chat.images import make_processor

# Text that the template renders for an image.
_IMAGE = {"gemma3": "<|vision_start|>"} | dict.fromkeys(
    ("idefics3", "smolvlm", "llava", "llava_next", "internvl"), "<image>"
)
# Attributes of tokenizers that processors read.
_ATTRIBUTES = {
    "boi": "<|vision_start|>", "eoi": "<|vision_end|>", "image": "<image>", "start_image": "<|vision_start|>",
    "end_image": "<|vision_end|>", "context_image": "<image>", "video": "<|video_pad|>",
}  # fmt: skip
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
# Images of different sizes have different numbers of placeholders, except with llava; with llava_next, although their
# tensors have the same shapes.
FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "internvl")
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_GRIDS = [[16, 32], [32, 16]]  # of llava_next
_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}


def picture(number: int, size: tuple[int, int] = (24, 16)) -> af.Image:
    pixels = np.random.default_rng(number).bytes(3 * size[0] * size[1])
    return af.Image(PIL.Image.frombytes("RGB", size, pixels))


def tokenizer(family: str, *, results: bool = False) -> Any:
    """Return the shipped tokenizer with the placeholders of a family and a template that renders images.

    Args:
        family: the family.
        results: whether the template renders images in tool results, as well as those in other messages.
    """
    made = af.tiny.tokenizer()
    shown = _IMAGE.get(family, _QWEN)
    special = ["<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    if family in ("gemma3", "internvl"):
        made._set_model_specific_special_tokens({f"{name}_token": text for name, text in _ATTRIBUTES.items()})
    parts = (
        "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
        "{%- for part in message.content or [] -%}"
        f"{{{{- '{shown}' if part.type == 'image' else part.text -}}}}{{%- endfor -%}}{{%- endif -%}}"
    )
    template = made.chat_template.replace("{{- message.content or '' -}}", parts)
    made.chat_template = template.replace("{{ message.content }}", parts) if results else template
    return made


def _processor(family: str, made: Any) -> Any:
    from transformers import (
        CLIPImageProcessorPil,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        GotOcr2ImageProcessorPil,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        InternVLProcessor,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
        LlavaProcessor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessorPil,
        Qwen3VLProcessor,
    )

    if family in ("idefics3", "smolvlm"):
        images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        return Idefics3Processor(images, made, image_seq_len=4)
    if family == "internvl":
        images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4)
        return make_processor(InternVLProcessor, images, made, {"image_seq_length": 4})
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, made, image_seq_length=4)
    if family in ("llava", "llava_next"):
        sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        if family == "llava":
            return LlavaProcessor(CLIPImageProcessorPil(**sizes), made, **options)
        return LlavaNextProcessor(LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=_GRIDS), made, **options)
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    return make_processor(Qwen2_5_VLProcessor if family == "qwen2_5_vl" else Qwen3VLProcessor, images, made, {})


def _config(family: str, made: Any) -> Any:
    from transformers import AutoConfig

    text = _TEXT | {"vocab_size": len(made), "model_type": "llama"}
    image = made.convert_tokens_to_ids(_IMAGE.get(family, "<|image_pad|>"))
    if family in ("idefics3", "smolvlm"):
        vision = _VISION | {"image_size": 16, "patch_size": 4}
        given = {"image_token_id": image, "pad_token_id": 0}
    elif family == "gemma3":
        text["model_type"] = "gemma3_text"
        vision = _VISION | {"image_size": 16, "patch_size": 4}
        given = {"image_token_index": made.convert_tokens_to_ids("<image>"), "mm_tokens_per_image": 4}
    elif family == "internvl":
        vision = _VISION | {"image_size": [16, 16], "patch_size": [4, 4]}
        given = {"image_token_id": image, "image_seq_length": 4}
    elif family in ("llava", "llava_next"):
        vision = _VISION | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model"}
        given = {"image_token_index": image} | ({"image_grid_pinpoints": _GRIDS} if "next" in family else {})
    else:
        text["model_type"] = f"{family}_text"
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision = dict(_TOWER)
        more = {"window_size": 16, "fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {}
        vision |= more or {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        names = {"video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
        given = {f"{name}_token_id": made.convert_tokens_to_ids(token) for name, token in names.items()}
        given["image_token_id"] = image
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False, **given)


def policy(family: str, *, results: bool = False, **options: Any) -> af.Policy:
    """Return a policy with random weights whose distributions are far from uniform and depend on images."""
    from transformers import AutoModelForImageTextToText

    made = tokenizer(family, results=results)
    processor = _processor(family, made)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(_config(family, made)).to(torch.float32)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
    return af.Policy(model, af.Chat(made, processor=processor), **options)


shared = functools.cache(policy)


@torch.no_grad()
def reference_logprobs(policy: af.Policy, ids: list[int], images: list[af.Image]) -> torch.Tensor:
    """Return log p(ids[t] | ids[:t]) for t > 0 with one forward pass of the model, which finds placeholders by ids."""
    import inspect

    reader = policy.chat.reader
    pictures: Any = [image.to_pil() for image in images]
    if "Idefics3" in type(reader.processor).__name__:
        pictures = [pictures]
    row = torch.tensor([ids])
    given = dict(reader.processor.image_processor(pictures, return_tensors="pt")) if images else {}
    given["mm_token_type_ids"] = (row == reader.token_id).int()
    names = inspect.signature(policy.model.forward).parameters
    logits = policy.model(input_ids=row, use_cache=False, **{k: v for k, v in given.items() if k in names}).logits[0]
    logits[:, reader.token_id] = -torch.inf
    return logits.double().log_softmax(-1)[torch.arange(len(ids) - 1), row[0, 1:]]
