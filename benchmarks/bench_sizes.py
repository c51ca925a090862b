"""Compare sampling and updates with their rivals on random-weight models of real architectures.

    make bench-sizes                                   # 1M and 5M parameters; several minutes
    make bench-sizes ARGS="--sizes 40M 150M --architectures qwen3 --out sizes.json"
    make bench-sizes ARGS="--parts growth --sizes 1M --architectures qwen3 --long --plot docs/images/growth.svg"

sample   Sampled tokens per CPU second of `LocalEngine`, relative to transformers `generate` on the same prompts: 8 and
         64 chains, prompts of 128 and 1,024 tokens, each prompt shared by a group of 8 chains. The engine computes a
         shared prompt once; "cold" samples with a new engine, whose cache is empty.
vllm     The same, relative to vLLM's CPU build as `VLLMEngine`, in CPU time of all processes. An engine is kept for
         all repeats, which have different prompts, and each engine has a process of its own.
update   CPU time and peak memory of `ppo_step`, relative to a plain step on the same padded rows (logits at every
         position, cross-entropy of the same tokens, backward, AdamW): all weights, and with LoRA the adapters alone.
checkpointing   CPU time and peak memory of `ppo_step` with and without gradient checkpointing, for all weights and for
         LoRA. Both are measured in one process, which returns freed tensors to the system.
logits   CPU time and peak memory of a forward and backward pass of 1,536 trained tokens with a vocabulary of 151,936.
         The logits are computed in chunks, and again in the backward pass; relative to the same pass without chunks.
growth   CPU time and peak memory of `ppo_step` against the number and the length of rows, with the exponent of a
         power law through the last two points. Attention makes the exponent of time against length exceed 1.

Every case runs in a process of its own. In it the candidates alternate, and the fastest of the repeats counts. A
ratio above 1 means that this package samples faster; for updates, a ratio below 1 means that it is faster or smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from bench_rollout import cpu_of_all

import agentfly_kit as af
from agentfly_kit.policy import forward
from agentfly_kit.samples import TurnRequest
from agentfly_kit.types import Task

SIZES = {"1M": (128, 4), "5M": (256, 6), "40M": (576, 12), "150M": (1024, 14)}
"""Width and number of layers. The vocabulary has 4,096 tokens."""

VOCABULARY = 4096
TASK = Task("bench", ({"role": "user", "content": "?"},))


def random_policy(architecture: str, size: str) -> af.Policy:
    """Return a policy with random weights and the tokenizer of the calculator policy."""
    prefix, config_type = {
        "qwen3": ("Qwen3", transformers.Qwen3Config),
        "llama": ("Llama", transformers.LlamaConfig),
        "gemma3": ("Gemma3", transformers.Gemma3TextConfig),
    }[architecture]
    if size == "0.5B":  # the shape of Qwen2.5-0.5B
        prefix, config_type = "Qwen2", transformers.Qwen2Config
        shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        shape |= {"num_key_value_heads": 2, "vocab_size": 151_936}
    else:
        width, layers = SIZES[size]
        shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "vocab_size": VOCABULARY}
        shape |= {"head_dim": 32}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = config_type(**shape, **tokens, max_position_embeddings=16_384, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
    chat = af.tiny.policy("calculator").chat
    chat.stop_ids = ()  # so that all actions have the same length
    return af.Policy(model, chat)


def prompts(chains: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return the prompts of the chains; each group of eight has the same prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, 380, (math.ceil(chains / 8), length), generator=generator).tolist()
    return [rows[i // 8] for i in range(chains)]


async def sample_all(engine: Any, rows: list[list[int]], new: int) -> None:
    """Sample `new` tokens after each prompt, as concurrent chains."""

    async def chain(number: int, ids: list[int]) -> None:
        request = TurnRequest(TASK, 0, f"chain-{number}")
        sample = await engine.sample(ids, af.Sampling(max_tokens=new), number, request=request)
        assert len(sample.ids) == new
        engine.release(f"chain-{number}")

    await asyncio.gather(*(chain(i, ids) for i, ids in enumerate(rows)))


def best_cpu(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the least CPU seconds of each run, after one warm-up. The runs alternate."""
    best = dict.fromkeys(runs, math.inf)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:
                best[name] = min(best[name], time.process_time() - began)
    return best


