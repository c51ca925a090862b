"""Compute the tokens that a `Constraint` allows, with the package llguidance, which is imported on first use."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import SettingsError
from agentfly_kit.samples import Constraint

# JSON as `json.dumps` writes it, with or without spaces. Without a bound on whitespace, samples may never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_CACHE_SIZE = 256


def obstacle(chat: Chat) -> str:
    """Return the reason why samples with this tokenizer cannot be constrained, or ""."""
    if importlib.util.find_spec("llguidance") is None:
        return "it requires llguidance: pip install 'agentfly_kit[constraints]'"
    if not hasattr(chat.tokenizer, "backend_tokenizer"):
        return f"llguidance cannot read the tokenizer {type(chat.tokenizer).__name__}"
    return ""


class Grammars:
    """Compiled constraints for one tokenizer and V token ids."""

    def __init__(self, chat: Chat, vocab_size: int) -> None:
        self._matcher = importlib.import_module("llguidance").LLMatcher
        load = importlib.import_module("llguidance.hf").from_tokenizer
        self._tokenizer = load(chat.tokenizer, n_vocab=vocab_size, eos_token=list(chat.stop_ids))
        added = {str(token): id for id, token in chat.tokenizer.added_tokens_decoder.items()}
        self._special = {text: id for text, id in added.items() if self._tokenizer.is_special_token(id)}
        self._cache: dict[Constraint, Any] = {}

    def matcher(self, constraint: Constraint) -> Any:
        """Return a new matcher for `allowed_tokens`, whose method `consume_token` adds a sampled token.

        Raises:
            SettingsError: if a JSON schema has keywords or values that are not supported.
        """
        if constraint not in self._cache:
            matcher = self._matcher(self._tokenizer, self.to_lark(constraint), log_level=0)
            if problem := matcher.get_error():
                reason = problem.strip().splitlines()[0]
                raise SettingsError(f"the reply cannot be constrained to this JSON schema: {reason}")
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[constraint] = matcher
        return self._cache[constraint].deep_copy()

    def to_lark(self, constraint: Constraint) -> str:
        """Return a grammar in llguidance's dialect of Lark."""
        rules = [f"start: {'thinking ' if constraint.thinking_end else ''}reply"]
        if (end := constraint.thinking_end) in self._special:
            rules.append(f"thinking: /(.|\\n)*/ {self._literal(end)} /\\s?/ /\\s?/")
        elif end:
            rules.append(f"thinking: thought /\\s?/ /\\s?/\nthought[suffix={json.dumps(end)}]: /(.|\\n)*/")
        choices = []
        for choice in constraint.choices:
            parts = []
            for i, part in enumerate(choice):
                if i % 2:
                    name = f"json{len(rules)}"
                    schema = {**json.loads(part), "x-guidance": _SPACING}
                    parts.append(name)
                    rules.append(f"{name}: %json {json.dumps(schema)}")
                elif part:
                    parts.append(self._literal(part))
            choices.append(" ".join(parts))
        return "\n".join([*rules, f"reply: {' | '.join(choices)}"])

    def _literal(self, text: str) -> str:
        """Return the grammar of a text. Special tokens are matched by id, because no bytes match them."""
        names = sorted(map(re.escape, self._special), key=len, reverse=True)
        found = []
        for part in re.split(f"({'|'.join(names)})", text) if names else [text]:
            if part in self._special:
                found.append(f"<[{self._special[part]}]>")
            elif part:
                found.append(json.dumps(part))
        return " ".join(found)


def allowed_tokens(matchers: Iterable[Any], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return a mask, (B rows, V ids), of the tokens that each matcher allows next; None if all matchers are None."""
    matchers = list(matchers)
    if not any(matcher is not None for matcher in matchers):
        return None
    mask = np.ones((len(matchers), vocab_size), dtype=np.bool_)
    for row, matcher in zip(mask, matchers, strict=True):
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            row[:] = np.unpackbits(bits, count=vocab_size, bitorder="little")
    return torch.from_numpy(mask).to(device)
