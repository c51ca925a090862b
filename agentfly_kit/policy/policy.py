"""The policy: a language model that scores token ids with logprobs, entropies, values and hidden states.

`logprobs[t]` is log p(ids[t] | ids[:t]) and `values[t]` is V(ids[:t]); both are computed from the hidden state at
t - 1. `Policy._predicted_positions` is the only place in the package that applies this shift by one.
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

from agentfly_kit._display import Displayable
from agentfly_kit.chat.chat import Chat, History
from agentfly_kit.errors import AlignmentError, PolicyError, SettingsError
from agentfly_kit.policy.prefix_tree import PackedTrees, PrefixTree, build_prefix_trees

ScoreName = Literal["logprob", "entropy", "value", "hidden"]
_SCORE_NAMES = frozenset({"logprob", "entropy", "value", "hidden"})


# Cost per operation of masked attention relative to a matrix product, measured on a CPU; see docs/log.md.
_MASKED_ATTENTION_COST = 4.0


@dataclass
class TokenScores:
    """Per-token scores, each (B, T) float32 with NaN where the mask is 0; `hidden` is (B, T, d) with 0 there."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    hidden: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise KeyError(f"{name!r} was not computed; call score(batch, want={{{name!r}}})")
        return cast(Tensor, value)


@dataclass
class ForwardOutput:
    """Results of a forward pass at the N masked positions, in the order of `mask.nonzero()`, with gradients.

    Attributes:
        logprob: (N,).
        entropy: (N,).
        value: (N,).
        hidden: (N, d): the hidden states that predict the tokens.
    """

    logprob: Tensor
    entropy: Tensor | None
    value: Tensor | None
    hidden: Tensor


