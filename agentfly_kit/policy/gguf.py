"""Loading of GGUF files, the format of llama.cpp: weights, tokenizer and chat template in one file."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import struct
import threading
from pathlib import Path
from typing import Any

from agentfly_kit.errors import PolicyError

# Format of the numbers in metadata, by type. The other types are strings (8) and arrays (9).
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# Lock held while the progress bar of transformers' conversion is replaced, so that files are loaded one at a time.
_loading = threading.Lock()


def models_folder() -> Path:
    """Return the folder in the user's cache for models that scripts/install adds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentfly_kit"


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at `path`: the file itself, or the only one in a folder without a transformers model.

    Raises:
        PolicyError: If the folder has several GGUF files.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or any(
        (path / name).exists() for name in ("config.json", "adapter_config.json", "run.json")
    ):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise PolicyError(f"path must name one of the GGUF files in {str(path)!r}: {names}")
    return found[0] if found else None


def load_gguf(file: Path, **options: Any) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a GGUF file with transformers, and convert quantized weights to `dtype`.

    Args:
        file: The GGUF file, already checked by `check_gguf`.
        **options: Arguments of `from_pretrained`.

    Returns:
        The model, which can be saved as an ordinary folder, and the tokenizer.

    Raises:
        PolicyError: If the weights of the file do not match its metadata.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The progress bar of the conversion cannot be disabled by a setting, unlike others; see `without_output`.
    conversion: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    with _loading:
        before, conversion.tqdm = conversion.tqdm, transformers_logging.tqdm
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                **where, quantization_config=GgufConfig(dequantize=True), output_loading_info=True, **options
            )
        finally:
            conversion.tqdm = before
    model, report = found
    if missing := sorted(report["missing_keys"]):
        raise PolicyError(f"{file.name} lacks {len(missing)} weights of the model, such as {missing[0]}")
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(model.config).state_dict()
    for name, value in model.state_dict().items():
        if value.shape != expected[name].shape:
            raise PolicyError(
                f"{name} must have the shape {tuple(expected[name].shape)} according to the metadata of {file.name}, "
                f"got {tuple(value.shape)}"
            )
    model.name_or_path = str(file)  # name of the base model in the config of an adapter
    return model, tokenizer


def check_gguf(file: Path) -> int:
    """Return the number of weights of a GGUF file after checking that all sizes in its header fit the file.

    Readers allocate and loop according to these sizes, so a damaged or hostile header could make them use any amount of
    memory.

    Raises:
        PolicyError: If a size does not fit, if transformers ignores a setting of the file, or if a package is missing.
    """
    lacking = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if lacking:
        raise PolicyError(f"GGUF files require {' and '.join(lacking)}: pip install {' '.join(lacking)}")
    with file.open("rb") as stream:
        try:
            return _Header(stream.read, file.stat().st_size).check()
        except (ValueError, struct.error) as error:
            raise PolicyError(f"{str(file)!r} is not a valid GGUF file: {error}") from error


class _Header:
    """Sequential reader of the header: counts, metadata, and the names, shapes and positions of the tensors."""

    def __init__(self, read: Any, size: int) -> None:
        self._read, self._size, self._done, self._weights = read, size, 0, 0

    def check(self) -> int:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self._number(4)
        if version not in (2, 3):
            raise ValueError(f"its version must be 2 or 3, got {version}")
        tensors, fields = self._count(24, "tensors"), self._count(13, "metadata fields")
        metadata = {self._text(): self._value(self._number(4)) for _ in range(fields)}
        for name, value in metadata.items():
            if name.endswith(".block_count") and not 0 < value <= tensors:
                raise ValueError(f"{name} must be between 1 and the number of tensors, {tensors}, got {value}")
            if name.endswith("_token_id") and value >= metadata.get("tokenizer.ggml.tokens", 0):
                raise ValueError(f"{name} must be a token of its vocabulary, got {value}")
            if name.endswith(".rope.scaling.type") and value != "none":  # transformers does not read these settings
                raise ValueError(
                    f"{name} must be 'none', got {value!r}; load the model from its folder or by hub name"
                )
        ends = [self._tensor_end() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment must be at least 1, got {align}")
        needed = -(-self._done // align) * align + max(ends, default=0)
        if needed > self._size:
            raise ValueError(f"its tensors end at byte {needed}, but the file has only {self._size} bytes")
        return self._weights

    def _bytes(self, count: int) -> bytes:
        if self._done + count > self._size:
            raise ValueError(f"it ends at byte {self._size}, inside its header")
        self._done += count
        found: bytes = self._read(count)
        return found

    def _number(self, kind: int) -> Any:
        form = _NUMBERS[kind]
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self, least: int, what: str) -> int:
        """Read the number of elements that have at least `least` bytes each."""
        count: int = self._number(10)
        if count * least > self._size - self._done:
            raise ValueError(f"it has only {self._size} bytes, too few for {count} {what}")
        return count

    def _text(self) -> str:
        return self._bytes(self._count(1, "characters")).decode()

    def _value(self, kind: int) -> Any:
        """Read a value of the given type. For an array, return only the number of elements."""
        if kind == 8:
            return self._text()
        if kind != 9:
            if kind not in _NUMBERS:
                raise ValueError(f"its metadata has a value of the unknown type {kind}")
            return self._number(kind)
        kind = self._number(4)
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            count = self._count(size, "array elements")
            self._bytes(size * count)
        elif kind == 8:
            count = self._count(8, "array elements")
            for _ in range(count):
                self._text()
        else:
            raise ValueError(f"its metadata has an array of the unknown type {kind}")
        return count

    def _tensor_end(self) -> int:
        """Read the description of a tensor, and return the position of its end relative to the first tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._text(), self._number(4)
        if name.startswith(("rope_freqs", "rope_factors")):
            raise ValueError(
                f"transformers does not read its scaled rotary frequencies ({name}); load the model from its folder or "
                "by hub name"
            )
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name!r} must have 1 to 4 dimensions, got {dimensions}")
        elements = math.prod(self._number(10) for _ in range(dimensions))
        self._weights += elements
        kind, start = self._number(4), self._number(10)
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise ValueError(f"tensor {name!r} has the unknown quantization {kind}") from None
        return int(start + -(-elements // block) * size)
