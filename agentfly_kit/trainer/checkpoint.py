"""Checkpoints: weights, optimizer state, and the rollout that was prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.errors import RunError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.run_dir import Run

_VERSION = 1


@dataclass(frozen=True)
class ResumedState:
    """State of the training loop in a checkpoint, besides weights and optimizer.

    Attributes:
        steps: Number of completed iterations.
        kl_coef: Current KL coefficient.
        prefetched: Chains of the next iteration, if they were sampled already.
    """

    steps: int
    kl_coef: float
    prefetched: Rollout | None


def save(
    run: Run, policy: Policy, optimizer: torch.optim.Optimizer, steps: int, kl_coef: float, prefetched: Rollout | None
) -> None:
    """Write a checkpoint to the folder of a run. It becomes valid only when it is complete.

    Args:
        run: Folder of the run.
        policy: Policy whose weights and version are saved.
        optimizer: Its optimizer.
        steps: Number of completed iterations.
        kl_coef: Current KL coefficient.
        prefetched: Chains of the next iteration, if they were sampled already. They are left out if their tasks cannot
            be saved as JSON.

    Raises:
        RunError: If the checkpoint cannot be written; the previous one is kept.
    """
    state = {
        "version": _VERSION,
        "steps": steps,
        "policy": policy.state(),
        "policy_version": policy.version,
        "optimizer": optimizer.state_dict(),
        "kl_coef": kl_coef,
    }
    with run.new_checkpoint() as folder:
        torch.save(state, folder / "state.pt")
        if prefetched is not None:
            try:
                prefetched.save(folder / "ahead.jsonl")
            except RunError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                # The tasks are not JSON-serializable. A resumed run samples these chains again.
                (folder / "ahead.jsonl").unlink(missing_ok=True)


def load(run: Run, checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer, kl_coef: float) -> ResumedState:
    """Load the weights and the optimizer state of a checkpoint.

    Args:
        run: Folder of the run.
        checkpoint: Folder of the checkpoint.
        policy: Policy that receives the weights and the version.
        optimizer: Optimizer that receives the state.
        kl_coef: KL coefficient to use if the checkpoint has none.

    Returns:
        The remaining state of the training loop.

    Raises:
        RunError: If the checkpoint is damaged or was written by a newer version. The message explains how to continue
            from the previous checkpoint, if there is one.
    """
    file = checkpoint / "state.pt"
    try:
        run.verify(checkpoint)
        state = torch.load(file, map_location=policy.device, weights_only=True)
        if state["version"] > _VERSION:
            raise RunError(
                f"{file} was written by a newer version ({state['version']} > {_VERSION}); upgrade agentfly_kit"
            )
        prefetched = checkpoint / "ahead.jsonl"
        resumed = ResumedState(
            int(state["steps"]),
            float(state.get("kl_coef", kl_coef)),
            Rollout.load(prefetched) if prefetched.exists() else None,
        )
        policy.load_state(state["policy"])
        policy.version = state["policy_version"]
        optimizer.load_state_dict(state["optimizer"])
        return resumed
    except RunError as error:
        raise RunError(f"{error}; {_recovery_hint(run, checkpoint)}") from error
    except Exception as error:
        raise RunError(f"{file} cannot be read ({error}); {_recovery_hint(run, checkpoint)}") from error


def _recovery_hint(run: Run, checkpoint: Path) -> str:
    """Return how to continue without this checkpoint."""
    anew = "resume=False starts the run anew"
    other = run.path / "checkpoint.before"
    if checkpoint == other or not (other / "done").exists():
        return anew
    return f"delete {checkpoint} to go on from the checkpoint before it, or {anew}"


def save_reference(run: Run, reference: Policy) -> None:
    """Save the weights of the reference policy in the folder of a run."""
    with run.atomic_write_bytes(run.path / "reference.pt") as file:
        torch.save(reference.state(), file)


def load_reference(run: Run, policy: Policy) -> Policy:
    """Load the reference policy of a run. For a policy with an adapter it is the base model, which needs no file.

    Args:
        run: Folder of the run.
        policy: Policy that is trained.

    Returns:
        The frozen reference policy.

    Raises:
        RunError: If the file cannot be read.
    """
    reference = policy.reference()
    if policy.has_adapter:
        return reference
    file = run.path / "reference.pt"
    try:
        reference.load_state(torch.load(file, map_location=policy.device, weights_only=True))
    except Exception as error:
        raise RunError(f"{file} cannot be read ({error}); resume=False starts the run anew") from error
    return reference
