"""HTTP client that retries requests of the engines after temporary errors."""

from __future__ import annotations

import asyncio
import random
import weakref
from typing import Any

from agentfly_kit.errors import EngineError

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# Maximum wait before a retry in seconds, even if the server's Retry-After is longer.
_MAX_RETRY_WAIT = 30.0
# Command that starts a vLLM server whose samples can be used for training.
SERVE_COMMAND = (
    "python -m vllm.entrypoints.openai.api_server --model <folder> --logprobs-mode processed_logprobs "
    "--generation-config vllm"
)


class Refused(EngineError):
    """Raised when a server rejects a request with a status that is not retried."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class RetryingClient:
    """HTTP client for one server, which can be pickled and used in several event loops.

    Args:
        base_url: Address of the server, without a slash at the end.
        key: Key sent as a bearer token, or None.
        timeout: Time limit per attempt in seconds.
        retries: Number of retries after a temporary error.
        backoff: Wait before the first retry in seconds; the wait doubles with each further retry.

    Attributes:
        disconnections: Number of connections that have failed.
    """

    def __init__(self, base_url: str, key: str | None, timeout: float, retries: int, backoff: float) -> None:
        self.base_url = base_url
        self.disconnections = 0
        self._key = key
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        # Each httpx2 client can be used only in the event loop in which it was created.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return RetryingClient, (self.base_url, self._key, self._timeout, self._retries, self._backoff)

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            import httpx2

            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            client = httpx2.AsyncClient(timeout=httpx2.Timeout(self._timeout), limits=limits, headers=headers)
            self._clients[loop] = client
        return client

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, retries: int | None = None
    ) -> dict[str, Any]:
        """Send a request, with retries, and return the decoded response. Cancellation closes the connection.

        Args:
            method: "GET" or "POST".
            path: Path below `base_url`, or a full URL.
            body: Body, sent as JSON.
            retries: Number of retries; by default that of the client.

        Raises:
            Refused: If the server rejects the request with a status that is not retried.
            EngineError: If all attempts failed, or the response is not valid JSON.
        """
        import httpx2

        client = self._client()
        url = path if "://" in path else self.base_url + path
        last, retries = "", self._retries if retries is None else retries
        for attempt in range(retries + 1):
            wait = self._backoff * 2**attempt * random.uniform(0.75, 1.25)
            try:
                async with asyncio.timeout(self._timeout):
                    response = await client.request(method, url, json=body)
            except (httpx2.TransportError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.disconnections += 1
            else:
                if response.status_code < 300:
                    try:
                        answer = response.json() if response.content else {}
                    except ValueError as error:
                        raise EngineError(
                            f"{url} returned a response that is not valid JSON: {response.text[:200]!r}"
                        ) from error
                    return answer if isinstance(answer, dict) else {"answer": answer}
                last = f"{response.status_code} {_error_text(response)}"
                if response.status_code not in _RETRIED_STATUSES:
                    raise Refused(f"{url} refused the request: {last}", response.status_code)
                wait = max(wait, _retry_after_seconds(response.headers.get("retry-after")))
            if attempt < retries:
                await asyncio.sleep(min(wait, _MAX_RETRY_WAIT))
        raise EngineError(
            f"{url} failed {retries + 1} times, the last time with {last}; check that the server is running, or "
            "increase retries=, backoff= or timeout="
        )

    async def close(self) -> None:
        """Close the connections that belong to the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def _error_text(response: Any) -> str:
    try:
        answer = response.json()
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return str(response.text)[:300]


def _retry_after_seconds(retry_after: str | None) -> float:
    """Parse a Retry-After header in seconds; dates are treated as 0."""
    try:
        return float(retry_after or 0)
    except ValueError:
        return 0.0
