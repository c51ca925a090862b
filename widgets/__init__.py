"""Notebook widgets that display records and live state. Sampling, scoring and training happen in the library.

from agentfly_kit import widgets as w
w.TokenView(trajectory)     tokens coloured by a signal: author, logprob, entropy, advantage, ratio, ...
w.ChainStepper(chain)       step one chain with buttons and keys: sample, run the tools, write, undo, fork, finish
w.PoolView(pool)            live view of a pool's sandboxes
w.TrajectoryView(rollout)   filter, sort and search trajectories, and compare the selected ones side by side
w.RolloutView(run)          live view of a rollout's chains, with pause and stop
w.TrainView(run)            curves of a training run, live or from its folder
w.ToolForm(tool)            call a tool and show exactly the text that a model would see
w.RewardForm(reward, rollout)    re-score saved trajectories while editing a reward, and list the changed scores
w.freeze("mine.ipynb")      replace the views in a saved notebook with static pictures, for readers without a kernel
"""

from __future__ import annotations

if __name__ == "widgets":
    raise ImportError(
        "this folder is the package agentfly_kit.widgets; importing it as `widgets` from the repository root would "
        "make a second copy. Write: from agentfly_kit import widgets as w"
    )

try:
    import anywidget as _anywidget  # noqa: F401
except ImportError as error:  # pragma: no cover - installed in the test environment
    raise ImportError("the widgets need anywidget; type: pip install 'agentfly_kit[lab]'") from error

from ._base import Static, View
from ._saved import freeze
from ._selection import Trajectories
from ._tokens import Selection, Span
from .chain_stepper import ChainStepper
from .pool_view import PoolView, Sandboxes
from .reward_form import RewardForm
from .rollout_view import RolloutView
from .token_view import TokenView
from .tool_form import Call, Calls, ToolForm
from .train_view import TrainView
from .trajectory_view import TrajectoryView

__all__ = [
    "Call", "Calls", "ChainStepper", "PoolView", "RewardForm", "RolloutView", "Sandboxes", "Selection", "Span",
    "Static", "TokenView", "ToolForm", "TrainView", "Trajectories", "TrajectoryView", "View", "freeze",
]  # fmt: skip