class ValueHead(nn.Linear):
    """Linear head that maps the trunk's hidden state to V(ids[:t]).

    It is initialized to zero, so that the first advantages equal the rewards.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Critic(nn.Module):
    """Separate value model: a copy of the policy's decoder with a zero-initialized value head.

    It needs a second forward and backward pass; in return the value loss has no gradient in the policy's weights.
    """

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(width)


class Policy(Displayable):
    """A causal language model with its chat template, an optional value head and a count of optimizer steps.

    Args:
        model: Causal language model with the interface of transformers.
        chat: Tokenizer, chat template and tool-call format of the model.
        value_head: True adds a value head on the policy's own trunk, "separate" one on a copy of it (see `Critic`).
        version: Number of optimizer steps taken so far.
    """

    _size_cache: tuple[Any, int] = (None, 0)  # model and its number of parameters

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
        self.model.eval()  # with dropout, the trained distribution would differ from the sampled one
        if value_head is True:
            value_head = ValueHead(self.width).to(self.device)
        elif value_head == "separate":
            value_head = _make_critic(self.model).to(self.device)
        elif isinstance(value_head, str):
            raise SettingsError(f"value_head must be True, False or 'separate', got {value_head!r}")
        self.value_head: ValueHead | Critic | None = value_head or None
        # Number of optimizer steps that `ppo_step` has taken on these weights.
        self.version = version
        # Held during weight updates and during an engine's forward pass, so that no sample sees a partial update.
        self.lock = threading.Lock()
        # Fingerprint of the initial weights by run folder, so that a re-executed notebook cell resumes its run.
        self.run_fingerprints: dict[str, str] = {}
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
        """Load a policy from a folder in the transformers layout or by hub name.

        Args:
            path: Folder or hub name.
            value_head: True for a value head on the policy's trunk, "separate" for a separate critic; see `Critic`.
            lora: Rank, or options of `peft.LoraConfig`. The weights are frozen and an adapter on all linear layers is
                trained; `reference()` then returns the frozen base. Not needed for a folder that contains an adapter.
            device: Device of the model; by default CUDA if available, else the CPU.
            dtype: Torch dtype or its name.
            format: Format of tool calls; see `Chat`.
            history: Handling of chat templates that rewrite earlier turns; see `Chat`.

        Raises:
            PolicyError: If a file is missing or cannot be read; the message names it.
            SettingsError: If `dtype` is unknown, or `lora` is given for a folder that already contains an adapter.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(path)
        meta: dict[str, Any] = {}
        weights = str(path)
        adapter = folder / "adapter_config.json"
        if folder.exists() or str(path).startswith((".", "/", "~")):
            if adapter.exists():
                if lora is not None:
                    raise SettingsError(f"{str(folder)!r} already contains an adapter; load it without lora=")
                weights = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
                _check_folder(folder, ("adapter_model.safetensors",))
            else:
                _check_folder(folder, _WEIGHT_FILES)
            if (folder / "policy.json").exists():
                meta = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise SettingsError(f"dtype must be a torch dtype or a name such as 'float32' or 'bfloat16', got {dtype!r}")
        try:
            with _without_progress_bar():
                model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=kind)
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:
            raise PolicyError(f"cannot load a policy from {str(path)!r}: {type(error).__name__}: {error}") from error
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)
        # Copy the critic before adding the adapter, so that the critic does not contain it.
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
                raise PolicyError(f"{head} does not contain the weights of a {kind_of}: {error}") from error
        return policy

    def save(self, path: str | Path) -> Path:
        """Save the model, the tokenizer, the chat template and, in a separate file, the value head.

        For a policy with an adapter, only the adapter and the location of its base model are written; use
        `merged().save()` to write the full model.

        Returns:
            The folder.
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
        for file in folder.rglob("*.safetensors"):  # safetensors creates files readable only by the owner
            file.chmod(readable)
        return folder

    def copy(self) -> Policy:
        """Return a policy with a copy of the weights, for use as a KL reference or for separate training."""
        with self.lock:
            model = copy.deepcopy(self.model)
            head = copy.deepcopy(self.value_head)
        return Policy(model, self.chat, value_head=head if head is not None else False, version=self.version)

    def reference(self) -> Policy:
        """Return a frozen reference policy for a KL penalty.

        For a policy with an adapter this is its base model. It shares the weights, disables the adapter while scoring,
        and supports only `score`. Otherwise it is a frozen copy without a value head.
        """
        if self.has_adapter:
            return _FrozenBase(self)
        with self.lock:
            model = copy.deepcopy(self.model)
        return Policy(model.requires_grad_(False), self.chat, version=self.version)

    def merged(self) -> Policy:
        """Return a copy with the adapter merged into the base weights, which any engine can load."""
        if not self.has_adapter:
            return self.copy()
        with self.lock:
            model: Any = copy.deepcopy(self.model)
            head = copy.deepcopy(self.value_head)
        model = model.merge_and_unload()
        model.requires_grad_(True)
        return Policy(model, self.chat, value_head=head if head is not None else False, version=self.version)

    # --- properties and state ---

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
        """Maximum context length of the model in tokens."""
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def size(self) -> int:
        """Number of parameters, excluding the value head."""
        if (
            self._size_cache[0] is not self.model
        ):  # cached: read per micro-batch, and walking the modules takes a millisecond
            self._size_cache = (self.model, sum(p.numel() for p in self.model.parameters()))
        return self._size_cache[1]

    @property
    def micro_tokens(self) -> int:
        """Default number of padded tokens per forward pass; small on a CPU, so that short rows need little padding."""
        return 1536 if self.device.type == "cpu" else 32768

    @property
    def launch_overhead(self) -> int:
        """Fixed cost of a forward and backward pass, expressed in tokens; see `split_by_token_budget`.

        The overhead is negligible for large models. It is 0 on a GPU, where full micro-batches are fastest.

        Source:  measured for the shipped policy, docs/log.md.
        """
        return min(100, 30_000_000 // max(self.size, 1)) if self.device.type == "cpu" else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    def state(self) -> dict[str, Tensor]:
        """Return the weights by name; those of the value head have the prefix `value_head.`.

        The tensors are not copied. For a policy with an adapter, only the trainable weights are included.
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
        """Load weights that `state` returned.

        Raises:
            PolicyError: If names or shapes do not match this model.
        """
        own = {k: v for k, v in state.items() if not k.startswith(_VALUE_HEAD_PREFIX)}
        head = {k.removeprefix(_VALUE_HEAD_PREFIX): v for k, v in state.items() if k.startswith(_VALUE_HEAD_PREFIX)}
        if bool(head) != (self.value_head is not None):
            raise PolicyError(
                "either the weights or this policy has a value head, but not both; load the policy with a matching "
                "value_head="
            )
        if self.has_adapter and set(own) != {k for k in self.state() if not k.startswith(_VALUE_HEAD_PREFIX)}:
            raise PolicyError(
                "these weights belong to a different adapter; load the policy with the lora= they were trained with"
            )
        try:
            with self.lock:
                self.model.load_state_dict(own, strict=not self.has_adapter)
                if self.value_head is not None:
                    self.value_head.load_state_dict(head)
        except RuntimeError as error:
            raise PolicyError(f"these weights belong to a different model: {error}") from error

    def fingerprint(self) -> str:
        """Return a digest of all weights and their names."""
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

    # --- forward pass ---

    def hidden(self, ids: Tensor, attention: Tensor | None = None) -> Tensor:
        """Return the last hidden states.

        Positions are passed explicitly rather than inferred from a pad id. Padding on the right needs no attention
        mask, because causal attention already excludes it.

        Shapes:  ids (B, T), attention (B, T) or None for rows padded on the right -> (B, T, d).
        """
        return _run_decoder(self.model.get_decoder(), ids, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits for hidden states: (N, d) -> (N, V).

        Raises:
            PolicyError: If the model transforms its logits after the output matrix, for instance by soft-capping.
        """
        if self._plain_head is None:
            self._plain_head = self._head_is_plain()
        if not self._plain_head:
            raise PolicyError(
                f"{type(self.model).__name__} changes its logits after the output matrix (soft-capping or a scale), "
                "which is not applied to the selected positions; this model is not supported yet"
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
        """Compute logprobs, and optionally entropies and values, where the mask is 1, with gradients.

        Logits are computed at these positions only.

        Args:
            ids: Token ids.
            mask: Positions to score.
            temperatures: Sampling temperature of each row.
            entropy: Compute entropies.
            value: Compute values; the policy must have a value head.

        Raises:
            AlignmentError: If the mask is 1 at position 0, which no earlier token can predict.

        Shapes:  ids (B, T) int64 padded on the right, mask (B, T) bool, temperatures (B,) -> N = mask.sum() each.
        Units:   nats, after temperature.
        """
        rows, cols = self._predicted_positions(mask)
        packed = self._pack_trees(ids, mask)
        # Positions with the same prefix share one hidden state; compute its logits only once.
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
        """Return the critic's decoder (None if values use the policy's decoder) and the value head."""
        if self.value_head is None:
            raise PolicyError("this policy has no value head; load it with value_head=True")
        if isinstance(self.value_head, Critic):
            return self.value_head.trunk, self.value_head.head
        return None, self.value_head

    def micro_batches(self, batch: Any, rows: Tensor | None = None, micro_tokens: int | None = None) -> list[Tensor]:
        """Split rows of a batch into micro-batches of at most `micro_tokens` tokens; see `split_by_token_budget`.

        Rows with a common prefix are grouped if the model supports prefix sharing, and each shared token counts once.
        A row longer than `micro_tokens` forms a micro-batch of its own.

        Args:
            batch: The batch.
            rows: Indices of the rows to split; all rows if None.
            micro_tokens: Upper limit of the tokens per micro-batch; `self.micro_tokens` if None.

        Returns:
            The row indices of each micro-batch.
        """
        rows = torch.arange(len(batch.lengths)) if rows is None else rows
        limit = micro_tokens or self.micro_tokens
        if not len(rows) or not self._supports_trees():
            return [rows[part] for part in split_by_token_budget(batch.lengths[rows], limit, self.launch_overhead)]
        trees = self._build_trees(batch.ids[rows], batch.mask[rows], limit)
        parts = split_by_token_budget(torch.tensor([tree.width for tree in trees]), limit, self.launch_overhead)
        return [rows[torch.tensor([row for i in part.tolist() for row in trees[i].rows])] for part in parts]

    def _pack_trees(self, ids: Tensor, mask: Tensor) -> PackedTrees | None:
        """Pack rows into prefix trees; None if they share too little or the model does not support trees."""
        if not self._supports_trees():
            return None
        trees = self._build_trees(ids, mask, self.micro_tokens)
        if len(trees) == len(ids):
            return None
        return PackedTrees.build(trees, ids, _context_lengths(mask))

    def _build_trees(self, ids: Tensor, mask: Tensor, max_tokens: int) -> list[PrefixTree]:
        config = self.model.config.get_text_config()
        # Operations per token: 2 per weight, plus 4 x (heads x head size) per layer and attended key.
        heads = config.num_attention_heads
        inner = heads * (getattr(config, "head_dim", None) or self.width // heads)
        weights = max(1, self.size - self.vocab_size * self.width)
        scale = 2 * weights / (4 * self.layers * inner) / _MASKED_ATTENTION_COST
        return build_prefix_trees(ids, _context_lengths(mask), scale=scale, max_tokens=max_tokens)

    def _supports_trees(self) -> bool:
        """Return True if a trial shows that the model gives the same states for a tree as for its rows; cached."""
        if self._trees_supported is None:
            # The first call may come from inside autocast, where the tolerance of the trial for float32 would fail.
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
            return False  # the model does not accept this attention mask
        return gap <= (1e-4 if self._is_float32 else 0.05) * float(plain.abs().max())

    @property
    def _is_float32(self) -> bool:
        return all(p.dtype == torch.float32 for p in self.model.parameters())

    @torch.no_grad()
    def bootstrap_values(self, batch: Any, *, micro_tokens: int | None = None) -> Tensor:
        """Return V after each row's last token, (B,): the expected remaining return of a truncated trajectory."""
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
        """Enable gradient checkpointing: the backward pass recomputes each layer's activations instead of storing them.

        Raises:
            PolicyError: If the model has no layers that support checkpointing.
        """
        models = [self.model, self.value_head.trunk] if isinstance(self.value_head, Critic) else [self.model]
        if not on:
            yield
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise PolicyError(f"{type(self.model).__name__} has no layers that support gradient checkpointing")
        before = [(layer, layer.training) for layer in layers]
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # only this module's flag, so that dropout inside the layer stays off
        try:
            yield
        finally:
            for layer, training in before:
                layer.training = training
            for model in models:
                model.gradient_checkpointing_disable()

    @staticmethod
    def _predicted_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and columns where the mask is 1; the token at column t is predicted by the state at t - 1."""
        rows, cols = mask.nonzero(as_tuple=True)
        if bool((cols == 0).any()):
            raise AlignmentError("the mask must be 0 at position 0; the first token of a row is never predicted")
        return rows, cols

    @torch.no_grad()
    def score(
        self, batch: Any, want: Iterable[ScoreName] = ("logprob", "entropy"), *, micro_tokens: int | None = None
    ) -> TokenScores:
        """Score the masked positions of a batch without gradients.

        Args:
            batch: The batch.
            want: Scores to compute, out of "logprob", "entropy", "value" and "hidden".
            micro_tokens: Upper limit of the tokens per forward pass; `self.micro_tokens` if None.

        Raises:
            SettingsError: If `want` is empty or contains an unknown name.

        Shapes:  batch.ids, batch.mask (B, T), batch.temperatures (B,) -> (B, T) each; see `TokenScores`.
        """
        wanted = set(want)
        if not wanted or not wanted <= _SCORE_NAMES:
            raise SettingsError(f"want={sorted(wanted)} must be a non-empty subset of {sorted(_SCORE_NAMES)}")
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
        """Compute values, (B, T), with the separate critic, without running the policy."""
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
    """Frozen base model of a policy with an adapter; shares the policy's weights and lock."""

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
        return f"Policy(base model of an adapter, {self.size:,} parameters, frozen, {self.device})"


