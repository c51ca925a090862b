"""Two processes compute the step of one: the same loss, gradients and weights."""

import sys
from pathlib import Path
from typing import Any, Literal

import agents
import errors
import pytest
import torch
from processes import run_two
from test_ppo_settings import Kept, judged, made

import agentfly_kit as af
from agentfly_kit.ppo.distributed import WorkerGroup, gather

pytest.importorskip("accelerate")

CASES: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch": 5, "epochs": 2, "clip": 0.1, "correction": "token", "entropy_coef": 0.01},
    "sequence means": {"loss": "sapo", "aggregate": "seq_mean_token_mean"},
    "fewer rows than processes": {"loss": "gspo", "minibatch": 1},
    "value and reference": {"kl_coef": 0.1, "aggregate": "trajectory_mean", "target_kl": 10.0},
    "stops early": {"minibatch": 4, "epochs": 4, "target_kl": 1e-12},
}
SCORES: tuple[Literal["logprob", "value"], ...] = ("logprob", "value")
NUMBERS = (
    "loss",
    "policy_loss",
    "value_loss",
    "kl_reference",
    "approx_kl",
    "clip_fraction",
    "ratio_max",
    "grad_norm",
)


class Forwards:
    """Count the sampled tokens for which a policy computes logprobs."""

    def __init__(self, policy: af.Policy) -> None:
        self.tokens, self._forward = 0, policy.forward
        policy.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.tokens += int(mask.sum())
        return self._forward(ids, mask, *args, **options)


def prepared() -> tuple[af.Policy, af.Batch]:
    policy = af.Policy(agents.random_policy(3).model, agents.chat(), value_head=True)
    return policy, judged(policy, made(policy))


def run(accelerator: Any = None) -> dict[str, Any]:
    """Return gradients and statistics of every case, and the weights after a step with AdamW."""
    out: dict[str, Any] = {}
    for name, options in CASES.items():
        policy, batch = prepared()
        batch = batch.replace(ref_logprobs=batch.logprobs - 0.1)
        kept = Kept(policy)
        stats = af.ppo_step(
            policy,
            kept,
            batch,
            af.PPOConfig(old_logprobs="engine", max_grad_norm=None, **options),
            accelerator=accelerator,
        )
        numbers = {n: getattr(stats, n) for n in NUMBERS} | {"updates": stats.updates, "stopped": stats.stopped_early}
        out[name] = {"gradients": torch.stack(kept.seen), "numbers": numbers}
    # Only one process finds that the sampler's logprobs are wrong: in one row, or in the one row of the minibatch.
    batch = made(agents.random_policy(3), 8, noise=0.0)
    longest = int(batch.mask.sum(1).argmax())
    for name, rows, minibatch in (("one wrong row", [longest], None), ("one row per minibatch", slice(None), 1)):
        policy = agents.random_policy(3)
        logprobs = batch.logprobs.clone()
        logprobs[rows] -= 0.01
        given = batch.replace(logprobs=logprobs, advantages=torch.where(batch.mask, 1.0, torch.nan))
        config = af.PPOConfig(epochs=2, minibatch=minibatch, max_grad_norm=None)
        kept = Kept(policy)
        stats = af.ppo_step(policy, kept, given, config, accelerator=accelerator)
        out[name] = {"gradients": torch.stack(kept.seen), "sampler_gap": stats.sampler_gap}
    # Each process computes about half of the rows, and returns the scores of all.
    policy, batch = prepared()
    forwards = Forwards(policy)
    whole = policy.score(batch, SCORES)
    tokens = forwards.tokens
    out["scores"] = {name: WorkerGroup(accelerator).score(policy, batch, name, None) for name in SCORES}
    share = (forwards.tokens / tokens - 1) / len(SCORES)
    assert share == 1 if accelerator is None else 0.4 < share < 0.6, share
    for name, scores in out["scores"].items():
        torch.testing.assert_close(scores, whole[name], rtol=1e-5, atol=1e-5, equal_nan=True)
    af.ppo_step(policy, af.adamw(policy, 1e-3), batch, af.PPOConfig(minibatch=4), accelerator=accelerator)
    out["weights"] = torch.cat([p.detach().flatten() for p in policy.parameters()])
    if accelerator is not None:
        # Each process collected its own rows, and each steps on the rows of all.
        half = made(policy, 8, seed=accelerator.process_index)
        together = gather(half, accelerator)
        assert len(together) == 16 and len(together.groups.unique()) == 4
        mine = slice(8 * accelerator.process_index, 8 * accelerator.process_index + 8)
        assert torch.equal(together.logprobs[mine][together.mask[mine]], half.logprobs[half.mask])
        af.ppo_step(policy, af.adamw(policy), together, af.PPOConfig(old_logprobs="engine"), accelerator=accelerator)
        errors.check(
            lambda: af.ppo_step(
                policy, af.adamw(policy), half, af.PPOConfig(old_logprobs="engine"), accelerator=accelerator
            ),
            af.errors.BatchError,
            "gather",
        )
    return out


def child(folder: Path) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    torch.save(run(accelerator), folder / f"{accelerator.process_index}.pt")
    accelerator.end_training()


@pytest.mark.real
def test_two_processes_compute_the_step_of_one(tmp_path: Path) -> None:
    alone = run()
    ranks = run_two(Path(__file__).resolve(), tmp_path)
    for name in (*CASES, "one wrong row", "one row per minibatch"):
        for rank in ranks:
            got, wanted = rank[name], alone[name]
            agents.assert_same_gradient(got["gradients"], wanted["gradients"], name)
            if name in CASES:
                assert got["numbers"] == pytest.approx(wanted["numbers"], rel=1e-5, abs=1e-6, nan_ok=True), name
            else:
                assert (
                    got["sampler_gap"]
                    == pytest.approx(wanted["sampler_gap"], abs=1e-6)
                    == pytest.approx(0.01, abs=1e-4)
                )
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    # Adam divides by the size of the gradient, so the sign of its step is arbitrary where the gradient is about 0.
    away = (ranks[0]["weights"] - alone["weights"]).abs()
    assert float(away.quantile(0.99)) < 1e-5 and float(away.max()) < 1e-2
    assert alone["stops early"]["numbers"]["stopped"] and alone["stops early"]["numbers"]["updates"] == 1


if __name__ == "__main__":
    child(Path(sys.argv[1]))
