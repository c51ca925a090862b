"""Forward passes: logprobs, entropies, values and hidden states for the tokens of padded rows.

`logprobs[t]` is log p(ids[t] | ids[:t]) and `values[t]` is V(ids[:t]); both are computed from the hidden state at
t - 1. `LanguageModel._locate_states` is the only place in the package that applies this shift by one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentfly_kit._display import Tensors
from agentfly_kit.errors import AlignmentError, PolicyError, SettingsError
from agentfly_kit.policy.attention import agree
from agentfly_kit.policy.cpu import single_torch_thread
from agentfly_kit.policy.prefix_tree import PackedTrees, PrefixTree, build_prefix_trees, split_by_token_budget
from agentfly_kit.policy.states import check_row_length, hidden_states, sharing_obstacle
from agentfly_kit.policy.value_head import Critic, ValueHead
from agentfly_kit.types import ImageSpan

_log = logging.getLogger(__name__)

RowSpans: TypeAlias = Sequence[Sequence[ImageSpan]]  # spans of images in each row
ScoreName = Literal["logprob", "entropy", "value", "hidden", "sum_squared_probs"]

# Time per operation in masked attention relative to a matrix product, measured on a CPU.
_MASKED_ATTENTION_COST = 4.0

# Maximum number of logits computed at once (512 MB). Larger micro-batches are processed in chunks.
_MAX_LOGITS = 2**27
# Config settings with which models scale their logits.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_LARGE = 2**25  # number of parameters above which activations, not fixed costs, limit micro-batches on a CPU


@dataclass
class ForwardOutput:
    """Results of a forward pass at the N positions in the mask, in the order of `mask.nonzero()`, with gradients."""

    logprob: Tensor  # (N,)
    entropy: Tensor | None  # (N,)
    value: Tensor | None  # (N,)
    hidden: Tensor  # (N, d): hidden states from which the tokens are predicted
    sum_squared_probs: Tensor | None = None  # (N,)


class LanguageModel:
    """Causal language model with an optional value head, evaluated on rows padded on the right."""

    accelerator: Any = None  # accelerator over whose processes the weights are sharded; see `Policy.shard`

    def __init__(self, model: Any, value_head: ValueHead | Critic | None) -> None:
        self.model = model
        self.value_head = value_head
        self.placeholders: tuple[int, ...] = ()  # ids of image placeholders, which are never sampled

    @property
    def device(self) -> torch.device:
        return cast(torch.device, next(iter(self.model.parameters())).device)

    @property
    def is_float32_on_cpu(self) -> bool:
        parameter = next(iter(self.model.parameters()))
        return bool(parameter.device.type == "cpu" and parameter.dtype == torch.float32)

    @property
    def decoder(self) -> Any:
        """The model without its output matrix, in evaluation mode even if another library has set training mode."""
        if self.model.training:
            self.model.eval()
        decoder = self.model.get_decoder()
        return self.model.model if decoder is self.model else decoder

    @property
    def width(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[1])

    @cached_property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def layers(self) -> int:
        return int(getattr(self.model.config.get_text_config(), "num_hidden_layers", 1))

    @cached_property
    def max_length(self) -> int:
        """Maximum context length of the model in tokens."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        # With longrope, the context ends at the original length; see `micro_batches`.
        limit = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        return int(limit or getattr(config, "max_position_embeddings", 0) or 1 << 30)

    @cached_property
    def size(self) -> int:
        """Number of parameters, excluding the value head."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def micro_tokens(self) -> int:
        """Default number of padded tokens per forward pass, smaller on a CPU because padding costs more there.

        With 135 million parameters, an update with 512 tokens took as long as one with 1,536, with 2 GB less memory. On
        a GPU, activations take up to a quarter of its memory: about 160 bytes per token, layer and unit of width.
        """
        if self.device.type == "cpu":
            return 1536 if self.size < _LARGE else 512
        memory = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 2**34
        return int(min(32768, max(1024, memory // (640 * self.layers * self.width))))

    @property
    def launch_overhead(self) -> int:
        """Fixed cost of a forward and backward pass, in units of the time for one token.

        Measured with a shipped policy. It is negligible for large models, and 0 on a GPU, where full passes are best.
        """
        return min(100, 30_000_000 // max(self.size, 1)) if self.device.type == "cpu" else 0

    # --- forward pass ---

    def hidden(self, ids: Tensor, layers: Sequence[int] | None = None, *, images: RowSpans | None = None) -> Tensor:
        """Return the hidden states of the last layer, (B, T, d), or of L `layers`, (B, T, L, d).

        Args:
            ids: Token ids, (B rows, T tokens), padded on the right.
            layers: Layer indices as in transformers: 0 is the embedding, and -1 the last layer (after its norm).
            images: Spans of images in each row; None if there are none.

        Raises:
            SettingsError: If the model has no such layer.
        """
        shown = self._row_images(ids, images)
        states, chosen = hidden_states(self.decoder, ids, None, self._check_layers(layers), shown)
        return states if chosen is None else chosen

    def _row_images(self, ids: Tensor, images: RowSpans | None) -> Any:
        if images is None or not any(images):
            return None
        from agentfly_kit.policy.vision import row_images

        return row_images(self, ids, images)

    def _check_layers(self, layers: Sequence[int] | None) -> Sequence[int] | None:
        n = self.layers
        if layers is not None and not (len(layers) and all(isinstance(i, int) and -n - 1 <= i <= n for i in layers)):
            raise SettingsError(f"layers must be a non-empty list of layers from {-n - 1} to {n}, got {layers!r}")
        return layers

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the float32 logits of N hidden states over a vocabulary of V tokens: (N, d) -> (N, V).

        The product with the output matrix, by `head` if given, is scaled and soft-capped. `placeholders` get -1e9.

        Raises:
            PolicyError: If the model changes its logits in another way.
        """
        scale, cap = self.check_head()
        logits = cast(Tensor, (head or self.model.get_output_embeddings())(hidden)).float()
        logits = logits if scale == 1 else logits * scale
        logits = torch.tanh(logits / cap) * cap if cap else logits
        if self.placeholders:
            # With -1e9, the probability is exactly 0. With -inf, the entropy would be 0 * -inf = NaN.
            logits = logits.index_fill(-1, torch.tensor(self.placeholders, device=logits.device), -1e9)
        return logits

    def check_head(self) -> tuple[float, float]:
        """Return the scale and soft cap (0 if none) of the logits. Raise PolicyError for any other change of logits."""
        if self._head is None:
            raise PolicyError(
                f"the logits of {type(self.model).__name__} must be the product of its hidden states and output "
                f"matrix, only scaled ({', '.join(_SCALES)}) or soft-capped (final_logit_softcapping) by its config"
            )
        return self._head

    @cached_property
    def _head(self) -> tuple[float, float] | None:
        """Scale and soft cap of the logits, or None if a trial with them does not give the logits of the model.

        A hook replaces the output of the output matrix with large and small numbers, because a cap would not change the
        small logits of an untrained model.
        """
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        thread = threading.get_ident()
        seen: list[Tensor] = []

        def replace_logits(_: Any, args: Any, logits: Tensor) -> Tensor | None:
            if threading.get_ident() != thread:  # an engine may be sampling from this model
                return None
            large = torch.linspace(-22, 22, logits.numel(), device=logits.device) ** 3
            large = large.view_as(logits).to(logits.dtype)
            seen[:] = args[0], large
            return large.clone()  # the model may change it in place

        hook = self.model.get_output_embeddings().register_forward_hook(replace_logits)
        try:
            with torch.no_grad():
                # TRL and accelerate replace `forward` on the object. In a copy, it would call the original's method.
                logits = type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        # hidden states are NaN if the weights have diverged
        if not seen or not agree(self.hidden(ids).nan_to_num(), seen[0].nan_to_num()):
            return None
        config, products = self.model.config.get_text_config(), seen[1].float()
        cap = float(getattr(config, "final_logit_softcapping", None) or 0)
        # Some models multiply by a setting and some divide by it. The ratio is rounded in bfloat16.
        settings = [1.0, *(float(getattr(config, name, None) or 1) for name in _SCALES)]
        ratio = 1.0 if cap else float(logits.flatten()[-1] / products.flatten()[-1])
        scale = min((power for x in settings for power in (x, 1 / x)), key=lambda x: abs(x / ratio - 1))
        expected = torch.tanh(products / cap) * cap if cap else products * scale
        # Compare each element, because a change such as an added bias is small relative to the largest logits.
        exact = logits.dtype == torch.float32
        same = torch.allclose(logits.float(), expected, rtol=1e-5 if exact else 0.02, atol=1e-6)
        return (scale, cap) if same else None

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        temperatures: Tensor,
        *,
        entropy: bool = False,
        value: bool = False,
        sum_squared_probs: bool = False,
        layers: Sequence[int] | None = None,
        row_keys: Tensor | None = None,
        images: RowSpans | None = None,
    ) -> ForwardOutput:
        """Compute logprobs and, optionally, entropies and values where the mask is 1, with gradients.

        Logits are computed only at these positions. If they need too much memory, they are computed in chunks, which
        the backward pass recomputes.

        Args:
            ids: Token ids.
            mask: True at the N positions to score.
            temperatures: Sampling temperature of each row.
            entropy: Whether to compute entropies.
            value: Whether to compute values; the policy must have a value head.
            sum_squared_probs: Whether to compute the sum of squared probabilities over the vocabulary.
            layers: Indices of L layers. Their hidden states, (N, L, d), are also returned; see `hidden`.
            row_keys: Keys, (B, T); the ids if None. Rows whose keys have a common prefix share its computation.
            images: Spans of images in each row; None if there are none.

        Raises:
            AlignmentError: If the mask is 1 at position 0, which no earlier token can predict.

        Shapes:  ids (B rows, T tokens) int64 padded on the right, mask (B, T) bool, temperatures (B,) -> (N,).
        Units:   nats, at the sampling temperature.
        """
        self.check_head()
        rows, cols = mask.nonzero(as_tuple=True)
        packed, place = self._locate_states(ids, mask, row_keys)
        # Positions with the same prefix share a hidden state, whose logits are computed only once. `each` maps each
        # position to the index of its state.
        each: Tensor | None = None
        if packed is not None and bool((temperatures == temperatures[0]).all()):
            place, each = place.unique(return_inverse=True)
        shown = self._row_images(ids, images)
        last, chosen = hidden_states(self.decoder, ids[:, :-1], packed, self._check_layers(layers), shown)
        states = last.flatten(0, 1)[place]
        temperature = temperatures.to(states.device, torch.float32)
        temperature = temperature[rows] if each is None else temperature[:1].expand(len(states))
        scores = self._scores_of_states(states, temperature, each, ids[rows, cols], entropy, sum_squared_probs)
        of_positions = slice(None) if each is None else each
        return ForwardOutput(
            logprob=scores["logprob"],
            entropy=scores["entropy"][of_positions] if entropy else None,
            value=self._values(ids, packed, place, states, shown)[of_positions] if value else None,
            hidden=(states if chosen is None else chosen.flatten(0, 1)[place])[of_positions],
            sum_squared_probs=scores["sum_squared_probs"][of_positions] if sum_squared_probs else None,
        )

    def _scores_of_states(
        self,
        states: Tensor,
        temperature: Tensor,
        each: Tensor | None,
        targets: Tensor,
        entropy: bool,
        sum_squared_probs: bool,
    ) -> dict[str, Tensor]:
        """Compute the logprobs of N targets, (N,), and other requested scores of S hidden states, (S,).

        `each`, (N,), is the index of the state that predicts each target, or None if there is one target per state, in
        order. The states have shape (S, d), and `temperature` has one entry per state, (S,).
        """

        def scores(states: Tensor, temperature: Tensor, each: Tensor | None, targets: Tensor) -> dict[str, Tensor]:
            logp = torch.log_softmax(self.logits(states) / temperature[:, None], dim=-1)
            out = {"logprob": logp.gather(-1, targets[:, None])[:, 0] if each is None else logp[each, targets]}
            if entropy:
                out["entropy"] = -(logp.exp() * logp).sum(-1)
            if sum_squared_probs:
                out["sum_squared_probs"] = (2 * logp).exp().sum(-1)
            return out

        size = max(1, _MAX_LOGITS // self.vocab_size)
        if len(states) <= size:
            return scores(states, temperature, each, targets)
        parts, order = [], []
        index = torch.arange(len(states), device=states.device) if each is None else each
        for start in range(0, len(states), size):
            chunk = slice(start, start + size)
            of_chunk = index[chunk] if each is None else ((index >= start) & (index < start + size)).nonzero()[:, 0]
            arguments = states[chunk], temperature[chunk], index[of_chunk] - start, targets[of_chunk]
            parts.append(checkpoint(scores, *arguments, use_reentrant=False, preserve_rng_state=False))
            order.append(of_chunk)
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return joined | {"logprob": joined["logprob"][torch.cat(order).argsort()]}

    def _locate_states(
        self, ids: Tensor, mask: Tensor, row_keys: Tensor | None = None
    ) -> tuple[PackedTrees | None, Tensor]:
        """Return prefix trees, or None for separate rows, and the indices of the states that predict the N tokens.

        The indices, (N,) for the N tokens in the mask, refer to the flattened hidden states of the trees or, without
        trees, of `ids[:, :-1]`.
        """
        rows, cols = mask.nonzero(as_tuple=True)
        if bool((cols == 0).any()):
            raise AlignmentError("the mask must be 0 at position 0; the first token of a row is never predicted")
        if not self._sharing_obstacle:
            trees = self._build_trees(ids if row_keys is None else row_keys, mask, self.micro_tokens)
            if len(trees) < len(ids):
                packed = PackedTrees.build(trees, ids, _context_lengths(mask))
                return packed, packed.token_index[rows, cols - 1]
        return None, rows * (ids.shape[1] - 1) + cols - 1

    def _values(
        self, ids: Tensor, packed: PackedTrees | None, place: Tensor, states: Tensor | None, images: Any
    ) -> Tensor:
        """Compute values, (N,), from `states`, (N, d), or from the states of a separate critic at indices `place`."""
        head = self.value_head
        if head is None:
            raise PolicyError("values need a value head; load the policy with value_head=True")
        if isinstance(head, Critic):
            images = None if images is None else images.detach()
            states = hidden_states(head.trunk, ids[:, :-1], packed, None, images)[0].flatten(0, 1)[place]
            head = head.head
        assert states is not None
        return cast(Tensor, head(states.to(head.weight.dtype)))[:, 0].float()

    @torch.no_grad()
    def score(
        self,
        batch: Any,
        want: Iterable[ScoreName] = ("logprob", "entropy"),
        *,
        layers: Sequence[int] | None = None,
        rows: Tensor | None = None,
        micro_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """Compute scores where the mask of a batch is 1, without gradients.

        Args:
            batch: The batch.
            want: Scores to compute: any of "logprob", "entropy", "value", "hidden" and "sum_squared_probs".
            layers: Indices of the layers to return as "hidden"; by default the last layer. See `hidden`.
            rows: Indices of the rows to score; all rows if None. Other rows are treated as if the mask were 0.
            micro_tokens: Maximum number of tokens per forward pass; `self.micro_tokens` if None.

        Returns:
            The float32 scores keyed by name, (B, T), with NaN where the mask is 0. "hidden" is (B, T, d), or
            (B, T, L, d) if L `layers` are given, with 0 where the mask is 0.

        Raises:
            SettingsError: If `want` is empty or contains an unknown name, or if the model has no such layer.

        Shapes:  batch.ids, batch.mask (B, T), batch.temperatures (B,) -> (B, T) each.
        """
        wanted = set(want)
        if not wanted or not wanted <= set(get_args(ScoreName)):
            raise SettingsError(f"want must be a non-empty subset of {get_args(ScoreName)}, got {sorted(wanted)}")
        out: dict[str, Tensor] = {name: torch.full(batch.ids.shape, torch.nan) for name in wanted - {"hidden"}}
        if "hidden" in wanted:
            chosen = self._check_layers(layers)
            out["hidden"] = torch.zeros(*batch.ids.shape, *([] if chosen is None else [len(chosen)]), self.width)
        keys, images = getattr(batch, "row_keys", None), getattr(batch, "images", None)
        with single_torch_thread(self):
            for part in self.micro_batches(batch, rows, micro_tokens):
                width = max(batch.lengths[part].tolist(), default=2)
                mask = batch.mask[part, :width]
                if not bool(mask.any()) and self.accelerator is None:
                    continue
                inputs = batch.ids[part, :width].to(self.device), mask.to(self.device)
                shared = None if keys is None else keys[part, :width]
                spans = None if images is None else [images[row] for row in part.tolist()]
                if wanted == {"value"} and isinstance(self.value_head, Critic):  # no forward pass of the policy
                    shown = self._row_images(inputs[0], spans)
                    got = {"value": self._values(inputs[0], *self._locate_states(*inputs, shared), None, shown)}
                else:
                    options: Any = {name: name in wanted for name in ("entropy", "value", "sum_squared_probs")}
                    options |= {"row_keys": shared, "images": spans}
                    got = vars(self.forward(*inputs, batch.temperatures[part], layers=layers, **options))
                r, c = mask.nonzero(as_tuple=True)
                for name in wanted:
                    out[name][part[r], c] = got[name].float().cpu()
        return Tensors(out)

    @torch.no_grad()
    def bootstrap_values(self, batch: Any, *, micro_tokens: int | None = None) -> Tensor:
        """Return the value after the last token of each row, (B,): the expected remaining return of a truncated row."""
        # The value at a position is computed from the tokens before it, so append an arbitrary token and score it.
        mask = torch.arange(batch.ids.shape[1] + 1) == batch.lengths[:, None]
        keys, images = getattr(batch, "row_keys", None), getattr(batch, "images", None)
        keys = None if keys is None else nn.functional.pad(keys, (0, 1))
        ids, ones = nn.functional.pad(batch.ids, (0, 1)), torch.ones(len(mask))
        longer = SimpleNamespace(
            ids=ids, row_keys=keys, images=images, mask=mask, lengths=batch.lengths + 1, temperatures=ones
        )
        return self.score(longer, {"value"}, micro_tokens=micro_tokens)["value"][mask]

    @contextlib.contextmanager
    def checkpointing(self, on: bool = True) -> Iterator[None]:
        """Enable gradient checkpointing: activations inside layers are recomputed in the backward pass, not stored.

        Raises:
            PolicyError: If the model has no layers that support checkpointing.
        """
        if not on:
            yield
            return
        from agentfly_kit.policy.gradient_checkpointing import checkpointed

        with checkpointed([self.model, *([self.value_head.trunk] if isinstance(self.value_head, Critic) else [])]):
            yield

    # --- micro-batches and prefix sharing ---

    def micro_batches(self, batch: Any, rows: Tensor | None = None, micro_tokens: int | None = None) -> list[Tensor]:
        """Split rows of a batch into micro-batches of at most `micro_tokens` tokens; see `split_by_token_budget`.

        If the model supports prefix sharing, rows with a common prefix are grouped, and each shared token counts once.
        A row longer than `micro_tokens` forms a micro-batch of its own.

        Args:
            batch: The batch.
            rows: Indices of the rows to split; all rows if None.
            micro_tokens: Maximum number of tokens per micro-batch; `self.micro_tokens` if None.

        Returns:
            The row indices of each micro-batch.

        Raises:
            PolicyError: If a row is longer than the context and the model's rotary embeddings depend on the longest
                row.
        """
        check_row_length(self.model.config.get_text_config(), int(batch.lengths.max()), self.max_length)
        rows = torch.arange(len(batch.lengths)) if rows is None else rows
        limit = micro_tokens or self.micro_tokens
        if not len(rows) or self._sharing_obstacle:
            return [rows[part] for part in split_by_token_budget(batch.lengths[rows], limit, self.launch_overhead)]
        keys = getattr(batch, "row_keys", None)
        trees = self._build_trees((batch.ids if keys is None else keys)[rows], batch.mask[rows], limit)
        parts = split_by_token_budget(torch.tensor([tree.width for tree in trees]), limit, self.launch_overhead)
        return [rows[torch.tensor([row for i in part.tolist() for row in trees[i].rows])] for part in parts]

    def _build_trees(self, keys: Tensor, mask: Tensor, max_tokens: int) -> list[PrefixTree]:
        return build_prefix_trees(
            keys, _context_lengths(mask), scale=self._keys_as_costly_as_weights, max_tokens=max_tokens
        )

    @cached_property
    def _keys_as_costly_as_weights(self) -> float:
        """Number of keys at which attention costs as much as the rest of the model; see `build_prefix_trees`."""
        config = self.decoder.config
        config = (getattr(config, "per_layer_config", None) or [config])[0]
        # Operations per token: 2 per weight, plus 4 x (heads x head size) per layer and attended key.
        heads = config.num_attention_heads
        inner = heads * (getattr(config, "head_dim", None) or self.width // heads)
        weights = max(1, self.size - self.vocab_size * self.width)
        return float(2 * weights / (4 * self.layers * inner) / _MASKED_ATTENTION_COST)

    @cached_property
    def _sharing_obstacle(self) -> str:
        """Reason why rows cannot share prefixes, or "" if a trial yields equal hidden states with sharing."""
        reason = sharing_obstacle(self.decoder, self.vocab_size)
        if reason:
            _log.warning("%s computes rows without prefix sharing: %s", type(self.model).__name__, reason)
        return reason


def _context_lengths(mask: Tensor) -> list[int]:
    """Return the number of tokens before the last sampled token of each row, but at least 1."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return cast(list[int], (mask * columns).amax(1).clamp(min=1).tolist())
