"""Policies whose weights are distributed over several processes with `fully_shard` of torch (FSDP2)."""

from __future__ import annotations

import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import broadcast_object_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from agentfly_kit._display import Displayable
from agentfly_kit.errors import PolicyError, SettingsError
from agentfly_kit.policy.forward import ForwardOutput
from agentfly_kit.policy.prefix_tree import PackedTrees
from agentfly_kit.policy.value_head import VALUE_HEAD_PREFIX, Critic

if TYPE_CHECKING:
    from agentfly_kit.policy.policy import Policy
else:
    # Python allows a policy's class to change only to a class with the same first base.
    Policy = Displayable


def shard(policy: Policy, accelerator: Any) -> Policy:
    """Shard a policy in place; see `Policy.shard`."""
    if accelerator.num_processes == 1:
        return policy
    if policy.accelerator is not None:
        raise SettingsError("policy must not be sharded already")
    if getattr(policy.model, "hf_device_map", None):
        raise SettingsError("device_map must not be given to Policy.load for a policy that is sharded")
    if policy.chat.reader is not None:
        raise SettingsError("policy must be a text policy to be sharded, got a vision policy")
    # Run these trials and compute the sizes now, because neither is possible with sharded weights.
    policy.check_head()
    _ = policy._sharing_obstacle, policy.size, policy.vocab_size
    dtypes = {name: tensor.dtype for name, tensor in policy._full_state().items()}
    head = policy.value_head
    heads = [head.trunk, head.head] if isinstance(head, Critic) else [head] if head is not None else []
    rounded = {root: _is_rounded(root) for root in (policy.model, *heads)}  # before any of them is sharded
    mesh = init_device_mesh(policy.device.type, (accelerator.num_processes,))
    for root in rounded:
        _shard_module(root, mesh, rounded[root])
    policy.model.call_sharded = types.MethodType(lambda _, function: function(), policy.model)
    register_fsdp_forward_method(policy.model, "call_sharded")
    policy.__dict__.update(accelerator=accelerator, dtypes=dtypes)
    policy.__class__ = _subclass(ShardedPolicy, type(policy))
    return policy


def _is_rounded(root: Any) -> bool:
    """Return True if bfloat16 weights are trained. Raise SettingsError for types that cannot be sharded."""
    rounded = torch.bfloat16 in {p.dtype for p in root.parameters() if p.requires_grad}
    used = {p.dtype for p in root.parameters()}
    if used - {torch.float32, torch.bfloat16} or (rounded and len(used) > 1):
        raise SettingsError(
            "a sharded policy must have float32 or bfloat16 weights, of one type if bfloat16 weights are trained, "
            f"got {', '.join(sorted(map(str, used)))}; load it with one of these dtypes"
        )
    return rounded


def _shard_module(root: Any, mesh: Any, rounded: bool) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    precision = MixedPrecisionPolicy()
    if rounded:  # keep and reduce in float32, as `adamw` does in one process, but gather and compute in bfloat16
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for p in root.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
    layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, root):
        sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        # The loss of a minibatch is the sum over processes, so gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for p in root.parameters():
        p.rounded = rounded


def _subclass(mixin: type, base: type) -> Any:
    return type(mixin.__name__, (mixin, base), {})


