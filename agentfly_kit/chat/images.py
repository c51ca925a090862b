"""Images in a chat: the placeholders that a model's image processor inserts, and the pixels that the model reads.

This module is imported when a chat gets an image processor. While messages are rendered, a marker stands for each
image. The template receives it as a part of type "image" and renders its placeholder, which is replaced by the
placeholders that the processor requires for the size of the image.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentfly_kit.chat.template import Template
from agentfly_kit.errors import ChatTemplateError, SettingsError
from agentfly_kit.images import Image
from agentfly_kit.seeds import digest
from agentfly_kit.types import ImageSpan, Message

# Maximum numbers of images whose pixels and placeholders are cached, because they are used in many forward passes.
_PIXELS, _EXPANSIONS = 32, 1024
# Marker of an image in rendered messages, followed by its digest. No other text contains the random number.
_MARK = f"qzimage{secrets.token_hex(8)}x"
_MARKED = re.compile(f"({_MARK}[0-9a-f]{{32}})")


class ImageIds(tuple[int, ...]):
    """Token ids with the spans of their images, `images`. A slice keeps the spans that lie inside it."""

    images: tuple[ImageSpan, ...]

    def __new__(cls, ids: Sequence[int], images: Sequence[ImageSpan]) -> ImageIds:
        self = super().__new__(cls, ids)
        self.images = tuple(images)
        return self

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if not isinstance(at, slice):
            return found
        start, stop, _ = at.indices(len(self))
        moved = (span._replace(start=span.start - start) for span in self.images if span.start + span.length <= stop)
        return ImageIds(found, [span for span in moved if span.start >= 0])

    def __getnewargs__(self) -> Any:
        return tuple(self), self.images


class ImageReader:
    """Image processor of a vision model, with the tokens that stand for images.

    Args:
        processor: Processor of transformers with `image_processor`, `tokenizer` and `image_token`.

    Attributes:
        token: Text of the placeholder, which occurs once in a rendered template and many times in the ids of an image.
        token_id: Id of the placeholder.

    Raises:
        SettingsError: If the processor does not define its placeholders.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.token: str = getattr(processor, "image_token", None) or ""
        if not self.token or not callable(getattr(processor, "replace_image_token", None)):
            raise SettingsError(
                "processor must be the processor of a vision model with 'image_token' and 'replace_image_token', which "
                f"most have from transformers 5.19 on, got {type(processor).__name__}"
            )
        ids = processor.tokenizer(self.token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise SettingsError(
                f"the placeholder of images must be one token, got {self.token!r} ({len(ids)} tokens)"
            )
        self.token_id = int(ids[0])
        self._create_caches()

    def _create_caches(self) -> None:
        self._process = functools.lru_cache(_PIXELS)(self._process_image)
        # The placeholders of an image as text.
        self.expansion = functools.lru_cache(_EXPANSIONS)(
            lambda image: str(self.processor.replace_image_token(self._process(image), 0))
        )
        # Whether the template renders images in tool results.
        self._in_results: bool | None = None
        self._appends = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("processor", "token", "token_id")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._create_caches()

    @property
    def fingerprint(self) -> str:
        """Digest of the settings of the processor, which determine pixels and placeholders."""
        return digest(json.dumps(_settings(self.processor), sort_keys=True, default=str))

    # --- images ---

    def _process_image(self, image: Image) -> Any:
        # Idefics3 returns the numbers of rows and columns of crops only on request; other processors ignore the
        # keyword.
        process = self.processor.image_processor
        options = {"return_row_col_info": True} if hasattr(process, "return_row_col_info") else {}
        try:
            return process([image.to_pil()], **options)
        except ValueError as error:
            raise SettingsError(f"the image processor rejected an image ({image}): {error}") from error

    def pixels(self, image: Image) -> dict[str, Any]:
        """Return the arrays with the pixels of an image and their sizes, keyed by name."""
        import numpy as np

        return {name: np.asarray(value) for name, value in self._process(image).items()}

    # --- messages ---

    def mark(self, messages: Sequence[Message], template: Template, *, results_as_user: bool) -> tuple[Message, ...]:
        """Return messages whose content is text, with a marker for each image.

        If the template drops images of tool results, the images are shown in a user message after the results.

        Raises:
            ChatTemplateError: If the rendering of an image depends on earlier images.
        """
        if not self._appends:
            _require_append(template, self.token)
            self._appends = True
        moves = not results_as_user and not self._shows_results(template)
        out: list[Message] = []
        moved: list[str] = []
        for message in (*messages, None):
            if moved and (message is None or message["role"] != "tool"):
                out.append({"role": "user", "content": "".join(moved)})
                moved = []
            if message is None:
                break
            content = message["content"]
            if not isinstance(content, str):
                parts = [part if isinstance(part, str) else _MARK + part.digest for part in content]
                if moves and message["role"] == "tool":
                    name = message.get("name") or "the tool"
                    marks = [part for part in parts if _MARKED.fullmatch(part)]
                    moved += [f"Images returned by {name}:", *marks]
                    parts = [part for part in parts if part not in marks]
                content = "".join(parts)
            out.append({**message, "content": content})
        return tuple(out)

    def to_parts(self, content: str) -> Any:
        """Return content with markers as a list of parts for a template, and other content unchanged."""
        pieces = _MARKED.split(content)
        if len(pieces) == 1:
            return content
        parts = enumerate(pieces)
        return [{"type": "image"} if i % 2 else {"type": "text", "text": text} for i, text in parts if text]

    def _shows_results(self, template: Template) -> bool:
        """Return True if the template renders images in tool results. Some templates drop them."""
        if self._in_results is None:
            result = {"role": "tool", "name": "probe0", "tool_call_id": "call-0", "content": f"?{_MARK}{'0' * 32}"}
            try:
                self._in_results = template.text_after_action([result]).count(self.token) == 1
            except ChatTemplateError:
                self._in_results = False
        return self._in_results

    def describe(self, ids: ImageIds, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of ids, in which "[image 640 x 480]" stands for the placeholders of an image."""
        parts, end = [], 0
        for image, start, length in ids.images:
            parts += [decode(ids[end:start]), str(image)]
            end = start + length
        return "".join([*parts, decode(ids[end:])])

    def encode(self, text: str, images: Sequence[Image], encode: Callable[..., tuple[int, ...]]) -> ImageIds:
        """Encode rendered text in which each image has one placeholder. Placeholder strings in messages must have been
        replaced by marks.

        Args:
            text: The text.
            images: The images, in order.
            encode: Function that encodes a part of the text, with `anchored=True` if other ids precede it.

        Raises:
            ChatTemplateError: If the number of placeholders differs from the number of images.
        """
        first, *pieces = text.split(self.token)
        if len(pieces) != len(images):
            raise ChatTemplateError(
                f"the chat template must render {self.token!r} once for each image, got {len(pieces)} for "
                f"{len(images)} images; put images into user messages"
            )
        ids, spans = list(encode(first)), []
        for image, piece in zip(images, pieces, strict=True):
            expanded = encode(self.expansion(image), anchored=bool(ids))
            spans.append(ImageSpan(image, len(ids), len(expanded)))
            ids += (*expanded, *encode(piece, anchored=True))
        return ImageIds(ids, spans)

    # --- files ---

    def save(self, folder: Path) -> None:
        """Write the files from which `load_processor` creates the processor. The tokenizer is saved separately."""
        self.processor.image_processor.save_pretrained(folder)
        text = json.dumps(_settings(self.processor), indent=2, sort_keys=True)
        (folder / "processor_config.json").write_text(text + "\n", encoding="utf-8")


def _require_append(template: Template, token: str) -> None:
    """Raise ChatTemplateError unless an image in a user message has one placeholder and can be appended."""
    user: Message = {"role": "user", "content": f"?{_MARK}{'0' * 32}"}
    before = template.render([user], generate=True)
    whole = template.render([user, {"role": "assistant", "content": "!"}, user], generate=True)
    if before.count(token) != 1:
        raise ChatTemplateError(
            f"the chat template of {template.name} must render {token!r} for an image in a user message, got "
            f"{before[-80:]!r}"
        )
    if not whole.endswith(template.text_after_action([user])):
        raise ChatTemplateError(
            f"the chat template of {template.name} renders an image differently after earlier images, so that "
            "messages cannot be appended; remove the option that numbers images"
        )


def load_processor(path: str, tokenizer: Any, config: Any, **hub: Any) -> Any:
    """Return the processor of a vision model, given by folder or hub name, or None if the model has none.

    Images are processed by Pillow and NumPy, because torchvision would give different pixels. Processors for videos
    require torchvision and are left out.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if type(config) not in PROCESSOR_MAPPING:
        return None
    kind: Any = PROCESSOR_MAPPING[type(config)]
    try:
        image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", **hub)
    except OSError:  # there is no such file
        return None
    settings, _ = kind.get_processor_dict(path, **hub)
    if not tokenizer.chat_template and isinstance(settings.get("chat_template"), str):
        tokenizer.chat_template = settings["chat_template"]
    used = {name: settings[name] for name in inspect.signature(kind.__init__).parameters if name in settings}
    return make_processor(kind, image_processor, tokenizer, {n: v for n, v in used.items() if v is not None})


def make_processor(kind: Any, image_processor: Any, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Create a processor of the transformers class `kind` without the video and sound processors it may require."""
    given = {"image_processor": image_processor, "tokenizer": tokenizer}
    others = dict.fromkeys(set(kind.get_attributes()) - set(given))
    arguments = {**{name: value for name, value in settings.items() if name not in others}, **given, **others}
    if not others:
        return kind(**arguments)
    found = (kind, image_processor, tokenizer, settings)
    methods = {
        # Without this, the class would reject None.
        "check_argument_for_proper_class": lambda *_: None,
        "__reduce__": lambda self: (make_processor, found),
    }
    return type(kind.__name__, (kind,), methods)(**arguments)


def _settings(processor: Any) -> dict[str, Any]:
    return {name: value for name, value in processor.to_dict().items() if value is not None}
