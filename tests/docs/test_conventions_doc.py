"""Compute the worked numbers of docs/conventions.md and compare its table of stop reasons with the code.

Write newly computed numbers into the generated section, between the two markers:

    python tests/docs/test_conventions_doc.py --write
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from agentfly_kit import advantages, losses, types

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conventions.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


class Side(NamedTuple):
    who: str
    code: str  # code shown to the reader, evaluated by the test
    shown: str = ""  # appended to the numbers


class Dispute(NamedTuple):
    title: str
    words: str
    given: str  # statements shared by all sides
    sides: list[Side]
    chosen: int | None = 0  # index of the side used by this package


DISPUTES = [
    Dispute(
        "Standard deviation of a group",
        'DeepSeekMath divides by "the std" without specifying which. With small groups it matters.',
        "rewards, groups = [1, 0, 0, 1], [0, 0, 0, 0]",
        [
            Side("sample (verl, SkyRL, TRL GRPO)", 'af.advantages.grpo(rewards, groups, std="sample")'),
            Side("population (TRL AsyncGRPO, rLLM, ART)", 'af.advantages.grpo(rewards, groups, std="population")'),
            Side("none (Dr.GRPO, tinker)", "af.advantages.dr_grpo(rewards, groups)"),
            Side("none, compared with the others only (RLOO)", "af.advantages.rloo(rewards, groups)"),
        ],
    ),
    Dispute(
        "The eps in the denominator",
        "It prevents division by 0, and it changes results when rewards differ little. (Groups with equal rewards give "
        "exactly 0 here, for any eps.)",
        "rewards, groups = [0.001, 0, 0, 0.001], [0, 0, 0, 0]",
        [
            Side("1e-6 (verl, SkyRL)", "af.advantages.grpo(rewards, groups, eps=1e-6)"),
            Side("1e-4 (TRL)", "af.advantages.grpo(rewards, groups, eps=1e-4)"),
        ],
    ),
    Dispute(
        "A group of one",
        "There is nothing to compare with. The raw reward pushes every success up, and never a failure down.",
        'rewards, groups = [0.7, 1, 0], ["a", "b", "b"]',
        [
            Side("zero (tinker, AsyncGRPO)", 'af.advantages.grpo(rewards, groups, singleton="zero")'),
            Side("the raw reward (verl, SkyRL)", 'af.advantages.grpo(rewards, groups, singleton="raw")'),
        ],
    ),
    Dispute(
        "A trajectory that failed on the host",
        "A failure of the host is not the model's failure. Unscored rewards are NaN, or None in a list.",
        "groups = [0, 0, 0, 0]",
        [
            Side("left out of the group", "af.advantages.grpo([1, None, 0, 1], groups)"),
            Side("counted as 0", "af.advantages.grpo([1, 0, 0, 1], groups)"),
        ],
    ),
    Dispute(
        "GAE over observation tokens",
        "Two actions of two tokens with two tokens of tool output between them. Stepping through the output needs the "
        "critic's value of partial text, and makes the advantage depend on the length of the output.",
        "rewards, values = [0, 0, 0, 0, 0, 1], [0.2, 0.2, 0.9, 0.9, 0.5, 0.5]\nmask = [1, 1, 0, 0, 1, 1]",
        [
            Side("skipped (verl)", "af.advantages.gae(rewards, values, mask, lam=0.95)[0]"),
            Side(
                "an ordinary time step (SkyRL, TRL PPO, torchtune)",
                'af.advantages.gae(rewards, values, mask, lam=0.95, observations="step")[0]',
            ),
        ],
    ),
    Dispute(
        "The step of GAE",
        "Three turns of two tokens. With turns as steps, the value is that at a turn's first action token, lambda "
        "counts turns, and all tokens of a turn have its advantage. Turn ids are passed, not inferred from the mask.",
        "row = [0, 0, 0, 0, 0, 1], [0.2, 0.3, 0.5, 0.6, 0.8, 0.9], [1, 1, 1, 1, 1, 1]",
        [
            Side("a token", "af.advantages.gae(*row, lam=0.95)[0]"),
            Side("a turn", "af.advantages.gae(*row, lam=0.95, turns=[0, 0, 1, 1, 2, 2])[0]"),
        ],
    ),
    Dispute(
        "Discount over observation tokens",
        "With gamma below 1: does a long tool output discount the reward after it for the action before it?",
        "rewards, mask = [0, 0, 0, 0, 1], [1, 0, 0, 1, 1]",
        [
            Side("no (verl's GAE)", "af.advantages.reinforce_plus_plus(rewards, mask, gamma=0.5, whiten=False)"),
            Side(
                "yes (slime)",
                "af.advantages.reinforce_plus_plus(rewards, mask, gamma=0.5, whiten=False, discount_observations=True)",
            ),
        ],
    ),
    Dispute(
        "A return over observation tokens",
        "Two actions of two tokens with one token of tool output between them, and a reward at the end. verl and SkyRL "
        "multiply the running return of REINFORCE++ by the mask, so every observation ends an episode: a first action "
        "that made the success possible gets nothing, and less than nothing after whitening.",
        "rewards, mask = [0, 0, 0, 0, 1], [1, 1, 0, 1, 1]",
        [
            Side("carried through", "af.advantages.reinforce_plus_plus(rewards, mask, whiten=False)"),
            Side(
                "restarted, as if the actions were two rows (verl, SkyRL)",
                "af.advantages.reinforce_plus_plus([[0, 0], [0, 1]], [[1, 1], [1, 1]], whiten=False)",
            ),
        ],
    ),
    Dispute(
        "GAE over a compaction",
        "A trajectory with two rows of two actions. Treated as one episode, as in `train`, the reward reaches the "
        "tokens of the first row, and a compaction is handled like an observation. Treated separately, the first row "
        "ends with the critic's value of the second row, or with 0.",
        "rewards, values = [[0, 0], [0, 1]], [[0.2, 0.3], [0.6, 0.8]]\nmask = [[1, 1], [1, 1]]",
        [
            Side("one episode", 'af.advantages.gae(rewards, values, mask, lam=0.95, trajectory_index=["a", "a"])[0]'),
            Side(
                "two, the first truncated with the second's first value",
                "af.advantages.gae(rewards, values, mask, lam=0.95, bootstrap=[0.6, 0])[0]",
            ),
            Side("two, the first ending at the compaction", "af.advantages.gae(rewards, values, mask, lam=0.95)[0]"),
        ],
    ),
    Dispute(
        "A trajectory of several rows",
        "A success with three rows, a failure with one. Per row, the success counts three times in its own baseline, "
        "and the advantage of the failure is three times as large as that of each row of the success.",
        'rewards, groups, trajectory_index = [1, 1, 1, 0], [0, 0, 0, 0], ["a", "a", "a", "b"]',
        [
            Side(
                "one advantage per trajectory (Agent Lightning v1)",
                "af.advantages.trajectory_level(rewards, groups, trajectory_index=trajectory_index)",
            ),
            Side("one per row (verl)", "af.advantages.grpo(rewards, groups)"),
        ],
    ),
    Dispute(
        "Forked chains",
        "Chain a was forked into three after its first turn, and chain b was not; one advantage per turn. A plain mean "
        "over leaves counts a three times. With weights 1 / branches, forking does not change the mean (here 1/3, not "
        "1/2) or the weight of a chain in the loss. The expected gradient is then nearly that of the policy, not "
        "exactly, because the mean contains the leaf itself: on a tree that a test enumerates, its cosine with the "
        'true gradient is 0.995, and 0.951 for the other two. `TrainConfig(advantage="arpo")` uses the default; pass '
        "a function for another attribution.",
        'rewards, groups = [1, 1, 0, 0], [0, 0, 0, 0]\nturns = [["a", 1], ["a", 2], ["a", 3], ["b", 4]]',
        [
            Side("soft (ARPO)", "af.advantages.arpo(rewards, groups, turn_ids=turns, std=None)"),
            Side("hard (ARPO)", 'af.advantages.arpo(rewards, groups, turn_ids=turns, std=None, attribution="hard")'),
            Side(
                "weighted by 1 / branches",
                'af.advantages.arpo(rewards, groups, turn_ids=turns, std=None, attribution="inverse_branching")',
            ),
        ],
    ),
    Dispute(
        "Loss mass",
        "The weight of one token of each row: trajectory a has rows with 2 and 1 tokens, b has one row with 1 token. "
        "`mass` is the gradient of the aggregate with respect to the token's loss.",
        'mask = torch.tensor([[1, 1], [1, 0], [1, 0]])\ntrajectory_index = ["a", "a", "b"]',
        [
            Side("every token equal (DAPO)", 'mass(mask, "token_mean")'),
            Side("every row equal (GRPO)", 'mass(mask, "seq_mean_token_mean")'),
            Side(
                "every trajectory equal (Agent Lightning v1)",
                'mass(mask, "trajectory_mean", trajectory_index=trajectory_index)',
            ),
            Side(
                "the same, divided by the number of rows",
                'mass(mask, "trajectory_mean", trajectory_index=trajectory_index, count="rows")',
            ),
        ],
    ),
    Dispute(
        "Rows without action tokens in a mean over rows",
        "",
        "loss = torch.tensor([[1.0, 3.0], [0.0, 0.0]])\nmask = torch.tensor([[1, 1], [0, 0]])",
        [
            Side("left out of the denominator (verl)", 'af.losses.aggregate(loss, mask, "seq_mean_token_mean")'),
            Side("counted (TRL, SkyRL)", 'af.losses.aggregate(loss, mask, "seq_mean_token_mean", empty_rows="count")'),
        ],
    ),
    Dispute(
        "The denominator of Dr.GRPO",
        "A constant, so that length has no influence. If it is the width of the padded batch, it changes with the "
        "longest row of the batch; `denominator` has no default here.",
        "loss = torch.ones(2, 4)\nmask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])",
        [
            Side("a configured maximum (TRL, SkyRL)", 'af.losses.aggregate(loss, mask, "fixed", denominator=8)'),
            Side(
                "the padded width (verl by default)",
                'af.losses.aggregate(loss, mask, "fixed", denominator=loss.shape[1])',
            ),
        ],
    ),
    Dispute(
        "CISPO",
        "The weight of A log p for ratios 0.5, 1 and 2. A lower bound gives a token that has become unlikely more "
        "weight than its ratio.",
        "logprobs, old = torch.tensor([0.25, 0.25, 0.25]).log(), torch.tensor([0.5, 0.25, 0.125]).log()\n"
        "ones = torch.ones(3)",
        [
            Side(
                "clipped on both sides (verl, SkyRL)",
                "af.losses.cispo(logprobs, old, ones, ones, clip=0.2) / -logprobs",
            ),
            Side(
                "capped from above (TRL)",
                'af.losses.cispo(logprobs, old, ones, ones, clip_high=0.2, bounds="upper") / -logprobs',
            ),
        ],
    ),
    Dispute(
        "The ratio of DPPO",
        "A token of advantage 1 whose probability rose from 0.02 to 0.08; value and gradient with respect to log p. "
        "The objective of the paper (eq. 12) has the ratio itself. verl truncates it at `clip_ratio_c`, 3 in its "
        "default settings, which the paper advises against (5.4). verl's loss is ratio · A · log p, which has another "
        "value but, below the limit, the same gradient.",
        "p, q, one = torch.tensor([0.08]).log(), torch.tensor([0.02]).log(), torch.ones(1)",
        [
            Side("the ratio (DPPO)", "both(lambda p, q, a: af.losses.dppo(p, q, a, one), p, q, one)"),
            Side(
                "at most 3, times log p (verl)",
                'both(lambda p, q, a: af.losses.cispo(p, q, a, one, clip_high=2, bounds="upper"), p, q, one)',
            ),
        ],
    ),
    Dispute(
        "The denominator of the ratio",
        "The sampler's probability of a token was 0.4. The trainer computes 0.5 with the same weights (another kernel "
        "or precision), and 0.6 after some updates. The loss for advantage 1:",
        "sampler, before, now = (torch.tensor([p]).log() for p in (0.4, 0.5, 0.6))\none = torch.ones(1)",
        [
            Side("recomputed before the update", "af.losses.ppo(now, before, one, one, clip=0.3)"),
            Side(
                "recomputed, with an importance weight for the sampler",
                "af.losses.ppo(now, before, one, one, clip=0.3) * af.losses.importance_weights(before, sampler, one)",
            ),
            Side("the sampler's own", "af.losses.ppo(now, sampler, one, one, clip=0.3)", "clipped: no gradient"),
        ],
        chosen=None,
    ),
    Dispute(
        "Truncated sampling",
        "With top-p the sampler draws from the tokens kept, here 0.8 of the mass. Its logprobs are log(p / 0.8), and "
        "the ratio of an unchanged policy is 0.8, not 1. This kit's `logprobs` are those before truncation, the kept "
        "mass is recorded too, and training on such rows is rejected unless requested.",
        "p, kept, one = torch.tensor([0.3]), 0.8, torch.ones(1)",
        [
            Side("before truncation", "-af.losses.ppo(p.log(), p.log(), one, one)"),
            Side("after truncation", "-af.losses.ppo(p.log(), (p / kept).log(), one, one, clip=0.5)"),
        ],
    ),
    Dispute(
        "KL from two logprobs",
        "Value and gradient with respect to log p, for tokens with log p - log q = 0.5 and -0.5. Only the gradients of "
        "k2 and k3+ equal that of the KL in expectation; that of k1 is 0 in expectation, and using it as a loss warns.",
        "p, q, one = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5]), torch.ones(2)",
        [Side(kind, f'both(af.losses.kl, p, q, "{kind}")') for kind in ("k3", "k1", "abs", "k2", "k3+")],
    ),
]


def mass(mask: Tensor, how: Any, **options: Any) -> Tensor:
    """Return the weight of one token of each row."""
    x = torch.ones(mask.shape, requires_grad=True)
    (g,) = torch.autograd.grad(losses.aggregate(x, mask, how, **options), x)
    return g.max(1).values


def both(f: Any, p: Tensor, q: Tensor, third: Any) -> str:
    p = p.clone().requires_grad_()
    value = f(p, q, third)
    (g,) = torch.autograd.grad(value.sum(), p)
    return f"value {number(value.detach())}, gradient {number(g)}"


def number(x: Any) -> str:
    if isinstance(x, str):
        return x
    if isinstance(x, Tensor) and x.ndim:
        return "[" + ", ".join(number(v) for v in x) + "]"
    text = f"{float(x):.4f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def generated() -> str:
    lines = [BEGIN, "<!-- python tests/docs/test_conventions_doc.py --write -->", ""]
    for dispute in DISPUTES:
        names: dict[str, Any] = {
            "af": SimpleNamespace(advantages=advantages, losses=losses),
            "torch": torch,
            "mass": mass,
            "both": both,
        }
        exec(dispute.given, names)
        lines += [f"### {dispute.title}", ""]
        lines += [dispute.words, ""] if dispute.words else []
        lines += ["```python", dispute.given, "```", "", "| choice | call | gives |", "|---|---|---|"]
        for i, side in enumerate(dispute.sides):
            result = number(eval(side.code, names)) + (f" ({side.shown})" if side.shown else "")
            who = f"**{side.who}**" if i == dispute.chosen else side.who
            lines.append(f"| {who} | `{side.code}` | {result} |")
        lines.append("")
    return "\n".join([*lines, END])


def parts() -> tuple[str, str, str]:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1, f"{PAGE.name} needs each of {BEGIN} and {END} once"
    before, rest = text.split(BEGIN)
    middle, after = rest.split(END)
    return before, BEGIN + middle + END, after


@pytest.mark.filterwarnings("ignore:aggregate. rows without action tokens:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:kl.kind='k1'. in a loss:UserWarning")
def test_the_worked_numbers_are_what_the_code_gives() -> None:
    assert parts()[1] == generated(), "out of date; run: python tests/docs/test_conventions_doc.py --write"


def test_the_table_of_stop_reasons_is_that_of_the_code() -> None:
    rows = [line.strip("| ").split("|") for line in parts()[0].splitlines() if line.startswith("| `")]
    table = {cells[0].strip().strip("`"): [c.strip() for c in cells[1:4]] for cells in rows}
    assert sorted(table) == sorted(get_args(types.StopReason))
    for reason, (scored, terminal, truncated) in table.items():
        assert scored == ("no" if reason in types.UNSCORED_STOPS else "yes"), reason
        assert truncated == ("yes" if reason in types.TRUNCATED_STOPS else "no"), reason
        assert terminal == ("yes" if reason not in types.TRUNCATED_STOPS | types.UNSCORED_STOPS else "no"), reason


def test_the_hand_written_headings_are_there() -> None:
    before = parts()[0]
    for heading in ("Tokens and rows", "Seeds", "Rewards and truncation", "Stop reasons"):
        assert f"\n## {heading}\n" in before


def test_numbers_are_written_plainly() -> None:
    assert number(torch.tensor([0.5, -0.0, 1 / 3, -2.0])) == "[0.5, 0, 0.3333, -2]"
    assert number(math.sqrt(0.5)) == "0.7071"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/docs/test_conventions_doc.py --write")
    import warnings

    warnings.simplefilter("ignore")
    before, _, after = parts()
    PAGE.write_text(before + generated() + after, encoding="utf-8")
