"""Loading of GGUF files: the models, what they are saved as, and damaged files."""

import itertools
import random
import re
import struct

import dice
import errors
import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

import agentfly_kit as af
from agentfly_kit.errors import PolicyError
from agentfly_kit.policy.gguf import check_gguf
from tests.policy import gguf_files

IDS = torch.arange(3, 40)[None]
# One format of each kind, and an architecture whose weights are changed when they are read, in `make test`.
FAST = ("llama", "gemma3", ("llama", "Q8_0"), ("gemma3", "Q4_K"))


def some(*every):
    """Return parameters of which only those in `FAST` are tested in `make test`."""
    return [pytest.param(each, marks=[] if each in FAST else pytest.mark.long) for each in every]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("architecture", some(*gguf_files.ARCHITECTURES))
def test_a_file_in_half_precision_gives_the_written_model(tmp_path, architecture):
    file = tmp_path / "tiny.gguf"
    model = gguf_files.write(file, architecture)
    policy = af.Policy.load(file, device="cpu")
    assert torch.allclose(logits(policy.model), logits(model), atol=1e-5)
    assert policy.chat.tokenizer.decode(policy.chat.stop_ids) == "<|im_end|>"
    assert policy.chat.tokenizer.decode(policy.chat.encode("a b é")) == "a b é"


@pytest.mark.parametrize(
    "file", some(*itertools.product(("llama", "gemma3"), ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"))), ids=" ".join
)
def test_quantized_weights_are_those_of_transformers_and_survive_saving(tmp_path, file):
    gguf_files.write(tmp_path / "tiny.gguf", *file)
    shown = modeling_gguf_pytorch_utils.tqdm
    policy = af.Policy.load(tmp_path, device="cpu")  # a folder with one file
    assert modeling_gguf_pytorch_utils.tqdm is shown, "other loads have their progress bars"
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert torch.equal(logits(policy.model), logits(own))
    saved = af.Policy.load(policy.save(tmp_path / "saved"), device="cpu")
    assert torch.equal(logits(saved.model), logits(own))
    assert saved.chat.settings() == policy.chat.settings()
    assert saved.chat.tokenizer.chat_template == policy.chat.tokenizer.chat_template


def test_an_adapter_names_the_file_as_its_base_model(tmp_path):
    gguf_files.write(tmp_path / "tiny.gguf")
    gguf_files.write(tmp_path / "other.gguf", "qwen2")
    policy = af.Policy.load(tmp_path / "tiny.gguf", lora=4, device="cpu")
    loaded = af.Policy.load(policy.save(tmp_path / "adapter"), device="cpu")
    assert torch.equal(logits(loaded.model), logits(policy.model))
    message = re.compile(r"path must name one of the GGUF files in .*: other\.gguf, tiny\.gguf")
    errors.check(lambda: af.Policy.load(tmp_path), PolicyError, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": None}, "chat template"),
        ({"eos": 99_999}, "tokenizer.ggml.eos_token_id must be a token of its vocabulary, got 99999"),
        ({"skip": "layers.1.mlp.up_proj"}, "lacks 1 weights of the model, such as model.layers.1.mlp.up_proj.weight"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type must be 'none', got 'yarn'"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, changes, message):
    gguf_files.write(tmp_path / "tiny.gguf", **changes)
    errors.check(lambda: af.Policy.load(tmp_path, device="cpu"), Exception, message)


@pytest.fixture
def file(tmp_path):
    gguf_files.write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_damaged_and_hostile_headers_are_refused_before_anything_is_allocated(file):
    data = file.read_bytes()
    start = data.index(b"general.architecture") - 8
    for damaged, message in [
        (b"", "it ends at byte 0"),
        (b"PK" + data[2:], "does not begin with 'GGUF'"),
        (data[:4] + struct.pack("<I", 9) + data[8:], "version must be 2 or 3, got 9"),
        (data[:8] + struct.pack("<Q", 2**40) + data[16:], "too few for 1099511627776 tensors"),
        (data[:16] + struct.pack("<Q", 2**40) + data[24:], "too few for 1099511627776 metadata fields"),
        (data[:start] + struct.pack("<Q", 2**60) + data[start + 8 :], "characters"),
        (data[: len(data) // 2], "inside its header|but the file has only"),
    ]:
        file.write_bytes(damaged)
        errors.check(lambda: af.Policy.load(file), PolicyError, re.compile(message))


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_a_changed_header_never_crashes_or_hangs(file, count):
    data = file.read_bytes()
    rng = random.Random(dice.seed())
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(2000)] = rng.randrange(256)
        file.write_bytes(bytes(changed))
        try:
            check_gguf(file)
        except PolicyError:
            pass
