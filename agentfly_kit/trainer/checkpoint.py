"""Checkpoints: weights, optimizer state, and the prefetched rollout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.errors import RunError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.run_dir import Run

_VERSION = 1


@dataclass(frozen=True)
class LoopState:
    """State of the training loop in a checkpoint, in addition to the weights and the optimizer state."""

    steps: int  # number of completed iterations
    kl_coef: float
    prefetched: Rollout | None = None  # chains of the next iteration, if already sampled


def save(run: Run, policy: Policy, optimizer: torch.optim.Optimizer, loop: LoopState) -> None:
    """Write a checkpoint. Prefetched chains are omitted if their tasks cannot be saved as JSON."""
    state = {
        "version": _VERSION,
        "steps": loop.steps,
        "policy": policy.state(),
        "policy_version": policy.version,
        "optimizer": optimizer.state_dict(),
        "kl_coef": loop.kl_coef,
    }
    with run.new_checkpoint() as folder:
        torch.save(state, folder / "state.pt")
        if loop.prefetched is not None:
            try:
                loop.prefetched.save(folder / "ahead.jsonl")
            except RunError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                # The tasks are not JSON-serializable, so a resumed run must resample these chains.
                (folder / "ahead.jsonl").unlink(missing_ok=True)


def load(run: Run, checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> LoopState:
    """Load the weights and optimizer state of a checkpoint, and return the state of the training loop."""
    file = checkpoint / "state.pt"
    try:
        run.verify(checkpoint)
        state = torch.load(file, map_location=policy.device, weights_only=True)
        if state["version"] > _VERSION:
            raise RunError(
                f"{file} was written by a newer version ({state['version']} > {_VERSION}); upgrade agentfly_kit"
            )
        prefetched = checkpoint / "ahead.jsonl"
        resumed = LoopState(state["steps"], state["kl_coef"], Rollout.load(prefetched) if prefetched.exists() else None)
        policy.load_state(state["policy"])
        policy.version = state["policy_version"]
        optimizer.load_state_dict(state["optimizer"])
        return resumed
    except Exception as error:
        remedy = "resume=False starts the run from scratch"
        previous = run.path / "checkpoint.before"
        if checkpoint != previous and (previous / "done").exists():
            remedy = f"delete {checkpoint} to continue from the checkpoint before it, or {remedy}"
        problem = str(error) if isinstance(error, RunError) else f"{file} cannot be read ({error})"
        raise RunError(f"{problem}; {remedy}") from error


def save_reference(run: Run, reference: Policy) -> None:
    """Save the reference policy of a run. Call this before the first checkpoint is written."""
    file = run.path / "reference.pt"
    try:
        with file.open("wb") as out:
            torch.save(reference.state(), out)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        raise RunError(f"{file} could not be written ({error})") from error


def load_reference(run: Run, policy: Policy) -> Policy:
    """Load the frozen reference policy of a run. For a policy with an adapter, this is the base model."""
    reference = policy.reference()
    if policy.has_adapter:
        return reference
    file = run.path / "reference.pt"
    try:
        reference.load_state(torch.load(file, map_location=policy.device, weights_only=True))
    except Exception as error:
        raise RunError(f"{file} cannot be read ({error}); resume=False starts the run from scratch") from error
    return reference
