"""Loading of models and tokenizers from folders, GGUF files and the hub."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import logging
import math
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from agentfly_kit.errors import PolicyError, list_neighbours

# Arguments of from_pretrained that are also passed to the tokenizer.
_HUB_KEYWORDS = (
    "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code",
)  # fmt: skip


def load_model(weights: str, tokenizer: str, device: torch.device, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Load model, tokenizer and processor (or None) from paths or hub names. A local model must fit in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    file, dtype, is_vision = _gguf_file(Path(weights)), options["dtype"], False
    hub = {name: value for name, value in options.items() if name in _HUB_KEYWORDS}
    if file:
        from agentfly_kit.policy.gguf import check_gguf, load_gguf

        count, stored = check_gguf(file), file.stat().st_size
    else:
        count, stored = _count_weights(Path(weights))
    if not {"device_map", "quantization_config"} & {*options}:
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        _check_memory(weights, count * kind.itemsize if isinstance(kind, torch.dtype) else stored, device)
    if file:
        model, own = load_gguf(file, **options)
        if tokenizer == weights:
            return model, own, None
    else:
        config = AutoConfig.from_pretrained(weights, **hub)
        loader: Any = AutoModelForCausalLM
        if is_vision := hasattr(config, "vision_config") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            from transformers import AutoModelForImageTextToText as loader
        model, report = loader.from_pretrained(weights, output_loading_info=True, **options)
        if missing := sorted(report["missing_keys"]):  # transformers would initialize them at random
            raise ValueError(f"the files lack {len(missing)} weights of the model, such as {missing[0]!r}")
    own = AutoTokenizer.from_pretrained(tokenizer, **hub)
    if not is_vision:
        return model, own, None
    from agentfly_kit.chat.images import load_processor

    return model, own, load_processor(tokenizer, own, config, **hub)


def _count_weights(folder: Path) -> tuple[int, int]:
    """Return the number of weights in the safetensors files of a local folder, and the size of the files in bytes."""
    count = stored = 0
    for file in folder.glob("model*.safetensors"):  # some folders contain the weights in another layout as well
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), size)))
        count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
        stored += size
    return count, stored


def _check_memory(weights: str, needed: int, device: torch.device) -> None:
    """Raise PolicyError if the total memory of a device is smaller than `needed` bytes."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:  # Windows
        return
    if needed > available:
        raise PolicyError(
            f"{device} must have {needed / 1e9:.1f} GB of memory for the weights of {weights!r}, got "
            f"{available / 1e9:.1f} GB; use a smaller dtype, device_map= or a smaller model"
        )


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at `path` or None; see `gguf.gguf_file`."""
    if path.suffix != ".gguf" and not any(path.glob("*.gguf")):
        return None
    from agentfly_kit.policy.gguf import gguf_file

    return gguf_file(path)


def policy_folder(path: str | Path) -> Path:
    """Return the folder or GGUF file of the policy. If `path` is a training run, this is its last checkpoint."""
    folder = Path(path).expanduser()
    if file := _gguf_file(folder):
        return file
    if str(path) == "smollm2" and not folder.exists():
        from agentfly_kit.policy.gguf import models_folder

        folder = models_folder() / "smollm2"
        if not folder.exists():
            raise PolicyError("the model smollm2 is not installed; in a checkout, run: scripts/install smollm2")
    if not folder.is_dir():
        # A hub name has at most one slash. If its first part is a local folder, it was meant as a path.
        parts = folder.parts
        if (
            isinstance(path, Path)
            or path[:1] in "./~"
            or len(parts) > 2
            or (len(parts) == 2 and folder.parent.is_dir())
        ):
            raise PolicyError(
                f"path must be a folder written by Policy.save or a hub name, got {str(path)!r}, which does not exist; "
                f"{list_neighbours(folder)}"
            )
        return folder
    if (folder / "run.json").exists():
        found = [folder / name for name in ("checkpoint", "checkpoint.before") if (folder / name / "done").exists()]
        if not found:
            raise PolicyError(f"path must be a policy or a run with a checkpoint, got the run {folder} without one")
        folder = found[0]
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise PolicyError(
            f"{str(folder)!r} must contain a config.json (a model) or an adapter_config.json (an adapter)"
        )
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if the file does not exist.

    Raises:
        PolicyError: If the file does not contain a JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{file} is damaged: {error}") from error
    return found


def check_hub(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyError for the name of a shipped policy, and for a hub name that is not cached if there is no network.

    Without this check, transformers tries to connect for almost a minute. `kwargs` are arguments for `from_pretrained`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if importlib.resources.files("agentfly_kit._data").joinpath("policies", name).is_dir():
        raise PolicyError(f"path must be a folder or a hub name, got {name!r}; use af.tiny.policy({name!r})")
    options = {key: kwargs[key] for key in ("cache_dir", "revision") if key in kwargs}
    folder = f"{kwargs['subfolder']}/" if kwargs.get("subfolder") else ""
    found = [
        try_to_load_from_cache(name, folder + file, **options) for file in ("config.json", "adapter_config.json")
    ]
    is_offline = kwargs.get("local_files_only") or constants.is_offline_mode()
    if any(isinstance(path, str) for path in found) or is_offline or urllib.request.getproxies():
        return
    host = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(host.hostname, host.port or host.scheme)
    except OSError as error:
        raise PolicyError(
            f"{name!r} is not a folder, and cannot be downloaded, because {host.hostname} is unknown here: {error}; "
            f"{list_neighbours(Path(name).absolute())}"
        ) from None


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Disable the progress bars of transformers, which notebooks would save, and warnings about default configs."""
    from transformers.utils import logging as transformers_logging

    shown, configs = (
        transformers_logging.is_progress_bar_enabled(),
        logging.getLogger("transformers.configuration_utils"),
    )
    transformers_logging.disable_progress_bar()
    # For example, the default config of Idefics3 has an invalid `pad_token_id`.
    configs.addFilter(is_error := lambda record: record.levelno >= logging.ERROR)  # a separate filter for each thread
    try:
        yield
    finally:
        configs.removeFilter(is_error)
        if shown:
            transformers_logging.enable_progress_bar()
