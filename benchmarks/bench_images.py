"""Benchmark images: how policies learn, an update on rows with images, and the cost for text. Writes JSON to stdout.

    python benchmarks/bench_images.py learning --family shapes --seeds 3 --steps 60
    python benchmarks/bench_images.py update
    python benchmarks/bench_images.py text 9c7858fe 39e2c7aa
    python benchmarks/bench_images.py share

learning  Success on 256 test tasks by kind of task, before and after GRPO on 512 training tasks. The first seed is 0.
          "cpu seconds" is the CPU time of training.
update    CPU time of `ppo_step` on 128 rows with different images, in minibatches of 32, relative to a plain supervised
          step of transformers with the same rows, padded, and the same images, which the image processor processes in
          both. "pixels given" is a plain step without the processor. The fastest of --repeats counts.
text      CPU time of a rollout of 64 chains without images and of an update on them at the second commit, relative to
          the first. Each commit runs in a process of its own. The two take turns in random order, so that other load
          affects both alike. The ratio of two processes, the median of --rounds, also depends on where their memory
          lies, so the result is the mean over --processes pairs. The same commit twice shows how exact it is.
share     Share of the same work that is spent in functions for images, as measured by cProfile. Calls of one such
          function by another count twice.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import cProfile
import functools
import itertools
import json
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import agentfly_kit as af

ROOT = Path(__file__).resolve().parent.parent
# Targets: success of each kind of task after learning, and ratios of CPU time.
BARS = {"shapes": 0.85, "desk": 0.7, "update": 1.2, "text": 1.02}
# Functions for images in other modules than `images.py` and `vision.py`.
FUNCTIONS = (
    "check_images", "_mark_images", "first_image", "images_of", "images_in", "spans_of", "_row_images",
)  # fmt: skip


async def by_kind(agent: Any, tasks: Any) -> dict[str, float]:
    """Return the sampled success on tasks by kind of task, and of all tasks."""
    found = await af.evaluate(agent, tasks)
    rewards = defaultdict(list)
    for t in found.rollout:
        rewards[t.task.fields["kind"]].append(t.reward)
    return {kind: round(statistics.mean(some), 3) for kind, some in rewards.items()} | {
        "all": round(found.success, 3)
    }


async def learn(family: str, seed: int, steps: int) -> dict[str, Any]:
    """Train the shipped policy of a family once."""
    of, policy = getattr(af.envs, family), af.tiny.policy(family)
    agent, test = of.agent(policy, seed=seed), of.tasks(256, "test")
    before, began = await by_kind(agent, test), time.process_time()
    config = af.TrainConfig(steps=steps, checkpoint_every=steps, lr_end=3e-5, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        await af.train(agent, policy, of.tasks(512, "train"), config, run=Path(folder) / "run")
    seconds = time.process_time() - began
    after = await by_kind(agent, test)
    await agent.engine.close()
    print(f"seed {seed}: {before} -> {after} in {seconds:.0f} cpu s", file=sys.stderr, flush=True)
    return {"seed": seed, "before": before, "after": after, "cpu seconds": round(seconds, 1)}


def update(repeats: int) -> dict[str, Any]:
    """Compare `ppo_step` with a padded step of transformers."""
    from bench_update import measure

    policy = af.tiny.policy("shapes")
    rollout = asyncio.run(af.envs.shapes.agent(policy).rollout(af.envs.shapes.tasks(128, "train"), 1))
    batch = af.collate(rollout, torch.where(torch.arange(128) % 3 == 0, 1.0, -0.5))
    process = policy.chat.reader.processor.image_processor
    pictures = [spans[0].image for spans in batch.images]
    pixels = process([[each.to_pil()] for each in pictures], return_tensors="pt")["pixel_values"]
    # With this tiny learning rate, AdamW does the usual work but the weights are practically equal in all repeats.
    mine, theirs = af.adamw(policy, 1e-12), torch.optim.AdamW(policy.model.parameters(), lr=1e-12, fused=True)
    config = af.PPOConfig(minibatch=32, old_logprobs="engine", max_lag=None)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))

    def padded(images: Any = None) -> None:
        for rows in order.split(32):
            theirs.zero_grad()
            width = int(batch.lengths[rows].max())
            ids, mask = batch.ids[rows, :width], batch.mask[rows, :width]
            shown = process([[pictures[i].to_pil()] for i in rows], return_tensors="pt") if images is None else None
            given = images[rows] if shown is None else shown["pixel_values"]
            attention = batch.attention[rows, :width]
            logits = policy.model(input_ids=ids, attention_mask=attention, pixel_values=given, use_cache=False).logits
            labels = torch.where(mask, ids, -100)[:, 1:]
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            theirs.step()

    step, given = lambda: af.ppo_step(policy, mine, batch, config), lambda: padded(pixels)
    seconds = measure({"ppo_step": step, "padded": padded, "pixels given": given}, repeats)
    best = {name: each["best"] for name, each in seconds.items()}
    ratios = {name: round(best["ppo_step"] / best[name], 3) for name in ("padded", "pixels given")}
    assert len({*pictures}) > 100
    return {"rows": len(batch), "tokens": int(batch.lengths.sum()), "cpu seconds": best, "ratios": ratios}


def text_work() -> tuple[dict[str, Callable[[], Any]], int]:
    """Return a rollout of 64 chains and an update on such chains, as functions, and the number of their tokens."""
    from bench_learning import agent_of

    policy = af.tiny.policy("calculator")
    agent = agent_of("calculator", policy, 0)
    tasks, optimizer = af.load_tasks("calculator").train[:8], af.adamw(policy, 1e-12)
    config = af.PPOConfig(minibatch=32, old_logprobs="engine", max_lag=None)
    loop = asyncio.new_event_loop()

    def sample() -> Any:
        return loop.run_until_complete(agent.rollout(tasks, group_size=8))

    batch = af.collate(sample(), torch.where(torch.arange(64) % 3 == 0, 1.0, -0.5))
    step = functools.partial(af.ppo_step, policy, optimizer, batch, config)
    return {"rollout": sample, "ppo_step": step}, int(batch.lengths.sum())


def work() -> None:
    """Carry out the work that is named in each line of standard input, and write its CPU seconds and its tokens."""
    assert str(Path(af.__file__).parent.parent) == os.environ["PYTHONPATH"]
    run, tokens = text_work()
    for line in sys.stdin:
        began = time.process_time()
        run[line.strip()]()
        print(time.process_time() - began, tokens, flush=True)


def text(commits: Sequence[str], processes: int, rounds: int) -> dict[str, Any]:
    """Compare the CPU time of text-only work at two commits."""
    rng, ratios, tokens = random.Random(0), defaultdict(list), {}
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(i) for i in range(2)]
        for tree, commit in zip(trees, commits, strict=True):
            tree.mkdir()
            archive = subprocess.run(["git", "archive", commit, "agentfly_kit"], cwd=ROOT, stdout=-1, check=True)
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        for _ in range(processes):
            workers: Any = [
                subprocess.Popen(
                    [sys.executable, __file__, "work"],
                    env={**os.environ, "PYTHONPATH": str(tree)},
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for tree in trees
            ]
            found = defaultdict(list)
            for at, name in itertools.product(range(-2, rounds), ("rollout", "ppo_step")):
                taken = [0.0, 0.0]
                for i in rng.sample(range(2), 2):
                    workers[i].stdin.write(f"{name}\n")
                    workers[i].stdin.flush()
                    seconds, tokens[i] = map(float, workers[i].stdout.readline().split())
                    taken[i] = seconds
                if at >= 0:  # the first rounds are for warming up
                    found[name].append(taken[1] / taken[0])
            for name, some in found.items():
                ratios[name].append(round(statistics.median(some), 4))
            print({name: some[-1] for name, some in ratios.items()}, file=sys.stderr, flush=True)
            for worker in workers:
                worker.stdin.close()
                worker.wait()
    assert tokens[0] == tokens[1], "the work differs"
    return {name: summary(some, rng) for name, some in ratios.items()}


def summary(ratios: Sequence[float], rng: random.Random) -> dict[str, Any]:
    """Return the mean of ratios and its 95 % interval, by bootstrap."""
    means = sorted(statistics.mean(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    interval = [round(means[50], 4), round(means[-51], 4)]
    return {"ratio": round(statistics.mean(ratios), 4), "interval": interval, "ratios": ratios}


def share() -> dict[str, float]:
    """Return the share of text-only work that is spent in functions for images."""
    found = {}
    for name, run in text_work()[0].items():
        run()
        profile = cProfile.Profile()
        for _ in range(10):
            profile.runcall(run)
        stats: Any = pstats.Stats(profile)
        within = sum(
            taken[3]
            for (file, _, function), taken in stats.stats.items()
            if function in FUNCTIONS or Path(file).stem in ("images", "vision")
        )
        found[name] = round(within / stats.total_tt, 6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["learning", "update", "text", "share", "work"])
    parser.add_argument("commits", nargs="*", help="two commits")
    parser.add_argument("--family", choices=["shapes", "desk"], default="shapes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="iterations of 128 episodes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=8)
    given = parser.parse_args()
    if given.part == "work":
        work()
        return
    result: dict[str, Any] = {"part": given.part, "load": os.getloadavg()[0], "bars": BARS}
    if given.part == "learning":
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        result["runs"] = [asyncio.run(learn(given.family, seed, given.steps)) for seed in seeds]
    elif given.part == "update":
        result |= update(given.repeats)
    elif given.part == "share":
        result |= share()
    else:
        result |= text(given.commits, given.processes, given.rounds)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
