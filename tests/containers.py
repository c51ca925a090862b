"""A private container engine for tests: podman's API service on a separate socket, with an image built from this
machine's Python. Nothing is downloaded, and no existing engine is used."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

from waiting import GUARD, blocking_until

IMAGE = "agentfly-test:latest"
PODMAN = "apt-get install --no-install-recommends podman runc"


def trouble() -> str:
    """Return the reason why tests cannot use a container engine, or an empty string."""
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            return f"{program} is not installed: `{PODMAN}`"
    return "" if os.geteuid() == 0 else "the tests' engine is rootful: they run as root"


def _libraries(binaries: Iterable[str]) -> set[str]:
    """Return the paths of the shared libraries that programs and modules load, as resolved by ldd."""
    said = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE))


def build_image(tar: Path) -> None:
    """Build a minimal root file system of about 40 MB with this machine's Python, its libraries and a shell."""
    system = "/usr/bin/python3"
    python = os.path.realpath(system if os.access(system, os.X_OK) else sys.executable)
    ask = "import sysconfig as s; print(s.get_path('stdlib')); print(s.get_config_var('EXT_SUFFIX'))"
    standard = sysconfig.get_path("stdlib")
    if python != os.path.realpath(sys.executable):
        said = subprocess.run([python, "-S", "-c", ask], capture_output=True, text=True, check=True).stdout
        standard = said.split()[0]
    modules = [str(path) for path in Path(standard, "lib-dynload").glob("*.so")]
    programs = [
        path
        for name in ("sh", "bash", "sleep", "yes", "cat", "id", "env", "mkdir", "rm", "chmod")
        if (path := shutil.which(name))
    ]
    out = {
        "test", "tests", "idlelib", "site-packages", "dist-packages", "ensurepip", "lib2to3", "tkinter", "turtledemo",
    }  # fmt: skip

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if out & set(entry.name.split("/")) or "/config-3" in entry.name:
            return None
        entry.uid = entry.gid = 0
        return entry

    with tarfile.open(tar, "w", dereference=True) as image:
        for name in ("tmp", "proc", "sys", "dev", "etc", "run", "var/tmp", "root"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            image.addfile(folder)
        links = {
            f"/{name}": os.readlink(f"/{name}") for name in ("bin", "lib", "lib64") if os.path.islink(f"/{name}")
        }
        for link, target in {**links, "/usr/local/bin/python3": python}.items():
            entry = tarfile.TarInfo(link.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            image.addfile(entry)
        image.add(standard, standard, filter=keep)
        for path in {python, *programs, *_libraries([python, *modules, *programs])}:
            folder, name = os.path.split(path)  # resolves parent links, which are also links in the image
            image.add(path, os.path.join(os.path.realpath(folder), name), filter=keep)


class Podman:
    """podman's API service with a private store in a folder.

    The configuration is written before the first call, because a store created without a driver delays every container
    by 20 s.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/podman.sock"
        (folder / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\nnetns = "none"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'tmp_dir = "{folder}/tmp"\n'
        )
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        self.environment = {
            **os.environ, "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf", "XDG_RUNTIME_DIR": str(folder),
        }  # fmt: skip
        self.log = (folder / "service.log").open("wb")
        self.process = subprocess.Popen(
            ["podman", "system", "service", "--time=0", self.url],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        blocking_until(lambda: (folder / "podman.sock").exists() or self.process.poll() is not None)
        if self.process.poll() is not None:
            said = (folder / "service.log").read_text()
            self.stop()
            raise RuntimeError(f"podman's service did not start: {said}")
        build_image(folder / "image.tar")
        self.podman("import", str(folder / "image.tar"), IMAGE)
        (folder / "image.tar").unlink()

    def podman(self, *arguments: str) -> str:
        """Run a podman command on the same store and return its output."""
        done = subprocess.run(
            ["podman", *arguments], env=self.environment, capture_output=True, text=True, timeout=GUARD
        )
        if done.returncode:
            raise RuntimeError(f"podman {arguments}: {done.stderr}")
        return done.stdout

    def names(self) -> list[str]:
        """Return the names of all containers, in any state."""
        return self.podman("ps", "--all", "--format", "{{.Names}}").split()

    def stop(self) -> None:
        if self.process.poll() is None:
            for name in self.names():
                self.podman("rm", "--force", "--time", "0", name)
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(GUARD)
        self.log.close()
        subprocess.run(["umount", "-R", self.folder / "graph" / "overlay"], capture_output=True, check=False)