def sample_case(architecture: str, size: str, chains: int, length: int, new: int, repeats: int) -> dict[str, Any]:
    policy = random_policy(architecture, size)
    rows = prompts(chains, length)

    async def ours() -> None:
        engine = af.LocalEngine(policy, slots=chains)
        await sample_all(engine, rows, new)
        await engine.close()

    @torch.inference_mode()
    def generate() -> None:
        ids = torch.tensor(rows)
        policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=new, max_new_tokens=new,
            pad_token_id=0,
        )  # fmt: skip

    best = best_cpu({"LocalEngine": lambda: asyncio.run(ours()), "generate": generate}, repeats)
    speed = {name: round(chains * new / seconds, 1) for name, seconds in best.items()}
    return {"tokens per CPU second": speed, "ratio": round(best["generate"] / best["LocalEngine"], 2)}


async def warm_cases(
    architecture: str, size: str, who: str, chains: list[int], lengths: list[int], new: int, repeats: int
) -> dict[str, list[float]]:
    """Return the CPU and wall-clock seconds of an engine that is kept for all cases. All prompts differ."""
    policy = random_policy(architecture, size)
    engine: Any = af.LocalEngine(policy, slots=max(chains))
    if who == "vLLM":
        limits = {"max_model_len": max(lengths) + new, "max_num_seqs": max(chains), "kv_cache_memory_bytes": 1 << 31}
        engine = af.VLLMEngine(policy, stop_ids=(), **limits)
    found = {}
    try:
        if isinstance(engine, af.VLLMEngine):
            await engine.start()
        for count in chains:
            for length in lengths:
                best = [math.inf, math.inf]
                for repeat in range(repeats + 1):
                    cpu, wall = cpu_of_all(), time.perf_counter()
                    await sample_all(engine, prompts(count, length, seed=repeat), new)
                    spent = (cpu_of_all() - cpu, time.perf_counter() - wall)
                    if repeat:
                        best = [min(pair) for pair in zip(best, spent, strict=True)]
                found[f"{count} chains, prompts of {length}"] = best
    finally:
        await engine.close()
    return found


def warm_case(**arguments: Any) -> dict[str, Any]:
    return asyncio.run(warm_cases(**arguments))