def _run_decoder(decoder: Any, ids: Tensor, attention: Tensor | None = None) -> Tensor:
    """Run a decoder (a model without its output matrix) and return its last hidden states, (B, T, d)."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    out = decoder(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, return_dict=True)
    return cast(Tensor, out.last_hidden_state)


def _states(decoder: Any, ids: Tensor, packed: PackedTrees | None) -> Tensor:
    """Return the last hidden states of all tokens, (N, d): of the ids (B, T) row by row, or of their packed trees."""
    if packed is None:
        return _run_decoder(decoder, ids).flatten(0, 1)
    mask: Tensor = packed.mask()
    if decoder.config._attn_implementation == "eager":  # eager attention adds the mask to the scores
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
    """Return the indices of the tokens at (rows, cols) in the output of `_states`."""
    return rows * width + cols if packed is None else packed.token_index[rows, cols]


def _apply_value_head(head: ValueHead, states: Tensor) -> Tensor:
    return cast(Tensor, head(states.to(head.weight.dtype)))[:, 0].float()


def _context_lengths(mask: Tensor) -> list[int]:
    """Return for each row the number of tokens before its last sampled token, and at least 1."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last: list[int] = (mask * columns).amax(1).clamp(min=1).tolist()
    return last


def _make_critic(model: Any) -> Critic:
    trunk = copy.deepcopy(model.get_decoder()).requires_grad_(True).eval()
    return Critic(trunk, int(model.get_output_embeddings().weight.shape[1]))


