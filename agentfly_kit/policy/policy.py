"""The model: logprobs, entropies, values and hidden states of given ids, and the only place that shifts by one.

Knows nothing of rewards, advantages, losses or engines. `logprobs[t]` is log p(ids[t] | ids[:t]) and `values[t]` is
V(ids[:t]): both come from the hidden state at t - 1, and `_predicted_positions` is where that is said.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from agentfly_kit import _html
from agentfly_kit.chat.chat import Chat, History
from agentfly_kit.errors import AlignmentError, PolicyError, SettingsError
from agentfly_kit.policy.prefix_tree import PackedTrees, PrefixTree, build_prefix_trees

ScoreName = Literal["logprob", "entropy", "value", "hidden"]
_SCORE_NAMES = frozenset({"logprob", "entropy", "value", "hidden"})


_MASKED_ATTENTION_COST = 4.0
"""How much less attention under a mask gets done in a second than a matrix product; measured on a CPU, docs/log.md."""


@dataclass
class TokenScores:
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
class ForwardOutput:
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


class Critic(nn.Module):
    """V by a model of its own: a copy of the policy's decoder, trained apart from it, with a head that starts at zero.

    It costs a second forward and backward, and no gradient of the value loss reaches the policy.
    """

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(width)


class Policy:
    """A causal language model with its chat, perhaps a value head, and the count of optimizer steps behind it.

    value_head: True reads values from the policy's own trunk, "separate" from a copy of it (see `Critic`).
    """

    _size_cache: tuple[Any, int] = (None, 0)  # a model, and its size

    def __init__(
        self,
        model: Any,
        chat: Chat,
        *,
        value_head: bool | Literal["separate"] | ValueHead | Critic = False,
        version: int = 0,
    ) -> None:
        self.model = model
        self.chat = chat
        self.model.eval()  # dropout would make the sampled and the trained distribution differ
        if value_head is True:
            value_head = ValueHead(self.width).to(self.device)
        elif value_head == "separate":
            value_head = _make_critic(self.model).to(self.device)
        elif isinstance(value_head, str):
            raise SettingsError(f"value_head={value_head!r}: give True, False or 'separate'")
        self.value_head: ValueHead | Critic | None = value_head or None
        self.version = version
        """Optimizer steps of `ppo_step` taken on these weights."""
        self.lock = threading.Lock()
        """Held by whoever changes the weights and by an engine's forward, so that none samples from half an update."""
        self.run_fingerprints: dict[str, str] = {}
        """Run folder -> fingerprint of the weights with which its run began: a cell that is run again finds its run."""
        self._plain_head: bool | None = None
        self._trees_supported: bool | None = None

    # --- loading and saving ---

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        value_head: bool | Literal["separate"] = False,
        lora: int | Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        format: str = "auto",
        history: History = "exact",
    ) -> Policy:
        """A policy from a folder in the transformers layout, or from a hub name.

        value_head: True for one on the policy's trunk, "separate" for a critic of its own; see `Critic`.
        lora: a rank, or the options of `peft.LoraConfig`: the weights are frozen and an adapter on all linear layers
            learns; `reference()` is then the frozen base. A folder that holds an adapter needs no `lora=`.
        format, history: how it writes tool calls, and what to do where its template rewrites history; see `Chat`.
        Raises:  PolicyError naming the file that a folder lacks or that cannot be read.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(path)
        meta: dict[str, Any] = {}
        weights = str(path)
        adapter = folder / "adapter_config.json"
        if folder.exists() or str(path).startswith((".", "/", "~")):
            if adapter.exists():
                if lora is not None:
                    raise SettingsError(f"{str(folder)!r} holds an adapter already; load it without lora=")
                weights = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
                _check_folder(folder, ("adapter_model.safetensors",))
            else:
                _check_folder(folder, _WEIGHT_FILES)
            if (folder / "policy.json").exists():
                meta = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise SettingsError(f"dtype={dtype!r}: give a torch dtype or its name, such as 'float32' or 'bfloat16'")
        try:
            with _without_progress_bar():
                model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=kind)
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:
            raise PolicyError(
                f"no policy could be loaded from {str(path)!r}: {type(error).__name__}: {error}"
            ) from error
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)
        # The critic is copied before an adapter is put into the model, which it does not share.
        critic = _make_critic(model).to(device) if value_head == "separate" else value_head
        if lora is not None:
            model = _with_lora(model, lora)
        elif adapter.exists():
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        policy = cls(
            model,
            Chat(
                tokenizer, format=meta.get("format", format), history=history, stop=_extra_stop_tokens(model, tokenizer)
            ),
            value_head=critic,
            version=meta.get("version", 0),
        )
        head = folder / _VALUE_HEAD_FILE
        if policy.value_head is not None and head.exists():
            from safetensors.torch import load_file

            try:
                policy.value_head.load_state_dict(load_file(head))
            except RuntimeError as error:
                kind_of = "separate critic" if isinstance(policy.value_head, Critic) else "head on the shared trunk"
                raise PolicyError(f"{head} does not hold the values of a {kind_of}: {error}") from error
        return policy

    def save(self, path: str | Path) -> Path:
        """Write the model, tokenizer, chat template, and the value head in a file of its own.

        Of a policy with an adapter the adapter alone is written, and where its base is; `merged().save()` writes all.
        """
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with self.lock, _without_progress_bar():
            self.model.save_pretrained(folder)
            if self.value_head is not None:
                (folder / _VALUE_HEAD_FILE).parent.mkdir(exist_ok=True)
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in self.value_head.state_dict().items()},
                    folder / _VALUE_HEAD_FILE,
                )
        self.chat.tokenizer.save_pretrained(folder)
        meta = {"format": self.chat.format.name, "version": self.version}
        (folder / "policy.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        readable = (folder / "policy.json").stat().st_mode
        for file in folder.rglob("*.safetensors"):  # safetensors writes for the owner alone; others may read the rest
            file.chmod(readable)
        return folder

    def copy(self) -> Policy:
        """The same weights in new tensors: a reference for a KL, or a second learner."""
        with self.lock:
            model = copy.deepcopy(self.model)
            head = copy.deepcopy(self.value_head)
        return Policy(model, self.chat, value_head=head if head is not None else False, version=self.version)

    def reference(self) -> Policy:
        """A frozen policy to keep near to: the base under an adapter (no copy), else a copy without a value head.

        The base shares the adapter's model and switches the adapter off while it scores: it is for `score` alone.
        """
        if self.has_adapter:
            return _FrozenBase(self)
        with self.lock:
            model = copy.deepcopy(self.model)
        return Policy(model.requires_grad_(False), self.chat, version=self.version)

    def merged(self) -> Policy:
        """A copy with the adapter's weights added to the base's: an ordinary model that any engine loads."""
        if not self.has_adapter:
            return self.copy()
        with self.lock:
            model: Any = copy.deepcopy(self.model)
            head = copy.deepcopy(self.value_head)
        model = model.merge_and_unload()
        model.requires_grad_(True)
        return Policy(model, self.chat, value_head=head if head is not None else False, version=self.version)

    # --- facts ---

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

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
    def layers(self) -> int:
        return int(getattr(self.model.config.get_text_config(), "num_hidden_layers", 1))

    @property
    def max_length(self) -> int:
        """Tokens of context that the model was made for."""
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def size(self) -> int:
        """Number of parameters, the value head's left out."""
        if (
            self._size_cache[0] is not self.model
        ):  # asked for at every micro-batch; walking the modules takes a millisecond
            self._size_cache = (self.model, sum(p.numel() for p in self.model.parameters()))
        return self._size_cache[1]

    @property
    def micro_tokens(self) -> int:
        """Padded tokens a forward, unless said otherwise: few on a CPU, where short rows then stay unpadded."""
        return 1536 if self.device.type == "cpu" else 32768

    @property
    def launch_overhead(self) -> int:
        """What a forward and its backward cost beside their tokens, in tokens: see `split_by_token_budget`.

        Source:  measured for the shipped policy, docs/log.md; a larger model hides it. A GPU wants full groups.
        """
        return min(100, 30_000_000 // max(self.size, 1)) if self.device.type == "cpu" else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    def state(self) -> dict[str, Tensor]:
        """All weights by name, the value head's under `value_head.`; tensors are the live ones.

        Of a policy with an adapter, only what learns: the base is where it was loaded from.
        """
        learns = {k for k, p in self.model.named_parameters() if p.requires_grad} if self.has_adapter else None
        return {
            k: v
            for k, v in self._full_state().items()
            if learns is None or k in learns or k.startswith(_VALUE_HEAD_PREFIX)
        }

    def _full_state(self) -> dict[str, Tensor]:
        out = dict(self.model.state_dict())
        if self.value_head is not None:
            out |= {_VALUE_HEAD_PREFIX + k: v for k, v in self.value_head.state_dict().items()}
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises PolicyError if the names or shapes are another model's."""
        own = {k: v for k, v in state.items() if not k.startswith(_VALUE_HEAD_PREFIX)}
        head = {k.removeprefix(_VALUE_HEAD_PREFIX): v for k, v in state.items() if k.startswith(_VALUE_HEAD_PREFIX)}
        if bool(head) != (self.value_head is not None):
            raise PolicyError("one of the two has a value head and the other has not; load with value_head= to match")
        if self.has_adapter and set(own) != {k for k in self.state() if not k.startswith(_VALUE_HEAD_PREFIX)}:
            raise PolicyError(
                "these weights belong to another adapter; load with the lora= that they were trained with"
            )
        try:
            with self.lock:
                self.model.load_state_dict(own, strict=not self.has_adapter)
                if self.value_head is not None:
                    self.value_head.load_state_dict(head)
        except RuntimeError as error:
            raise PolicyError(f"these weights belong to another model: {error}") from error

    def fingerprint(self) -> str:
        """A digest of all weights by name."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self._full_state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        head = {ValueHead: ", value head", Critic: ", separate critic"}.get(type(self.value_head), "")
        model = self.model.get_base_model() if self.has_adapter else self.model
        learns = ""
        if self.has_adapter:
            learns = f" of which {sum(p.numel() for p in self.model.parameters() if p.requires_grad):,} in an adapter"
        kind = type(model).__name__
        return f"Policy({kind}, {self.size:,} parameters{learns}{head}, version {self.version}, {self.device})"

    def _repr_html_(self) -> str:
        model = self.model.get_base_model() if self.has_adapter else self.model
        c = model.config
        shape = {
            name: getattr(c, key)
            for name, key in (
                ("layers", "num_hidden_layers"), ("width", "hidden_size"), ("heads", "num_attention_heads"),
                ("vocabulary", "vocab_size"), ("longest context", "max_position_embeddings"),
            )
            if isinstance(getattr(c, key, None), int)
        }  # fmt: skip
        learning = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        head = {ValueHead: "a linear head", Critic: "a separate critic"}.get(type(self.value_head), "none")
        numbers = {"parameters": self.size, "that learn": learning, **shape, "value": head, "version": self.version}
        return _html.definition_table(self, {**numbers, "device": str(self.device), "chat": repr(self.chat)})

    # --- the forward ---

    def hidden(self, ids: Tensor, attention: Tensor | None = None) -> Tensor:
        """Last hidden states. ids (B, T), attention (B, T) or None for rows padded on the right -> (B, T, d).

        Positions are given, never guessed from a pad id: on the right, causal attention alone keeps pads out.
        """
        return _run_decoder(self.model.get_decoder(), ids, attention)

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
    ) -> ForwardOutput:
        """Logprobs (and more) at the positions where the mask is 1; logits are made there only. Carries gradients.

        Shapes:  ids (B, T) int64 padded on the right, mask (B, T) bool, temperatures (B,) -> N = mask.sum() each.
        Units:   nats, after temperature.
        Raises:  AlignmentError if position 0 is masked: nothing comes before it that could predict it.
        """
        rows, cols = self._predicted_positions(mask)
        packed = self._pack_trees(ids, mask)
        # Tokens after the same tokens have one state; logits are made once for it.
        merged = packed is not None and bool((temperatures == temperatures[0]).all())
        place = _state_index(packed, rows, cols - 1, ids.shape[1] - 1)
        each: Tensor | slice = slice(None)
        if merged:
            place, each = place.unique(return_inverse=True)
        states = _states(self.model.get_decoder(), ids[:, :-1], packed)[place]
        temperature = temperatures.to(states.device, torch.float32)
        logits = self.logits(states) / (temperature[:1, None] if merged else temperature[rows, None])
        logp = torch.log_softmax(logits, dim=-1)
        values = None
        if value:
            decoder, head = self._value_parts()
            seen = states if decoder is None else _states(decoder, ids[:, :-1], packed)[place]
            values = _apply_value_head(head, seen)[each]
        return ForwardOutput(
            logprob=logp.gather(-1, ids[rows, cols, None])[:, 0] if not merged else logp[each, ids[rows, cols]],
            entropy=-(logp.exp() * logp).sum(-1)[each] if entropy else None,
            value=values,
            hidden=states[each],
        )

    def _value_parts(self) -> tuple[Any, ValueHead]:
        """The critic's decoder, or None where the policy's own is read, and the head that reads it."""
        if self.value_head is None:
            raise PolicyError("this policy has no value head; load it with value_head=True")
        if isinstance(self.value_head, Critic):
            return self.value_head.trunk, self.value_head.head
        return None, self.value_head

    def micro_batches(self, batch: Any, rows: Tensor | None = None, micro_tokens: int | None = None) -> list[Tensor]:
        """Rows of a batch (all, or some) in forwards of at most `micro_tokens` tokens; see `split_by_token_budget`.

        Rows that begin alike go together where one forward can share what they have in common; a shared token is then
        counted once. A row longer than `micro_tokens` goes alone.
        """
        rows = torch.arange(len(batch.lengths)) if rows is None else rows
        limit = micro_tokens or self.micro_tokens
        if not len(rows) or not self._supports_trees():
            return [rows[part] for part in split_by_token_budget(batch.lengths[rows], limit, self.launch_overhead)]
        trees = self._build_trees(batch.ids[rows], batch.mask[rows], limit)
        parts = split_by_token_budget(torch.tensor([tree.width for tree in trees]), limit, self.launch_overhead)
        return [rows[torch.tensor([row for i in part.tolist() for row in trees[i].rows])] for part in parts]

    def _pack_trees(self, ids: Tensor, mask: Tensor) -> PackedTrees | None:
        """Rows as trees, or None where they share too little or the model must run them as they are."""
        if not self._supports_trees():
            return None
        trees = self._build_trees(ids, mask, self.micro_tokens)
        if len(trees) == len(ids):
            return None
        return PackedTrees.build(trees, ids, _context_lengths(mask))

    def _build_trees(self, ids: Tensor, mask: Tensor, max_tokens: int) -> list[PrefixTree]:
        config = self.model.config.get_text_config()
        # Operations a token: two a weight, and for each key that it may look at four a number of the heads' in a layer.
        heads = config.num_attention_heads
        inner = heads * (getattr(config, "head_dim", None) or self.width // heads)
        weights = max(1, self.size - self.vocab_size * self.width)
        scale = 2 * weights / (4 * self.layers * inner) / _MASKED_ATTENTION_COST
        return build_prefix_trees(ids, _context_lengths(mask), scale=scale, max_tokens=max_tokens)

    def _supports_trees(self) -> bool:
        """Whether the model runs a tree as it would run its rows: found out on a trial."""
        if self._trees_supported is None:
            # Whoever asks first may run in autocast, where the trial's tolerance for float32 would fail.
            with torch.autocast(self.device.type, enabled=False):
                self._trees_supported = self._try_trees()
        return self._trees_supported

    @torch.no_grad()
    def _try_trees(self) -> bool:
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager") or set(kinds) - {"full_attention"}:
            return False
        ids = (torch.arange(30) * 7 % self.vocab_size).reshape(3, 10).to(self.device)
        ids[:, :4] = ids[0, :4]
        ids[2, :7] = ids[1, :7]
        lengths = [10, 9, 8]
        try:
            trees = build_prefix_trees(ids, lengths, scale=1e9, max_tokens=100)
            decoder = self.model.get_decoder()
            packed = PackedTrees.build(trees, ids, lengths)
            plain, grown = _states(decoder, ids, None).float(), _states(decoder, ids, packed).float()
            where = [(i, j) for i, n in enumerate(lengths) for j in range(n)]
            gap = max(float((plain[i * 10 + j] - grown[packed.token_index[i, j]]).abs().max()) for i, j in where)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
            return False  # a model that wants another mask, or none
        return gap <= (1e-4 if self._is_float32 else 0.05) * float(plain.abs().max())

    @property
    def _is_float32(self) -> bool:
        return all(p.dtype == torch.float32 for p in self.model.parameters())

    @torch.no_grad()
    def bootstrap_values(self, batch: Any, *, micro_tokens: int | None = None) -> Tensor:
        """V of the state after each row's last token: what a chain that a limit cut would still have got. (B,)."""
        decoder, head = self._value_parts()
        out = torch.zeros(len(batch.lengths))
        with single_torch_thread(self):
            for rows in split_by_token_budget(batch.lengths, micro_tokens or self.micro_tokens, self.launch_overhead):
                ids = batch.ids[rows, : int(batch.lengths[rows].max())].to(self.device)
                each = torch.arange(len(rows), device=self.device)
                states = _run_decoder(self.model.get_decoder() if decoder is None else decoder, ids)
                out[rows] = _apply_value_head(head, states[each, batch.lengths[rows].to(self.device) - 1]).cpu()
        return out

    @contextlib.contextmanager
    def checkpointing(self, on: bool = True) -> Iterator[None]:
        """Within it, a backward computes each layer's inner activations again instead of having kept them."""
        models = [self.model, self.value_head.trunk] if isinstance(self.value_head, Critic) else [self.model]
        if not on:
            yield
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise PolicyError(f"{type(self.model).__name__} has no layers that can be checkpointed")
        before = [(layer, layer.training) for layer in layers]
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # the layer's own switch; the dropouts inside it stay off
        try:
            yield
        finally:
            for layer, training in before:
                layer.training = training
            for model in models:
                model.gradient_checkpointing_disable()

    @staticmethod
    def _predicted_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
        """The shift by one, the only one: the token at column t is predicted by the state at column t - 1."""
        rows, cols = mask.nonzero(as_tuple=True)
        if bool((cols == 0).any()):
            raise AlignmentError("the mask is 1 at position 0; the first token of a row is never predicted")
        return rows, cols

    @torch.no_grad()
    def score(
        self, batch: Any, want: Iterable[ScoreName] = ("logprob", "entropy"), *, micro_tokens: int | None = None
    ) -> TokenScores:
        """Score a batch as it stands, without gradients. Only positions with mask 1 are scored.

        Shapes:  batch.ids, batch.mask (B, T), batch.temperatures (B,) -> (B, T) each; see `TokenScores`.
        """
        wanted = set(want)
        if not wanted or not wanted <= _SCORE_NAMES:
            raise SettingsError(f"want={sorted(wanted)}: give some of {sorted(_SCORE_NAMES)}")
        ids, mask = batch.ids, batch.mask
        shape = tuple(ids.shape)
        if wanted == {"value"} and isinstance(self.value_head, Critic):
            return TokenScores(value=self._critic_values(batch, micro_tokens))
        out = {
            name: torch.full(
                (*shape, self.width) if name == "hidden" else shape, 0.0 if name == "hidden" else torch.nan
            )
            for name in wanted
        }
        with single_torch_thread(self):
            for rows in self.micro_batches(batch, None, micro_tokens):
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
        return TokenScores(**out)

    def _critic_values(self, batch: Any, micro_tokens: int | None) -> Tensor:
        """(B, T) values without running the policy."""
        out = torch.full(tuple(batch.ids.shape), torch.nan)
        decoder, head = self._value_parts()
        with single_torch_thread(self):
            for rows in self.micro_batches(batch, None, micro_tokens):
                width = int(batch.lengths[rows].max())
                r, c = self._predicted_positions(batch.mask[rows, :width])
                ids, mask = batch.ids[rows, :width].to(self.device), batch.mask[rows, :width].to(self.device)
                packed = self._pack_trees(ids, mask)
                place = _state_index(packed, r.to(self.device), c.to(self.device) - 1, width - 1)
                out[rows[r], c] = _apply_value_head(head, _states(decoder, ids[:, :-1], packed)[place]).cpu()
        return out


class _FrozenBase(Policy):
    """The frozen base under a policy's adapter. It shares the weights, and the lock under which it scores."""

    def __init__(self, policy: Policy) -> None:
        self.model, self.chat, self.version = policy.model, policy.chat, policy.version
        self.value_head = None
        self.lock = policy.lock
        self.run_fingerprints = {}
        self._plain_head, self._trees_supported = policy._plain_head, policy._trees_supported

    def score(
        self, batch: Any, want: Iterable[ScoreName] = ("logprob", "entropy"), *, micro_tokens: int | None = None
    ) -> TokenScores:
        with self.lock, self.model.disable_adapter():
            return super().score(batch, want, micro_tokens=micro_tokens)

    def __repr__(self) -> str:
        return f"Policy(the base under an adapter, {self.size:,} parameters, frozen, {self.device})"


def _run_decoder(decoder: Any, ids: Tensor, attention: Tensor | None = None) -> Tensor:
    """Last hidden states of a decoder without its output matrix."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    out = decoder(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, return_dict=True)
    return cast(Tensor, out.last_hidden_state)


def _states(decoder: Any, ids: Tensor, packed: PackedTrees | None) -> Tensor:
    """Last hidden states of all tokens, (N, d): of (B, T) ids row by row, or of the trees that they make."""
    if packed is None:
        return _run_decoder(decoder, ids).flatten(0, 1)
    mask: Tensor = packed.mask()
    if decoder.config._attn_implementation == "eager":  # it adds the mask to its scores
        kind = next(decoder.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(~mask, torch.finfo(kind).min)
    out = decoder(
        input_ids=packed.ids,
        attention_mask=mask,
        position_ids=packed.positions,
        use_cache=False,
        return_dict=True,
    )
    return cast(Tensor, out.last_hidden_state).flatten(0, 1)


def _state_index(packed: PackedTrees | None, rows: Tensor, cols: Tensor, width: int) -> Tensor:
    """Where the states of tokens (rows, cols) are in those that `_states` gives."""
    return rows * width + cols if packed is None else packed.token_index[rows, cols]


def _apply_value_head(head: ValueHead, states: Tensor) -> Tensor:
    return cast(Tensor, head(states.to(head.weight.dtype)))[:, 0].float()


def _context_lengths(mask: Tensor) -> list[int]:
    """Of each row, how many tokens the last sampled one is predicted from, and at least one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last: list[int] = (mask * columns).amax(1).clamp(min=1).tolist()
    return last


def _make_critic(model: Any) -> Critic:
    trunk = copy.deepcopy(model.get_decoder()).requires_grad_(True).eval()
    return Critic(trunk, int(model.get_output_embeddings().weight.shape[1]))


def _with_lora(model: Any, lora: int | Mapping[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    if isinstance(lora, int) and lora < 1:
        raise SettingsError(f"lora={lora}: give a rank of at least 1, options of peft.LoraConfig, or None")
    options = {"r": lora, "lora_alpha": 2 * lora} if isinstance(lora, int) else dict(lora)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.0} | options
    if options["lora_dropout"]:
        raise SettingsError("lora_dropout must be 0: with it the sampled and the trained distribution differ")
    with torch.random.fork_rng(devices=[]):  # the same adapter every time, and no number taken from anyone's generator
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**options))


