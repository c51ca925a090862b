"""Saving and loading of checkpoints, which contain the policy, the optimizer state and the training loop's state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.errors import RunError, TrainingError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.run_dir import Run

_VERSION = 2


@dataclass(frozen=True)
class LoopState:
    """State of the training loop that is saved in a checkpoint along with the weights and the optimizer state."""

    steps: int  # number of completed iterations
    kl_coef: float
    prefetched: Rollout | None = None  # chains of the next iteration, if already sampled


def save(run: Run, policy: Policy, optimizer: torch.optim.Optimizer, loop: LoopState) -> None:
    """Save a checkpoint. Prefetched chains are omitted if their tasks cannot be saved as JSON.

    The weights are written by `Policy.save`. Weights that cannot be restored exactly from these files (adapters, and
    weights that transformers converts when it saves them) are also stored in `state.pt`.
    """
    with run.new_checkpoint() as folder:
        policy.save(folder)
        weights, saved = policy.state(), _saved_weights(policy, folder)
        state = {
            "version": _VERSION,
            "steps": loop.steps,
            "names": list(weights),
            "policy": {k: v for k, v in weights.items() if k not in saved or not _same_bits(v, saved[k])},
            "policy_version": policy.version,
            "optimizer": optimizer.state_dict(),
            "kl_coef": loop.kl_coef,
        }
        torch.save(state, folder / "state.pt")
        if loop.prefetched is not None:
            try:
                loop.prefetched.save(folder / "ahead.jsonl")
            except RunError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                # The tasks are not JSON-serializable. Delete the partial file. A resumed run samples the chains again.
                (folder / "ahead.jsonl").unlink(missing_ok=True)


def load(run: Run, checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> LoopState:
    """Load the weights and optimizer state of a checkpoint, and return the state of the training loop."""
    file = checkpoint / "state.pt"
    try:
        whole = policy.accelerator is None
        state = torch.load(file, map_location=policy.device if whole else "cpu", weights_only=True)
        if state["version"] > _VERSION:
            raise RunError(
                f"{file} was written by a newer version ({state['version']} > {_VERSION}); upgrade agentfly_kit"
            )
        prefetched = checkpoint / "ahead.jsonl"
        resumed = LoopState(
            state["steps"], state["kl_coef"], Rollout.load(prefetched) if prefetched.exists() else None
        )
        weights = {**_saved_weights(policy, checkpoint), **state["policy"]}
        loaded = {name: weights[name] for name in state["names"] if name in weights}
        policy.load_state(loaded, state["policy_version"])
        if not whole:
            from agentfly_kit.policy.sharding import scatter

            state["optimizer"] = scatter(state["optimizer"], optimizer)
        optimizer.load_state_dict(state["optimizer"])
        return resumed
    except TrainingError:  # the processes of a learner have failed
        raise
    except Exception as error:
        remedy = "resume=False starts the run from scratch"
        previous = run.path / "checkpoint.before"
        if checkpoint != previous and (previous / "done").exists():
            remedy = f"delete {checkpoint} to continue from the checkpoint before it, or {remedy}"
        problem = str(error) if isinstance(error, RunError) else f"{checkpoint} cannot be read ({error})"
        raise RunError(f"{problem}; {remedy}") from error


def _saved_weights(policy: Policy, folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights that `Policy.save` wrote to a folder. Tied weights are included under each of their names."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    if not policy.has_adapter:
        for file in sorted(folder.glob("model*.safetensors")):
            found |= load_file(file)
    for file in folder.glob("value_head/*.safetensors"):
        found |= {f"value_head.{name}": tensor for name, tensor in load_file(file).items()}
    by_storage: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in Policy.state(policy).items():
        tensor = getattr(tensor, "_local_tensor", tensor)  # local part of a sharded tensor
        if tensor.numel():  # all empty tensors have the same address
            by_storage[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()].append(name)
    for names in by_storage.values():
        for name in names:
            if known := [found[n] for n in (name, *names) if n in found]:
                found[name] = known[0]
    return found


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().cpu().contiguous(), b.contiguous()
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(
        a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)
    )


def save_reference(run: Run, reference: Policy) -> None:
    """Save the reference policy of a run. Call this before the first checkpoint is written."""
    file = run.path / "reference.pt"
    try:
        torch.save(reference.state(), file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        raise RunError(f"{file} could not be written ({error})") from error


def load_reference(run: Run, policy: Policy) -> Policy:
    """Load the frozen reference policy of a run. If the policy has an adapter, this is the base model."""
    reference = policy.reference()
    if policy.has_adapter:
        return reference
    file = run.path / "reference.pt"
    try:
        reference.load_state(torch.load(file, map_location=policy.device, weights_only=True))
    except Exception as error:
        raise RunError(f"{file} cannot be read ({error}); resume=False starts the run from scratch") from error
    return reference
