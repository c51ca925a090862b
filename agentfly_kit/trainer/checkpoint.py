"""What a run goes on from: weights, optimizer, and the rollout that was sampled ahead. Knows no loop."""

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
    """What a checkpoint says beside the weights that it put in place.

    Attributes:
        steps: Iterations behind it.
        kl_coef
        prefetched: The next iteration's chains, where they had been sampled already.
    """

    steps: int
    kl_coef: float
    prefetched: Rollout | None


def save(
    run: Run, policy: Policy, optimizer: torch.optim.Optimizer, steps: int, kl_coef: float, prefetched: Rollout | None
) -> None:
    """Write a checkpoint into a run's folder; it counts only when it is whole.

    Raises:  RunError if it cannot be written; the one before it is kept.
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
                # Its tasks hold what JSON cannot. Whoever goes on from here samples these chains again.
                (folder / "ahead.jsonl").unlink(missing_ok=True)


def load(run: Run, checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer, kl_coef: float) -> ResumedState:
    """Put a checkpoint's weights and optimizer in place.

    Raises:  RunError if it is damaged, or of a newer version; it says whether there is one to fall back on.
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
    anew = "resume=False starts the run anew"
    other = run.path / "checkpoint.before"
    if checkpoint == other or not (other / "done").exists():
        return anew
    return f"delete {checkpoint} to go on from the checkpoint before it, or {anew}"


def save_reference(run: Run, reference: Policy) -> None:
    with run.atomic_write_bytes(run.path / "reference.pt") as file:
        torch.save(reference.state(), file)


def load_reference(run: Run, policy: Policy) -> Policy:
    """The policy that this run's KL is taken to."""
    reference = policy.reference()
    if policy.has_adapter:
        return reference
    file = run.path / "reference.pt"
    try:
        reference.load_state(torch.load(file, map_location=policy.device, weights_only=True))
    except Exception as error:
        raise RunError(f"{file} cannot be read ({error}); resume=False starts the run anew") from error
    return reference