def _with_lora(model: Any, lora: int | Mapping[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    if isinstance(lora, int) and lora < 1:
        raise SettingsError(f"lora={lora} must be a rank of at least 1, options of peft.LoraConfig, or None")
    options = {"r": lora, "lora_alpha": 2 * lora} if isinstance(lora, int) else dict(lora)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.0} | options
    if options["lora_dropout"]:
        raise SettingsError("lora_dropout must be 0; dropout makes the trained and the sampled distribution differ")
    with torch.random.fork_rng(devices=[]):  # reproducible adapter, without advancing the global generator
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**options))


_VALUE_HEAD_PREFIX = "value_head."
# Stored in a subfolder, because engines load every .safetensors file next to the config.
_VALUE_HEAD_FILE = Path("value_head") / "value_head.safetensors"
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def _check_folder(folder: Path, weights: tuple[str, ...]) -> None:
    if not folder.is_dir():
        raise PolicyError(f"no policy folder at {str(folder)!r}; pass a folder written by Policy.save, or a hub name")
    config = () if weights[0].startswith("adapter") else (("config.json",),)
    for wanted in (*config, weights, ("tokenizer.json", "tokenizer.model", "vocab.json")):
        if not any((folder / name).exists() for name in wanted):
            raise PolicyError(
                f"policy folder {str(folder)!r} lacks {wanted[0]}; it contains "
                f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'no files'}. Write it with Policy.save"
            )


