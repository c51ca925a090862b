"""Images in the prompts of a `VLLMEngine`. This module is imported when the first such prompt arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly_kit.chat.images import ImageReader
from agentfly_kit.types import ImageSpan


def make_prompt(ids: Sequence[int], images: Sequence[ImageSpan], reader: ImageReader) -> dict[str, Any]:
    """Return a prompt with one placeholder per image, which vLLM replaces by its image processor's placeholders."""
    short: list[int] = []
    end = 0
    for _, start, length in images:
        short += [*ids[end:start], reader.token_id]
        end = start + length
    pictures = [span.image.to_pil() for span in images]
    return {"prompt_token_ids": [*short, *ids[end:]], "multi_modal_data": {"image": pictures}}


def use_processor(llm: Any, reader: ImageReader) -> str:
    """Replace vLLM's image processor by that of a chat. Return the reason if this is impossible, otherwise "".

    If torchvision is installed, vLLM's own image processor gives other pixel values.
    """
    info, own = llm.renderer.get_mm_processor().info, reader.processor.image_processor
    info.get_hf_processor().image_processor = own
    # Some models load the image processor separately.
    find = getattr(info, "get_image_processor", lambda: info.get_hf_processor().image_processor)
    return "" if find() is own else f"vLLM does not use the image processor of the chat, {type(own).__name__}"
