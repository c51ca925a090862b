"""Rollouts and runs on disk, and a rollout as frames. `load(save(x)) == x`; every file is written whole or not at all.

Knows no engine and no policy. A rollout is one JSONL file: a header, then a trajectory a line. A run is a folder:
`run.json` (what it is), `steps.jsonl` (a flat line of numbers a step), `rollouts/`, `checkpoint/`.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfly_kit.context import Context
from agentfly_kit.errors import RunError, RunMismatch, SettingsError
from agentfly_kit.pending import awaited
from agentfly_kit.rewards import RewardSet
from agentfly_kit.types import UNSCORED, Failure, Group, Sampling, Task, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = "agentfly_kit.rollout"
_RUN = "agentfly_kit.run"
_VERSION = 1


# --- records to JSON and back --------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as numbers and lists; anything else that JSON does not know is refused."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def _dump(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
            text = json.dumps(value, separators=(",", ":"), default=_plain, allow_nan=False)
        return text
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{where} holds what JSON cannot: {error}; keep task fields and metrics to texts, numbers, lists and dicts"
        ) from error


def _bare(record: Any, leave: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    out = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name in leave:
            continue
        default = f.default if f.default_factory is MISSING else f.default_factory()
        # None has no type of its own to differ in; () and "" are kept where they are not the default.
        if type(value) is not type(default) or value != default:
            out[f.name] = value
    return out


def _result_out(result: ToolResult) -> dict[str, Any]:
    out = _bare(result)
    if result.error is not None:
        out["error"] = vars(result.error)
    return {"observation": result.observation} | out


def _call_out(call: ToolCall) -> dict[str, Any]:
    out = {"id": call.id, "name": call.name, "arguments": call.arguments} | _bare(call, ("rerunner",))
    if call.result is not None:
        out["result"] = _result_out(call.result)
    return out


def _turn_out(turn: Turn) -> dict[str, Any]:
    out = _bare(turn, ("parent", "pieces", "tool_calls"))
    if turn.ids is not None and turn.pieces is None:
        out["pieces"] = None  # its ids have pieces in the header, if another turn has the same, but it has none
    if turn.tool_calls:
        out["tool_calls"] = [_call_out(call) for call in turn.tool_calls]
    return out


def _trajectory_out(t: Trajectory) -> dict[str, Any]:
    out = _bare(t, ("task", "turns", "sampling", "error", "chain", "seed"))
    out |= {"task": vars(t.task), "chain": t.chain, "seed": t.seed, "sampling": vars(t.sampling)}
    out["turns"] = [_turn_out(turn) for turn in t.turns]
    if t.error is not None:
        out["error"] = vars(t.error)
    return out


def _call_in(data: dict[str, Any]) -> ToolCall:
    result = data.pop("result", None)
    if result is not None:
        error = result.pop("error", None)
        result = ToolResult(**result, error=Failure(**error) if error else None)
    return ToolCall(**data, result=result)


def _trajectory_in(data: dict[str, Any], pieces: dict[int, str]) -> Trajectory:
    task = data.pop("task")
    error = data.pop("error", None)
    turns: list[Turn] = []
    for raw in data.pop("turns"):
        for name in ("ids", "logprobs", "entropies", "kept_mass", "versions", "messages"):
            if raw.get(name) is not None:
                raw[name] = tuple(raw[name])
        if raw["ids"] is not None and "pieces" not in raw:
            raw["pieces"] = tuple(pieces.get(i, f"[{i}]") for i in raw["ids"])
        calls = tuple(_call_in(call) for call in raw.pop("tool_calls", ()))
        turns.append(Turn(**raw, tool_calls=calls, parent=turns[-1] if turns else None))
    sampling = data.pop("sampling")
    return Trajectory(
        **data | {"tools": tuple(data.get("tools", ()))},
        task=Task(task["id"], tuple(task["messages"]), task["fields"]),
        turns=tuple(turns),
        error=Failure(**error) if error else None,
        sampling=Sampling(**sampling | {"stop": tuple(sampling["stop"])}),
    )


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """Write a text file under another name and move it into place: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}); what was there before is unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