def _extra_stop_tokens(model: Any, tokenizer: Any) -> list[str]:
    """Return the end tokens in the model's generation config other than the tokenizer's EOS token."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i != tokenizer.eos_token_id]


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Disable the progress bar of transformers, which would remain in a notebook's saved output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def split_by_token_budget(lengths: Tensor, micro_tokens: int, launch_overhead: int = 0) -> list[Tensor]:
    """Group rows of similar length into micro-batches of at most `micro_tokens` padded tokens, longest rows first.

    Args:
        lengths: Number of tokens of each row, (B,).
        micro_tokens: Upper limit of the padded tokens per micro-batch; a longer row forms a micro-batch of its own.
        launch_overhead: Fixed cost of a forward pass, in tokens. If positive, the boundaries minimize padding plus
            overhead; 0 fills each micro-batch as far as possible.

    Returns:
        The row indices of each micro-batch.
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
    """Return the boundaries of least total cost for rows sorted by length, longest first, by dynamic programming."""
    # best[a] is the least cost of the rows from a on, and after[a] the end of the first group in that solution.
    best, after = [0.0] * (len(sizes) + 1), [0] * (len(sizes) + 1)
    for a in range(len(sizes) - 1, -1, -1):
        limit = min(len(sizes), a + max(1, micro_tokens // sizes[a]))
        best[a], after[a] = min((launch_overhead + sizes[a] * (b - a) + best[b], b) for b in range(a + 1, limit + 1))
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(after[cuts[-1]])
    return cuts


class single_torch_thread:
    """Context manager that limits torch to one thread for a tiny model on a CPU, where more threads are slower.

    The setting applies to the whole process, and an engine's thread and an update may enter concurrently: the first to
    enter saves the previous setting, and the last to leave restores it.
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
