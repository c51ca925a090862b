"""Forward passes of a decoder with attention restricted by a given mask and by the windows of its layers."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Types of layers without attention. Models with "mlp" or "moe" layers also have recurrent layers.
_RECURRENT = {"linear_attention", "conv", "mlp", "moe"}
# For each type of attention layer, the config setting that restricts the keys it attends to.
_RESTRICTED_BY = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Config settings with "window" in their name that `masked_states` handles or that have no effect of their own.
_HARMLESS = {"sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"}
# Length of the attention windows in trial forward passes, short enough for a few tokens to exceed it.
_TRIAL_WINDOW = 3
# Name under which `_shared_keys_attention` is registered in transformers.
_SHARED_KEYS = "agentfly_kit_shared_keys"


def masked_states(
    decoder: Any,
    ids: Tensor,
    positions: Tensor,
    allowed: Tensor,
    key_positions: Tensor,
    cache: Any = None,
    **options: Any,
) -> Any:
    """Run a decoder with attention restricted by a mask and return its output.

    Tokens attend to keys that are `allowed` and within the layer's window. `positions` and `key_positions` are the
    positions of tokens and keys in their rows, `cache` is a transformers cache, and `options` are passed to the
    decoder, for example to replace ids by embeddings. Recurrent layers take no mask, so their rows must have no padding
    before the last token that is used.

    Shapes:  ids, positions (R rows, C tokens), allowed (R, 1, C, S keys), key_positions (1 or R, S) ->
             `last_hidden_state` (R, C, d).
    """
    config = decoder.config
    masks: dict[str, Tensor | None] = {}
    for kind in _layer_types(config):
        if kind in _RECURRENT:
            masks[kind] = None
            continue
        mask = allowed
        if limit := getattr(config, _RESTRICTED_BY[kind] or "", None):
            first = positions - limit + 1 if kind == "sliding_attention" else positions // limit * limit
            mask = allowed & (key_positions[:, None, None, :] >= first[:, None, :, None])
        if config._attn_implementation == "eager":  # eager attention adds the mask to the scores
            dtype = next(decoder.parameters()).dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        masks[kind] = mask
    # Models without layer types take one mask; others take one per type unless all layers have full attention.
    mapped = getattr(config, "layer_types", None) and masks.keys() not in ({"full_attention"}, {"linear_attention"})
    if cache is not None:
        options[_cache_parameter(decoder.__class__)] = cache
    return decoder(
        attention_mask=masks if mapped else next(iter(masks.values())),
        use_cache=False,
        return_dict=True,
        **{"input_ids": ids, "position_ids": positions} | options,
    )


@functools.cache
def _cache_parameter(decoder: type[torch.nn.Module]) -> str:
    # Transformers before 5.24 uses the first two names, the second one for models without attention.
    accepted = inspect.signature(decoder.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in accepted), "cache")


def is_recurrent(decoder: Any) -> bool:
    """Return True if some layers have a recurrent state. In this case, no token can be removed from a cache."""
    return bool(_layer_types(decoder.config) & _RECURRENT)


def use_soft_caps(model: Any) -> None:
    """Select "eager" attention if the config soft-caps attention scores, because "sdpa" silently ignores soft caps."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


@contextlib.contextmanager
def shared_keys(config: Any) -> Iterator[None]:
    """Context manager that avoids copies of keys in masked "sdpa" attention with grouped query heads.

    Transformers copies keys and values for each query head of a group, which takes several times as long as attention
    itself. Only forward passes on a CPU without gradients benefit. Results are bitwise identical. The context manager
    is thread-safe.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_SHARED_KEYS, _shared_keys_attention)
    AttentionMaskInterface.register(_SHARED_KEYS, sdpa_mask)
    if config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = _SHARED_KEYS
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _shared_keys_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = not options.get("dropout") and all(options.get(name) is None for name in ("position_bias", "cache"))
    # Only CPU kernels use the keys of a group of query heads without copying them for each head.
    if attention_mask is None or torch.is_grad_enabled() or query.device.type != "cpu" or not plain:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    seen = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
    )
    return seen.transpose(1, 2).contiguous(), None


def unsupported_attention(decoder: Any, *, recurrent: bool = False) -> str:
    """Return the reason why `masked_states` does not support a decoder with this config, or "" if it does.

    Args:
        decoder: The decoder.
        recurrent: Whether rows are computed as in a cache, which permits recurrent layers.
    """
    config = decoder.config
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager", _SHARED_KEYS):
        return f"its attention implementation {implementation!r} takes no masks; load the model with 'sdpa'"
    if unknown := _layer_types(config) - _RESTRICTED_BY.keys() - (_RECURRENT if recurrent else set()):
        return f"it has layers of type {', '.join(map(repr, sorted(unknown)))}"
    if getattr(config, "attn_temperature_tuning", None):
        return "its attn_temperature_tuning scales queries by their column in the batch"
    windows = [k for k, v in vars(config).items() if v and "window" in k and k.strip("_") not in _HARMLESS]
    return f"its config restricts attention by {windows[0]}, which is not supported" if windows else ""


def with_short_windows(decoder: Any) -> Any:
    """Return a copy of a decoder that shares its weights but has attention windows of `_TRIAL_WINDOW` tokens."""
    short = copy.copy(decoder)
    short.config = copy.copy(decoder.config)
    for name in filter(None, _RESTRICTED_BY.values()):
        if getattr(short.config, name, None):
            setattr(short.config, name, _TRIAL_WINDOW)
    return short


def agree(expected: Tensor, got: Tensor) -> bool:
    """Return True if hidden states are equal up to rounding errors in the dtype of `expected`, and none is NaN."""
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.05
    return bool((expected.float() - got.float()).abs().max() <= tolerance * expected.float().abs().max())


def _layer_types(config: Any) -> set[str]:
    if types := set(getattr(config, "layer_types", None) or ()):
        return types - {"hybrid"} | ({"full_attention", "linear_attention"} if "hybrid" in types else set())
    # A config may contain `sliding_window` although its model class does not support it.
    declared = "sliding_window" in inspect.signature(type(config)).parameters
    return {"sliding_attention" if declared and config.sliding_window else "full_attention"}
