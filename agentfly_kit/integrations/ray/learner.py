"""`af.ray.learner`: processes on a Ray cluster that update a policy, each with a part of its weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import init_process_group

from agentfly_kit._async.pending_call import pending_call, run_in_thread
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import AgentFlyError, SettingsError, TrainingError, check_count, check_instance, check_value
from agentfly_kit.integrations.ray.cluster import Processes, connected, describe_node
from agentfly_kit.policy.forward import ScoreName
from agentfly_kit.policy.policy import Policy
from agentfly_kit.policy.sharding import gather, scatter
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.ppo.imitation import imitation_step
from agentfly_kit.ppo.inputs import check_vocabulary
from agentfly_kit.ppo.optimizer import adamw
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.ppo.step import ppo_step
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task

_TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
_DEFAULTS = PPOConfig()
# Time in seconds to wait for the other processes after one has failed. They also fail, or wait for the failed process
# forever.
_GRACE_SECONDS = 30.0


def learner(policy: Policy, n: int, *, lr: float = 3e-4, timeout: float = 600.0, **options: Any) -> Learner:
    """Start `n` processes on the Ray cluster that update `policy`, each with 1/n of the weights and optimizer state.

    The policy in this process keeps all weights, in main memory if it was loaded with `device="cpu"`, and receives the
    new weights after each step, so engines and `policy.save` work as without a learner. Connect to the cluster with
    `ray.init` first.

    Args:
        policy: Policy to update. With several processes, it must be a text policy in float32 or bfloat16.
        n: Number of processes.
        lr: Learning rate of AdamW; `train` uses `config.lr` instead.
        timeout: Time limit for the start of the processes in seconds.
        options: Ray actor options of a process, such as `num_gpus=1` or `runtime_env`. By default, each process takes
            one CPU.

    Raises:
        SettingsError: If Ray is not connected, the policy cannot be sharded, or the processes cannot start.
    """
    return Learner(policy, n, lr, timeout, options)


class Learner(Processes):
    """Processes that update a policy, created by `af.ray.learner`.

    Pass the object as `af.train(learner=)`, or call `step` instead of `ppo_step`. If a process or its node dies, the
    others are ended, and `step` raises TrainingError.

    Attributes:
        policy: The policy, with the weights of the last step.
        optimizer: The optimizer of the processes. Its `param_groups` contain the learning rates.
        nodes: Host name and process id of each process.
    """

    def __init__(self, policy: Policy, n: int, lr: float, timeout: float, options: dict[str, Any]) -> None:
        super().__init__()
        check_instance("policy", policy, Policy, "an af.Policy")
        check_count("n", n)
        connected()
        self.policy, self._lr, self._timeout = policy, lr, timeout
        self._size, self._options = n, {"num_cpus": 1} | options
        self.optimizer = _RemoteOptimizer(self)
        self._steps = 0
        # The reference policy sent last, how often its weights were changed, and its handle in Ray's object store.
        self._reference: tuple[Policy, list[int], Any] | None = None
        # Lock held during every call of the processes except cancellations.
        self._lock = threading.RLock()
        self._start()

    def _start(self) -> None:
        ray = connected()
        # A second thread of a process receives cancellations.
        actor = ray.remote(max_concurrency=2, **self._options)(_Process)
        self._actors = [actor.remote() for _ in range(self._size)]
        what, failed = f"{self._size} processes", "a process of the learner did not start"
        with self._starting(what, self._timeout, self._options, failed):
            address = ray.get(self._actors[0].listen.remote(), timeout=self._timeout)
            sent = ray.put(self.policy)
            joined = [
                actor.join.remote(rank, self._size, address, sent, self._lr)
                for rank, actor in enumerate(self._actors)
            ]
            found = ray.get(joined, timeout=self._timeout)
            self._set_nodes(found)
        self.optimizer.param_groups = found[0]["groups"]
        self._seen = _changes(self.policy)

    def __repr__(self) -> str:
        state = f"{len(self._actors)} processes" if self._actors else "no process is running"
        return f"Learner({self.policy!r}, {state})"

    # --- steps ---

    @pending_call
    async def step(
        self,
        batch: Batch,
        config: PPOConfig = _DEFAULTS,
        *,
        reference: Policy | None = None,
        seed: int = 0,
        detail: bool = False,
    ) -> Stats:
        """Update the policy with `ppo_step`, or with `imitation_step` for a batch of `collate(imitate=)`.

        Args:
            batch, config, reference, seed, detail: As in `ppo_step`.

        Returns:
            The statistics of the step.

        Raises:
            AgentFlyError: For the same reasons as in `ppo_step`.
            SettingsError: If the weights of the policy in this process were changed in place after the last step, or
                the settings cannot be pickled. Changes of the attribute `data` of a parameter are not detected.
            TrainingError: If a process has failed.
            asyncio.CancelledError: If the call was cancelled. The weights are then those of the last complete update.
        """
        if batch.imitation and (reference is not None or detail):
            raise SettingsError("reference and detail must not be set for a batch of collate(imitate=)")
        self._steps += 1
        number, actors = self._steps, self._actors

        def cancel() -> None:
            for actor in actors:
                actor.cancel.remote(number)

        stats: Stats = await run_in_thread(
            self._step, number, batch, config, reference, seed, detail, on_cancel=cancel
        )
        return dataclasses.replace(stats, batch=batch) if detail else stats

    def _step(
        self,
        number: int,
        batch: Batch,
        config: PPOConfig,
        reference: Policy | None,
        seed: int,
        detail: bool,
    ) -> Stats:
        config = PPOConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(PPOConfig)})
        with self._lock:
            self._check_unchanged()
            sent = _put("the batch or its settings", (self._without_texts(batch), config))
            groups, options = self.optimizer.param_groups, {"seed": seed, "detail": detail}
            found = self._call("step", number, sent, self._send(reference), groups, options)
            _, version, arrays = found[0]
            weights = self.policy.state()
            for name, array in arrays.items():  # a tensor of a read-only array must be a copy
                weights[name] = torch.tensor(array).view(weights[name].dtype)
            self.policy.load_state(weights, version)
            self._seen = _changes(self.policy)
        return _result([each[0] for each in found])  # type: ignore[no-any-return]

    def score(self, policy: Policy, batch: Batch, what: ScoreName, micro_tokens: int | None) -> Tensor:
        """Compute a score of each token, (B, T), under the policy or a reference; see `Policy.score`."""
        with self._lock:
            self._steps += 1
            if policy is self.policy:
                self._check_unchanged()
            referred = None if policy is self.policy else self._send(policy)
            found = self._call(
                "score", self._steps, _put("the batch", self._without_texts(batch)), referred, what, micro_tokens
            )
        return _result(found)  # type: ignore[no-any-return]

    def _without_texts(self, batch: Batch) -> Batch:
        """Return a batch without the texts of its trajectories, which take longer to send than all tensors.

        The processes do not need them, except for images.
        """
        if batch.row_keys is not None:
            return batch
        check_vocabulary(self.policy, batch.trajectories, batch.row_index)
        task = Task("sent", ({"role": "user", "content": ""},))
        empty = Trajectory("sent", task, "", 0, (), "answered", vocabulary=self.policy.chat.vocabulary)
        return dataclasses.replace(batch, trajectories=(empty,) * len(batch))

    def _check_unchanged(self) -> None:
        if _changes(self.policy) != self._seen:
            raise SettingsError(
                "the policy must not be changed between steps of its learner; call await learner.reset() to continue "
                "with its weights and a new optimizer"
            )

    def _send(self, reference: Policy | None) -> list[Any] | None:
        """Return a list with the reference to send; [] if it is the policy without its adapter, None if not given."""
        if reference is None:
            return None
        if reference.model is self.policy.model:
            return []
        changes = _changes(reference)
        if self._reference is None or self._reference[0] is not reference or self._reference[1] != changes:
            self._reference = reference, changes, _put("the reference policy", reference)
        return [self._reference[2]]  # in a list, so that Ray does not fetch the policy for every call

    @pending_call
    async def reset(self, lr: float | None = None) -> None:
        """Send the weights of the policy to the processes, which create a new optimizer.

        Processes that have ended are started again.

        Args:
            lr: Learning rate; None keeps the learning rate of the last start.

        Raises:
            SettingsError: If `lr` is not a positive finite number.
        """
        check_value("lr", lr, "float | None", "above 0")
        self._lr = lr or self._lr
        await run_in_thread(self._reset, on_cancel=self.close)

    def _reset(self) -> None:
        with self._lock:
            if self._actors:
                with contextlib.suppress(TrainingError):  # a process has ended since the last call
                    return self._load(None)
            self._start()

    def _load(self, state: dict[str, Any] | None) -> None:
        with self._lock:
            weights = {name: tensor.detach().cpu() for name, tensor in self.policy.state().items()}
            sent = _put("the state of the optimizer", (weights, self.policy.version, state))
            self.optimizer.param_groups = self._call("load", sent, self._lr)[0]
            self._seen = _changes(self.policy)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all processes and return the results. If a process fails, end all of them."""
        import ray

        if not self._actors:
            raise TrainingError("the processes of the learner have ended; call await learner.reset() to start others")
        calls = [getattr(actor, method).remote(*args) for actor in self._actors]
        left = calls
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        while left:
            done, left = ray.wait(left, timeout=_GRACE_SECONDS if failed else None)
            if not done:
                break
            rank = calls.index(done[0])
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                failed[rank] = error
            except ray.exceptions.RayError as error:  # the process has ended
                failed[rank] = error
                break
        if not failed:
            return [results[rank] for rank in range(self._size)]
        # If a process has died, the others report broken connections.
        rank = min(failed, key=lambda rank: isinstance(failed[rank], ray.exceptions.RayTaskError))
        node, failure = self.nodes[rank], getattr(failed[rank], "cause", failed[rank])
        text = str(failure).strip().partition("\n")[0]
        self.close()
        raise TrainingError(
            f"process {rank} of {self._size} of the learner, on {node}, failed, and the others were ended "
            f"({type(failure).__name__}: {text}). Await the run again to continue "
            "from its last checkpoint, or call await learner.reset() to continue with the weights of the policy"
        ) from failed[rank]


