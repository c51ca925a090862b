"""Conversion of values returned by tools to observations, the text that the model sees."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from dataclasses import replace
from numbers import Real
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.types import ToolResult, is_image


def to_result(value: Any) -> ToolResult:
    """Convert the return value of a tool to a ToolResult. Data URLs are replaced with descriptions.

    An image, or a list that contains images, is converted to a result with images.
    """
    if isinstance(value, SandboxResult):
        return ToolResult(value.ok, value.text, truncated=value.truncated)
    parts = value if isinstance(value, list | tuple) else [value]
    if any(map(is_image, parts)):
        images = [part for part in parts if is_image(part)]
        if len(images) > _MAX_IMAGES:
            raise ValueError(f"a tool must return at most {_MAX_IMAGES} images, got {len(images)}")
        # The images follow the text, so markers in the text show where they belong.
        count = itertools.count(1)
        texts = [f"[image {next(count)}]" if is_image(part) else to_text(part) for part in parts]
        return ToolResult(True, "\n".join(texts) if len(images) < len(parts) else "", images=tuple(images))
    if not isinstance(value, ToolResult):
        return ToolResult(True, _DATA_URL.sub(_describe_url, to_text(value)))
    reward: Any = value.reward
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        raise TypeError(f"the reward of a ToolResult must be a finite number or None, got {reward!r}")
    return replace(value, observation=_DATA_URL.sub(_describe_url, value.observation))


_MAX_IMAGES = 16
# Base64 data in a result, such as an image, would fill the prompt. Short data is kept, because it may be text.
_DATA_URL = re.compile(r"data:(\w+)(/[\w.+-]+)(?:;[\w=.+-]+)*;base64,([\w+/-]{64,}=*)")
_IMAGE = re.compile(rb"(?P<png>\x89PNG)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<webp>RIFF....WEBP)", re.DOTALL)
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def _describe_url(url: re.Match[str]) -> str:
    return f"[{url[1]} {url[1]}{url[2]}, {len(url[3].rstrip('=')) * 3 // 4} bytes, not shown]"


def _describe_bytes(value: Any) -> Any:
    """Replace bytes, also in lists and dicts, with the decoded text or, if they are not UTF-8, with a description."""
    if isinstance(value, dict):
        return {key: _describe_bytes(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_bytes(part) for part in value]
    if not isinstance(value, bytes | bytearray | memoryview):
        return value
    data = bytes(value)
    try:
        return data.decode()
    except UnicodeDecodeError:
        image = _IMAGE.match(data)
        kind = f"image image/{image.lastgroup}" if image else "binary data"
        return f"[{kind}, {len(data)} bytes, not shown]"


def to_text(value: Any) -> str:
    """Convert a value to text: "" for None, strings unchanged, and other values as compact JSON.

    Bytes are decoded or, if they are not UTF-8, described. TypeError is raised for values without a representation.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the value of a string enum, not its name
    if isinstance(value, bytes | bytearray | memoryview):
        return str(_describe_bytes(value))
    convert = functools.partial(
        to_jsonable_python, inf_nan_mode="constants", bytes_mode="utf8", fallback=_json_fallback
    )
    try:
        plain = convert(value)
    except UnicodeDecodeError:
        plain = convert(_describe_bytes(_ANY.dump_python(value, warnings=False)))
    # Dates, paths and enum members become strings, which are shown without quotes like other strings.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _json_fallback(value: Any) -> Any:
    """Convert arrays to lists and other objects to strings. Raise TypeError if the string contains a memory address."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    text = str(value)
    if re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", text, re.DOTALL):
        raise TypeError(
            f"a tool returned a {type(value).__qualname__}, which has no string representation; "
            "return a str, number or JSON value"
        )
    return text


def fit_result(result: ToolResult, max_chars: int | None) -> ToolResult:
    """Truncate the observation to `max_chars` characters and replace lone surrogates, which cannot be tokenized."""
    text = result.observation
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if max_chars is None or len(text) <= max_chars:
        return replace(result, observation=text)
    cut = f"{text[:max_chars]}\n[truncated: the first {max_chars} of {len(text)} characters]"
    return replace(result, observation=cut, truncated=True)
