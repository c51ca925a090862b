"""Images in the forward passes of a policy: features of its vision tower in place of placeholders, and positions.

This module is imported when the first image is read. Whether a model can be run in this way is decided by a trial.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.errors import PolicyError
from agentfly_kit.images import Image
from agentfly_kit.policy.attention import agree
from agentfly_kit.policy.states import hidden_states
from agentfly_kit.types import ImageSpan

# Features of an image, (F, d), followed by those that DeepStack adds to the first layers, (F, d) each.
Features = tuple[Tensor, ...]


@dataclass(frozen=True)
class RowImages:
    """Features of the images in B rows of T tokens.

    Attributes:
        features: Features of the distinct images, (F, d), and features of DeepStack, (F, d) each.
        index: Index into the features for each placeholder, (B, T); -1 at other tokens.
        positions: Rotary positions, (3, B, T), for models with positions in three dimensions, otherwise None.
    """

    features: Features
    index: Tensor
    positions: Tensor | None

    def options(self, decoder: Any, ids: Tensor, source: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a decoder that replace `input_ids` and, if necessary, `position_ids`.

        Args:
            decoder: The decoder.
            ids: Token ids, (R, C): the first C columns of the rows or, with `source`, any tokens of the rows.
            source: Index of each token in the flattened rows, (R, C).
        """
        if source is None:
            index = self.index[:, : ids.shape[1]]
            positions = None if self.positions is None else self.positions[..., : ids.shape[1]]
        else:
            index = self.index.flatten()[source]
            positions = None if self.positions is None else self.positions.flatten(1)[:, source]
        shown = index >= 0
        features, *deep = (part[index[shown]] for part in self.features)
        embedded = decoder.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter(shown[..., None], features.to(embedded.dtype))
        options = {"input_ids": None, "inputs_embeds": embedded}
        if positions is not None:
            options["position_ids"] = positions
        if deep:
            options |= {"visual_pos_masks": shown, "deepstack_visual_embeds": deep}
        return options

    def detach(self) -> RowImages:
        """Return the images without gradients with respect to the vision tower."""
        return replace(self, features=tuple(part.detach() for part in self.features))


def row_images(
    policy: Any,
    ids: Tensor,
    images: Sequence[Sequence[ImageSpan]],
    known: dict[str, Features] | None = None,
) -> RowImages:
    """Compute the features of the distinct images in rows, and locate their placeholders.

    Args:
        policy: The policy.
        ids: Token ids, (B, T).
        images: Spans of images in each of the B rows.
        known: Features that have been computed with the current weights, keyed by digest. Features of other images are
            computed one image at a time and added. If None, similar images are computed together.

    Raises:
        PolicyError: If the policy reads no images, or the placeholders do not match its processor.
    """
    if policy.image_obstacle:
        raise PolicyError(
            f"the rows must contain text only, because {policy!r} reads no images: {policy.image_obstacle}"
        )
    return _row_images(policy, ids, images, known)


def _row_images(
    policy: Any,
    ids: Tensor,
    images: Sequence[Sequence[ImageSpan]],
    known: dict[str, Features] | None = None,
) -> RowImages:
    if known is None:
        known = _features({image.digest: image for spans in images for image, _, _ in spans}, policy)
    starts: dict[str, int] = {}
    parts: list[Features] = []
    shown: list[Image] = []
    index = torch.full_like(ids, -1)
    count = 0
    for row, spans in enumerate(images):
        for image, start, length in spans:
            key = image.digest
            if key not in known:
                # Compute one image at a time, because in a batch sums might be rounded differently.
                known |= _features({key: image}, policy)
            size = len(known[key][0])
            if key not in starts:
                starts[key] = count
                parts.append(known[key])
                count += size
            at = start + (ids[row, start : start + length] == policy.placeholders[-1]).nonzero()[:, 0]
            if len(at) != size:
                raise PolicyError(
                    f"an image must have {size} placeholders, one per feature, got {len(at)}; the ids were made "
                    "with another image processor"
                )
            index[row, at] = torch.arange(starts[key], starts[key] + size, device=ids.device)
            shown.append(image)
    features = tuple(torch.cat(same) for same in zip(*parts, strict=True))
    return RowImages(features, index, _positions(policy, ids, index >= 0, shown))


