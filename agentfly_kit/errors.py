"""Exceptions and warnings of the package.

Every message states the requirement, the given value and the remedy. User code needs to raise only `ToolError`, whose
text is shown to the model.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

F = TypeVar("F", bound=Callable[..., Any])


class AgentFlyError(Exception):
    """Base class of all exceptions of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback for IPython without the frames of this package."""
        from agentfly_kit._display import user_traceback

        return user_traceback(self)


class HostError(AgentFlyError):
    """Base class of errors of pools, sandboxes and engines. A chain that ends with such an error is not scored."""


# --- user code and settings ----------------------------------------------------------------------


class ToolError(AgentFlyError):
    """Raised by a tool to show an error message to the model as the observation. The chain continues."""


class ToolSchemaError(AgentFlyError, TypeError):
    """Raised for a tool whose signature or docstring cannot be converted to a schema."""


class RewardError(AgentFlyError, TypeError):
    """Raised for an invalid signature or return value of a reward function, or if an answer cannot be scored."""


class TaskError(AgentFlyError, ValueError):
    """Raised for an invalid task or task file. The message names the task, field or line."""


class SettingsError(AgentFlyError, ValueError):
    """Raised for invalid options and for options that contradict each other."""


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise SettingsError if `value` is not in the Literal type `choices`."""
    if value not in get_args(choices):
        raise SettingsError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")


def check_instance(name: str, value: object, types: Any, expected: str) -> None:
    """Raise SettingsError if `value` is not an instance of `types`, which the message describes as `expected`."""
    if not isinstance(value, types):
        raise SettingsError(f"{name} must be {expected}, got {value!r:.200}")


# Types that can be checked by name, with their descriptions in messages.
_TYPES = {
    "bool": "True or False",
    "int": "an integer",
    "float": "a finite number",
    "str": "a string",
    "Budget": "an af.Budget",
    "Branch": "an af.Branch",
    "Sampling": "an af.Sampling",
    "None": "None",
}
_BOUNDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}


def check_value(name: str, value: Any, types: str = "float", limit: str = "") -> None:
    """Raise SettingsError unless `value` has one of the types, such as "int | None", and is within the limit.

    Integers are accepted as floats, but True and False are not accepted as numbers. NaN and infinity are rejected.
    An invalid limit raises KeyError or ValueError for any value.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        types: Names in `_TYPES`.
        limit: Bounds of a number in words, such as "above 0 and at most 1".
    """
    first, *others = types.split(" | ")
    parts = [part.rpartition(" ") for part in limit.removeprefix("of ").split(" and ") if part]
    bounds = [(_BOUNDS[words], float(bound)) for words, _, bound in parts]
    classes = (bool,) if isinstance(value, bool) else type(value).__mro__
    fits = not {first, *others}.isdisjoint({"None"} if value is None else {c.__name__ for c in classes})
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        fits = isinstance(value, numbers.Integral) if first == "int" else first == "float" and math.isfinite(value)
        fits = fits and all(within(value, bound) for within, bound in bounds)
    if not fits:
        what = " or ".join([f"{_TYPES[first]} {limit}".rstrip(), *(_TYPES[other] for other in others)])
        raise SettingsError(f"{name} must be {what}, got {value!r:.200}")


