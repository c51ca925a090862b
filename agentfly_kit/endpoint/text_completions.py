"""Completions API, which samples after a prompt of text or token ids, without messages or a chat template."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from agentfly_kit.endpoint.reply import Reply, RequestError, validating
from agentfly_kit.endpoint.request import Request, Response, Sampler, chunk_events, head, make_request, usage

_UNSUPPORTED = ("echo", "suffix", "prompt_embeds")


def read_request(body: Mapping[str, Any]) -> Request:
    """Parse the body of a request to /v1/completions.

    Raises:
        RequestError: if a parameter is not supported or has the wrong type.
    """
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestError(f"{name!r} is not supported")
    if (body.get("logprobs") or 0) > 1 or (body.get("best_of") or 1) > 1:
        raise RequestError("'logprobs' and 'best_of' must be at most 1: only the sampled tokens are reported")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a batch of one prompt
    is_ids = isinstance(prompt, list) and all(type(id) is int for id in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise RequestError(f"'prompt' must be one text or one list of token ids, got {prompt!r:.80}")
    return make_request(
        body,
        (),
        (),
        "max_tokens",
        stop=body.get("stop"),
        n=body.get("n"),
        prompt=prompt,
    )


def _choices(request: Request, replies: list[Reply]) -> list[dict[str, Any]]:
    choices = []
    for i, reply in enumerate(replies):
        choice = {
            "index": i,
            "text": reply.text,
            "finish_reason": reply.finish,
            "logprobs": None,
        }
        if request.body.get("logprobs") is not None:
            texts = [text for text, _ in reply.tokens]
            ends = list(itertools.accumulate(map(len, texts)))
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [logprob for _, logprob in reply.tokens],
                "text_offset": [0, *ends[:-1]] if texts else [],
                "top_logprobs": None,
            }
        if request.body.get("return_token_ids"):  # as in vLLM
            choice |= {"prompt_token_ids": list(reply.prompt_ids), "token_ids": list(reply.ids)}
        choices.append(choice)
    return choices


async def answer(body: Mapping[str, Any], sample: Sampler, answer_id: str) -> Response:
    """Answer a completion request."""
    with validating():
        request = read_request(body)
    replies = await sample(request)
    begin = head(f"cmpl-{answer_id}", "text_completion", request.model)
    choices = _choices(request, replies)
    if request.stream:
        return chunk_events(request, begin, choices, replies)
    return {**begin, "choices": choices, "usage": usage(replies)}