_VALUE_HEAD_PREFIX = "value_head."
_VALUE_HEAD_FILE = Path("value_head") / "value_head.safetensors"
"""In a folder of its own: engines load every .safetensors that they find beside the config."""
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def _check_folder(folder: Path, weights: tuple[str, ...]) -> None:
    if not folder.is_dir():
        raise PolicyError(f"no policy folder at {str(folder)!r}; give a folder that Policy.save wrote, or a hub name")
    config = () if weights[0].startswith("adapter") else (("config.json",),)
    for wanted in (*config, weights, ("tokenizer.json", "tokenizer.model", "vocab.json")):
        if not any((folder / name).exists() for name in wanted):
            raise PolicyError(
                f"policy folder {str(folder)!r} lacks {wanted[0]}; it has "
                f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Write it with Policy.save"
            )


def _extra_stop_tokens(model: Any, tokenizer: Any) -> list[str]:
    """What a model's generation config names as ends beside the tokenizer's own."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i != tokenizer.eos_token_id]


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Without the progress bar of transformers, which a notebook would keep for ever."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def split_by_token_budget(lengths: Tensor, micro_tokens: int, launch_overhead: int = 0) -> list[Tensor]:
    """Row indices in groups of at most `micro_tokens` padded tokens, rows of like length together, longest first.

    A row longer than `micro_tokens` goes alone. launch_overhead: what a forward costs beside its tokens, in tokens; the
    cuts are then where padding and launches together are least. 0 fills every group.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = [max(n, 1) for n in lengths[order].tolist()]
    cuts = (
        _cut_greedily(sizes, micro_tokens)
        if launch_overhead <= 0
        else _cut_by_cost(sizes, micro_tokens, launch_overhead)
    )
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def _cut_greedily(sizes: list[int], micro_tokens: int) -> list[int]:
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(min(cuts[-1] + max(1, micro_tokens // sizes[cuts[-1]]), len(sizes)))
    return cuts


def _cut_by_cost(sizes: list[int], micro_tokens: int, launch_overhead: int) -> list[int]:
    """Cuts of rows sorted by length, longest first, that cost least: best[a] is the cost of the rows from a on."""
    best, after = [0.0] * (len(sizes) + 1), [0] * (len(sizes) + 1)
    for a in range(len(sizes) - 1, -1, -1):
        limit = min(len(sizes), a + max(1, micro_tokens // sizes[a]))
        best[a], after[a] = min((launch_overhead + sizes[a] * (b - a) + best[b], b) for b in range(a + 1, limit + 1))
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(after[cuts[-1]])
    return cuts


class single_torch_thread:
    """One torch thread for a tiny model on a CPU: more of them spin longer than they compute.

    The setting is the whole process's, and an engine's thread and an update hold it at one time: the first one in takes
    what was set, the last one out puts it back.
    """

    _inside = 0
    _before = 0
    _changing = threading.Lock()

    def __init__(self, policy: Policy) -> None:
        self._wanted = policy.device.type == "cpu" and policy.size < 5_000_000

    def __enter__(self) -> None:
        if not self._wanted:
            return
        shared = single_torch_thread
        with shared._changing:
            if shared._inside == 0:
                shared._before = torch.get_num_threads()
            if torch.get_num_threads() != 1:
                torch.set_num_threads(1)
            shared._inside += 1

    def __exit__(self, *_: object) -> None:
        if not self._wanted:
            return
        shared = single_torch_thread
        with shared._changing:
            shared._inside -= 1
            if shared._inside == 0 and torch.get_num_threads() != shared._before:
                torch.set_num_threads(shared._before)
