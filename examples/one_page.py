"""Reinforcement learning of a tool-using language model on one page: rollout, mask, advantages, loss, update.

Every step is written out. `agent.rollout`, `af.collate` and `af.ppo_step` perform the same steps, with sandboxes,
checkpoints and records. Run `python examples/one_page.py` from any folder (about a minute on one CPU core).
"""

import ast
import asyncio
import operator

import torch

import agentfly_kit as af

STEPS, TASKS, GROUP, MAX_TURNS, LEARNING_RATE, CLIP = 4, 32, 8, 3, 3e-4, 0.2
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@af.tool
def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression.

    Args:
        expression: integers with + - * and parentheses, for example "3*(4+5)".
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise af.ToolError("only integers, + - * and parentheses")

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        raise af.ToolError(f"{expression!r} is not a valid expression") from None


TOOLS = af.ToolSet([calculator])


async def run_chain(engine: af.LocalEngine, chat: af.Chat, task: af.Task, seed: int) -> dict:
    """Sample a trajectory and return its token ids, a mask of the sampled tokens, their logprobs, and the reward."""
    ids = list(chat.prompt(task.messages, TOOLS.schemas))
    mask, logprobs, reward = [False] * len(ids), [0.0] * len(ids), 0.0
    for turn in range(MAX_TURNS):
        action = await engine.sample(ids, af.Sampling(max_tokens=64), seed=1000 * seed + turn)
        ids += action.ids
        mask += [True] * len(action.ids)  # only sampled tokens are trained
        logprobs += action.logprobs
        parsed = chat.parse(action.ids, TOOLS.schemas)
        if not parsed.calls:  # without a tool call, the action is the answer
            reward = float(parsed.content.strip() == task.fields["answer"])
            break
        results = [await TOOLS.call(call, af.Context(task)) for call in parsed.calls]
        messages = [{"role": "tool", "content": result.observation} for result in results]
        observation = chat.observation_ids(messages, after=action.ids)
        ids += observation
        mask += [False] * len(observation)
        logprobs += [0.0] * len(observation)
    return {"ids": ids, "mask": mask, "logprobs": logprobs, "reward": reward}


def pad(chains: list[dict], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Stack one field of all chains into a tensor (B, T), padded with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(c[name], dtype=dtype) for c in chains], batch_first=True)


async def main() -> list[float]:
    """Train for a few steps and return the success rate of each step's rollouts."""
    policy, tasks = af.tiny.policy("calculator"), af.load_tasks("calculator").train
    engine = af.LocalEngine(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    success = []
    for step in range(STEPS):
        # Rollout: GROUP concurrent chains per task.
        chosen = [task for task in tasks[step * TASKS : (step + 1) * TASKS] for _ in range(GROUP)]
        chains = await asyncio.gather(*(run_chain(engine, policy.chat, task, i) for i, task in enumerate(chosen)))
        rewards = torch.tensor([chain["reward"] for chain in chains]).view(TASKS, GROUP)
        success.append(float(rewards.mean()))
        print(f"step {step}: success {success[-1]:.2f}")

        # Advantages: the reward relative to the mean of the task's chains, in standard deviations.
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)

        # Clipped loss over the sampled tokens. The logits at position t predict the token at position t + 1.
        ids, mask = pad(chains, "ids", torch.long), pad(chains, "mask", torch.bool)
        old = pad(chains, "logprobs", torch.float)
        weight = mask[:, 1:] / mask.sum()
        optimizer.zero_grad()
        for rows in torch.arange(len(chains)).split(32):  # micro-batches limit memory without changing the gradient
            logits = policy.model(input_ids=ids[rows]).logits[:, :-1]
            new = torch.log_softmax(logits, -1).gather(-1, ids[rows, 1:, None]).squeeze(-1)
            ratio = torch.exp(torch.where(mask[rows, 1:], new - old[rows, 1:], 0.0))
            advantage = advantages.flatten()[rows, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (loss * weight[rows]).sum().backward()
        torch.nn.utils.clip_grad_norm_(list(policy.parameters()), 1.0)
        optimizer.step()
        await engine.update(policy)  # sample the next step with the new weights
    return success


if __name__ == "__main__":
    asyncio.run(main())
