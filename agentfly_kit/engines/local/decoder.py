"""Forward pass of the `LocalEngine`, which stores the keys and values of the tokens in a `KVCache`.

For Llama-like models on a CPU, `FusedLlamaDecoder` makes a third as many function calls, adds LoRA adapters to the
weights and, unless the model is small, uses oneDNN's layout of the weights. For other models, and for models with a
hook, the model's own modules are called. Before a forward pass is used, its results are compared with those of a
forward pass without a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentfly_kit.engines.local.kv_cache import KVCache, Product, aligned, packed_product, weighted_sum
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.attention import agree, masked_states, shared_keys, unsupported_attention, with_short_windows
from agentfly_kit.policy.policy import Policy

Options: TypeAlias = dict[str, Any] | None
# A function of (cache, rows, tokens (R, C), positions (R, C), stamp, options) that returns hidden states (R, C, d), for
# R rows, C tokens per row and hidden size d. `rows` is as in `KVCache.prepare`, `stamp` identifies the weights, and
# `options` are arguments of the decoder, such as embeddings in place of tokens.
CachedForward: TypeAlias = Callable[[KVCache, Tensor | int, Tensor, Tensor, object, Options], Tensor]

_FAMILIES = ("llama", "qwen2", "qwen3")
# Maximum number of parameters of a fused model, because fusing copies the weights.
_MAX_PARAMETERS = 1 << 30
# Models with fewer parameters use torch's layout, because each of oneDNN's products takes 8 us longer to start.
_MIN_PACKED_PARAMETERS = 1 << 24


def cached_forward(policy: Policy) -> CachedForward:
    """Return a forward pass with a KV cache, fused if possible.

    Raises:
        EngineError: If the model cannot be run with a KV cache.
        PolicyError: If the logits cannot be computed from hidden states; see `Policy.logits`.
    """
    policy.check_head()
    trunk = policy.decoder
    if (fused := FusedLlamaDecoder.try_build(trunk, policy.model.get_output_embeddings())) is not None:
        return fused
    short = with_short_windows(trunk)
    reason = unsupported_attention(short, recurrent=True)
    try:
        if not reason and not _passes_trial(short, _modules_forward(short, trunk.config)):
            reason = "a trial gave different hidden states with and without a KV cache"
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        reason = f"a trial raised {type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and isinstance(error.obj, KVCache):
            reason = f"its layers need a cache with {error.name!r}"
    if reason:
        raise EngineError(f"LocalEngine cannot run {type(policy.model).__name__}: {reason}. Use VLLMEngine instead")
    return _modules_forward(trunk)


def _modules_forward(trunk: Any, config: Any = None) -> CachedForward:
    """Return a forward pass that runs the modules of `trunk`. The layers use `config`, by default `trunk.config`."""

    def forward(
        cache: KVCache,
        rows: Tensor | int,
        tokens: Tensor,
        positions: Tensor,
        stamp: object,
        options: Options = None,
    ) -> Tensor:
        mask = cache.prepare(rows, positions)
        keys = torch.arange(mask.shape[-1], device=mask.device)[None]
        with shared_keys(config or trunk.config):
            states = masked_states(trunk, tokens, positions, mask, keys, cache, **(options or {})).last_hidden_state
        cache.store_states()
        return cast(Tensor, states)

    return forward


@torch.inference_mode()
def _passes_trial(trunk: Any, forward: CachedForward) -> bool:
    """Return True if `forward` agrees with a forward pass without a cache for two prompt chunks and one more token."""
    rows, width = 2, 13
    device = next(trunk.parameters()).device
    ids = (
        torch.arange(rows * width, device=device).reshape(rows, width) * 7
    ) % trunk.get_input_embeddings().num_embeddings
    expected = trunk(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    cache = KVCache(rows, width)
    parts = []
    for start, stop in ((0, 5), (0, 7), (7, 12), (12, 13)):  # the first chunk is replaced by the second
        positions = torch.arange(start, stop, device=device)[None].expand(rows, -1)
        slots = torch.arange(rows, device=device) if stop - start > 1 else rows
        parts.append(forward(cache, slots, ids[:, start:stop], positions, "trial", None))
    return agree(expected, torch.cat(parts[1:], 1))


class FusedLlamaDecoder:
    """Decoder that fuses projections of the same input, for Llama-like float32 models on a CPU.

    It holds a copy of the weights, to which LoRA adapters are added. With a hook, it runs the modules.
    """

    @classmethod
    def try_build(cls, trunk: Any, head: Any = None) -> FusedLlamaDecoder | None:
        """Return a fused decoder, or None if the model is unsupported or a trial run differs from the unfused model.

        `head` is the output layer, which is copied too if it is a linear layer of a model that is not small.
        """
        try:
            if not _is_supported(trunk):
                return None
            decoder = cls(trunk, head)
            return decoder if _passes_trial(trunk, decoder) else None
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):  # the structure is another one
            return None

    def __init__(self, trunk: Any, head: Any = None) -> None:
        config = trunk.config
        self._trunk = trunk
        self._head = head if type(head) is nn.Linear else nn.Identity()
        self._list_modules()
        # The product with the output matrix, or None if the output layer is to be called.
        self.head: Product | None = None
        self.is_packed = sum(p.numel() for p in self._parameters) > _MIN_PACKED_PARAMETERS
        self._heads = int(config.num_attention_heads)
        self._kv = int(config.num_key_value_heads)
        first = trunk.layers[0].self_attn
        self._size = int(first.q_proj.weight.shape[0]) // self._heads
        self._eps = float(trunk.norm.variance_epsilon)
        self._weights_key: object = None
        # The products with the weights, and the scales of the normalizations, of each layer.
        self._layers: list[tuple[Product, Product, Product, Product, Tensor, Tensor, Tensor]] = []
        self._cos = self._sin = torch.zeros(0)

    def __call__(
        self,
        cache: KVCache,
        rows: Tensor | int,
        tokens: Tensor,
        positions: Tensor,
        stamp: object,
        options: Options = None,
    ) -> Tensor:
        """Compute hidden states; see `CachedForward`. The fused weights are rebuilt if `stamp` has changed."""
        if not self._refresh(int(cache.capacity), stamp):
            return _modules_forward(self._trunk)(cache, rows, tokens, positions, stamp, options)
        if tokens.shape[1] == 1:
            mask = cache.prepare(rows, positions, aligned)
            return self._decode_one_token(cache, tokens[:, 0], positions[:, 0], mask)[:, None]
        mask = cache.prepare(rows, positions)
        (count, width), heads, kv, size = tokens.shape, self._heads, self._kv, self._size
        x = options["inputs_embeds"] if options else F.embedding(tokens, self._trunk.embed_tokens.weight)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        for i, (qkv, out, gate_up, down, before, after, scale) in enumerate(self._layers):
            found = qkv(self._norm(x, before)).view(count, width, heads + 2 * kv, size)
            qk = found[:, :, : heads + kv]
            if len(scale):
                qk = self._norm(qk, None) * scale
            qk = (qk * cos).add_(torch.roll(qk, size // 2, -1) * sin)
            keys, values = cache.update(
                qk[:, :, heads:].transpose(1, 2), found[:, :, heads + kv :].transpose(1, 2), layer_idx=i
            )
            seen = F.scaled_dot_product_attention(
                qk[:, :, :heads].transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=heads != kv
            )
            x = x + out(seen.transpose(1, 2).reshape(count, width, heads * size))
            gate, up = gate_up(self._norm(x, after)).chunk(2, -1)
            x = x + down(F.silu(gate).mul_(up))
        return self._norm(x, self._trunk.norm.weight)

    def _decode_one_token(self, cache: KVCache, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Compute the hidden states of one token per row.

        With one query per row, torch's fused attention is slow, because it computes a separate product for each row and
        head. Two batched products over all rows and heads take about two thirds of the time.

        Shapes:  tokens (R rows,), positions (R,), mask (R, 1, 1, S keys) -> (R, d).
        """
        rows, heads, kv, size = len(tokens), self._heads, self._kv, self._size
        share = heads // kv
        x = F.embedding(tokens, self._trunk.embed_tokens.weight)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        seen = mask.shape[-1]
        hidden = torch.where(mask[:, 0, :, None], 0.0, -torch.inf)
        hidden = hidden.expand(rows, kv, share, seen).reshape(rows * kv, share, seen)
        for i, (qkv, out, gate_up, down, before, after, scale) in enumerate(self._layers):
            found = qkv(self._norm(x, before)).view(rows, heads + 2 * kv, size)
            qk = found[:, : heads + kv]
            if len(scale):
                qk = self._norm(qk, None).mul_(scale)
            # Apply the rotary embedding to queries and keys together, in place.
            turned = torch.roll(qk, size // 2, -1).mul_(sin)
            torch.addcmul(turned, qk, cos, out=found[:, : heads + kv])
            states = found[:, heads:, None]
            keys, values = (
                part.reshape(rows * kv, seen, size) for part in cache.update(states[:, :kv], states[:, kv:], i)
            )
            queries = found[:, :heads].reshape(rows * kv, share, size)
            scores = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=size**-0.5)
            mixed = weighted_sum(scores.softmax(-1), values)
            x = x + out(mixed.view(rows, heads * size))
            gate, up = gate_up(self._norm(x, after)).chunk(2, -1)
            x = x + down(F.silu(gate).mul_(up))
        return self._norm(x, self._trunk.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _product(self, *projections: Any) -> Product:
        """Return a function that applies projections of the same input and concatenates the results."""
        weights = [_weight(m) for m in projections]
        weight = torch.cat(weights) if weights[1:] else weights[0]
        bias = None if projections[0].bias is None else torch.cat([m.bias for m in projections])
        if self.is_packed:
            return packed_product(weight, bias)
        return functools.partial(F.linear, weight=weight, bias=bias)

    def _list_modules(self) -> None:
        self._modules = [*self._trunk.modules(), self._head]
        self._parameters = [*self._trunk.parameters(), *self._head.parameters()]
        self._adapters = [m for m in self._modules if hasattr(m, "lora_A")]

    def _refresh(self, capacity: int, stamp: object) -> bool:
        """Rebuild the fused weights if they have changed, and extend the rotary embedding to `capacity` positions.

        Returns False if the model cannot be fused any more, for example because it has a hook.
        """
        adapters = [(m.merged, m.disable_adapters, m.active_adapters, {**m.scaling}) for m in self._adapters]
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in self._modules)
        key = (stamp, sum(p._version for p in self._parameters), adapters)
        if hooked or key != self._weights_key:
            self._layers, self.head, self._weights_key = [], None, None
            self._list_modules()  # adapters may have been added in place
            if hooked or not _is_supported(self._trunk):
                return False
            for layer in self._trunk.layers:
                a, mlp = layer.self_attn, layer.mlp
                scale = torch.zeros(0)
                if hasattr(a, "q_norm"):
                    scale = torch.cat([a.q_norm.weight.expand(self._heads, -1), a.k_norm.weight.expand(self._kv, -1)])
                products = (
                    self._product(a.q_proj, a.k_proj, a.v_proj),
                    self._product(a.o_proj),
                    self._product(mlp.gate_proj, mlp.up_proj),
                    self._product(mlp.down_proj),
                )
                self._layers.append(
                    (*products, layer.input_layernorm.weight, layer.post_attention_layernorm.weight, scale)
                )
            if self.is_packed and type(self._head) is nn.Linear:
                self.head = self._product(self._head)
            self._weights_key = key
        if len(self._cos) < capacity:
            cos, sin = self._trunk.rotary_emb(torch.zeros(1), torch.arange(capacity)[None])
            # The rotation negates half of the elements; store the sign in the sine table.
            half = self._size // 2
            self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return True


