"""Text retrieval with BM25 or embedding vectors.

The package bm25s is imported when the first index is built, and transformers when an embedding model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from agentfly_kit.errors import SettingsError

# Function that embeds n strings as vectors of length d. The function returns an array or tensor of shape (n, d), or
# nested lists.
Embed: TypeAlias = Callable[[list[str]], Any]

# Lucene's English stop words.
STOP = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "  # noqa: SIM905
    "to was will with".split()
)


def words(text: str) -> list[str]:
    """Tokenize into lower-case words and numbers, without stop words and plural s, like Lucene's English analyzer."""
    found = (w for w in re.findall(r"\w+", text.lower()) if w not in STOP)
    return [w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in found]


class Index(Protocol):
    """Interface of a searchable index of texts."""

    def find(self, query: str, k: int) -> list[int]:
        """Return the indices of at most k texts, best first; ties keep the order of the texts."""
        ...


class WordIndex:
    """BM25 index, scored as in Lucene. Texts that share no word with the query are not returned.

    Source: Robertson & Zaragoza 2009; Lù 2024, BM25S, arXiv 2407.03618. The defaults of k1 and b are Pyserini's.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 0.9, b: float = 0.4) -> None:
        try:
            import bm25s
        except ImportError:
            raise SettingsError('WordIndex needs bm25s; type: pip install "agentfly_kit[envs]"') from None

        if not texts:
            raise SettingsError("an index needs at least one text")
        tokens = [words(text) or [""] for text in texts]
        self._index = bm25s.BM25(method="lucene", k1=k1, b=b)
        self._index.index(tokens, show_progress=False)
        self._known = {token for text in tokens for token in text}

    def find(self, query: str, k: int) -> list[int]:
        """Return the indices of the k texts with the highest BM25 scores; see `Index.find`."""
        known = [token for token in words(query) if token in self._known]
        if not known:
            return []
        scores = self._index.get_scores(known).round(4)  # prevents rounding errors from changing the order
        return [int(i) for i in (-scores).argsort(kind="stable")[:k] if scores[i] > 0]


class VectorIndex:
    """Text index that ranks by the cosine similarity of embedding vectors."""

    def __init__(self, texts: Sequence[str], embed: Embed, *, batch: int = 64) -> None:
        import numpy

        self.embed = embed
        parts = [_vectors(embed, list(texts[i : i + batch])) for i in range(0, len(texts), batch)]
        if not parts:
            raise SettingsError("an index needs at least one text")
        if len({part.shape[1] for part in parts}) > 1:
            raise SettingsError("all embedding vectors must have the same length, but their lengths differ")
        self._vectors = numpy.concatenate(parts)

    def find(self, query: str, k: int) -> list[int]:
        """Return the indices of the k texts with the highest cosine similarity; see `Index.find`."""
        scores = (self._vectors @ _vectors(self.embed, [query])[0]).round(6)
        return [int(i) for i in (-scores).argsort(kind="stable")[:k]]


def _vectors(embed: Embed, texts: list[str]) -> Any:
    """Return the embeddings of n texts, scaled to unit length, as an array of shape (n, d)."""
    import numpy

    got = embed(texts)
    array = numpy.asarray(got.detach().cpu() if hasattr(got, "detach") else got, dtype="float32")
    if array.ndim != 2 or len(array) != len(texts):
        raise SettingsError(
            f"the embedding returned shape {array.shape} for {len(texts)} texts; it must be ({len(texts)}, d)"
        )
    if not numpy.isfinite(array).all():
        raise SettingsError("the embedding returned NaN or infinite values")
    return array / numpy.maximum(numpy.linalg.norm(array, axis=1, keepdims=True), 1e-12)


def embedding(model: str | Path | Embed, *, max_tokens: int = 256) -> Embed:
    """Return an embedding function: `model` itself if it is callable, else one that uses a transformers model.

    A transformers model embeds a text as the mean of the last hidden states of its first `max_tokens` tokens. Nothing
    is downloaded.

    Raises:  SettingsError if `model` is not callable and not a folder with a loadable model.
    """
    if callable(model):
        return model
    folder = Path(model).expanduser()
    if not (folder / "config.json").exists():
        raise SettingsError(
            f"dense must be a function or a folder with a model, got {str(folder)!r}; type: hf download "
            "sentence-transformers/all-MiniLM-L6-v2 --local-dir minilm"
        )
    import torch
    from transformers import AutoModel, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, **local).eval()

    def embed(texts: list[str]) -> Any:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        ready = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.no_grad():
            states = encoder(input_ids=ready["input_ids"], attention_mask=ready["attention_mask"]).last_hidden_state
        mask = ready["attention_mask"][..., None].float()
        return (states * mask).sum(1) / mask.sum(1).clamp(min=1)

    return embed
