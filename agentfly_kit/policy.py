"""The model: logprobs, entropies, values and hidden states of given ids, and the only place that shifts by one.

Knows nothing of rewards, advantages, losses or engines. `logprobs[t]` is log p(ids[t] | ids[:t]) and `values[t]` is
V(ids[:t]): both come from the hidden state at t - 1, and `_selected` is where that is said.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from agentfly_kit.chat import Chat
from agentfly_kit.errors import AlignmentError, PolicyError, SettingsError

Want = Literal["logprob", "entropy", "value", "hidden"]
_WANTS = frozenset({"logprob", "entropy", "value", "hidden"})


@dataclass
class Scored:
    """Per-token results, (B, T) float32 each; NaN where the mask is 0. `hidden` is (B, T, d), 0 there."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    hidden: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise KeyError(f"{name!r} was not asked for; score(batch, want={{{name!r}}})")
        return cast(Tensor, value)


@dataclass
class Selected:
    """What a forward gives at the N masked positions, in the order of `mask.nonzero()`. Carries gradients."""

    logprob: Tensor
    """(N,)"""
    entropy: Tensor | None
    """(N,)"""
    value: Tensor | None
    """(N,)"""
    hidden: Tensor
    """(N, d), the states that predicted the tokens"""


class ValueHead(nn.Linear):
    """V(ids[:t]) from the trunk's state, starting at zero so that the first advantages are the rewards."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Policy:
    """A causal language model with its chat, perhaps a value head, and the count of optimizer steps behind it."""

    def __init__(self, model: Any, chat: Chat, *, value_head: bool | ValueHead = False, version: int = 0) -> None:
        self.model = model
        self.chat = chat
        self.model.eval()  # dropout would make the sampled and the trained distribution differ
        if value_head is True:
            value_head = ValueHead(self.width).to(self.device)
        self.value_head: ValueHead | None = value_head or None
        self.version = version
        """Optimizer steps of `ppo_step` taken on these weights."""
        self.lock = threading.Lock()
        """Held by whoever changes the weights and by an engine's forward, so that none samples from half an update."""
        self.started: dict[str, str] = {}
        """Run folder -> fingerprint of the weights with which its run began: a cell that is run again finds its run."""
        self._plain_head: bool | None = None

    # --- loading and saving ---

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        value_head: bool = False,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        format: str = "hermes",
    ) -> Policy:
        """A policy from a folder in the transformers layout, or from a hub name.

        Raises:  PolicyError naming the file that a folder lacks or that cannot be read.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(path)
        meta: dict[str, Any] = {}
        if folder.exists() or str(path).startswith((".", "/", "~")):
            cls._check_folder(folder)
            if (folder / "policy.json").exists():
                meta = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise SettingsError(f"dtype={dtype!r}: give a torch dtype or its name, such as 'float32' or 'bfloat16'")
        try:
            with _no_bar():
                model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=kind)
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:
            raise PolicyError(
                f"no policy could be loaded from {str(path)!r}: {type(error).__name__}: {error}"
            ) from error
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)
        policy = cls(
            model,
            Chat(tokenizer, format=meta.get("format", format)),
            value_head=value_head,
            version=meta.get("version", 0),
        )
        head = folder / "value_head.safetensors"
        if policy.value_head is not None and head.exists():
            from safetensors.torch import load_file

            policy.value_head.load_state_dict(load_file(head))
        return policy

    @staticmethod
    def _check_folder(folder: Path) -> None:
        if not folder.is_dir():
            raise PolicyError(
                f"no policy folder at {str(folder)!r}; give a folder that Policy.save wrote, or a hub name"
            )
        weights = (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        )
        for wanted in (("config.json",), weights, ("tokenizer.json", "tokenizer.model", "vocab.json")):
            if not any((folder / name).exists() for name in wanted):
                raise PolicyError(
                    f"policy folder {str(folder)!r} lacks {wanted[0]}; it has "
                    f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Write it with Policy.save"
                )

    def save(self, path: str | Path) -> Path:
        """Write the model, tokenizer, chat template, and the value head in a file of its own."""
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with self.lock:
            self.model.save_pretrained(folder)
            if self.value_head is not None:
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in self.value_head.state_dict().items()},
                    folder / "value_head.safetensors",
                )
        self.chat.tokenizer.save_pretrained(folder)
        meta = {"format": self.chat.format.name, "version": self.version}
        (folder / "policy.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        return folder

    def copy(self) -> Policy:
        """The same weights in new tensors: a reference for a KL, or a second learner."""
        with self.lock:
            model = copy.deepcopy(self.model)
            head = copy.deepcopy(self.value_head)
        return Policy(model, self.chat, value_head=head if head is not None else False, version=self.version)

    # --- facts ---

    @property
    def device(self) -> torch.device:
        return cast(torch.device, next(iter(self.model.parameters())).device)

    @property
    def width(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int:
        """Tokens of context that the model was made for."""
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def size(self) -> int:
        """Number of parameters, the value head's left out."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def micro_tokens(self) -> int:
        """Padded tokens a forward, unless said otherwise: few on a CPU, where short rows then stay unpadded."""
        return 1536 if self.device.type == "cpu" else 32768

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    def state(self) -> dict[str, Tensor]:
        """All weights by name, the value head's under `value_head.`; tensors are the live ones."""
        out = dict(self.model.state_dict())
        if self.value_head is not None:
            out |= {f"value_head.{k}": v for k, v in self.value_head.state_dict().items()}
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises PolicyError if the names or shapes are another model's."""
        own = {k: v for k, v in state.items() if not k.startswith("value_head.")}
        head = {k.removeprefix("value_head."): v for k, v in state.items() if k.startswith("value_head.")}
        if bool(head) != (self.value_head is not None):
            raise PolicyError("one of the two has a value head and the other has not; load with value_head= to match")
        try:
            with self.lock:
                self.model.load_state_dict(own)
                if self.value_head is not None:
                    self.value_head.load_state_dict(head)
        except RuntimeError as error:
            raise PolicyError(f"these weights belong to another model: {error}") from error

    def fingerprint(self) -> str:
        """A digest of all weights by name."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        head = ", value head" if self.value_head is not None else ""
        kind = type(self.model).__name__
        return f"Policy({kind}, {self.size:,} parameters{head}, version {self.version}, {self.device})"

    # --- the forward ---

    def hidden(self, ids: Tensor, attention: Tensor | None = None) -> Tensor:
        """Last hidden states. ids (B, T), attention (B, T) or None for rows padded on the right -> (B, T, d).

        Positions are given, never guessed from a pad id: on the right, causal attention alone keeps pads out.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        out = self.model.get_decoder()(
            input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, return_dict=True
        )
        return cast(Tensor, out.last_hidden_state)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, d) -> (N, V) in float32. Includes whatever the model does after its output matrix."""
        if self._plain_head is None:
            self._plain_head = self._head_is_plain()
        if not self._plain_head:
            raise PolicyError(
                f"{type(self.model).__name__} changes its logits after the output matrix (soft-capping or a scale), "
                "which selected positions would miss; this model is not supported yet"
            )
        return cast(Tensor, self.model.get_output_embeddings()(hidden)).float()

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        whole = self.model(input_ids=ids, use_cache=False).logits[0].float()
        ours = self.model.get_output_embeddings()(self.hidden(ids)[0]).float()
        return bool(torch.allclose(whole, ours, atol=1e-3, rtol=1e-3))

    def forward(
        self, ids: Tensor, mask: Tensor, temperatures: Tensor, *, entropy: bool = False, value: bool = False
    ) -> Selected:
        """Logprobs (and more) at the positions where the mask is 1; logits are made there only. Carries gradients.

        Shapes:  ids (B, T) int64 padded on the right, mask (B, T) bool, temperatures (B,) -> N = mask.sum() each.
        Units:   nats, after temperature.
        Raises:  AlignmentError if position 0 is masked: nothing comes before it that could predict it.
        """
        rows, cols = self._selected(mask)
        states = self.hidden(ids)[rows, cols - 1]
        logits = self.logits(states) / temperatures.to(states.device, torch.float32)[rows, None]
        logp = torch.log_softmax(logits, dim=-1)
        return Selected(
            logprob=logp.gather(-1, ids[rows, cols, None])[:, 0],
            entropy=-(logp.exp() * logp).sum(-1) if entropy else None,
            value=self._values(states) if value else None,
            hidden=states,
        )

    def _values(self, states: Tensor) -> Tensor:
        if self.value_head is None:
            raise PolicyError("this policy has no value head; load it with value_head=True")
        return cast(Tensor, self.value_head(states.to(self.value_head.weight.dtype)))[:, 0].float()

    @staticmethod
    def _selected(mask: Tensor) -> tuple[Tensor, Tensor]:
        """The shift by one, the only one: the token at column t is predicted by the state at column t - 1."""
        rows, cols = mask.nonzero(as_tuple=True)
        if bool((cols == 0).any()):
            raise AlignmentError("the mask is 1 at position 0; the first token of a row is never predicted")
        return rows, cols

    @torch.no_grad()
    def score(
        self, batch: Any, want: Iterable[Want] = ("logprob", "entropy"), *, micro_tokens: int | None = None
    ) -> Scored:
        """Score a batch as it stands, without gradients. Only positions with mask 1 are scored.

        Shapes:  batch.ids, batch.mask (B, T), batch.temperatures (B,) -> (B, T) each; see `Scored`.
        """
        wanted = set(want)
        if not wanted or not wanted <= _WANTS:
            raise SettingsError(f"want={sorted(wanted)}: give some of {sorted(_WANTS)}")
        ids, mask = batch.ids, batch.mask
        shape = tuple(ids.shape)
        out = {
            name: torch.full(
                (*shape, self.width) if name == "hidden" else shape, 0.0 if name == "hidden" else torch.nan
            )
            for name in wanted
        }
        with compute_threads(self):
            for rows in micro_batches(batch.lengths, micro_tokens or self.micro_tokens):
                width = int(batch.lengths[rows].max())
                m = mask[rows, :width]
                if not bool(m.any()):
                    continue
                got = self.forward(
                    ids[rows, :width].to(self.device),
                    m.to(self.device),
                    batch.temperatures[rows],
                    entropy="entropy" in wanted,
                    value="value" in wanted,
                )
                r, c = m.nonzero(as_tuple=True)
                for name in wanted:
                    out[name][rows[r], c] = getattr(got, name).float().cpu()
        return Scored(**out)


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without the progress bar of transformers, which a notebook would keep for ever."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def micro_batches(lengths: Tensor, micro_tokens: int) -> list[Tensor]:
    """Row indices in groups of at most `micro_tokens` padded tokens, rows of like length together, longest first.

    A row longer than `micro_tokens` goes alone.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    groups: list[Tensor] = []
    start = 0
    while start < len(order):
        width = max(int(lengths[order[start]]), 1)
        count = max(1, micro_tokens // width)
        groups.append(order[start : start + count])
        start += count
    return groups


class compute_threads:
    """One torch thread for a tiny model on a CPU: more of them spin longer than they compute."""

    def __init__(self, policy: Policy) -> None:
        self._wanted = 1 if policy.device.type == "cpu" and policy.size < 5_000_000 else None

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._wanted is not None and self._before != self._wanted:
            torch.set_num_threads(self._wanted)

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)
