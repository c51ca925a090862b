"""The chat templates in TRL's wheel, each with a small local tokenizer that has the control tokens of the template."""

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

import agentfly_kit as af

_FOUND = importlib.util.find_spec("trl")
FOLDER = Path(_FOUND.origin).parent / "chat_templates" if _FOUND is not None and _FOUND.origin else None
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja")) if FOLDER is not None else []

# Spellings of control tokens in the supported model families: <|x|>, <｜x｜>, <|x>, <x|>, [X], <start_of_x>, </s>, <s>.
_SPECIAL = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[a-z_\"]{1,20}>|<[a-z_]{1,20}\|>|</?s>|<(?:start|end)_of_\w+>"
    r"|\[/?INST\]|\[gMASK\]|<sop>|<image>|\[(?:TOOL_CALLS|TOOL_RESULTS|/TOOL_RESULTS)\]"
)
# Tokens that are not special tokens, and therefore remain in the text that a server returns.
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response)>")


def tokenizer(template: str) -> Any:
    """Return the shipped tokenizer with the given template and its control tokens."""
    made = af.tiny.tokenizer()
    made.chat_template = template
    made.bos_token = "<s>"
    known = set(made.get_vocab())
    special = [t for t in sorted(set(_SPECIAL.findall(template))) if t not in known]
    plain = [t for t in sorted(set(_PLAIN.findall(template))) if t not in known]
    made.add_tokens([AddedToken(t, special=True, normalized=False) for t in special], special_tokens=True)
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return made


@functools.cache
def named(name: str) -> Any:
    """Return the tokenizer with the template of this name. It is shared and must not be modified."""
    assert FOLDER is not None
    return tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