def _changes(policy: Policy) -> list[int]:
    """Return how often each weight was changed in place, and the version."""
    return [policy.version, *(p._version for p in policy.parameters())]


def _put(what: str, value: Any) -> Any:
    """Store a value in Ray and return its reference. Raise SettingsError if it cannot be pickled."""
    import ray

    try:
        return ray.put(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        text = str(error).strip().partition("\n")[0]
        raise SettingsError(f"{what} cannot be sent to the processes of the learner: {text}") from error


def _result(found: list[Any]) -> Any:
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found[0]


class _RemoteOptimizer:
    """Optimizer of the processes, with the attributes and methods that `train` uses."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.param_groups: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of the optimizer."""
        with self._learner._lock:
            return self._learner._call("optimizer_state")[0]  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the full state of an optimizer, and the weights of the policy, unless the processes have ended."""
        if self._learner._actors:
            self._learner._load(state)


class _Process:
    """Ray actor with a part of the weights and of the optimizer state."""

    def __init__(self) -> None:
        self._cancelled: dict[int, threading.Event] = {}
        self._store: Any = None
        self._reference: tuple[Any, Policy] | None = None

    def listen(self) -> tuple[str, int]:
        """Open a port for the processes to find each other, and return its address."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = _TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(
        self,
        rank: int,
        size: int,
        address: tuple[str, int],
        policy: Policy,
        lr: float,
    ) -> dict[str, Any]:
        import accelerate

        cuda = torch.cuda.is_available()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
        store = self._store = self._store or _TCPStore(*address, is_master=False)
        init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
        self.accelerator = accelerate.Accelerator(cpu=not cuda)
        for module in (policy.model, policy.value_head):
            if module is not None:
                module.to(self.accelerator.device)
        self.policy = policy.shard(self.accelerator)
        self.optimizer = adamw(self.policy, lr)
        return describe_node() | {"groups": self._groups()}

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.state_dict()["param_groups"]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def load(
        self,
        sent: tuple[dict[str, Tensor], int, dict[str, Any] | None],
        lr: float,
    ) -> list[dict[str, Any]]:
        weights, version, state = sent
        self.policy.load_state(weights, version)
        self.optimizer = adamw(self.policy, lr)
        if state is not None:
            self.optimizer.load_state_dict(
                state if self.policy.accelerator is None else scatter(state, self.optimizer)
            )
        return self._groups()

    def cancel(self, number: int) -> None:
        self._cancelled.setdefault(number, threading.Event()).set()

    def step(
        self,
        number: int,
        given: tuple[Batch, PPOConfig],
        sent: list[Any] | None,
        groups: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> tuple[Any, int, dict[str, Any]]:
        """Return the statistics (or an error that all processes raised), the version and, from rank 0, the weights."""
        batch, config = given
        cancel = self._cancelled.setdefault(number, threading.Event())
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)

        def update() -> Stats:
            policy, optimizer = self.policy, self.optimizer
            if batch.imitation:
                return imitation_step(policy, optimizer, batch, config, seed=options["seed"], cancel=cancel)
            reference = self._referred(sent)
            return ppo_step(policy, optimizer, batch, config, reference=reference, cancel=cancel, **options)

        result = self._agree(number, update)
        if isinstance(result, Stats):
            result = dataclasses.replace(result, batch=None)
        weights = {k: v.detach().cpu() for k, v in self.policy.state().items()}  # empty if not of rank 0
        # Ray passes arrays, but not tensors, through shared memory. NumPy has no bfloat16.
        halves = {k: v.view(torch.int16) for k, v in weights.items() if v.dtype == torch.bfloat16}
        return result, self.policy.version, {k: v.numpy() for k, v in (weights | halves).items()}

    def score(
        self,
        number: int,
        batch: Batch,
        sent: list[Any] | None,
        what: ScoreName,
        micro: int | None,
    ) -> Any:
        group = WorkerGroup(self.accelerator)
        return self._agree(number, lambda: group.score(self._referred(sent) or self.policy, batch, what, micro))

    def _agree(self, number: int, function: Callable[[], Any]) -> Any:
        """Return the result of a function, or its error if the other processes have also ended the call.

        Otherwise, the error is raised, because the other processes wait for this one.
        """
        result: Any
        try:
            result = function()
        except (AgentFlyError, asyncio.CancelledError) as error:
            result = error
        self._store.set(f"{number}/{self.accelerator.process_index}", "ended")
        if isinstance(result, AgentFlyError):
            keys = [f"{number}/{rank}" for rank in range(self.accelerator.num_processes)]
            try:
                self._store.wait(keys, datetime.timedelta(seconds=_GRACE_SECONDS / 2))
            except RuntimeError:
                raise result from None
        return result

    def _referred(self, sent: list[Any] | None) -> Policy | None:
        """Return the reference policy, which is kept until another one is sent."""
        import ray

        if not sent:
            return None if sent is None else self.policy.reference()
        if self._reference is None or self._reference[0] != sent[0]:
            self._reference = None
            reference: Policy = ray.get(sent[0])
            reference.model.to(self.accelerator.device)
            self._reference = sent[0], reference.shard(self.accelerator)
        return self._reference[1]

    def optimizer_state(self) -> dict[str, Any]:
        optimizer: Any = self.optimizer
        if self.policy.accelerator is not None:
            optimizer = gather(self.policy, optimizer)[1]
        state: dict[str, Any] = optimizer.state_dict()
        moments = {i: {k: v.cpu() for k, v in values.items()} for i, values in state["state"].items()}
        return {**state, "state": moments} if self.accelerator.is_main_process else {}