def _features(images: Mapping[str, Image], policy: Any) -> dict[str, Features]:
    """Return the features of images. Those with the same placeholders and shapes pass through the tower together."""
    alike: dict[Any, dict[str, dict[str, Tensor]]] = {}
    names = inspect.signature(policy.model.get_image_features).parameters
    for key, image in images.items():
        pixels = _accepted(names, policy, image)
        # The number of features may depend on the size of the image, even if all tensors have the same shapes.
        alike.setdefault((policy.chat.reader.expansion(image), *(p.shape for p in pixels.values())), {})[key] = pixels
    known: dict[str, Features] = {}
    for same in alike.values():
        found = policy.model.get_image_features(
            **{name: torch.cat([p[name] for p in same.values()]) for name in next(iter(same.values()))}
        )
        deep = getattr(found, "deepstack_features", None) or ()
        parts = (_joined(part).chunk(len(same)) for part in (getattr(found, "pooler_output", found), *deep))
        known |= zip(same, zip(*parts, strict=True), strict=True)
    return known


def _joined(features: Any) -> Tensor:
    """Join the features of the crops of an image to shape (F, d)."""
    joined = features if isinstance(features, Tensor) else torch.cat([*features])
    return joined.reshape(-1, joined.shape[-1])


def _accepted(names: Collection[str], policy: Any, image: Image) -> dict[str, Tensor]:
    """Return the tensors of an image that have one of the names."""
    pixels = policy.chat.reader.pixels(image)
    return {name: torch.from_numpy(value).to(policy.device) for name, value in pixels.items() if name in names}


def _positions(policy: Any, ids: Tensor, shown: Tensor, images: Sequence[Image]) -> Tensor | None:
    """Return the positions of tokens in three dimensions, (3, B, T), or None if the model has ordinary positions."""
    model = policy.model.get_base_model() if policy.has_adapter else policy.model
    find = getattr(getattr(model, model.base_model_prefix, model), "get_rope_index", None)
    if find is None:
        return None
    grids = torch.cat([torch.from_numpy(policy.chat.reader.pixels(image)["image_grid_thw"]) for image in images])
    found: Tensor = find(ids, mm_token_type_ids=shown.int(), image_grid_thw=grids.to(ids.device))[0]
    return found


def find_obstacle(policy: Any) -> str:
    """Return the reason why a policy reads no images, or "" if a trial gives the logits of the model's forward pass.

    The model's forward pass may, for example, let the placeholders of an image attend to each other in both directions.
    """
    model = policy.model
    if not hasattr(model, "get_image_features"):
        return f"{type(model).__name__} has no vision tower"
    try:
        # Disable autocast, because its errors exceed the tolerance for float32.
        with torch.no_grad(), torch.autocast(policy.device.type, enabled=False):
            expected, got = _trial(policy)
    except Exception as error:  # models differ in their arguments
        return f"a trial raised {type(error).__name__}: {error}"
    if not agree(expected, got):
        return "a trial gave logits that differ from the model's own forward pass"
    return "a trial gave the same logits for two images" if agree(got[0], got[1]) else ""


def trial_rows(policy: Any) -> list[tuple[Tensor, ImageSpan]]:
    """Return the ids, (1, T), and the span of two texts with different images of the same size."""
    import PIL.Image

    pixels = torch.randint(0, 256, (2, 48 * 32 * 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    chat, rows = policy.chat, []
    text = chat.encode("1 2 3 4 5 6 7")
    for part in pixels:
        image = Image(PIL.Image.frombytes("RGB", (48, 32), part.numpy().tobytes()))
        placeholders = chat.encode(chat.reader.expansion(image))
        ids = torch.tensor([[*text, *placeholders, *text]], device=policy.device)
        rows.append((ids, ImageSpan(image, len(text), len(placeholders))))
    return rows


def _trial(policy: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of two texts with images, from the model's forward pass, one by one, and from the policy."""
    model, rows = policy.model, trial_rows(policy)
    ids = torch.cat([row for row, _ in rows])
    shown = _row_images(policy, ids, [[span] for _, span in rows])
    own = model.get_base_model().forward if policy.has_adapter else model.forward
    names = {"token_type_ids", "mm_token_type_ids"} & inspect.signature(own).parameters.keys()
    logits = []
    for (row, span), index in zip(rows, shown.index, strict=True):
        given = _accepted(inspect.signature(own).parameters, policy, span.image) | dict.fromkeys(
            names, (index[None] >= 0).int()
        )
        logits.append(type(model).forward(model, input_ids=row, use_cache=False, **given).logits.float())
    expected, got = torch.cat(logits), policy.logits(hidden_states(policy.decoder, ids, None, None, shown)[0])
    never = [*policy.placeholders]
    expected[..., never] = got[..., never] = 0
    return expected, got
