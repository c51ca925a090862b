"""Base class of views that list chains. A selected chain can be shown in a TokenView, in a ChainStepper or as code."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import traitlets

from agentfly_kit.integrations.html import escape_control_chars

from ._base import Opener
from ._chain_code import _named
from ._format import sendable
from ._selection import Trajectories
from .chain_stepper import ChainStepper
from .token_view import TokenView


def is_hash(task_id: str) -> bool:
    """Return True if the id is a hash of the task's content, as for tasks that were loaded without ids."""
    return re.fullmatch(r"[0-9a-f]{12}(-\d+)?", task_id) is not None


def chain_label(trajectory: Any) -> str:
    """Return a readable name for a trajectory, to show next to the question of its task."""
    return f"chain {trajectory.chain}" if is_hash(trajectory.task.id) else str(trajectory.id)


def find_in(source: str, id: str) -> str:
    """Return a Python expression for the trajectory with this id in the expression `source`."""
    return f"next(t for t in {source} if t.id == {id!r})"


def cell_of(trajectory: Any, found: str, agent: Any) -> str:
    """Return code for a cell that continues a trajectory, given by its name or the expression `found`, as a chain."""
    name = _named(trajectory) if trajectory is not None else None
    who = (_named(agent) if agent is not None else None) or "agent"
    return "\n".join((
        f"trajectory = {name or found}",
        "print(trajectory.explain())",
        f"chain = {who}.chain(trajectory)  # with its turns; chain.rewind(to=2) goes back, chain.step() continues",
    ))  # fmt: skip


class ChainsView(Opener):
    """View with a list from which a chain can be picked. `selection` contains the picked chain, and `opened` is the
    TokenView or ChainStepper that shows it.

    Subclasses implement `_agent_for()`, `_expression(id)`, and `_trajectory(id)`, which may raise LookupError.
    """

    picking: ClassVar[frozenset[str]] = frozenset(
        {"chain", "chain_tokens", "chain_stepper", "chain_code", "chain_leave"}
    )

    # The picked chain as {"id", "name", "agent"}; empty if no chain is picked.
    _chain = traitlets.Dict().tag(sync=True)
    _cell = traitlets.Dict().tag(sync=True)
    # Trajectory of the TokenView, which has only a weak reference to it.
    _shown: Any = None

    def _trajectory(self, id: str) -> Any:
        raise NotImplementedError

    def _agent_for(self) -> Any:
        return None

    def _expression(self, id: str) -> str:
        """Return a Python expression for the chain with this id."""
        raise NotImplementedError

    @property
    def selection(self) -> Trajectories:
        """The chain picked in the browser, as an iterable with `.to_frame()`. Empty if no chain is picked."""
        id = self._chain.get("id")
        if id is None:
            return Trajectories((), ())
        try:
            found = self._trajectory(id)
        except LookupError:
            found = None
        return Trajectories((id,), (found,))

    def pick(self, trajectory: Any) -> None:
        """Pick a chain by its trajectory or its id, and show it on the page. None clears the selection."""
        if trajectory is None:
            self._show_below(None)
            self._chain = {}
            return
        id = sendable(trajectory if isinstance(trajectory, str) else trajectory.id)
        self._trajectory(id)
        if self._chain.get("id") != id:
            self._show_below(None)
        self._chain = {"id": id, "name": escape_control_chars(id, 200), "agent": self._agent_for() is not None}

    def _do_chain(self, value: Any) -> None:
        self.pick(value)

    def _do_chain_tokens(self, value: Any) -> None:
        if value is not None:
            self.pick(value)
        old, self._shown = self.opened, self._trajectory(self._picked_id())
        view = TokenView(self._shown, agent=self._agent_for())
        if isinstance(old, TokenView):  # the same chain, which may have had fewer turns
            view.signal, view._selected = old.signal, old._selected
        self._show_below(view)

    def _do_chain_stepper(self, _: Any) -> None:
        self._show_below(ChainStepper(self._agent_for(), self._trajectory(self._picked_id())))

    def _do_chain_code(self, _: Any) -> None:
        id = self._picked_id()
        text = cell_of(self._trajectory(id), self._expression(id), self._agent_for())
        self._cell = {"n": self._cell.get("n", 0) + 1, "text": sendable(text)}

    def _do_chain_leave(self, _: Any) -> None:
        self.pick(None)

    def _picked_id(self) -> str:
        id = self._chain.get("id")
        if id is None:
            raise ValueError("no chain is selected; click one, or call view.pick(trajectory)")
        return str(id)
