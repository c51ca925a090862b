"""Transfer of a policy's weights to vLLM in a file, which is read directly or over HTTP.

The file contains the values of all tensors one after another. The names, dtypes and shapes of the tensors are sent as
strings and numbers, never as pickled objects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import http.server
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener

from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentfly_kit.policy.policy import Policy

# A weight's name, a tensor with its dtype and shape, and a function that returns its values, with any adapter merged.
WeightSource = tuple[str, "torch.Tensor", "Callable[[], torch.Tensor]"]
# Name of a tensor, its dtype and its shape.
TensorInfo = list[Any]
# Name of the receiver in vLLM, and the setting of vLLM that selects it.
BACKEND = "agentfly"
TRANSFER_CONFIG = {"backend": BACKEND}

# Settings that must be equal in the sending and the receiving model.
_ARCHITECTURE = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
_SHM_DIR = "/dev/shm"
# Seconds without any data after which a receiver stops waiting.
_READ_TIMEOUT = 30.0


def architecture(config: Any) -> dict[str, Any]:
    """Return the settings of a transformers config that must be equal for sender and receiver of weights."""
    text = config.get_text_config()
    return {"model_type": config.model_type} | {name: getattr(text, name, None) for name in _ARCHITECTURE}


def check_architecture(engine: str, served: dict[str, Any], policy: Any) -> None:
    """Raise EngineError unless `served`, the architecture of an engine's model, equals that of the policy."""
    from agentfly_kit.policy.policy import Policy

    if not isinstance(policy, Policy):
        raise EngineError(f"update needs a Policy, got a {type(policy).__name__}")
    for name, wanted in architecture(policy.model.config).items():
        if served.get(name) != wanted:
            raise EngineError(
                f"{engine} has {name}={served.get(name)!r}, but the policy has {wanted!r}; weights can be changed, but "
                "the architecture cannot"
            )


# --- sender -------------------------------------------------------------------------------------------------------


def weight_sources(policy: Policy) -> list[WeightSource]:
    """Return the model's weights under their transformers names, without the value head or duplicates of tied weights.

    An adapter is merged layer by layer, so that no second model is needed. The caller must hold `policy.lock` while it
    reads the values.
    """
    if policy.accelerator is not None:
        raise EngineError(
            f"policy must not be sharded, because its weights cannot be sent to servers, got {policy!r}"
        )
    model: Any = policy.model.get_base_model() if policy.has_adapter else policy.model
    state = model.state_dict()
    merged: dict[str, Callable[[], torch.Tensor]] = {}
    if policy.has_adapter:
        layers = _adapter_layers(model)
        if layers is None:  # this adapter cannot be merged layer by layer
            whole: Any = copy.deepcopy(policy.model)
            whole = whole.merge_and_unload()
            state = whole.state_dict()
        else:
            plain = {}
            for name, tensor in state.items():
                layer = next((path for path in layers if name.startswith(f"{path}.")), None)
                if layer is None:
                    plain[name] = tensor
                elif name.startswith(f"{layer}.base_layer."):
                    short = name.removeprefix(f"{layer}.base_layer.")
                    name = f"{layer}.{short}"
                    plain[name] = tensor
                    merged[name] = functools.partial(_merged_weight, layers[layer], short)
            state = plain
    seen: set[tuple[Any, ...]] = set()
    found: list[WeightSource] = []
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found.append((name, tensor.detach(), merged.get(name, tensor.detach)))
    return found


