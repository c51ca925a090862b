"""The recipes of the shipped policies: their tasks, demonstrations and supervised pretraining.

The tasks and demonstrations of each policy are in the module named after it, as a `Recipe`. `make policy` regenerates
all of them; one of them, in a checkout:

    PYTHONPATH=benchmarks python -m recipes tasks --name lookup --out data/lookup
    PYTHONPATH=benchmarks python -m recipes policy --name lookup --out data/policies/lookup
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly_kit.envs.chess import puzzles
from agentfly_kit.policy.policy import Policy
from agentfly_kit.tiny import NAMES, _check_name, _imitate, _untrained
from recipes import word_problems
from recipes.base import BaseRecipe


def recipe(name: str) -> type[BaseRecipe]:
    """Return the recipe of a shipped policy, or raise SettingsError for an unknown name."""
    _check_name(name)
    found: type[BaseRecipe] = importlib.import_module(f"recipes.{name}").Recipe
    return found


def build(
    name: str = "calculator",
    out: str | Path | None = None,
    *,
    seed: int = 0,
    skill_steps: int | None = None,
    mixed_steps: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Policy:
    """Train a policy from random weights with two phases of imitation. Takes about a minute on one core.

    The first phase, "skill", uses only correct demonstrations: a single mixed phase would copy digits poorly, and
    reinforcement learning would plateau early. In the second phase, "mixed", three in ten demonstrations are correct
    and most others answer "I don't know"; see `BaseRecipe.habits`. This phase hides the skill without destroying it,
    and reinforcement learning recovers the skill. Held-out tasks are never shown.

    Args:
        name: one of `tiny.NAMES`.
        out: folder to save the policy in.
        seed: seed of the weights and the demonstrations.
        skill_steps: steps of the first phase; by default those of the recipe.
        mixed_steps: steps of the second phase; by default those of the recipe.
        report: called with a line of text after each phase.

    Raises:  SettingsError for an unknown name.
    """
    own = recipe(name)
    policy = _untrained(own.words, seed)
    clean, mixed = own(policy.chat, seed).batches()
    skill = own.skill_steps if skill_steps is None else skill_steps
    second = own.mixed_steps if mixed_steps is None else mixed_steps
    for phase, batches, steps, lr in (("skill", clean, skill, 3e-3), ("mixed", mixed, second, 1e-3)):
        began = time.process_time()
        loss = _imitate(policy, batches, steps, lr)
        if report is not None:
            report(f"{phase}: {steps} steps, loss {loss:.4f}, {time.process_time() - began:.1f} cpu s")
    if own.half:
        policy.model.half().float()  # round the weights, so that the returned policy equals the saved one
    if out is not None:
        policy.save(out)
        if own.half:
            copy.deepcopy(policy.model).half().save_pretrained(out)
            (Path(out) / "model.safetensors").chmod((Path(out) / "policy.json").stat().st_mode)
    return policy


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate shipped tasks or policies."""
    parser = argparse.ArgumentParser(prog="python -m recipes", description=main.__doc__)
    parser.add_argument("what", choices=("tasks", "policy"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", choices=(*NAMES, "chess", "word_problems"), default="calculator")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "policy":
        settings = {"seed": given.seed, "report": lambda line: print(line, file=sys.stderr)}
        if given.name in ("desk", "shapes"):  # vision policies
            importlib.import_module(f"recipes.{given.name}").build(given.out, **settings)
        else:
            build(given.name, given.out, **settings)
        return
    for split, rows in _tasks(given.name, given.seed).items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (given.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def _tasks(name: str, seed: int) -> Mapping[str, Sequence[dict[str, Any]]]:
    if name == "chess":  # tasks without a policy
        return {split: list(puzzles.made(count, seed=seed, split=split)) for split, count in puzzles.SIZES.items()}
    if name == "word_problems":
        return word_problems.tasks(seed)
    return recipe(name).tasks(seed)
