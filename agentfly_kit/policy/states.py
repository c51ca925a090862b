"""Hidden states of a decoder for separate rows or prefix trees, and a trial that determines whether they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from agentfly_kit.errors import PolicyError
from agentfly_kit.policy.attention import agree, masked_states, unsupported_attention, with_short_windows
from agentfly_kit.policy.prefix_tree import PackedTrees, build_prefix_trees


def hidden_states(
    decoder: Any, ids: Tensor, packed: PackedTrees | None, layers: Sequence[int] | None = None, images: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Return hidden states of the last layer: (B, T, d) for B rows of T tokens, or (P, W, d) for P trees of W tokens.

    The second result contains the states of L `layers`, (B, T, L, d) or (P, W, L, d), or is None if `layers` is None.
    `images` are the `RowImages` of the rows, if there are any.
    """
    options: dict[str, Any] = {} if layers is None else {"output_hidden_states": True}
    if images is not None:
        options |= images.options(decoder, *((ids,) if packed is None else (packed.ids, packed.source)))
    if packed is not None:
        out = masked_states(decoder, packed.ids, packed.positions, packed.mask(), packed.positions, **options)
    else:
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        options = {"input_ids": ids, "position_ids": positions, "use_cache": False, "return_dict": True} | options
        # Padding on the right needs no attention mask, because causal attention already excludes it.
        out = decoder(attention_mask=None, **options)
    last = cast(Tensor, out.last_hidden_state)
    return last, None if layers is None else torch.stack([out.hidden_states[i] for i in layers], -2)


def check_row_length(config: Any, longest: int, limit: int) -> None:
    """Raise PolicyError if rows exceed the context and the model's rotary embeddings depend on the longest row."""
    rope = getattr(config, "rope_parameters", None) or {}
    types = {str(r.get("rope_type")) for r in (rope, *rope.values()) if isinstance(r, dict)}
    dynamic = {"dynamic", "longrope"} & types
    if dynamic and longest > limit + 1:  # the model does not read the last token of a row
        raise PolicyError(
            f"rows must have at most {limit + 1} tokens, got {longest}, because the rotary embeddings of the model "
            f"({dynamic.pop()}) depend on the longest row"
        )


def sharing_obstacle(decoder: Any, vocab_size: int) -> str:
    """Return the reason why rows cannot share prefixes, or "" if a trial yields equal hidden states with sharing."""
    decoder = with_short_windows(decoder)
    if reason := unsupported_attention(decoder):
        return reason
    device = next(iter(decoder.parameters())).device
    # Three rows of 10, 9 and 8 tokens; the first two share 4 tokens, and the last two share 7.
    ids = (torch.arange(30) * 7 % vocab_size).reshape(3, 10).to(device)
    ids[:, :4] = ids[0, :4]
    ids[2, :7] = ids[1, :7]
    lengths = [10, 9, 8]
    is_token = torch.arange(10) < torch.tensor(lengths)[:, None]
    packed = PackedTrees.build(build_prefix_trees(ids, lengths, scale=1e9, max_tokens=100), ids, lengths)
    try:
        # Disable autocast if the caller enabled it, because its errors exceed the tolerance for float32.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            separate, shared = hidden_states(decoder, ids, None)[0], hidden_states(decoder, ids, packed)[0]
            same = agree(separate[is_token], shared.flatten(0, 1)[packed.token_index][is_token])
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        return f"a trial raised {type(error).__name__}: {error}"
    return "" if same else "a trial gave hidden states that differ from those of separate rows"
