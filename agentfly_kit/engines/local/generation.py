"""Continuous batching: prefill of waiting requests and decode steps of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentfly_kit import seeds
from agentfly_kit._async.delivery import deliver
from agentfly_kit._async.gc_pause import collect
from agentfly_kit.engines.local.decoder import CachedForward, cached_forward
from agentfly_kit.engines.local.kv_cache import aligned, padded
from agentfly_kit.engines.local.sampling import sample_tokens
from agentfly_kit.engines.local.slots import ROW_MULTIPLE, Request, SlotTable
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.attention import is_recurrent
from agentfly_kit.policy.policy import Policy

# Maximum numbers of tokens per prefill and per forward pass of a prefill, including padding. On a CPU, intermediate
# results of a forward pass should fit into the processor's cache. The limits for other devices have not been tuned.
_CPU_PREFILL_TOKENS, _CPU_FORWARD_TOKENS = 4096, 512
_PREFILL_TOKENS, _FORWARD_TOKENS = 32768, 8192
# Possible widths of a prefill chunk in tokens.
_CHUNK_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
# A request waits for the first prompt of a prefill if it can then copy at least this many more tokens. The prompts of a
# rollout usually share their system message.
_MIN_SHARED_TOKENS = 32
# A prefill starts when more requests wait than run, or when one has waited for more than this many decode steps.
_PREFILL_MAX_WAIT = 12


class ContinuousBatch:
    """Scheduler that runs the requests of a `LocalEngine` in one batch and sets the result of each request's future."""

    def __init__(self, policy: Policy, slots: int, alternatives: int = 0) -> None:
        self.policy = policy
        self._alternatives = alternatives
        self.waiting: list[Request] = []
        # Number of context tokens computed so far, excluding those that were copied or reused.
        self.prefilled = 0
        self.sampled = 0
        self._limit = slots
        self._weights = _WeightMonitor(policy)
        # Features of images; see `PromptImages`.
        self._features: dict[int, Any] = {}
        self._model: Any = None
        self.is_recurrent = False
        self._cached_forward: CachedForward
        self.table = self._empty_table()
        with policy.lock:
            self._check_model()

    def _empty_table(self) -> SlotTable:
        # Padding makes results batch-invariant, which the library ensures in float32 on a CPU only.
        round_up = padded if self.policy.is_float32_on_cpu else aligned
        return SlotTable(self._limit, self.policy.max_length, round_up)

    def step(self, released: list[str]) -> None:
        """Release the given sessions, prefill if enough requests wait, and sample one token for each running row."""
        table = self.table
        table.tick += 1
        for session in released:
            table.release(session)
        if self._drop_cancelled():
            # Chains of a closed event loop are in reference cycles and may still hold leases.
            collect()
        if self.waiting:
            for request in self.waiting:
                request.waited += 1
                # Prefilling one row takes as long as a decode step of many rows, so collect several requests first.
            if len(self.waiting) > table.active or self.waiting[0].waited > _PREFILL_MAX_WAIT:
                while self._prefill():
                    pass
        if table.active:
            self._decode()

    def _drop_cancelled(self) -> bool:
        """Remove the requests of cancelled callers and of closed event loops. Return True if a loop was closed."""
        table = self.table
        closed = [r for r in (*self.waiting, *table.requests()) if r.future.get_loop().is_closed()]
        for request in closed:
            request.cancelled = True
        self.waiting = [r for r in self.waiting if not r.cancelled]
        for row in reversed(range(table.active)):
            if table.running(row).cancelled:
                table.retire(row)
        return bool(closed)

    def fail(self, error: Exception) -> None:
        """Fail all requests with the error and discard the slots, whose state is now undefined."""
        wrapped = EngineError(f"LocalEngine failed while sampling: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        requests = [*self.waiting, *self.table.requests()]
        self.waiting, self.table = [], self._empty_table()
        deliver(*((request.future, wrapped) for request in requests))

    # --- prefill ---

    def _prefill(self) -> bool:
        """Assign slots to waiting requests, prefill their prompts and sample their first tokens.

        Returns True if requests are waiting for a prefix that is now in the cache.
        """
        table = self.table
        chosen: list[tuple[Request, int, int]] = []
        duplicates: list[tuple[Request, int, int]] = []
        later: list[Request] = []
        lead: dict[bytes, int] = {}
        width, shares = 0, False
        limit = _CPU_PREFILL_TOKENS if self.policy.device.type == "cpu" else _PREFILL_TOKENS
        # Hold the lock, so that the weights cannot change between the search for cached prefixes and the prefill.
        with self.policy.lock:
            table.use_weights(self._weights.number(thorough=not table.active))
            for request in self.waiting:
                # The chains of a group have the same prompt, so prefill it once and copy its keys and logits.
                key = request.row_keys.tobytes()
                if chosen and key not in lead and self._should_wait(request, chosen[0]):
                    shares = True
                    later.append(request)
                    continue
                width = max(width, min(len(request.ids) - table.held_history(request), _CHUNK_WIDTHS[-1]))
                if key not in lead and width * (len(chosen) + 1) > limit:
                    later.append(request)
                    continue
                try:
                    place = table.admit(request, len(self.waiting), empty=key in lead)
                except EngineError as error:
                    deliver((request.future, error))
                    continue
                if place is None:
                    later.append(request)
                elif key in lead:
                    duplicates.append((request, place[0], lead[key]))
                else:
                    lead[key] = len(chosen)
                    chosen.append((request, *place))
            self.waiting = later
            if not chosen:
                return False
            logits, version = self._prompt_logits(chosen)
            for request, slot, first in duplicates:
                table.cache.copy(chosen[first][1], slot, len(request.ids))
                request.shift = chosen[first][0].shift
            logits = torch.cat([logits, logits[[first for _, _, first in duplicates]]])
            chosen += duplicates
        going: list[int] = []
        for i, (request, slot, _) in enumerate(chosen):
            if request.top:
                table.reserve(slot, None)
                deliver((request.future, _top_distribution(logits[i], request)))
            else:
                going.append(i)
        if not going:
            return shares
        ended = self._sample_next([chosen[i][0] for i in going], logits[going], version)
        joining = []
        for at, i in enumerate(going):
            if at in ended:
                table.reserve(chosen[i][1], None)
            else:
                joining.append(chosen[i][1])
        # The running rows occupy the leading slots, so swap new rows with the idle slots after them.
        for slot in sorted(joining):
            table.start(slot)
        requests = {at: chosen[going[at]][0] for at in ended}
        deliver(*((requests[at].future, requests[at].sample(why)) for at, why in ended.items()))
        return shares

    def _should_wait(self, request: Request, first: tuple[Request, int, int]) -> bool:
        """Return True if many tokens of the request will be in the cache only after the prefill of `first`.

        `first` contains the first chosen request, its slot, and the number of tokens already in that slot.
        """
        if self.is_recurrent:  # a prefix of a cached history cannot be copied
            return False
        leader, _, held = first
        keys, other = request.row_keys[: len(leader.ids)], leader.row_keys[: len(request.ids)]
        same = keys == other
        common = len(keys) if same.all() else int(same.argmin())
        return common - max(held, self.table.held_history(request)) >= _MIN_SHARED_TOKENS

    def _prompt_logits(self, chosen: list[tuple[Request, int, int]]) -> tuple[Tensor, int]:
        """Return the logits after each of R prompts, (R, vocabulary size), and the policy version that computed them.

        `chosen` contains tuples of request, slot and number of tokens already in the slot.
        """
        cache = self.table.cache
        device = self.policy.device
        for request, slot, _ in chosen:
            cache.row_keys[slot, : len(request.ids)] = request.row_keys
        shown: Any = None
        if any(request.images for request, _, _ in chosen):
            from agentfly_kit.engines.local.images import PromptImages

            shown = PromptImages(self.policy, chosen, self._features, self._weights.last)
        done: dict[int, Tensor] = {}
        left = chosen
        while left:
            longest = max(len(r.ids) - start for r, _, start in left)
            width = next((w for w in _CHUNK_WIDTHS if w >= longest), _CHUNK_WIDTHS[-1])
            if self.is_recurrent:  # padding would change the states
                width = min(width, *(len(r.ids) - start for r, _, start in left))
            tokens = np.zeros((len(left), width), dtype=np.int64)
            starts = np.array([start for _, _, start in left])
            counts = np.array([min(width, len(r.ids) - start) for r, _, start in left])
            for i, (request, _, start) in enumerate(left):
                tokens[i, : counts[i]] = request.ids[start : start + counts[i]]
            # Padding is written to the position after a row's last token, and is overwritten by the row's next token.
            ends = starts + counts
            positions = torch.as_tensor(np.minimum(starts[:, None] + np.arange(width), ends[:, None]), device=device)
            slots = torch.as_tensor([slot for _, slot, _ in left], device=device)
            given = torch.as_tensor(tokens, device=device)
            limit = _CPU_FORWARD_TOKENS if device.type == "cpu" else _FORWARD_TOKENS
            few = max(ROW_MULTIPLE, limit // width // ROW_MULTIPLE * ROW_MULTIPLE)
            pieces = zip(given.split(few), positions.split(few), slots.split(few), strict=True)
            hidden = torch.cat([self._forward(*piece, shown.options(*piece) if shown else {}) for piece in pieces])
            self.prefilled += int(counts.sum())
            following = []
            for i, (request, slot, start) in enumerate(left):
                end = start + int(counts[i])
                cache.length[slot] = end
                if start <= cache.prefilled[slot]:
                    cache.prefilled[slot] = end
                if end == len(request.ids):
                    done[slot] = hidden[i, int(counts[i]) - 1]
                else:
                    following.append((request, slot, end))
            left = following
        states = torch.stack([done[slot] for _, slot, _ in chosen])
        padded = torch.cat([states, states[:1].expand(-len(chosen) % ROW_MULTIPLE, -1)])
        return self._logits(padded)[: len(chosen)], self.policy.version

    # --- decoding ---

    def _decode(self) -> None:
        table, cache = self.table, self.table.cache
        count = table.active
        # Padding rows would change the recurrent states of other slots.
        rows = count if self.is_recurrent else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        requests = [table.running(row) for row in range(count)]
        tokens = np.zeros(rows, dtype=np.int64)
        tokens[:count] = [request.sampled[-1] for request in requests]
        at = cache.length[:rows].copy()  # padding rows write to a position that is never read
        device = self.policy.device
        given = torch.as_tensor(np.stack([tokens, at]), device=device)[:, :, None]
        options = {}
        if any(request.shift for request in requests):
            shifts = [request.shift for request in requests] + [0] * (rows - count)
            options["position_ids"] = given[1] + torch.tensor(shifts, device=device)[:, None]
        with self.policy.lock:
            hidden = self._forward(given[0], given[1], rows, options)
            logits = self._logits(hidden[:, 0])[:count]
            version = self.policy.version
        cache.row_keys[np.arange(count), at[:count]] = tokens[:count]
        cache.length[:count] += 1
        ended = self._sample_next(requests, logits, version)
        for row in sorted(ended, reverse=True):
            table.retire(row)
        deliver(*((requests[row].future, requests[row].sample(why)) for row, why in ended.items()))

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | int, options: dict[str, Any]) -> Tensor:
        """Compute hidden states, (R, C, d), of C tokens in each of the R slots `rows`. Requires the policy's lock."""
        self._check_model()
        stamp = (self._weights.last, self.policy.version)
        return self._cached_forward(self.table.cache, rows, tokens, positions, stamp, options)

    def _logits(self, states: Tensor) -> Tensor:
        return self.policy.logits(states, getattr(self._cached_forward, "head", None))

    def _check_model(self) -> None:
        """Select the forward pass if the model is new or was replaced, for example by adding an adapter."""
        if self.policy.model.training:  # another library has trained it; dropout must be off
            self.policy.model.eval()
        if self._model is not self.policy.model:
            self._cached_forward = cached_forward(self.policy)
            self._model, self.is_recurrent = self.policy.model, is_recurrent(self.policy.decoder)

    def _sample_next(self, requests: Sequence[Request], logits: Tensor, version: int) -> dict[int, str]:
        """Sample one token for each request. Return a dict from the index of each ended request to its stop reason."""
        device = logits.device
        # The random number for a token depends only on its seed and position, and therefore not on other requests.
        noise = seeds.uniforms(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([len(request.sampled) for request in requests], dtype=np.uint64),
        )

        def column(name: str, off: float) -> Tensor | None:
            values = [getattr(request.sampling, name) for request in requests]
            return torch.tensor(values, device=device) if any(value != off for value in values) else None

        allowed = None
        if any(request.matchers for request in requests):
            from agentfly_kit.engines.local.grammar import allowed_tokens

            allowed = allowed_tokens([request.matchers for request in requests], logits.shape[-1], device)
        # A filter that no request uses is None and is skipped.
        drawn = sample_tokens(
            logits,
            torch.tensor([float(request.sampling.temperature) for request in requests], device=device),
            torch.as_tensor(noise, device=device),
            top_p=column("top_p", 1.0),
            top_k=column("top_k", 0),
            min_p=column("min_p", 0.0),
            allowed=allowed,
            alternatives=self._alternatives,
        )
        if not bool(drawn.logprobs.isfinite().all()):
            raise EngineError("the logits are not finite; the policy's weights have diverged")
        self.sampled += len(requests)
        # Transfer each tensor only once, because each transfer waits for the device.
        ids, logprobs, entropies = drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.entropies.tolist()
        kept_mass = drawn.kept_mass.tolist() if drawn.kept_mass is not None else None
        top = drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
        ended: dict[int, str] = {}
        for i, request in enumerate(requests):
            request.sampled.append(ids[i])
            request.logprobs.append(logprobs[i])
            request.entropies.append(entropies[i])
            request.versions.append(version)
            if kept_mass is not None:
                request.kept_mass.append(kept_mass[i])
            if self._alternatives:
                request.alternatives.append(tuple(zip(top[0][i], top[1][i], strict=True)))
            if not all(matcher.consume_token(ids[i]) for matcher in request.matchers):
                ended[i] = "abort"  # `Request.sample` returns an error
                continue
            # A stop token counts as a stop, not as a truncation, even if it is the last token within the limit.
            if ids[i] in self.policy.chat.stop_ids:
                ended[i] = "stop"
            elif request.sampling.stop and self._has_stop_string(request):
                ended[i] = "string"
            elif len(request.sampled) >= request.limit:
                ended[i] = "length"
        return ended

    def _has_stop_string(self, request: Request) -> bool:
        text = self.policy.chat.text(request.sampled)
        return any(stop in text for stop in request.sampling.stop)


class _WeightMonitor:
    """Counter of changes to a policy's weights.

    `policy.version` and torch's version counters miss some changes: loading weights may restore an old version, and
    neither counter changes if the user runs a fused optimizer or assigns to `.data`. Therefore the first elements of
    each parameter are compared too. A thorough check also compares all vectors, and the product of each matrix with a
    fixed vector, which takes as long as reading the weights once.
    """

    def __init__(self, policy: Policy) -> None:
        self.last = 0
        self._policy = policy
        self._key: tuple[int, int] | None = None
        self._values = torch.empty(0)
        # Summaries from the last thorough check; None if the weights have changed since then
        self._summaries: Tensor | None = None
        self._probes: dict[object, Tensor] = {}

    def _summary(self, p: Tensor) -> Tensor:
        if p.dim() < 2 or not p.is_floating_point() or p.dtype.itemsize < 2:  # compare a few quantized weights
            return p.detach().flatten()[: None if p.dim() < 2 else 8].float()
        key = (p.shape[-1], p.dtype, p.device)
        if key not in self._probes:
            self._probes[key] = torch.randn(p.shape[-1], generator=torch.Generator().manual_seed(0)).to(p)
        return (p.detach().reshape(-1, p.shape[-1]) @ self._probes[key]).float()

    def number(self, thorough: bool) -> int:
        """Return a number that is incremented if the weights have changed since the previous call."""
        parameters = list(self._policy.model.parameters())
        values = torch.cat([p.detach().flatten()[:8].float() for p in parameters])
        key = (self._policy.version, sum(p._version for p in parameters))
        summaries = torch.cat([self._summary(p) for p in parameters]) if thorough else self._summaries
        known = key == self._key and torch.equal(values, self._values)
        if known and summaries is not None and self._summaries is not None:
            known = torch.equal(summaries, self._summaries)
        self.last += not known
        self._key, self._values, self._summaries = key, values, summaries if thorough or known else None
        return self.last


def _top_distribution(logits: Tensor, request: Request) -> tuple[list[int], list[float], float]:
    logp = torch.log_softmax(logits.float() / (request.sampling.temperature or 1.0), dim=-1)
    best = logp.topk(min(request.top, len(logp)))
    p = logp.exp()
    entropy = float(-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum())
    return best.indices.tolist(), best.values.tolist(), entropy
