"""Compare the time of a GRPO iteration of SmolLM2-135M-Instruct with TRL's GRPOTrainer, with LoRA and a calculator.

    make bench-real-step                                   # may take an hour
    python benchmarks/bench_real_step.py --threads 2 --out step.json

Both start from the adapter that imitated demonstrations of the format (see bench_real.py), sample --tasks groups of
--group chains of the same problems at temperature 1, and update the adapter once, without KL. Imports, loading and
setup are not timed. TRL uses the tool and the reward as plain functions, transformers' `generate`, and a chat template
that renders the same prompts, which is checked. It runs once for each value of --micro, the rows per forward pass, and
its fastest run counts; with 32 rows it needed more than 19 GB. `ours` is the default of `af.train`, which skips groups
without signal; `ours, every row` trains all rows, as TRL does.

"limit" is the time of the floating-point operations of the tokens that must be computed, at the speed of a product of
two matrices of 2,048 x 2,048 in float32 with the same threads: each prompt once, each sampled token and tool result
once while sampling; each of these tokens forward and backward in the update, where the frozen weights need no gradient.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from bench_real import MODEL, correct, demonstrate
from bench_real import calculator as our_calculator
from recipes.base import RESPONSE_TEMPLATE

import agentfly_kit as af

LR = 3e-4
TURNS, TOKENS = 3, 64
"""Maximum number of actions of a chain, and of tokens of an action."""
# The template of SmolLM2, which has no tools, with the instructions that the package adds to the system message.
TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and tools %}{{ '<|im_start|>system\n' + INSTRUCTIONS + '<|im_end|>\n' }}{% endif -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{{ '<tool_call>{"name":"' + call.function.name + '","arguments":' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor -%}
{%- else -%}{{ message['content'] }}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    return our_calculator(expression)


def plain_reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
    finals = [c[-1]["content"] if c[-1]["role"] == "assistant" else None for c in completions]
    return [correct(final, expected) for final, expected in zip(finals, answer, strict=True)]


def agent_of(policy: af.Policy) -> af.Agent:
    return af.Agent(
        af.LocalEngine(policy, slots=64), chat=policy.chat, tools=[our_calculator], reward=correct, max_turns=TURNS,
        sampling=af.Sampling(max_tokens=TOKENS),
    )  # fmt: skip


async def prepared(folder: Path) -> None:
    """Save the adapter that both start from."""
    policy = af.Policy.load(MODEL, lora=16)
    engine = af.ScriptedEngine(functools.partial(demonstrate, policy, 0.8))
    chains = await agent_of(policy).replace(engine=engine).rollout(af.load_tasks("word_problems").train[:32])
    await af.imitate(policy, chains, epochs=1, minibatch=4, lr=1e-3)
    policy.save(folder)


def clocked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    out = run()
    out = {"cpu_s": round(time.process_time() - cpu, 1), "wall_s": round(time.perf_counter() - wall, 1), **out}
    print(json.dumps(out), file=sys.stderr, flush=True)
    return out


def ours(folder: Path, tasks: Any, group: int, *, every_row: bool) -> dict[str, Any]:
    policy = af.Policy.load(folder)
    agent = agent_of(policy)
    config = af.TrainConfig(
        steps=1, tasks_per_step=len(tasks), group_size=group, minibatch=None, epochs=1, lr=LR, checkpoint_every=1,
        loss=(lambda *given: af.losses.ppo(*given)) if every_row else "ppo",
    )  # fmt: skip

    async def iterate() -> dict[str, Any]:
        run = af.train(agent, policy, tasks, config)
        await run
        return {"success": run.records[-1]["success"]}

    return clocked(lambda: asyncio.run(iterate()))


def with_tools(policy: af.Policy) -> Any:
    """Return the tokenizer with a chat template that renders the agent's prompts, and TRL's parser of calls."""
    tokenizer = policy.chat.tokenizer
    instructions = policy.chat.format.instructions(agent_of(policy).tools.schemas)
    tokenizer.chat_template = TEMPLATE.replace("INSTRUCTIONS", json.dumps(instructions))
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def theirs(folder: Path, tasks: Any, group: int, micro: int) -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    policy = af.Policy.load(folder)
    tokenizer = with_tools(policy)
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1, learning_rate=LR,
            per_device_train_batch_size=micro, gradient_accumulation_steps=len(tasks) * group // micro,
            num_generations=group, lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, beta=0.0,
            temperature=1.0, max_completion_length=TURNS * TOKENS, max_tool_calling_iterations=TURNS - 1,
            shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            policy.model, reward_funcs=plain_reward, args=args, train_dataset=af.trl.dataset(tasks),
            processing_class=tokenizer, tools=[calculator],
        )  # fmt: skip

        def run() -> dict[str, Any]:
            trainer.train()
            logged = trainer.state.log_history[0]
            return {name: logged[name] for name in logged if name == "reward" or "length" in name or "tools" in name}

        return clocked(run)


def require_equal_prompts(folder: Path, task: Any) -> None:
    policy = af.Policy.load(folder)
    schemas = agent_of(policy).tools.schemas
    mine = list(policy.chat.prompt(task.messages, schemas))
    rendering = {"tools": list(schemas), "add_generation_prompt": True, "tokenize": False}
    text = with_tools(policy).apply_chat_template(list(task.messages), **rendering)
    if policy.chat.tokenizer(text, add_special_tokens=False)["input_ids"] != mine:
        raise SystemExit(f"TRL would train with another prompt:\n{text}\ninstead of\n{policy.chat.text(mine)}")


def product_flops() -> float:
    """Return the floating-point operations per second of a product of two matrices of 2,048 x 2,048."""
    a, b, seconds = torch.randn(2048, 2048), torch.randn(2048, 2048), []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return float(2 * 2048**3 / sorted(seconds)[len(seconds) // 2])


def operations(folder: Path, tasks: Any, group: int) -> dict[str, Any]:
    """Count the tokens and floating-point operations of an iteration without any repeated computation."""
    policy = af.Policy.load(folder)
    rollout = asyncio.run(agent_of(policy).rollout(tasks, group_size=group))
    prompts = sum(len(g[0].turns[0].ids) for g in rollout.groups)
    sampled = sum(int(t.action_mask.sum()) for t in rollout)
    results = sum(len(t.ids) - len(t.turns[0].ids) - int(t.action_mask.sum()) for t in rollout)
    head = policy.model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in policy.model.parameters()) - head
    forward = 2 * body * (prompts + sampled + results) + 2 * head * sampled
    # In the update, the gradients of activations take as many operations as the forward pass.
    return {
        "tokens": {"prompts": prompts, "sampled": sampled, "results": results},
        "operations": {"sampling": forward, "update": 2 * forward},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro", type=int, nargs="+", default=[4, 8, 16], help="TRL's rows per forward pass")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    import trl

    tasks = af.load_tasks("word_problems").train[: given.tasks]
    out: dict[str, Any] = {"benchmark": "real step", "tasks": given.tasks, "group": given.group}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "start"
        asyncio.run(prepared(folder))
        require_equal_prompts(folder, tasks[0])
        out |= operations(folder, tasks, given.group)
        for threads in given.threads:
            torch.set_num_threads(threads)
            flops = product_flops()
            runs = {"ours": ours(folder, tasks, given.group, every_row=False)}
            runs["ours, every row"] = ours(folder, tasks, given.group, every_row=True)
            runs |= {f"trl, {n} rows": theirs(folder, tasks, given.group, n) for n in given.micro}
            best = min((runs[name] for name in runs if name.startswith("trl")), key=lambda run: run["cpu_s"])
            limit = sum(out["operations"].values()) / flops
            out[f"{threads} threads"] = runs | {
                "GFLOPS of a product": round(flops / 1e9),
                "limit_s": round(limit, 1),
                "limit / ours, every row (wall)": round(limit / runs["ours, every row"]["wall_s"], 2),
                "times less CPU than trl": {
                    n: round(best["cpu_s"] / runs[n]["cpu_s"], 2) for n in runs if "ours" in n
                },
                "times less wall than trl": {
                    n: round(best["wall_s"] / runs[n]["wall_s"], 2) for n in runs if "ours" in n
                },
            }
            print(json.dumps(out[f"{threads} threads"]), file=sys.stderr, flush=True)
    out["machine"] = {
        "python": platform.python_version(), "torch": torch.__version__, "trl": trl.__version__,
        "cores": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()],
    }  # fmt: skip
    print(json.dumps(out, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