def check_settings(settings: Any, limits: Mapping[str, Any]) -> None:
    """Raise SettingsError if a field of the dataclass `settings` has a wrong type or is not within its limit.

    Args:
        settings: A dataclass. Fields whose types are not in `_TYPES` are not checked.
        limits: The limit for `check_value` or a Literal type with the allowed values, keyed by field name. A limit that
            cannot be checked raises KeyError or ValueError for any settings.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(settings)}
    for name in {**fields, **limits}:
        types, limit = fields[name], limits.get(name, "")
        if not isinstance(limit, str):
            check_choice(name, getattr(settings, name), limit)
        elif limit or _TYPES.keys() >= set(types.split(" | ")):
            check_value(name, getattr(settings, name), types, limit)


def check_count(name: str, value: Any, minimum: int = 1, *, optional: bool = False) -> None:
    """Raise SettingsError unless `value` is an integer of at least `minimum`. If `optional`, None is also allowed."""
    check_value(name, value, "int | None" if optional else "int", f"of at least {minimum}")


def check_accepts(name: str, function: Any, *arguments: str) -> None:
    """Raise SettingsError unless `function` can be called with one positional argument for each name in `arguments`."""
    if not callable(function):
        raise SettingsError(f"{name} must be a function of ({', '.join(arguments)}), got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = getattr(function, "__qualname__", type(function).__name__)
        text = f"{name} must be a function of ({', '.join(arguments)}), got {shown}{signature}: {error}"
        raise SettingsError(text) from None


# Keywords of each function, with the corresponding names in TRL, verl and PyTorch.
_OTHER_NAMES = {
    "af.TrainConfig": {
        "advantage": "adv_estimator advantage_estimator",
        "aggregate": "loss_agg_mode loss_reduction",
        "autocast": "bf16 fp16 mixed_precision",
        "checkpoint_every": "save_freq save_steps",
        "checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
        "clip": "clip_eps clip_range clip_ratio clip_ratio_low cliprange epsilon epsilon_low",
        "clip_high": "clip_ratio_high epsilon_high",
        "correction": "importance_sampling_correction rollout_is vllm_importance_sampling_correction",
        "dual_clip": "clip_ratio_c delta",
        "entropy_coef": "ent_coef entropy_coeff",
        "epochs": "num_iterations num_ppo_epochs ppo_epochs",
        "evaluate_every": "eval_steps test_freq",
        "group_size": "n num_generations num_return_sequences",
        "kl_coef": "beta init_kl_coef kl_loss_coef",
        "kl_kind": "kl_loss_type kl_penalty",
        "lam": "gae_lambda lambd",
        "loss": "loss_fn loss_mode loss_type",
        "lr": "learning_rate",
        "max_grad_norm": "clip_grad clip_grad_norm grad_clip",
        "micro_tokens": "per_device_train_batch_size ppo_max_token_len_per_gpu ppo_micro_batch_size",
        "minibatch": "batch_size mini_batch_size minibatch_size ppo_mini_batch_size",
        "steps": "max_steps num_train_epochs total_epochs total_training_steps",
        "tasks_per_step": "train_batch_size",
        "truncated": "mask_truncated_completions",
        "value_clip": "clip_range_vf cliprange_value",
        "value_coef": "vf_coef",
        "whiten": "normalize_advantage whiten_advantages whiten_rewards",
    },
    "af.Agent": {
        "max_turns": "max_assistant_turns max_tool_calling_iterations",
        "reward": "compute_score reward_fn reward_func reward_funcs reward_function",
        "system": "system_prompt",
        "tools": "",
    },
    "af.Sampling": {
        "max_tokens": "max_completion_length max_new_tokens max_response_length response_length",
        "min_p": "",
        "stop": "stop_strings",
        "temperature": "",
        "top_k": "",
        "top_p": "",
    },
    "af.evaluate": {
        "group_size": "samples",
    },
    "af.ppo_step": {
        "reference": "ref_model ref_policy",
    },
    "af.train": {
        "eval_tasks": "eval_dataset val_dataset",
        "run": "default_local_dir output_dir",
        "tasks": "dataset prompts train_dataset",
    },
}


def suggest_keyword(wrong: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a hint such as "; did you mean 'size'?" with the name most similar to `wrong`, or "" if there is none."""
    close = difflib.get_close_matches(wrong, names, 1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def list_neighbours(path: Path) -> str:
    """Return a text such as "'runs' contains 'a', 'b'" for the closest existing parent of a missing path."""
    parent = next(parent for parent in path.parents if parent.is_dir())
    names = (
        sorted(each.name for each in parent.iterdir() if each.name[0] != ".") if os.access(parent, os.R_OK) else []
    )
    missing = path.relative_to(parent).parts[0]
    shown = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, missing, name).ratio())[:8]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{str(parent)!r} contains {', '.join(map(repr, shown)) or 'nothing'}{more}"