# --- a rollout -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """Finished chains, grouped by task, in the order in which the tasks were given."""

    groups: tuple[Group, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for group in self.groups for t in group.trajectories)

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], seconds: float = 0.0) -> Rollout:
        """Group trajectories by their `group`, keeping the order in which groups first appear."""
        by: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            by.setdefault(t.group, []).append(t)
        return cls(tuple(Group(name, tuple(ts)) for name, ts in by.items()), seconds)

    # --- numbers ---

    def numbers(self) -> dict[str, float]:
        """Means over the scored trajectories, and the shares that were not."""
        ts = self.trajectories
        scored = [t for t in ts if t.reward is not None]
        out: dict[str, float] = {"trajectories": len(ts)}
        if scored:
            out["success"] = sum(bool(t.success) for t in scored) / len(scored)
            out["reward"] = sum(t.reward for t in scored if t.reward is not None) / len(scored)
        if ts:
            out["unscored"] = 1 - len(scored) / len(ts)
            out["truncated"] = sum(t.truncated for t in ts) / len(ts)
            out["turns"] = sum(len(t.actions) for t in ts) / len(ts)
            out["calls"] = sum(len(t.tool_calls) for t in ts) / len(ts)
            out["seconds"] = self.seconds
            if all(t.exact for t in ts):
                out["tokens"] = sum(int(t.action_mask.sum()) for t in ts) / len(ts)
        return out

    # --- frames ---

    def to_frame(self, kind: Literal["trajectories", "turns", "tokens"] = "trajectories") -> pd.DataFrame:
        """One row a trajectory, a turn or a token. Missing numbers are NaN, never 0."""
        import pandas as pd

        if kind not in ("trajectories", "turns", "tokens"):
            raise SettingsError(f"to_frame({kind!r}): give 'trajectories', 'turns' or 'tokens'")
        rows: list[dict[str, Any]] = []
        for t in self.trajectories:
            head = {"trajectory": t.id, "task": t.task.id, "chain": t.chain}
            if kind == "trajectories":
                rows.append(head | self._trajectory_row(t))
            elif kind == "turns":
                rows.extend(head | row for row in self._turn_rows(t))
            else:
                rows.extend(head | row for row in self._token_rows(t))
        return pd.DataFrame(rows)

    @staticmethod
    def _trajectory_row(t: Trajectory) -> dict[str, Any]:
        return {
            "reward": math.nan if t.reward is None else t.reward,
            "success": t.success,
            "stop": t.stop,
            "final": t.final,
            "turns": len(t.actions),
            "calls": len(t.tool_calls),
            "failed_calls": sum(1 for c in t.tool_calls if c.result is not None and not c.result.ok),
            "tokens": len(t.ids) if t.exact else math.nan,
            "action_tokens": int(t.action_mask.sum()) if t.exact else math.nan,
            "seconds": t.seconds,
            "error": str(t.error) if t.error else None,
        } | {f"metric_{k}": v for k, v in t.metrics.items()}

    @staticmethod
    def _turn_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
        for i, turn in enumerate(t.turns):
            yield {
                "turn": i,
                "kind": turn.kind,
                "author": turn.author,
                "tokens": math.nan if turn.ids is None else len(turn.ids),
                "text": turn.text,
                "calls": [c.name for c in turn.tool_calls],
                "logprob": math.nan if turn.logprobs is None else math.fsum(turn.logprobs),
                "reward": math.nan if turn.reward is None else turn.reward,
                "stop": turn.stop,
                "seconds": turn.seconds,
            }

    @staticmethod
    def _token_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
        for position, (i, piece, mask, logprob, entropy, version, turn) in enumerate(
            zip(t.ids, t.pieces, t.action_mask, t.logprobs, t.entropies, t.versions, t.turn_index, strict=True)
        ):
            yield {
                "position": position,
                "turn": int(turn),
                "author": t.turns[int(turn)].author,
                "id": int(i),
                "text": piece,
                "mask": bool(mask),
                "logprob": float(logprob),
                "entropy": float(entropy),
                "version": int(version),
            }

    # --- scoring again, comparing ---

    @awaited
    async def rescore(self, reward: Any) -> Rollout:
        """The same chains scored by another reward; nothing is sampled.

        Their sandboxes went back to the pool: a reward that asks for one is refused for each chain, which is unscored.
        """
        rewards = RewardSet.of(reward)
        rewards.check([group.task for group in self.groups])
        groups = []
        for group in self.groups:
            scored = []
            for t in group.trajectories:
                if t.stop in UNSCORED:
                    scored.append(t)
                    continue
                async with Context(t.task, trajectory_id=t.id) as context:
                    score = await rewards.score(t, context)
                turns = _credited(t.turns, score.turn_rewards)
                scored.append(
                    t.replace(reward=score.reward, metrics=dict(score.metrics), error=score.error, turns=turns)
                )
            groups.append(Group(group.id, tuple(scored)))
        return Rollout(tuple(groups), self.seconds)

    def diff(self, other: Rollout) -> RolloutDiff:
        """What changed from this rollout to another of the same tasks: which chains flipped, and where."""
        mine, theirs = self._by_place(), other._by_place()
        both = [key for key in mine if key in theirs]
        if not both:
            raise SettingsError("these two rollouts have no task in common; roll out the same tasks with both agents")
        return RolloutDiff(tuple((mine[key], theirs[key]) for key in both))

    def _by_place(self) -> dict[tuple[str, int, str], Trajectory]:
        """By task, which of the task's groups it is in (a task may come twice), and place in the group."""
        seen: dict[str, int] = {}
        out: dict[tuple[str, int, str], Trajectory] = {}
        for group in self.groups:
            count = seen[group.task.id] = seen.get(group.task.id, 0) + 1
            out |= {(t.task.id, count, t.id.removeprefix(t.group)): t for t in group}
        return out

    # --- disk ---

    def save(self, path: str | Path) -> Path:
        """Write a .jsonl file; raises RunError naming the trajectory whose fields JSON cannot hold."""
        path = Path(path)
        pieces: dict[int, str] = {}
        for t in self.trajectories:
            for turn in t.turns:
                if turn.ids is not None and turn.pieces is not None:
                    pieces.update(zip(turn.ids, turn.pieces, strict=True))
        header = {"format": _FORMAT, "version": _VERSION, "seconds": self.seconds, "pieces": pieces}
        with whole_file(path) as file:
            file.write(_dump(header, "the header") + "\n")
            for t in self.trajectories:
                file.write(_dump(_trajectory_out(t), f"trajectory {t.id!r}") + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Read what `save` wrote. Raises RunError with the file and line of what cannot be read."""
        path = Path(path)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        number = 1
        try:
            header = json.loads(lines[0])
            if header.get("format") != _FORMAT:
                raise RunError(f"{path} is no saved rollout; give a file that Rollout.save wrote")
            if header["version"] > _VERSION:
                raise RunError(f"{path} was written by a newer version ({header['version']} > {_VERSION}); upgrade")
            pieces = {int(k): v for k, v in header["pieces"].items()}
            found = []
            for line in lines[1:]:
                number += 1
                if line:
                    found.append(_trajectory_in(json.loads(line), pieces))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path}:{number} is damaged: {type(error).__name__}: {error}") from error
        return cls.of(found, header["seconds"])

    def __repr__(self) -> str:
        n = self.numbers()
        success = f", success {n['success']:.3f}" if "success" in n else ", unscored"
        return f"Rollout({len(self.groups)} tasks, {len(self)} chains{success})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{k}</td><td style='text-align:right'>{v:.4g}</td></tr>" for k, v in self.numbers().items()
        )
        worst = "".join(
            f"<tr><td>{html.escape(t.id)}</td><td style='text-align:right'>"
            f"{'–' if t.reward is None else f'{t.reward:g}'}</td>"
            f"<td style='text-align:left'>{html.escape(t.explain()[:200])}</td></tr>"
            for t in self.trajectories[:8]
        )
        more = f"<p>and {len(self) - 8} more</p>" if len(self) > 8 else ""
        return (
            f"<p><b>{html.escape(repr(self))}</b></p><table><tbody>{cells}</tbody></table>"
            f"<details><summary>the first chains</summary><table><tbody>{worst}</tbody></table>{more}</details>"
        )


@dataclass(frozen=True)
class RolloutDiff:
    """Pairs (before, after) of the same task and chain."""

    pairs: tuple[tuple[Trajectory, Trajectory], ...] = field(repr=False)

    @property
    def gained(self) -> tuple[tuple[Trajectory, Trajectory], ...]:
        """Pairs that failed before and succeed now."""
        return tuple(p for p in self.pairs if p[1].success and not p[0].success)

    @property
    def lost(self) -> tuple[tuple[Trajectory, Trajectory], ...]:
        return tuple(p for p in self.pairs if p[0].success and not p[1].success)

    @property
    def success(self) -> tuple[float, float]:
        """Shares of success before and after, over the pairs in which both are scored."""
        scored = [p for p in self.pairs if p[0].success is not None and p[1].success is not None]
        n = max(1, len(scored))
        return sum(bool(a.success) for a, _ in scored) / n, sum(bool(b.success) for _, b in scored) / n

    def to_frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "task": a.task.id,
                    "chain": a.chain,
                    "before": math.nan if a.reward is None else a.reward,
                    "after": math.nan if b.reward is None else b.reward,
                    "final_before": a.final,
                    "final_after": b.final,
                    "calls_before": len(a.tool_calls),
                    "calls_after": len(b.tool_calls),
                    "first_difference": self.first_difference(a, b),
                }
                for a, b in self.pairs
            ]
        )

    @staticmethod
    def first_difference(a: Trajectory, b: Trajectory) -> int | None:
        """Index of the first turn whose text differs; None if all are the same."""
        for i, (x, y) in enumerate(zip(a.turns, b.turns, strict=False)):
            if x.text != y.text:
                return i
        return None if len(a.turns) == len(b.turns) else min(len(a.turns), len(b.turns))

    def __repr__(self) -> str:
        before, after = self.success
        return (
            f"RolloutDiff({len(self.pairs)} pairs: success {before:.3f} -> {after:.3f}, "
            f"{len(self.gained)} gained, {len(self.lost)} lost)"
        )

    def _repr_html_(self) -> str:
        def row(pair: tuple[Trajectory, Trajectory]) -> str:
            a, b = pair
            question = html.escape(str(a.task.messages[-1]["content"])[:60])
            texts = "".join(
                f"<td style='text-align:left'><code>{html.escape(' '.join(x.text for x in t.actions)[:160])}"
                "</code></td>"
                for t in (a, b)
            )
            return f"<tr><td style='text-align:left'>{question}</td>{texts}</tr>"

        head = "<thead><tr><th>task</th><th>before</th><th>after</th></tr></thead>"
        tables = "".join(
            f"<details{' open' if name == 'gained' else ''}><summary>{name}: {len(pairs)}</summary>"
            f"<table>{head}<tbody>{''.join(map(row, pairs[:5]))}</tbody></table></details>"
            for name, pairs in (("gained", self.gained), ("lost", self.lost))
            if pairs
        )
        return f"<p><b>{html.escape(repr(self))}</b></p>{tables}"


def _credited(turns: tuple[Turn, ...], rewards: dict[int, float]) -> tuple[Turn, ...]:
    """Turns with these rewards. What a tool gave stays; what rewards gave to actions before is replaced."""
    import dataclasses

    out: list[Turn] = []
    for i, turn in enumerate(turns):
        reward = rewards.get(i) if turn.kind == "action" else turn.reward
        out.append(dataclasses.replace(turn, reward=reward, parent=out[-1] if out else None))
    return tuple(out)


# --- a run's folder ------------------------------------------------------------------------------


class Run:
    """A folder that a training run writes and continues from.

    `records` are flat dicts of numbers, one a step. `subscribe(callback)` calls back with each new one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._listeners: list[Callable[[dict[str, float]], None]] = []
        self._records: list[dict[str, float]] | None = None

    # --- what it is ---

    def check(self, fingerprint: dict[str, Any], *, resume: bool) -> bool:
        """Whether the folder holds a run of this fingerprint that would be continued. Changes nothing.

        Raises:  RunMismatch, showing the difference, if it holds another run and resume is True; RunError if it holds
                 something that is no run.
        """
        file = self.path / "run.json"
        wanted = json.loads(_dump(fingerprint, "the run's fingerprint"))
        if file.exists():
            try:
                about = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                if not resume:
                    return False
                raise RunError(
                    f"{file} is damaged ({error}); give another folder, or resume=False to start anew"
                ) from error
            if not isinstance(about, dict) or about.get("format") != _RUN or "fingerprint" not in about:
                raise RunError(f"{file} is not the file of a run; give an empty or new folder")
            if about.get("version", 0) > _VERSION:
                raise RunError(f"{file} was written by a newer version ({about['version']} > {_VERSION}); upgrade")
            if not resume:
                return False
            known = about["fingerprint"]
            if known != wanted:
                lines = "\n".join(_differences(known, wanted))
                raise RunMismatch(
                    f"{self.path} holds a run with other settings:\n{lines}\n"
                    "give the run another folder, or resume=False to replace what is there"
                )
            return True
        if self.path.exists() and (not self.path.is_dir() or any(p not in self._begun() for p in self.path.iterdir())):
            raise RunError(f"{self.path} has something in it that is no run; give an empty or new folder")
        return False

    def begin(self, fingerprint: dict[str, Any], *, resume: bool) -> bool:
        """Claim the folder for a run of this fingerprint. True if there is something to continue; raises as `check`."""
        if self.check(fingerprint, resume=resume):
            return True
        about = {"format": _RUN, "version": _VERSION, "fingerprint": json.loads(_dump(fingerprint, "the fingerprint"))}
        try:
            for name in ("rollouts", "checkpoint", "checkpoint.before", "checkpoint.new"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.path / "steps.jsonl", *self._begun()):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made a run's folder ({error})") from error
        with whole_file(self.path / "run.json") as out:
            out.write(json.dumps(about, indent=1))
        self._records = []
        return False

    def _begun(self) -> list[Path]:
        """What is left of a `begin` that was killed."""
        return list(self.path.glob(".run.json.*.tmp")) if self.path.is_dir() else []

    # --- steps ---

    @property
    def records(self) -> list[dict[str, float]]:
        """The recorded steps, oldest first. A last line that was cut by a crash is left out."""
        if self._records is None:
            self._records = []
            file = self.path / "steps.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            for number, line in enumerate(lines, start=1):
                try:
                    self._records.append(json.loads(line))
                except ValueError as error:
                    if number < len(lines):
                        raise RunError(f"{file}:{number} is damaged: {error}") from error
        return self._records

    def append(self, record: dict[str, float]) -> None:
        """Write a step's line and tell the listeners."""
        self.write(record)
        self.tell(record)

    def write(self, record: dict[str, float]) -> None:
        """Write a step's line."""
        line = _dump(record, f"step {record.get('step')}")
        self.records.append(record)
        try:
            with (self.path / "steps.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self.records.pop()
            raise RunError(f"{self.path / 'steps.jsonl'} could not be written ({error})") from error

    def tell(self, record: dict[str, float]) -> None:
        """Tell the listeners. One that raises harms nobody else."""
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception as error:
                import warnings

                warnings.warn(f"a listener of {self.path.name} raised {type(error).__name__}: {error}", stacklevel=2)

    def truncate(self, steps: int) -> None:
        """Forget the steps after the first `steps`, which are not in the checkpoint, and a last line that was cut."""
        kept = self.records[:steps]
        file = self.path / "steps.jsonl"
        text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in kept)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            with whole_file(file) as out:
                out.write(text)
        self._records = kept

    def subscribe(self, callback: Callable[[dict[str, float]], None]) -> Callable[[], None]:
        self._listeners.append(callback)

        def unsubscribe() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return unsubscribe

    # --- rollouts ---

    def rollout_path(self, name: str) -> Path:
        return self.path / "rollouts" / f"{name}.jsonl"

    def rollout(self, step: int) -> Rollout:
        """The training rollout of a step, from 1."""
        return Rollout.load(self.rollout_path(f"step-{step:05d}"))

    # --- checkpoint ---

    @property
    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        for name in ("checkpoint", "checkpoint.before"):
            if (self.path / name / "done").exists():
                return self.path / name
        return None

    @contextlib.contextmanager
    def new_checkpoint(self) -> Iterator[Path]:
        """A folder to fill; it takes the place of the last checkpoint only when it is whole."""
        new, current, before = (self.path / n for n in ("checkpoint.new", "checkpoint", "checkpoint.before"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            yield new
            with (new / "done").open("w") as file:
                file.write("whole\n")
                file.flush()
                os.fsync(file.fileno())
            if (current / "done").exists():
                shutil.rmtree(before, ignore_errors=True)
                os.replace(current, before)
            else:
                shutil.rmtree(current, ignore_errors=True)
            os.replace(new, current)
            shutil.rmtree(before, ignore_errors=True)
        except (OSError, RuntimeError) as error:  # torch has a RuntimeError for a full disk
            raise RunError(f"no checkpoint could be written to {self.path} ({error}); the last one is kept") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def figure(self, *names: str) -> Any:
        """A plotly figure of recorded numbers, for a paper; for live curves use widgets.TrainView."""
        import plotly.graph_objects as go

        wanted = names or tuple(
            n for n in ("success", "reward", "approx_kl", "entropy") if any(n in r for r in self.records)
        )
        figure = go.Figure()
        for name in wanted:
            points = [(r["step"], r[name]) for r in self.records if name in r]
            figure.add_trace(go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=name, mode="lines"))
        figure.update_layout(xaxis_title="step", template="plotly_white")
        return figure

    def __repr__(self) -> str:
        last = self.records[-1] if self.records else {}
        success = f", success {last['success']:.3f}" if "success" in last else ""
        return f"Run({str(self.path)!r}, {len(self.records)} steps{success})"


def _differences(known: Any, wanted: Any, path: str = "") -> list[str]:
    """One line for each leaf that differs: name, what the folder has, what was asked for."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        out = []
        for key in sorted({*known, *wanted}):
            where = f"{path}.{key}" if path else key
            if key not in known:
                out.append(f"  {where}: not in the folder's run, now {_short(wanted[key])}")
            elif key not in wanted:
                out.append(f"  {where}: was {_short(known[key])}, now not there")
            elif known[key] != wanted[key]:
                out.extend(_differences(known[key], wanted[key], where))
        return out
    if isinstance(known, str) and isinstance(wanted, str) and ("\n" in known or "\n" in wanted):
        import difflib

        changed = [
            f"    {line}"
            for line in difflib.unified_diff(known.splitlines(), wanted.splitlines(), "then", "now", lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        return [f"  {path} changed:", *changed[:20]]
    return [f"  {path}: was {_short(known)}, now {_short(wanted)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
