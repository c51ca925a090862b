"""`Policy`, a causal language model with its chat template, which can be loaded, saved and copied."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agentfly_kit._display import Displayable, show_progress
from agentfly_kit.chat.chat import Chat, History
from agentfly_kit.errors import PolicyError, SettingsError
from agentfly_kit.policy.attention import use_soft_caps
from agentfly_kit.policy.cpu import warn_if_bfloat16_is_slow
from agentfly_kit.policy.forward import LanguageModel, ScoreName
from agentfly_kit.policy.loading import check_hub, load_model, policy_folder, read_json, without_output
from agentfly_kit.policy.value_head import VALUE_HEAD_PREFIX, Critic, ValueHead

# Saved in a subfolder, because engines load every .safetensors file next to the config.
_VALUE_HEAD_FILE = Path("value_head") / "value_head.safetensors"


class Policy(Displayable, LanguageModel):
    """Causal language model with its chat template, an optional value head, and a count of optimizer steps.

    Args:
        model: Causal language model with the interface of transformers.
        chat: Tokenizer, chat template and tool-call format of the model.
        value_head: True adds a value head to the policy's decoder, and "separate" to a copy of it (see `Critic`).
        version: Number of optimizer steps taken so far.
    """

    def __init__(
        self,
        model: Any,
        chat: Chat,
        *,
        value_head: bool | Literal["separate"] | ValueHead | Critic | None = False,
        version: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(chat, Chat):
            raise SettingsError(
                f"model must be a torch.nn.Module and chat an af.Chat, got {type(model).__name__} and "
                f"{type(chat).__name__}; af.Policy.load(name_or_folder) creates both"
            )
        _check_value_head(value_head)
        super().__init__(model, None)
        self.chat = chat
        if chat.reader is not None:  # the template may use another placeholder than the model
            self.placeholders = (chat.reader.token_id, getattr(model.config, "image_token_id", chat.reader.token_id))
        # Tokens added for other modalities may be outside the model's vocabulary, because text never contains them.
        used = (chat.tokenizer.vocab_size - 1, *chat.stop_ids, *chat.encode(chat.template.opening()))
        if max(used) >= self.vocab_size:
            raise PolicyError(
                f"the tokenizer must belong to the model, got a tokenizer that uses token {max(used)} and a model with "
                f"{self.vocab_size} tokens; after adding tokens, call model.resize_token_embeddings(len(tokenizer))"
            )
        if self.has_adapter:
            from agentfly_kit.policy.adapter import check_adapter

            check_adapter(model)
        if next(iter(model.parameters())).dtype == torch.bfloat16:
            warn_if_bfloat16_is_slow(self.device)
        use_soft_caps(model)
        # With dropout, the trained distribution would differ from the one that is sampled.
        self.model.eval()
        if value_head is True:
            self.value_head = ValueHead(self.width).to(self.device)
        elif value_head == "separate":
            self.value_head = _make_critic(self.model).to(self.device)
        else:
            self.value_head = value_head or None
        # Number of optimizer steps that `ppo_step` has taken on these weights.
        self.version = version
        # Lock held during weight updates and forward passes of an engine, so that no sample uses partly updated
        # weights.
        self.lock = threading.Lock()
        # Fingerprint of the initial weights of each run, keyed by folder, to identify the run if a cell is rerun.
        self.run_fingerprints: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("lock", "run_fingerprints")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock(), run_fingerprints={})

    # --- loading and saving ---

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        value_head: bool | Literal["separate"] = False,
        lora: int | Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        format: str = "auto",
        history: History | None = None,
        options: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> Policy:
        """Load a policy from a folder in the layout of transformers, from a GGUF file, or by hub name.

        A vision model becomes a vision policy if the files of its image processor are in the same place.

        Args:
            path: Folder of a model, hub name, GGUF file or a folder with one, folder of a training run (whose last
                checkpoint is loaded), or "smollm2" for the model that `scripts/install smollm2` adds. The weights of a
                GGUF file are converted to `dtype`.
            value_head: True adds a value head to the policy's decoder, and "separate" to a copy of it (see `Critic`).
            lora: Rank of a LoRA adapter, or options of `peft.LoraConfig`. By default, the adapter covers all linear
                layers except those of a vision tower, which `{"r": 16, "vision": True}` includes. The model is frozen
                and only the adapter is trained; `reference()` then returns the base model. Must be None for the folder
                of an adapter.
            device: Device of the model, such as "cuda:1" or "mps"; by default CUDA if available, otherwise the CPU.
            dtype: Torch dtype or its name; "auto" uses the dtype of the files.
            format: Format of tool calls; see `Chat`. "auto" uses the format of a saved policy.
            history: Handling of chat templates that rewrite earlier turns; see `Chat`. None uses the setting of a saved
                policy, or "exact".
            options: Variables for the chat template, such as {"enable_thinking": False}. None uses the variables of a
                saved policy.
            **model_kwargs: Further arguments of `from_pretrained` in transformers, such as `attn_implementation`,
                `revision` or `device_map` (instead of `device`). Code in the folder is run only if
                `trust_remote_code=True`; there is no interactive prompt.

        Raises:
            PolicyError: If a file is missing or cannot be read.
            SettingsError: If an argument is invalid, or if `lora` is given for a folder that contains an adapter.
        """
        _check_value_head(value_head)
        if "torch_dtype" in model_kwargs:
            raise SettingsError("torch_dtype must be passed as dtype=, the argument of Policy.load")
        if device is not None and "device_map" in model_kwargs:
            raise SettingsError(f"device must be None if device_map is given, got {device!r}")
        model_kwargs = {"trust_remote_code": False} | model_kwargs  # by default, transformers prompts on the terminal
        device = torch.empty(0, device=device or ("cuda" if torch.cuda.is_available() else "cpu")).device
        folder = policy_folder(path)
        path = str(folder.resolve()) if folder.exists() else str(path)  # adapters record the path of their base model
        meta = read_json(folder / "policy.json")
        # Transformers would ignore a damaged file without a warning, and thus its end tokens.
        read_json(folder / "generation_config.json")
        # If the folder contains an adapter, its config names the base model to load.
        weights = path
        has_adapter = (folder / "adapter_config.json").exists()
        if has_adapter:
            if lora is not None:
                raise SettingsError(f"lora must be None for a folder that contains an adapter, got {lora!r}")
            weights = str(read_json(folder / "adapter_config.json").get("base_model_name_or_path"))
            if (folder / weights).exists():
                weights = str(folder / weights)

        try:
            if not folder.exists():
                check_hub(path, model_kwargs)
            with show_progress(lambda: f"loading the policy {Path(path).name!r}"), without_output():
                model, tokenizer, processor = load_model(weights, path, device, {"dtype": dtype, **model_kwargs})
                if "device_map" in model_kwargs:
                    device = model.device
                else:
                    model.to(device)
                # The critic is a copy of the decoder, so create it before an adapter is added to the model.
                critic = _make_critic(model).to(device) if value_head == "separate" else value_head
                if has_adapter:
                    from peft import PeftModel

                    model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"cannot load a policy from {path!r}: {type(error).__name__}: {error}") from error
        if lora is not None:
            from agentfly_kit.policy.adapter import with_lora

            model = with_lora(model, lora)
        changes = {"format": None if format == "auto" else format, "history": history, "options": options}
        changes["processor"] = processor
        chat = Chat.from_saved(meta, tokenizer, getattr(model, "generation_config", None), **changes)
        policy = cls(model, chat, value_head=critic, version=int(meta.get("version", 0)))

        head = folder / _VALUE_HEAD_FILE
        if policy.value_head is not None and head.exists():
            from safetensors.torch import load_file

            try:
                policy.value_head.load_state_dict(load_file(head))
            except RuntimeError as error:
                kind = "separate critic" if isinstance(policy.value_head, Critic) else "head on the shared trunk"
                raise PolicyError(f"{head} does not contain the weights of a {kind}: {error}") from error
        return policy

    def save(self, path: str | Path) -> Path:
        """Save the model, the tokenizer, the chat template and, in a separate file, the value head.

        If the policy has an adapter, only the adapter and the location of its base model are written. To write the full
        model, use `merged().save()`.

        Returns:
            The folder.
        """
        return self._write(Path(path), {} if self.value_head is None else self.value_head.state_dict())

    def _write(self, folder: Path, head: dict[str, Tensor], **options: Any) -> Path:
        from safetensors.torch import save_file

        meta = {"format": self.chat.format.name, "version": self.version, "chat": self.chat.settings()}
        description = json.dumps(meta, indent=1) + "\n"  # may raise, so encode it before any file is written
        folder.mkdir(parents=True, exist_ok=True)
        with self.lock, without_output(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Could not find a config file")  # a base model that is a GGUF file
            self.model.save_pretrained(folder, **options)
            if head:
                (folder / _VALUE_HEAD_FILE).parent.mkdir(exist_ok=True)
                save_file({k: v.detach().cpu().contiguous() for k, v in head.items()}, folder / _VALUE_HEAD_FILE)
        self.chat.tokenizer.save_pretrained(folder)
        if self.chat.reader is not None:
            self.chat.reader.save(folder)
        (folder / "policy.json").write_text(description, encoding="utf-8")
        readable = (folder / "policy.json").stat().st_mode
        for file in folder.rglob("*.safetensors"):  # safetensors creates files readable only by the owner
            file.chmod(readable)
        return folder

    def copy(self) -> Policy:
        """Return a policy with a copy of the weights, for example to train it separately."""
        with self.lock:
            model, head = copy.deepcopy((self.model, self.value_head))
        return Policy(model, self.chat, value_head=head, version=self.version)

    def reference(self) -> Policy:
        """Return a frozen reference policy for a KL penalty.

        If the policy has an adapter, the reference is its base model: it shares the policy's weights, disables the
        adapter while scoring, and supports only `score`. Otherwise, it is a frozen copy without a value head.
        """
        if self.has_adapter:
            return _FrozenBase(self)
        with self.lock:
            model = copy.deepcopy(self.model)
        return Policy(model.requires_grad_(False), self.chat, version=self.version)

    def merged(self) -> Policy:
        """Return a copy with the adapter merged into the base weights, so that any engine can load it."""
        policy = self.copy()
        if policy.has_adapter:
            policy.model = policy.model.merge_and_unload().requires_grad_(True)
        return policy

    @cached_property
    def image_obstacle(self) -> str:
        """Reason why the policy reads no images, or "" if a trial with images gives the logits of the model."""
        if self.chat.reader is None:
            return "its chat has no image processor"
        from agentfly_kit.policy.vision import find_obstacle

        return find_obstacle(self)

    def shard(self, accelerator: Any) -> Policy:
        """Distribute the weights over the processes of an accelerate.Accelerator, in place, and return the policy.

        All processes must call it, with the same weights, before they create an optimizer; see docs/cluster.md. Trained
        weights in bfloat16 are kept and updated in float32, and gathered and computed in bfloat16.

        Raises:
            SettingsError: If the policy is sharded already, is a vision policy, was loaded with `device_map`, or has
                weights in other types than float32 and bfloat16.
        """
        from agentfly_kit.policy.sharding import shard

        return shard(self, accelerator)

    # --- weights ---

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    def state(self) -> dict[str, Tensor]:
        """Return the weights keyed by name. The names of value-head weights start with `value_head.`.

        The tensors are not copied. If the policy has an adapter, only the trainable weights are included.
        """
        state = self._full_state()
        if not self.has_adapter:
            return state
        trained = {k for k, p in self.model.named_parameters() if p.requires_grad}
        return {k: v for k, v in state.items() if k in trained or k.startswith(VALUE_HEAD_PREFIX)}

    def _full_state(self) -> dict[str, Tensor]:
        head = {} if self.value_head is None else self.value_head.state_dict()
        return dict(self.model.state_dict()) | {VALUE_HEAD_PREFIX + k: v for k, v in head.items()}

    def load_state(self, state: dict[str, Tensor], version: int | None = None) -> None:
        """Load weights returned by `state`.

        Args:
            state: The weights.
            version: Number of optimizer steps taken on these weights; None keeps the version of this policy.

        Raises:
            PolicyError: If names or shapes do not match this model.
        """
        own, given = ({name: tuple(v.shape) for name, v in each.items()} for each in (Policy.state(self), state))
        if different := sorted(dict(own.items() ^ given.items())):  # check all weights before changing any
            name = different[0]
            raise PolicyError(
                f"state must have the weights of this policy, but the shape of {name!r} is {own.get(name)} in the "
                f"policy and {given.get(name)} in the state; load the policy with the same value_head= and lora="
            )
        head = {k.removeprefix(VALUE_HEAD_PREFIX): v for k, v in state.items() if k.startswith(VALUE_HEAD_PREFIX)}
        model = {k: v for k, v in state.items() if not k.startswith(VALUE_HEAD_PREFIX)}
        with self.lock:
            self.model.load_state_dict(model, strict=not self.has_adapter)
            if self.value_head is not None:
                self.value_head.load_state_dict(head)
            if version is not None:
                self.version = version

    def fingerprint(self) -> str:
        """Return a digest of all weights and their names."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self._full_state().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        head = {ValueHead: ", value head", Critic: ", separate critic"}.get(type(self.value_head), "")
        model = self.model.get_base_model() if self.has_adapter else self.model
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        learns = f" of which {trained:,} in an adapter" if self.has_adapter else ""
        obstacle = self.__dict__.get("_sharing_obstacle")  # known after the first forward pass
        sharing = f", no prefix sharing: {obstacle}" if obstacle else ""
        if self.chat.reader is not None and (obstacle := self.__dict__.get("image_obstacle")):
            sharing += f", reads no images: {obstacle}"
        return (
            f"Policy({type(model).__name__}, {self.size:,} parameters{learns}{head}, version {self.version}, "
            f"{self.device}{sharing})"
        )


class _FrozenBase(Policy):
    """Frozen base model of a policy with an adapter. It shares the weights and the lock of this policy."""

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__, value_head=None, run_fingerprints={})

    def score(
        self, batch: Any, want: Iterable[ScoreName] = ("logprob", "entropy"), **options: Any
    ) -> dict[str, Tensor]:
        with self.lock, self.model.disable_adapter():
            return super().score(batch, want, **options)

    def __repr__(self) -> str:
        return f"Policy(base model of an adapter, {self.size:,} parameters, frozen, {self.device})"


def _check_value_head(value_head: Any) -> None:
    if not isinstance(value_head, ValueHead | Critic | bool | None) and value_head != "separate":
        raise SettingsError(f"value_head must be True, False or 'separate', got {value_head!r}")


def _make_critic(model: Any) -> Critic:
    use_soft_caps(model)
    trunk = copy.deepcopy(model.get_decoder()).requires_grad_(True).eval()
    return Critic(trunk, int(model.get_output_embeddings().weight.shape[1]))
