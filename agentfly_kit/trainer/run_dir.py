"""The folder of a training run.

It contains `run.json` (fingerprint of the run), `steps.jsonl` (one flat JSON object per step), `rollouts/`, `policies/`
(policies of earlier steps), and `checkpoint/` (a policy in the layout of transformers, and `state.pt`, which is needed
to resume the run). If a write is interrupted, the last complete version of the file remains readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from agentfly_kit._async.listeners import Listeners
from agentfly_kit._async.pending_call import warn_or_log
from agentfly_kit._display import Displayable
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.rollout_io import atomic_write, dump_json
from agentfly_kit.errors import RunError, RunMismatch
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.fingerprint import adds_iterations, differences, flat_settings, identity, without_code
from agentfly_kit.trainer.run_lock import LOCK_FILE, RunLock

if TYPE_CHECKING:
    from agentfly_kit.diagnosis.findings import Findings

KeepPolicies: TypeAlias = Literal["last", "best", "all"]

_FORMAT = "agentfly_kit.run"
# Before version 3, fingerprints depended on comments, docstrings and the source of this package.
_VERSION = 3


class Run(Displayable):
    """Folder of a training run, from which the run can be resumed.

    `records` contains one flat dict of numbers per step. `subscribe(callback)` registers a callback for new records.
    `lock` prevents other runs from training in the folder.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._listeners = Listeners[dict[str, float]](self.path.name)
        self._records: list[dict[str, float]] | None = None
        self.lock = RunLock(self.path)

    # --- identity ---

    def check(self, fingerprint: dict[str, Any], *, resume: bool) -> bool:
        """Return True if `resume` is True and the folder contains a run to continue.

        The run must have this fingerprint, but settings such as `checkpoint_every` may differ, and a complete run may
        be continued with more steps and another learning rate.

        Raises:
            RunMismatch: If the folder contains a different run and `resume` is True. The message lists the differences.
            RunError: If the folder contains something other than a run, or a run that is damaged or was written by
                an incompatible version.
        """
        file = self.path / "run.json"
        wanted = json.loads(dump_json(fingerprint, "the run's fingerprint"))
        # Never write to a folder that contains other files, even with resume=False.
        if not file.exists():
            if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - self._own_files()):
                raise RunError(f"{self.path} must be an empty or new folder, but it holds something other than a run")
            return False
        try:
            about = self._read_about()
        except (OSError, ValueError) as error:
            if not resume:
                return False
            raise RunError(
                f"{file} is damaged ({error}); use another folder, or resume=False to start over"
            ) from error
        # The file is read even with resume=False, because a newer format must not be overwritten.
        if not resume:
            return False
        known = about["fingerprint"]
        if about.get("version", 0) < _VERSION:
            known, wanted = without_code(known), without_code(wanted)
        known, wanted = identity(known), identity(wanted)
        if known != wanted and not adds_iterations(known, wanted, len(self.records)):
            lines = "\n".join(differences(known, wanted))
            raise RunMismatch(
                f"{self.path} holds a run with other settings:\n{lines}\n"
                "use another folder, or resume=False to replace the run; load the policy again if it was trained"
            )
        return True

    def _read_about(self) -> dict[str, Any]:
        """Return the content of `run.json`. Raise RunError if it does not describe a run or its format is newer."""
        file = self.path / "run.json"
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except RecursionError:
            about = None
        if not isinstance(about, dict) or about.get("format") != _FORMAT or "fingerprint" not in about:
            raise RunError(f"{file} does not describe a training run; use an empty or new folder")
        if (version := about.get("version", 0)) > _VERSION:
            raise RunError(f"{file} was written by a newer version ({version} > {_VERSION}); upgrade agentfly_kit")
        return about

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify the run: config, agent, functions, tasks and weights.

        Raises:
            RunError: If the folder contains no run, or `run.json` is damaged.
        """
        try:
            return dict(self._read_about()["fingerprint"])
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / 'run.json'} is missing or damaged ({error})") from error

    def flat_settings(self) -> dict[str, Any]:
        """Return the settings as a flat dict with keys such as "lr" and "agent.seed". Functions are hashed."""
        return flat_settings(self.settings())

    @property
    def id(self) -> str:
        """Random identifier of the run. It does not change when the run is continued or its folder is moved."""
        return str(self._read_about()["id"])

    def claim(self, fingerprint: dict[str, Any], *, resume: bool, start_version: int = 0) -> bool:
        """Return True if the folder contains a run to continue. Otherwise, replace its contents with a new run."""
        if self.check(fingerprint, resume=resume):
            about = self._read_about()
            changes: dict[str, Any] = {}
            before = about["fingerprint"]["config"]["steps"]
            if before != fingerprint["config"]["steps"]:  # iterations are added to a complete run
                changes["first_step"] = before
            if about.get("version", 0) < _VERSION:
                warn_or_log(
                    f"{self.path} was written by agentfly_kit 0.2, which identified functions differently, so changes "
                    "to functions since then are not detected"
                )
                changes["version"] = _VERSION
            if changes:
                self._write_about(about | {"fingerprint": fingerprint} | changes)
            return True
        about = {"format": _FORMAT, "version": _VERSION, "id": secrets.token_hex(8), "start_version": start_version}
        about["fingerprint"] = fingerprint
        dump_json(about, "the run's fingerprint")
        try:
            for name in ("rollouts", "policies", "checkpoint", "checkpoint.before", "checkpoint.new"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.path / "steps.jsonl", *self._own_files()):
                if file.name != LOCK_FILE:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be prepared for a run ({error})") from error
        self._write_about(about)
        self._records = []
        return False

    def _write_about(self, about: dict[str, Any]) -> None:
        with atomic_write(self.path / "run.json") as out:
            out.write(json.dumps(json.loads(dump_json(about, "the run's fingerprint")), indent=1))

    @property
    def start_version(self) -> int:
        """Version of the policy at the start of the run: the number of optimizer steps taken before it."""
        try:
            return int(self._read_about().get("start_version", 0))
        except (OSError, ValueError, RunError):
            return 0

    @property
    def first_step(self) -> int:
        """Number of steps before iterations were last added. The learning rate schedule begins after these steps."""
        return int(self._read_about().get("first_step", 0))

    def _own_files(self) -> set[Path]:
        """Return the lock file, and the temporary files of processes that were killed during `claim`."""
        return {*self.path.glob(".run.json.*.tmp"), *self.path.glob(LOCK_FILE)}

    def reload(self) -> None:
        """Read the records again. Call this after another process has changed the folder."""
        self._records = self._read_records()

    # --- steps ---

    @property
    def records(self) -> list[dict[str, float]]:
        """Records of the steps, oldest first. An incomplete last line, left by a crash, is ignored."""
        if self._records is None:
            self._records = self._read_records()
        return self._records

    def _read_records(self) -> list[dict[str, float]]:
        file = self.path / "steps.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if number < len(lines):
                    raise RunError(f"{file}:{number} is damaged: {error}") from error
        return records

    def append(self, record: dict[str, float]) -> None:
        """Append the record of a step to `steps.jsonl`, without calling the callbacks of `subscribe`."""
        line = dump_json(record, f"step {record.get('step')}")
        file = self.path / "steps.jsonl"
        self.records.append(record)
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")
        except OSError as error:
            self.records.pop()
            gone = (
                ""
                if self.path.exists()
                else "; the folder was deleted during the run: call train again to start over"
            )
            raise RunError(f"{file} could not be written ({error}){gone}") from error

    def notify(self, record: dict[str, float]) -> None:
        """Call the callbacks of `subscribe` with a record. If one raises an exception, warn and call the others."""
        self._listeners.notify(record)

    def subscribe(self, callback: Callable[[dict[str, float]], object]) -> Callable[[], None]:
        """Register a callback for new records. Return a function that unregisters it."""
        return self._listeners.subscribe(callback)

    def truncate(self, steps: int) -> None:
        """Delete the records and policies of all steps after `steps`, and incomplete lines of `steps.jsonl`."""
        kept = self.records[:steps]
        file = self.path / "steps.jsonl"
        if len(kept) < steps:
            raise RunError(
                f"{file} must contain the records of the {steps} steps of the checkpoint, got {len(kept)}; restore the "
                "file, or start over with resume=False"
            )
        text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in kept)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            with atomic_write(file) as out:
                out.write(text)
        self._records = kept
        for step, folder in self._kept_policies().items():
            if step > steps:
                shutil.rmtree(folder, ignore_errors=True)

    # --- rollouts ---

    def rollout_path(self, name: str) -> Path:
        """Return the path of a saved rollout."""
        return self.path / "rollouts" / f"{name}.jsonl"

    def rollout(self, step: int) -> Rollout:
        """Load the training rollout of a step, counted from 1. Requires `TrainConfig(save_rollouts=True)`."""
        return Rollout.load(self.rollout_path(f"step-{step:05d}"))

    def diagnose(self) -> Findings:
        """Apply `af.diagnose` to the records and the last saved rollout, to find out why the policy does not learn."""
        from agentfly_kit.diagnosis.diagnose import diagnose

        last = self.rollout_path(f"step-{len(self.records):05d}")
        return diagnose(Rollout.load(last) if last.exists() else None, records=self.records)

    # --- checkpoint ---

    @property
    def checkpoint(self) -> Path | None:
        """Path of the newest complete checkpoint, or None. The folder contains the last two checkpoints."""
        folders = (self.path / name for name in ("checkpoint", "checkpoint.before"))
        return next((folder for folder in folders if (folder / "done").exists()), None)

    @contextlib.contextmanager
    def new_checkpoint(self) -> Iterator[Path]:
        """Yield a folder for a new checkpoint, which replaces the current one if the `with` block succeeds."""
        new, current, before = (self.path / n for n in ("checkpoint.new", "checkpoint", "checkpoint.before"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            yield new
            (new / "done").touch()
            # Keep the previous checkpoint, in case the new checkpoint is damaged.
            if (current / "done").exists():
                shutil.rmtree(before, ignore_errors=True)
                os.replace(current, before)
            else:
                shutil.rmtree(current, ignore_errors=True)
            os.replace(new, current)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise RunError(
                f"no checkpoint could be written to {self.path} ({error}); the last one is kept"
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    # --- policies ---

    def policy(self, step: int | None = None, *, best: bool = False, **options: Any) -> Policy:
        """Load the policy as it was after a step, by default the step of the last checkpoint.

        `TrainConfig(keep=)` determines which policies are kept besides the last two checkpoints.

        Args:
            step: The step, counted from 1; 0 is the initial policy.
            best: Whether to load the policy with the highest success in an evaluation (the earliest if several are
                equal).
            **options: Further arguments of `Policy.load`, such as `value_head` and `device`.

        Raises:
            RunError: If the policy was not kept, or if the run has no evaluation or no checkpoint.
        """
        if best and (step := _best_step(self.records)) is None:
            raise RunError(f"best=True needs a run with evaluations, but {self.path} has none")
        kept = self._kept_policies()
        if step is None and (newest := self.checkpoint) is not None:
            return Policy.load(newest, **options)
        if step not in kept:
            have = ", ".join(map(str, sorted(kept))) or "none"
            wanted = "a checkpoint" if step is None else f"the policy of step {step}"
            raise RunError(f"{self.path} must contain {wanted}, got policies of steps {have}; see TrainConfig(keep=)")
        return Policy.load(kept[step], **options)

    def keep_policy(self, step: int, policy: Policy, which: KeepPolicies) -> None:
        """Save the policy after `step`, the last recorded step, if `which` requires it. No optimizer state is saved.

        With "best", the policy of the previous best step is replaced.
        """
        if which == "last" or (which == "best" and _best_step(self.records) != step):
            return
        folder = self.path / "policies"
        new = folder / f".step-{step:05d}"
        try:
            shutil.rmtree(new, ignore_errors=True)
            policy.save(new)
            shutil.rmtree(folder / f"step-{step:05d}", ignore_errors=True)
            os.replace(new, folder / f"step-{step:05d}")
        except (OSError, RuntimeError) as error:
            raise RunError(f"the policy of step {step} could not be written to {folder} ({error})") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        for path in folder.glob("step-*") if which == "best" else ():
            if path.name != f"step-{step:05d}":
                shutil.rmtree(path, ignore_errors=True)

    def _kept_policies(self) -> dict[int, Path]:
        """Return the folders of all policies that can be loaded, keyed by step."""
        kept = {int(path.name.removeprefix("step-")): path for path in (self.path / "policies").glob("step-[0-9]*")}
        for name in ("checkpoint.before", "checkpoint"):
            if (self.path / name / "done").exists() and (self.path / name / "state.pt").exists():
                state = torch.load(self.path / name / "state.pt", mmap=True, weights_only=True, map_location="cpu")
                kept[int(state["steps"])] = self.path / name
        return kept

    def figure(self, *names: str) -> Any:
        """Plot recorded metrics as a plotly figure. For live curves, use `widgets.TrainView`.

        Args:
            names: Metrics to plot; by default success, reward, approx_kl and entropy, if recorded.
        """
        import pandas
        import plotly.express

        found = {name for record in self.records for name in record}
        wanted = list(names) or [n for n in ("success", "reward", "approx_kl", "entropy") if n in found]
        table = pandas.DataFrame(self.records, columns=["step", *wanted]).melt("step", var_name="metric").dropna()
        return plotly.express.line(table, x="step", y="value", color="metric", template="plotly_white")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self.records)} steps{describe_success(self.records)})"


def _best_step(records: Sequence[Mapping[str, Any]]) -> int | None:
    evaluated = [r for r in records if isinstance(r.get("eval_success"), int | float)]
    return int(max(evaluated, key=lambda r: r["eval_success"])["step"]) if evaluated else None


def describe_success(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of a repr such as ", success 0.281 (step 1) -> 0.992 (step 24)", or "" if none was recorded.

    If there are several evaluations, the success of the first and the last one is shown instead.
    """
    for name, label in (("eval_success", "evaluated success"), ("success", "success")):
        shown = [f"{r[name]:.3f} (step {r['step']})" for r in records if isinstance(r.get(name), int | float)]
        if len(shown) > 1:
            return f", {label} {shown[0]} -> {shown[-1]}"
    return f", success {shown[0]}" if shown else ""
