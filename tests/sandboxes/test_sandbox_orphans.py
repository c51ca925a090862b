"""Resources of killed processes are removed by the next process, and those of living processes are kept."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from levels import LEVELS
from test_sandbox_python import below, groups, no_groups, runs
from waiting import GUARD, blocking_until

from agentfly_kit.sandboxes.host import cgroups, isolation, reaper

HOST = """
import asyncio, sys
from agentfly_kit.sandboxes.python import PythonSandbox

async def main():
    sandbox = PythonSandbox(isolation=sys.argv[1])
    await sandbox.start()
    await sandbox.run("import os, subprocess\\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)", 300)
    # chmod is refused at landlock
    await sandbox.run("os.makedirs('a/b')\\nopen('a/b/c', 'w').write('x')\\nos.chmod('a', 0)", 300)
    print(sandbox.pid, flush=True)
    if sys.argv[2] == "stay":
        await asyncio.sleep(1000)
    await sandbox.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_the_next_start_removes_the_resources_of_a_killed_process(level: str, tmp_path: Path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    isolation.hierarchy()  # the first call of this function removes orphans too
    host = subprocess.Popen([sys.executable, "-c", HOST, level, "stay"], stdout=subprocess.PIPE, env=environment)
    assert host.stdout is not None
    with host:
        try:
            zygote = int(host.stdout.readline())
            everything = [zygote, *below(zygote)]
            (sleeper,) = [pid for pid in everything if b"sleep\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(zygote, signal.SIGSTOP)  # so that it cannot clean up
        finally:
            host.kill()
            host.wait(GUARD)
        with contextlib.suppress(ProcessLookupError):  # its parent's death may have killed it first
            os.kill(zygote, signal.SIGKILL)
    assert len(list(tmp_path.glob(f"agentfly-sandbox-{host.pid}-*"))) == (level in ("landlock", "none"))
    assert groups(host.pid) or isolation.hierarchy() is None
    subprocess.run([sys.executable, "-c", HOST, level, "go"], check=True, stdout=subprocess.DEVNULL, env=environment)
    if isolation.hierarchy() is None and level != "strict":
        everything.remove(sleeper)  # documented: its owner is unknown without control groups
        os.kill(sleeper, signal.SIGKILL)
    blocking_until(lambda: not any(runs(pid) for pid in everything))
    blocking_until(lambda: no_groups(host.pid))
    assert not list(tmp_path.iterdir()), "a folder was left"


def ended() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def tags() -> tuple[dict[str, str], dict[str, str]]:
    """Return tags of owners that are gone, and tags of owners that may be alive, by description."""
    pid, start, space, boot = reaper.owner_tag().split("-")
    gone = {
        "ended": f"{ended()}-{start}-{space}-{boot}",
        "reused pid": f"{pid}-{int(start) - 1}-{space}-{boot}",
        "pid reused by init": f"1-99999999999-{space}-{boot}",
    }
    alive = {
        "this one": reaper.owner_tag(),
        "another namespace": f"{ended()}-{start}-{int(space) + 1}-{boot}",
        "another boot": f"{ended()}-{start}-{space}-0123456789ab",
        "no tag": f"{ended()}",
        "unknown start time": f"{ended()}-0--",
    }
    return gone, alive


def test_folders_of_gone_owners_are_deleted(tmp_path: Path):
    gone, alive = tags()
    for tag in [*gone.values(), *alive.values()]:
        folder = tmp_path / f"{reaper.SCRATCH}{tag}-abc_123"
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").write_text("x")
        (folder / "inner").chmod(0)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "file").write_text("x")
    link = tmp_path / f"{reaper.SCRATCH}{gone['ended']}-link"
    link.symlink_to(target)
    plain = tmp_path / f"{reaper.SCRATCH}{gone['ended']}-file"
    plain.write_text("x")
    (tmp_path / f"other-{gone['ended']}-abc").mkdir()
    reaper.reap_folders(str(tmp_path))
    for case, tag in gone.items():
        assert not (tmp_path / f"{reaper.SCRATCH}{tag}-abc_123").exists(), case
    for case, tag in alive.items():
        assert (tmp_path / f"{reaper.SCRATCH}{tag}-abc_123" / "inner").exists(), case
    assert link.is_symlink() and (target / "file").exists() and plain.exists()
    assert (tmp_path / f"other-{gone['ended']}-abc").exists()
    reaper.reap_folders(str(tmp_path / "not there"))


def test_a_folder_of_another_user_is_kept(tmp_path: Path):
    if os.getuid():
        pytest.skip("only root can make a folder of another user")
    folder = tmp_path / f"{reaper.SCRATCH}{tags()[0]['ended']}-abc"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    reaper.reap_folders(str(tmp_path))
    assert folder.exists()


def test_orphaned_groups_are_removed_with_their_processes():
    hierarchy = isolation.hierarchy()
    if hierarchy is None:
        pytest.skip("no control group can be made here")
    gone, alive = tags()
    sleepers = {}
    made = []
    try:
        for tag in [*gone.values(), *alive.values()]:
            sleepers[tag] = subprocess.Popen(["sleep", "1000"])
            for root in hierarchy.roots.values():
                folder = root / f"agentfly-{tag}-700000"  # no sandbox of this process has this number
                folder.mkdir()
                made.append(folder)
                (folder / "cgroup.procs").write_text(str(sleepers[tag].pid))

        def removed() -> bool:
            cgroups.remove_orphans(hierarchy)
            return not [folder for folder in made for tag in gone.values() if tag in folder.name and folder.exists()]

        blocking_until(removed)
        for case, tag in gone.items():
            assert sleepers[tag].wait(GUARD) == -signal.SIGKILL, case
        for case, tag in alive.items():
            assert sleepers[tag].poll() is None, case
            assert all(folder.exists() for folder in made if tag in folder.name), case
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()
        for folder in made:
            if folder.exists():
                folder.rmdir()
