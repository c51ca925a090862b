"""The trajectories that a user selected in a view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ._tokens import some


class Trajectories:
    """Iterable of the trajectories selected in the browser; falsy if empty."""

    def __init__(self, ids: Sequence[str], trajectories: Sequence[Any]) -> None:
        self.ids = tuple(ids)
        self._found = tuple(trajectories)

    @property
    def trajectories(self) -> tuple[Any, ...]:
        """The selected trajectories.

        Raises:  LookupError if a trajectory was garbage-collected. The view does not keep trajectories alive.
        """
        gone = [id for id, t in zip(self.ids, self._found, strict=True) if t is None]
        if gone:
            raise LookupError(f"{some(gone)} no longer exists; keep the rollout in a variable")
        return self._found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.ids)

    def to_frame(self, kind: Any = "trajectories") -> Any:
        """Return a data frame with one row per trajectory, turn or token, as `Rollout.to_frame` does."""
        from agentfly_kit.agent.rollout import Rollout

        return Rollout.from_trajectories(self.trajectories).to_frame(kind)

    def __repr__(self) -> str:
        return f"Trajectories({some(list(self.ids)) if self.ids else 'nothing'})"
