"""Chains of a harness with images: rows, token identity, and the wire formats of three APIs."""

from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import vision_models
from test_harness import TASK, run_one
from test_vision import SAMPLING, A, B, agent, user
from vision_models import reference_logprobs

import agentfly_kit as af


def shown(image: af.Image) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": image.data_url, "detail": "low"}},
    ]


async def run(harness: Any) -> af.Trajectory:
    tried = agent(vision_models.shared("idefics3")).replace(harness=harness, max_turns=9, sampling=SAMPLING)
    return next(iter(await tried.rollout([TASK])))


async def test_images_of_a_harness_are_in_its_rows() -> None:
    async def looking(endpoint: af.Endpoint) -> str:
        create, messages = endpoint.client.chat.completions.create, [{"role": "user", "content": shown(A)}]
        for image in (B, A):
            got = await create(model="policy", messages=messages, n=2)
            messages += [got.choices[1].message, {"role": "user", "content": shown(image)}]
        await create(model="policy", messages=messages)
        await create(model="policy", messages=[{"role": "user", "content": shown(B)}])
        return "done"

    policy, t = vision_models.shared("idefics3"), await run(looking)
    assert t.stop == "answered" and [[s.image for s in row.images] for row in t.rows] == [[A], [A, B], [A, B, A], [B]]
    assert tuple(t.rows[0].ids[: t.rows[0].action_mask.argmax()]) == policy.chat.prompt([user("What?", A)])
    for row in t.rows:
        at = np.flatnonzero(row.action_mask)
        expected = reference_logprobs(policy, row.ids.tolist(), [span.image for span in row.images])
        np.testing.assert_allclose(row.logprobs[at], expected[at - 1], atol=1e-5)
    assert len({turn.seed for turn in t.turns if turn.kind == "action"}) == 6
    scored = policy.score(batch := af.collate([t], [1.0]), {"logprob"})["logprob"]
    assert float((scored - batch.logprobs)[batch.mask].abs().max()) <= 1e-5


async def test_all_apis_give_the_same_tokens_for_an_image() -> None:
    async def with_chat(endpoint: af.Endpoint) -> None:
        await endpoint.client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": shown(A)}]
        )

    async def with_responses(endpoint: af.Endpoint) -> None:
        parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": A.data_url}]
        await endpoint.client.responses.create(model="policy", input=[{"role": "user", "content": parts}])

    async def with_messages(endpoint: af.Endpoint) -> None:
        client: Any = anthropic.AsyncAnthropic(api_key="-", http_client=endpoint.http_client)
        source = {"type": "base64", "media_type": "image/png", "data": A.data_url.partition(",")[2]}
        content = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
        await client.messages.create(model="policy", max_tokens=64, messages=[{"role": "user", "content": content}])

    chains = [await run(harness) for harness in (with_chat, with_responses, with_messages)]
    assert len({tuple(t.ids) for t in chains}) == 1 and all(t.rows[0].images[0].image == A for t in chains)


async def test_a_policy_that_reads_no_images_refuses_the_request() -> None:
    async def looking(endpoint: af.Endpoint) -> str:
        with pytest.raises(openai.BadRequestError, match=r"has an image, but LocalEngine.* reads no images"):
            await endpoint.client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": shown(A)}]
            )
        return "5"

    assert (await run_one(looking)).final == "5"