def _translated_keyword(wrong: str, names: Sequence[str]) -> str:
    """Return a hint with the keyword of this package that is called `wrong` in another library, or ""."""
    found = [
        (n, f) for f, table in _OTHER_NAMES.items() for n, other in table.items() if wrong in (n, *other.split())
    ]
    here = [f"; did you mean {name!r}?" for name, _ in found if name in names]
    misspelled = suggest_keyword(wrong, names, cutoff=0.85)
    if misspelled and not here:
        return misspelled
    return next(iter(here + [f"; did you mean {name!r} of {function}?" for name, function in found]), "")


def checks_keywords(target: F) -> F:
    """Decorator for functions and classes that makes the TypeError for an unknown keyword suggest the closest one.

    The signature of `target` is preserved. If `target` accepts **kwargs, its keywords are not checked.
    """
    if isinstance(target, type):
        target.__init__ = _check_keywords(target.__init__, target.__name__)  # type: ignore[misc]
        return target
    return _check_keywords(target, target.__qualname__)


def _check_keywords(function: F, name: str) -> F:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function
    names = [n for n in parameters if n not in ("self", "cls")]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for wrong in kwargs:
            if wrong not in names:
                known = f"; its keywords are {', '.join(n for n in names if n[0] != '_')}"
                hint = _translated_keyword(wrong, names) or suggest_keyword(wrong, names) or known
                raise TypeError(f"{name}() got an unexpected keyword {wrong!r}{hint}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


class NotAwaited(AgentFlyError, AttributeError):
    """Raised when the result of an async call is used without `await`."""


# --- text and tokens -----------------------------------------------------------------------------


class ChatTemplateError(AgentFlyError):
    """Raised when a chat template does not allow messages to be encoded as exact token ids."""


class AlignmentError(AgentFlyError, ValueError):
    """Raised when values per token or trajectory, such as logprobs, are missing or have the wrong shape or length."""


def check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise AlignmentError if a tensor does not have the given shape."""
    if tuple(value.shape) != tuple(shape):
        raise AlignmentError(f"{name} must have the shape {tuple(shape)}, got {tuple(value.shape)}")


# --- policy, engine, training --------------------------------------------------------------------


class PolicyError(AgentFlyError):
    """Raised when a policy cannot be loaded or its model does not support an operation."""


def is_host_failure(error: BaseException) -> bool:
    """Return True for infrastructure failures, which leave a chain unscored, and False for all other exceptions.

    A lost or refused connection is an infrastructure failure. A tool that connects to addresses chosen by the model
    must catch ConnectionError and raise ToolError.
    """
    return isinstance(error, HostError | ConnectionError)


class EngineError(HostError):
    """Raised when an engine fails, is closed, or does not support an operation."""


class BatchError(AgentFlyError, ValueError):
    """Raised when a batch cannot be created from the given trajectories."""


class EmptyBatch(BatchError):
    """Raised when no trajectory remains to train on. `dropped` lists the excluded trajectories with reasons."""

    def __init__(self, message: str, dropped: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.dropped = dropped


class TrainingError(AgentFlyError):
    """Raised when training diverges or cannot continue. The message states which steps and weights are kept."""


class RunMismatch(AgentFlyError):
    """Raised when a run folder contains a run with different settings. The message lists the differences."""


class RunError(AgentFlyError):
    """Raised when a run folder cannot be read or written. The message names the file."""


# --- sandboxes -----------------------------------------------------------------------------------


class SandboxError(HostError):
    """Raised when a sandbox cannot be started, or fails because of the host rather than the code that it runs."""


class IsolationError(SandboxError):
    """Raised when this machine does not support the requested isolation level."""


class IsolationWarning(UserWarning):
    """Issued once if sandboxes run below isolation level "strict" because this machine does not support it."""


class LeaseRevoked(SandboxError):
    """Raised when a pool has revoked a lease because it lasted too long or was ended by the user."""


class PoolTimeout(HostError, TimeoutError):
    """Raised when no sandbox becomes free within the timeout, or when none is free and the request must not wait."""


class PoolClosed(HostError):
    """Raised when a closed pool is used, or when a pool is closed while a caller is waiting for a sandbox."""


if not TYPE_CHECKING:  # type checkers assume that a module with this function has every name

    def __getattr__(name: str) -> Any:
        raise sys.modules["agentfly_kit"]._missing(f"errors.{name}")
