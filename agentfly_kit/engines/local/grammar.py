"""Compute the tokens that a `Constraint` allows, with the package llguidance, which is imported on first use."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import SettingsError
from agentfly_kit.samples import Constraint

# JSON as `json.dumps` writes it, with or without spaces. Without a bound on whitespace, samples may never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
# JSON that Python reads: the numbers are integers of at most 4,300 digits or less than 1e308, and only control
# characters are escaped. It is matched in addition to the schema, because llguidance's bounds of numbers exclude
# exponents, and its further keys of an object may be unpaired surrogates or other spellings of keys in the schema.
_NUMBER = (
    r"-?([0-9]{1,4300}|[0-9]{1,308}(\.[0-9]+)?([eE]-[0-9]+)?"
    r"|[0-9]{1,8}(\.[0-9]+)?[eE]\+?([0-9]{1,2}|[12][0-9]{2}|300))"
)
_SCALAR = rf'({_NUMBER}|"([^"\\]|\\["\\bfnrt]|\\u00([01][0-9a-fA-F]|7[fF]))*"|true|false|null)'
_PUNCTUATION = "[]{},: "
_JSON = rf"({_SCALAR}?[{re.escape(_PUNCTUATION)}])*{_SCALAR}?"
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
        self._cache: dict[Constraint, list[Any]] = {}

    def matchers(self, constraint: Constraint) -> list[Any]:
        """Return new matchers for `allowed_tokens`. Add each sampled token to all of them with `consume_token`.

        Raises:
            SettingsError: if a JSON schema has keywords or values that are not supported.
        """
        if constraint not in self._cache:
            # The second grammar cannot tell where a value ends if the text after it could begin another value.
            after = {part.lstrip(_PUNCTUATION)[:1] for choice in constraint.choices for part in choice[2::2]}
            kinds = (False, True) if after.isdisjoint('"-0123456789tfn') else (False,)
            grammars = (self.to_lark(constraint, plain=plain) for plain in kinds)
            matchers = [self._matcher(self._tokenizer, grammar, log_level=0) for grammar in grammars]
            if problem := "".join(matcher.get_error() for matcher in matchers):
                reason = problem.strip().splitlines()[0]
                alone = [dataclasses.replace(constraint, choices=(choice,)) for choice in constraint.choices]
                wrong = filter(lambda one: self._matcher.validate_grammar(self.to_lark(one), self._tokenizer), alone)
                where = f" after {before!r}" if (before := next(wrong, constraint).choices[0][0]) else ""
                raise SettingsError(f"the reply{where} cannot be constrained to this JSON schema: {reason}")
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[constraint] = matchers
        return [matcher.deep_copy() for matcher in self._cache[constraint]]

    def to_lark(self, constraint: Constraint, *, plain: bool = False) -> str:
        """Return a grammar in llguidance's dialect of Lark.

        With `plain`, the grammar limits numbers and escapes instead of requiring the schemas. It relies on the other
        grammar for brackets, also those with which the text after a value begins.
        """
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
                    rules.append(f"{name}: /{_JSON}/" if plain else f"{name}: %json {json.dumps(schema)}")
                elif part:
                    parts.append(self._literal(part.lstrip(_PUNCTUATION) if plain and i else part))
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


def allowed_tokens(matchers: Sequence[Sequence[Any]], vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask, (B rows, V ids), of the tokens that all matchers of a row allow next."""
    bits = np.full((len(matchers), -(-vocab_size // 8)), 255, dtype=np.uint8)
    for row, of_row in zip(bits, matchers, strict=True):
        for matcher in of_row:
            row &= np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: len(row)]  # may be padded
    mask = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(mask.view(np.bool_)).to(device)
