"""Check of the names of models on the hub."""

from __future__ import annotations

import importlib.resources
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentfly_kit.errors import PolicyError, list_neighbours


def check_hub(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyError for the name of a shipped policy, and for a hub name that is not cached if there is no network.

    Without this check, transformers tries to connect for almost a minute. `kwargs` are those of `from_pretrained`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if importlib.resources.files("agentfly_kit._data").joinpath("policies", name).is_dir():
        raise PolicyError(f"path must be a folder or a hub name, got {name!r}; use af.tiny.policy({name!r})")
    options = {key: kwargs[key] for key in ("cache_dir", "revision") if key in kwargs}
    cached = any(try_to_load_from_cache(name, file, **options) for file in ("config.json", "adapter_config.json"))
    if cached or constants.is_offline_mode() or urllib.request.getproxies():
        return
    host = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(host.hostname, host.port or host.scheme)
    except OSError as error:
        raise PolicyError(
            f"{name!r} is not a folder, and cannot be downloaded, because {host.hostname} is unknown here: {error}; "
            f"{list_neighbours(Path(name).absolute())}"
        ) from None