def _is_supported(trunk: Any) -> bool:
    config = trunk.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _FAMILIES
        and not getattr(config, "sliding_window", None)
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and rope.get("rope_type") == "default"
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
        and config.hidden_act == "silu"
        and type(trunk.embed_tokens) is nn.Embedding
        and sum(p.numel() for p in trunk.parameters()) <= _MAX_PARAMETERS
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in trunk.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks for m in trunk.modules())
        and all(map(_has_plain_projections, trunk.layers))
    )


def _has_plain_projections(layer: Any) -> bool:
    a, mlp = layer.self_attn, layer.mlp
    without_bias = (a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    linear = all(map(_is_plain, (a.q_proj, a.k_proj, a.v_proj, *without_bias)))
    return linear and all(m.bias is None for m in without_bias)


def _is_plain(projection: Any) -> bool:
    """Return True for a linear layer, possibly with LoRA adapters that only add to its weight."""
    kind = type(projection)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return kind is nn.Linear
    undone = projection.merged and projection.disable_adapters  # the next forward pass of the module removes adapters
    plain = not undone and not projection.lora_variant and not any(projection.lora_bias.values())
    return plain and type(projection.base_layer) is nn.Linear


def _weight(projection: Any) -> Tensor:
    """Return the weight of a linear layer, (outputs, inputs), including its active adapters."""
    weight: Tensor = projection.weight
    if type(projection) is nn.Linear or projection.merged or projection.disable_adapters:
        return weight
    return sum((projection.get_delta_weight(n) for n in projection.active_adapters if n in projection.lora_A), weight)
