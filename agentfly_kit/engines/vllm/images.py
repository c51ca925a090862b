"""Images in the prompts of a `VLLMEngine`. This module is imported with the first such prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly_kit.chat.images import ImageReader
from agentfly_kit.types import ImageSpan


def make_prompt(ids: Sequence[int], images: Sequence[ImageSpan], reader: ImageReader) -> dict[str, Any]:
    """Return a prompt for vLLM. It has one placeholder per image, which vLLM replaces by those of its processor."""
    short: list[int] = []
    end = 0
    for _, start, length in images:
        short += [*ids[end:start], reader.token_id]
        end = start + length
    pictures = [span.image.to_pil() for span in images]
    return {"prompt_token_ids": [*short, *ids[end:]], "multi_modal_data": {"image": pictures}}


def find_obstacle(llm: Any, reader: ImageReader) -> str:
    """Return the reason why vLLM reads other pixels than a policy, or "" if it uses the same image processor."""
    used = llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
    found, expected = ((type(p).__name__, p.to_dict()) for p in (used, reader.processor.image_processor))
    if found == expected:
        return ""
    return f"vLLM's image processor, {found[0]}, is not that of the chat, {expected[0]}, or has other settings"