class ShardedPolicy(Policy):
    """Policy whose weights are sharded over processes. All processes must call its methods together."""

    dtypes: dict[str, torch.dtype]  # of the weights before sharding; shards of trained bfloat16 weights are float32

    # --- forward passes ---

    def forward(self, ids: Tensor, mask: Tensor, temperatures: Tensor, **options: Any) -> ForwardOutput:
        # The other processes may compute more micro-batches, and need this process's part of the weights.
        if not len(ids):
            ids, mask = ids.new_zeros(1, 2), mask.new_zeros(1, 2)
            temperatures, options["row_keys"] = torch.ones(1), None
        whole = super().forward

        def copied() -> dict[str, Tensor]:
            # FSDP registers hooks on the results, which must not be views.
            out = vars(whole(ids, mask, temperatures, **options))
            return {name: values.clone() for name, values in out.items() if values is not None}

        # Copy again, because `torch.autograd.grad` with respect to a result must not call the hooks.
        found = {name: values.clone() for name, values in self.model.call_sharded(copied).items()}
        return ForwardOutput(**{"entropy": None, "value": None} | found)

    def _values(
        self,
        ids: Tensor,
        packed: PackedTrees | None,
        place: Tensor,
        states: Tensor | None,
        images: Any,
    ) -> Tensor:
        return super()._values(ids if len(ids) else ids.new_zeros(1, 2), packed, place, states, images)

    def hidden(self, *args: Any, **options: Any) -> Tensor:
        raise PolicyError("hidden() is not available for a sharded policy; use forward(..., layers=)")

    def micro_batches(self, batch: Any, rows: Tensor | None = None, micro_tokens: int | None = None) -> list[Tensor]:
        """Split rows as `Policy.micro_batches` does, and add empty parts until all processes have the same number."""
        parts = super().micro_batches(batch, rows, micro_tokens)
        counts = self.accelerator.gather(torch.tensor([len(parts)], device=self.device))
        return parts + [torch.empty(0, dtype=torch.long)] * (int(counts.max()) - len(parts))

    # --- weights ---

    def gathered(self) -> Policy:
        """Return a policy that saves the full weights. Only the main process receives them."""
        policy: Any = object.__new__(_subclass(_GatheredPolicy, type(self).__bases__[1]))
        policy.__dict__.update(self.__dict__, whole=self._gather(super()._full_state()))
        return policy  # type: ignore[no-any-return]

    def _gather(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return full weights on the CPU in the main process, and an empty dict in other processes."""
        ties = {name: id(p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        found: dict[Any, Tensor] = {}  # tied weights are gathered once
        for name, tensor in state.items():
            key = ties.get(name, name)
            if key not in found:
                found[key] = _whole(tensor.detach().to(self.dtypes[name]), self.accelerator)
        return {name: found[ties.get(name, name)] for name in state} if self.accelerator.is_main_process else {}

    def state(self) -> dict[str, Tensor]:
        """Return the full weights (of the adapter, if there is one) on the CPU in the main process, otherwise {}."""
        return self._gather(super().state())

    def load_state(self, state: dict[str, Tensor], version: int | None = None) -> None:
        """Load full weights. Each process must pass all of them."""
        own = super()._full_state()
        super().load_state({name: _part(v, own.get(name)) for name, v in state.items()}, version)

    def fingerprint(self) -> str:
        digest = [self.gathered().fingerprint()]
        broadcast_object_list(digest)
        return digest[0]

    def save(self, path: str | Path) -> Path:
        """Save the full weights in the main process, as `Policy.save` does."""
        policy = self.gathered()
        try:
            return policy.save(path) if self.accelerator.is_main_process else Path(path)
        finally:
            self.accelerator.wait_for_everyone()

    def copy(self) -> Policy:
        raise PolicyError("a sharded policy cannot be copied; copy the policy before policy.shard(accelerator)")

    def reference(self) -> Policy:
        """Return the base model of an adapter as the reference. Without an adapter, raise PolicyError."""
        if not self.has_adapter:
            raise PolicyError(
                "a sharded policy cannot be copied; call policy.reference() before policy.shard(accelerator), and pass "
                "it as reference="
            )
        base = super().reference()
        base.__class__ = _subclass(ShardedPolicy, type(base))
        return base

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, sharded over {self.accelerator.num_processes} processes)"


class _GatheredPolicy(Policy):
    whole: dict[str, Tensor]

    def _full_state(self) -> dict[str, Tensor]:
        return self.whole

    def save(self, path: str | Path) -> Path:
        n = len(VALUE_HEAD_PREFIX)
        head = {name[n:]: tensor for name, tensor in self.whole.items() if name.startswith(VALUE_HEAD_PREFIX)}
        model = {name: tensor for name, tensor in self.whole.items() if not name.startswith(VALUE_HEAD_PREFIX)}
        dtype = next(iter(model.values())).dtype
        folder = self._write(Path(path), head, state_dict=model)
        if not self.has_adapter:  # transformers has written the dtype of the shards
            self.model.config.dtype = dtype
            self.model.config.save_pretrained(folder)
        return folder


def gather(policy: Any, optimizer: torch.optim.Optimizer) -> tuple[Policy, Any]:
    """Return a policy and an optimizer that can be saved, with the full weights and moments in the main process."""
    saved = optimizer.state_dict()
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in saved["state"].items():
        master = {"master": parameters[i].detach()} if parameters[i].rounded else {}  # see `adamw`
        saved["state"][i] = {name: _whole(tensor, policy.accelerator) for name, tensor in (values | master).items()}
    return policy.gathered(), SimpleNamespace(state_dict=lambda: saved)


def scatter(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this process's part of an optimizer state that contains full moments. Load float32 copies of weights."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = {i: {k: _part(v, parameters[i]) for k, v in values.items()} for i, values in state["state"].items()}
    for i, values in parts.items():
        held = parameters[i].data
        master = values.pop("master", held)
        # As in one process, a copy counts only where it rounds to the current weight, which may have changed since.
        held.copy_(torch.where(master.bfloat16() == held.bfloat16(), master, held))
    return {**state, "state": parts}


def _whole(tensor: Tensor, accelerator: Any) -> Tensor:
    """Return a full tensor on the CPU in the main process, and an empty one in the others."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if accelerator.is_main_process else whole.new_empty(0)


def _part(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return this process's part of the tensor `whole`, sharded in the same way as `like`."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    # With src_data_rank=None, each process takes its part without communication.
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
