"""Finding texts by their words (BM25) or by vectors. Knows no task and no page.

bm25s is loaded when the first index is made; a transformers model when a path is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from agentfly_kit.errors import SettingsError

Embed: TypeAlias = Callable[[list[str]], Any]
"""n texts -> n vectors of one length: an array (n, d), a tensor or lists."""

STOP = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "  # noqa: SIM905
    "to was will with".split()
)
"""Lucene's English stop words."""


def words(text: str) -> list[str]:
    """Lower-case words and numbers without the stop words, plural s taken off: Lucene's English analyzer, nearly."""
    found = (w for w in re.findall(r"\w+", text.lower()) if w not in STOP)
    return [w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in found]


class Index(Protocol):
    """What both kinds do."""

    def find(self, query: str, k: int) -> list[int]:
        """At most `k` numbers of texts, the best first; equally good ones in their own order."""
        ...


class WordIndex:
    """BM25 as Lucene computes it. A text that shares no word with the query is not found.

    Source: Robertson & Zaragoza 2009; Lù 2024, BM25S, arXiv 2407.03618. k1 and b are those of Pyserini.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 0.9, b: float = 0.4) -> None:
        import bm25s

        if not texts:
            raise SettingsError("an index needs at least one text")
        tokens = [words(text) or [""] for text in texts]
        self._index = bm25s.BM25(method="lucene", k1=k1, b=b)
        self._index.index(tokens, show_progress=False)
        self._known = {token for text in tokens for token in text}

    def find(self, query: str, k: int) -> list[int]:
        """As of `Index`."""
        known = [token for token in words(query) if token in self._known]
        if not known:
            return []
        scores = self._index.get_scores(known).round(4)  # the same order wherever sums are rounded otherwise
        return [int(i) for i in (-scores).argsort(kind="stable")[:k] if scores[i] > 0]


class VectorIndex:
    """By the cosine between vectors of an embedding model."""

    def __init__(self, texts: Sequence[str], embed: Embed, *, batch: int = 64) -> None:
        import numpy

        self.embed = embed
        parts = [_vectors(embed, list(texts[i : i + batch])) for i in range(0, len(texts), batch)]
        if not parts:
            raise SettingsError("an index needs at least one text")
        if len({part.shape[1] for part in parts}) > 1:
            raise SettingsError("the embedding gave vectors of different lengths")
        self._vectors = numpy.concatenate(parts)

    def find(self, query: str, k: int) -> list[int]:
        """As of `Index`."""
        scores = (self._vectors @ _vectors(self.embed, [query])[0]).round(6)
        return [int(i) for i in (-scores).argsort(kind="stable")[:k]]


def _vectors(embed: Embed, texts: list[str]) -> Any:
    """(n, d), each of length 1."""
    import numpy

    got = embed(texts)
    array = numpy.asarray(got.detach().cpu() if hasattr(got, "detach") else got, dtype="float32")
    if array.ndim != 2 or len(array) != len(texts):
        raise SettingsError(
            f"the embedding gave an array of shape {array.shape} for {len(texts)} texts; want ({len(texts)}, d)"
        )
    if not numpy.isfinite(array).all():
        raise SettingsError("the embedding gave NaN or infinite numbers")
    return array / numpy.maximum(numpy.linalg.norm(array, axis=1, keepdims=True), 1e-12)


def embedding(model: str | Path | Embed, *, max_tokens: int = 256) -> Embed:
    """A function as it is; of a folder with a transformers model, the mean of its last states over each text's tokens.

    Raises:  SettingsError for a folder that is not there; nothing is downloaded.
    """
    if callable(model):
        return model
    folder = Path(model).expanduser()
    if not (folder / "config.json").exists():
        raise SettingsError(
            f"no embedding model in {str(folder)!r} (it has no config.json); give the folder of one that you have, or "
            "a function from texts to vectors. Nothing is downloaded here; `hf download sentence-transformers/"
            "all-MiniLM-L6-v2 --local-dir minilm` fetches one of about 90 MB"
        )
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        encoder = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    except Exception as error:
        raise SettingsError(f"no embedding model could be loaded from {str(folder)!r}: {error}") from error

    def embed(texts: list[str]) -> Any:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        ready = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.no_grad():
            states = encoder(input_ids=ready["input_ids"], attention_mask=ready["attention_mask"]).last_hidden_state
        mask = ready["attention_mask"][..., None].float()
        return (states * mask).sum(1) / mask.sum(1).clamp(min=1)

    return embed