def _adapter_layers(model: Any) -> dict[str, Any] | None:
    """Return the layers that have an adapter, keyed by path; None if adapters cannot be merged layer by layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return None
        if isinstance(module, BaseTunerLayer):
            if any(path.startswith(f"{outer}.") for outer in layers):
                return None
            layers[path] = module
    own = Counter(tensor.data_ptr() for tensor in model.state_dict().values())
    for layer in layers.values():
        for parameter in layer.get_base_layer().parameters():
            if own[parameter.data_ptr()] > 1:
                return None  # tied weights: merging one layer would change the other
    return layers


def _merged_weight(layer: Any, name: str) -> torch.Tensor:
    """Return a weight of a layer after merging the adapter of the layer into a copy of it."""
    import torch

    with torch.no_grad():
        layer = copy.deepcopy(layer)
        layer.merge()
        found: torch.Tensor = layer.get_base_layer().state_dict()[name]
    return found


class WeightFile:
    """File with the current weights of a policy, in shared memory if there is enough space.

    The file is deleted by `close` or by garbage collection.

    Attributes:
        version: Version of the policy.
        tensors: Names, dtypes and shapes of the tensors, in the order of their values in the file.
        path: Path of the file.
    """

    def __init__(self, policy: Policy) -> None:
        """Gather the weights, holding `policy.lock` until they are in the file.

        Raises:
            EngineError: If neither /dev/shm nor the folder for temporary files has enough space.
        """
        import torch

        with policy.lock:
            self.version = policy.version
            sources = weight_sources(policy)
            self.tensors: list[TensorInfo] = [
                [name, str(like.dtype).removeprefix("torch."), list(like.shape)] for name, like, _ in sources
            ]
            size = sum(like.nbytes for _, like, _ in sources)
            try:
                roomy = os.path.isdir(_SHM_DIR) and shutil.disk_usage(_SHM_DIR).free > 2 * size
                folder = tempfile.mkdtemp(prefix=f"agentfly-weights-{os.getpid()}-", dir=_SHM_DIR if roomy else None)
                self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self.path = Path(folder, "weights")
                with self.path.open("wb") as file:
                    for _, _, values in sources:
                        content: Any = values().contiguous().view(-1).view(torch.uint8).cpu().numpy()
                        file.write(content)
            except OSError as error:
                if hasattr(self, "close"):
                    self.close()
                raise EngineError(
                    f"no space for {size / 2**20:.1f} MiB of weights in {_SHM_DIR} or {tempfile.gettempdir()}: "
                    f"{error}; free space, or set TMPDIR to a folder with enough space"
                ) from error


@contextlib.contextmanager
def serve_file(path: Path, addresses: Iterable[tuple[str, int]]) -> Iterator[tuple[str, dict[tuple[str, int], int]]]:
    """Serve a file over HTTP, without encryption. Only clients that know a secret path can read it.

    Args:
        path: The file.
        addresses: Interfaces and ports; port 0 selects a free port.

    Yields:
        The secret path, and the port of each address.

    Raises:
        EngineError: If an address does not belong to this machine, or the port is in use.
    """
    secret = f"/{secrets.token_urlsafe(24)}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != secret:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            with path.open("rb") as file, contextlib.suppress(OSError):  # the client reports a lost connection
                self.connection.sendfile(file)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with contextlib.ExitStack() as stack:
        ports = {}
        for address in dict.fromkeys(addresses):
            try:
                server = http.server.ThreadingHTTPServer(address, Handler)
            except OSError as error:
                raise EngineError(f"the weights cannot be served at {address}: {error}") from error
            stack.callback(server.server_close)
            ports[address] = server.server_port
            thread = threading.Thread(
                target=server.serve_forever,
                args=(0.02,),
                name="agentfly-weights",
                daemon=True,
            )
            thread.start()
            stack.callback(server.shutdown)
        yield secret, ports


# --- receiver -----------------------------------------------------------------------------------------------------


def open_weights(address: str) -> Any:
    """Open a file of weights at a file: or http: address for `read_weights`.

    Raises:
        OSError: If the file cannot be opened, or the other process cannot be reached or refuses the request.
    """
    try:
        return build_opener(ProxyHandler({})).open(address, timeout=_READ_TIMEOUT)
    except OSError as error:
        raise OSError(f"cannot read {address.rpartition('/')[0]}: {error}") from error


def read_weights(stream: Any, tensors: Iterable[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each tensor with a new tensor that contains its values.

    Raises:
        OSError: If the stream ends early.
    """
    import torch

    for name, dtype, shape in tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        content = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if stream.readinto(content) != content.nbytes:
            raise OSError(f"the connection was closed before the end of {name}")
        yield name, tensor