def make_batch(policy: af.Policy, rows: int, length: int) -> Any:
    """Return a batch of rows with a prompt of half the length, of which every fourth token is the tool's."""
    generator = torch.Generator().manual_seed(0)
    mask = [i >= length // 2 and i % 4 != 3 for i in range(length)]
    trajectories = [
        af.from_tokens(
            torch.randint(5, 380, (length,), generator=generator).tolist(),
            mask, [-math.log(policy.vocab_size)] * length, task=TASK, group=f"group-{i // 8}", chain=i % 8, reward=0.0,
        )
        for i in range(rows)
    ]  # fmt: skip
    return af.collate(af.Rollout.from_trajectories(trajectories), torch.where(torch.arange(rows) % 3 == 0, 1.0, -0.5))


def plain_step(policy: af.Policy, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Make one update on rows in micro-batches of `policy.micro_tokens` padded tokens."""
    tokens, rows = int(batch.mask.sum()), max(1, policy.micro_tokens // batch.ids.shape[1])
    optimizer.zero_grad()
    for start in range(0, len(batch), rows):
        part = slice(start, start + rows)
        logits = policy.model(input_ids=batch.ids[part], attention_mask=batch.attention[part], use_cache=False).logits
        labels = torch.where(batch.mask[part], batch.ids[part], -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / tokens).backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def peak() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def update_case(
    architecture: str,
    size: str,
    who: str,
    lora: bool,
    rows: int,
    length: int,
    repeats: int,
    checkpointing: bool = False,
) -> dict[str, Any]:
    policy = random_policy(architecture, size)
    if lora:
        with tempfile.TemporaryDirectory() as folder:
            policy.save(folder)
            policy = af.Policy.load(folder, lora=8)
    batch = make_batch(policy, rows, length)
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    if who == "ppo_step":
        optimizer = af.adamw(policy, 1e-12)
        config = af.PPOConfig(old_logprobs="engine", max_lag=None, checkpointing=checkpointing)
        runs = {who: lambda: af.ppo_step(policy, optimizer, batch, config)}
    else:
        optimizer = torch.optim.AdamW(weights, lr=1e-12, fused=True)
        runs = {who: lambda: plain_step(policy, optimizer, batch)}
    before = peak()
    seconds = best_cpu(runs, repeats)[who]
    return {"seconds": round(seconds, 3), "MiB": round(peak() - before, 1), "trained": sum(map(torch.numel, weights))}


def logits_case(chunks: bool, repeats: int) -> dict[str, Any]:
    shape = {"hidden_size": 896, "intermediate_size": 1792, "num_hidden_layers": 2, "num_attention_heads": 14}
    shape |= {"num_key_value_heads": 2, "vocab_size": 151_936, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, tie_word_embeddings=True))
    policy = af.Policy(model.to(torch.float32), af.tiny.policy("calculator").chat)
    if not chunks:
        forward._MAX_LOGITS = 2**40
    ids = torch.randint(5, 380, (6, 257), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False

    def step() -> None:
        model.zero_grad()
        policy.forward(ids, mask, torch.ones(len(ids))).logprob.sum().backward()

    before = peak()
    seconds = best_cpu({"step": step}, repeats)["step"]
    return {"seconds": round(seconds, 3), "MiB": round(peak() - before, 1)}


CASES = {"sample": sample_case, "warm": warm_case, "update": update_case, "logits": logits_case}


# With these variables, glibc returns freed tensors to the system at once. Otherwise the peak resident memory depends on
# gaps between tensors, which varies by a tenth. The calls to the system take time, so times are measured without them.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def in_process(case: str, environment: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """Run a case in a process of its own, because its peak memory cannot be reset."""
    command = [
        sys.executable,
        __file__,
        "--case",
        json.dumps([case, arguments]),
        "--threads",
        str(torch.get_num_threads()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    if done.returncode:
        raise SystemExit(f"{case} {arguments} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(case, *arguments.values(), found, file=sys.stderr, flush=True)
    return found


def exponent(points: dict[int, float]) -> float:
    """Return the exponent of the power law through the last two points."""
    (x0, y0), (x1, y1) = list(points.items())[-2:]
    return round(math.log(y1 / y0) / math.log(x1 / x0), 2) + 0.0  # turns -0.0 into 0.0


def growth(architecture: str, size: str, repeats: int, long: bool) -> dict[str, Any]:
    shapes = {
        "rows of 256 tokens": [(rows, 256) for rows in (8, 32, 128, *([512] if long else []))],
        "tokens per row": [(8, length) for length in (256, 1024, *([4096, 8192] if long else [2048]))],
    }
    out = {}
    for name, cases in shapes.items():
        found = {}
        for rows, length in cases:
            key = rows if "rows of" in name else length
            case = {"architecture": architecture, "size": size, "who": "ppo_step", "lora": False}
            case |= {"rows": rows, "length": length}
            found[key] = in_process("update", **case, repeats=repeats)
            found[key]["MiB"] = in_process("update", EXACT_MEMORY, **case, repeats=1)["MiB"]
        seconds = {key: case["seconds"] for key, case in found.items()}
        memory = {key: case["MiB"] for key, case in found.items()}
        out[name] = {"seconds": seconds, "MiB": memory, "exponents": [exponent(seconds), exponent(memory)]}
    return out


def plot(found: dict[str, Any]) -> str:
    """Return an SVG of the results of `growth`: time and memory against rows and row length, with logarithmic axes."""
    panels = []
    for column, (name, case) in enumerate(found.items()):
        for line, unit in enumerate(("seconds", "MiB")):
            points = {float(key): value for key, value in case[unit].items()}
            (x0, x1), (y0, y1) = ((math.log(min(v)), math.log(max(v))) for v in (points, points.values()))
            # One scale for both axes, so that linear growth has a slope of 45 degrees.
            scale = 210 / max(x1 - x0, y1 - y0)
            at = {x: ((math.log(x) - x0) * scale, 210 - (math.log(y) - y0) * scale) for x, y in points.items()}
            marks = "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
                f'<text x="{x + 8:.1f}" y="{y + 16:.1f}">{key:,.0f}: {points[key]:,.{2 - 2 * line}f}</text>'
                for key, (x, y) in at.items()
            )
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at.values())
            panels.append(
                f'<g transform="translate({30 + 360 * column},{50 + 290 * line})">'
                f'<text y="-24">{unit} against {name}, exponent {case["exponents"][line]:.2f}</text>'
                f'<path d="M0,0V210H320" class="axis"/><path d="M0,210L210,0" class="linear"/>'
                f'<polyline points="{path}"/>{marks}</g>'
            )
    style = (
        "text{font:13px sans-serif;fill:#333}circle{fill:#1769aa}polyline{fill:none;stroke:#1769aa;stroke-width:2}"
        ".axis{fill:none;stroke:#999}.linear{stroke:#bbb;stroke-dasharray:4}"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 600" width="740" height="600">'
        f'<style>{style}</style><rect width="740" height="600" fill="#fff"/>{"".join(panels)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1M", "5M"], choices=[*SIZES, "0.5B"])
    parser.add_argument("--architectures", nargs="+", default=["qwen3", "llama", "gemma3"])
    parser.add_argument(
        "--parts", nargs="+", default=["sample", "update", "growth"], help="also: vllm, logits, checkpointing"
    )
    parser.add_argument("--chains", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 1024], help="lengths of prompts in tokens")
    parser.add_argument("--new", type=int, default=32, help="sampled tokens per chain")
    parser.add_argument("--rows", type=int, default=32, help="rows of 256 tokens in an update")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, from 5M parameters on")
    parser.add_argument("--long", action="store_true", help="512 rows, and rows of 8,192 tokens")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="write the growth to this SVG")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.case is not None:
        name, arguments = json.loads(given.case)
        print(json.dumps(CASES[name](**arguments)))
        return

    results: dict[str, Any] = {}
    for architecture in given.architectures:
        for size in given.sizes:
            at = {"architecture": architecture, "size": size}
            found = results[f"{architecture} {size}"] = {}
            if "sample" in given.parts:
                found["sample"] = {
                    f"{chains} chains, prompts of {length}": in_process(
                        "sample", **at, chains=chains, length=length, new=given.new, repeats=given.repeats
                    )
                    for chains in given.chains
                    for length in given.prompts
                }
            if "vllm" in given.parts:
                case = {**at, "chains": given.chains, "lengths": given.prompts, "new": given.new}
                ours, rival = (
                    in_process("warm", **case, who=who, repeats=given.repeats) for who in ("LocalEngine", "vLLM")
                )
                found["vllm"] = {
                    name: {"CPU": round(rival[name][0] / cpu, 2), "wall": round(rival[name][1] / wall, 2)}
                    for name, (cpu, wall) in ours.items()
                }
            if "update" in given.parts:
                for lora in (False, True):
                    case = {**at, "lora": lora, "rows": given.rows, "length": 256}
                    ours, plain = (
                        in_process("update", **case, who=who, repeats=given.repeats)
                        | {"MiB": in_process("update", EXACT_MEMORY, **case, who=who, repeats=1)["MiB"]}
                        for who in ("ppo_step", "plain")
                    )
                    ratios = {key: round(ours[key] / plain[key], 2) for key in ("seconds", "MiB")}
                    found["update, LoRA" if lora else "update"] = {"ppo_step": ours, "plain": plain, "ratios": ratios}
            if "checkpointing" in given.parts:
                for lora in (False, True):
                    case = {**at, "who": "ppo_step", "lora": lora, "rows": given.rows, "length": 256, "repeats": 1}
                    found["checkpointing, LoRA" if lora else "checkpointing"] = {
                        name: in_process("update", EXACT_MEMORY, **case, checkpointing=on)
                        for name, on in (("without", False), ("with", True))
                    }
    if "logits" in given.parts:
        cases = [in_process("logits", chunks=chunks, repeats=given.repeats) for chunks in (True, False)]
        ratios = {key: round(cases[0][key] / cases[1][key], 2) for key in cases[0]}
        results["logits"] = {"in chunks": cases[0], "at once": cases[1], "ratios": ratios}
    if "growth" in given.parts:
        results["growth"] = growth(given.architectures[0], given.sizes[0], given.repeats, given.long)
        if given.plot is not None:
            given.plot.write_text(plot(results["growth"]), encoding="utf-8")
    text = json.dumps({"benchmark": "sizes", "load": os.getloadavg()[0], "results": results}, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
