"""The failures. Every message says what was given, what is wanted and what to do.

Knows no other module. `ToolError` is the one class here that a user raises: it is told to the model.
"""

from __future__ import annotations

from typing import Any


class AgentFlyError(Exception):
    """Base of every error this package raises on purpose."""


# --- what a user wrote ---------------------------------------------------------------------------


class ToolError(AgentFlyError):
    """Raise it in a tool: its text is told to the model as the observation, and the chain goes on."""


class ToolSchemaError(AgentFlyError, TypeError):
    """A tool's signature or docstring cannot become a schema. Names the function and the parameter."""


class RewardError(AgentFlyError, TypeError):
    """A reward's signature or its result cannot be used. Names the function and the argument."""


class TaskError(AgentFlyError, ValueError):
    """A task or a task file is wrong. Names the file and the line, or the position and the field."""


class SettingsError(AgentFlyError, ValueError):
    """An option has a value that nothing can be done with, or two options contradict each other."""


class NotAwaited(AgentFlyError, AttributeError):
    """A result was used before it was awaited. Names the call."""


# --- text and tokens -----------------------------------------------------------------------------


class ChatTemplateError(AgentFlyError):
    """A tokenizer's chat template cannot promise what exact tokens need. Names the missing promise."""


class AlignmentError(AgentFlyError, ValueError):
    """Per-token values do not have the length of the ids they belong to, or a row is not what was sampled."""


# --- policy, engine, training --------------------------------------------------------------------


class PolicyError(AgentFlyError):
    """A policy folder is incomplete or does not fit. Names the file."""


class EngineError(AgentFlyError):
    """An engine failed or is closed; or it was asked for what it declares that it cannot give."""


class BatchError(AgentFlyError, ValueError):
    """Trajectories cannot become a batch: no scored row, several temperatures, ids without logprobs."""


class EmptyBatch(BatchError):
    """No trajectory is left to train on. `dropped` has each one with its reason."""

    def __init__(self, message: str, dropped: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.dropped = dropped


class TrainingError(AgentFlyError):
    """A step diverged or a loop cannot go on. The last good checkpoint is kept; the message says where."""


class RunMismatch(AgentFlyError):
    """A run's folder holds a run with other settings. The message shows the difference."""


class RunError(AgentFlyError):
    """A run's folder cannot be read or written. Names the file."""


# --- sandboxes -----------------------------------------------------------------------------------


class SandboxError(AgentFlyError):
    """A sandbox could not start or died: the host's fault, not the fault of the code inside it."""


class IsolationError(SandboxError):
    """The isolation level that was asked for cannot be had on this machine."""


class IsolationWarning(UserWarning):
    """Sandboxes run below the isolation level "strict" because nothing stronger is available here. Shown once."""


class LeaseRevoked(SandboxError):
    """The pool took a sandbox from its holder: held for too long, or ended by hand. The message says which."""


class RemotePoolError(SandboxError):
    """A remote pool does not answer, refused its client, or has ended its lease. Names the address."""


class PoolTimeout(AgentFlyError, TimeoutError):
    """No sandbox became free in time. The message says who holds what."""


class PoolClosed(AgentFlyError):
    """The pool is closed; its waiters are woken with this."""
