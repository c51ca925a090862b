"""ShellSandbox: one bash a chain, what lives in it and what ends it, and that nothing of it is left for the next."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from test_sandbox_python import few, nothing_left, zygotes  # noqa: F401  (nothing_left is a fixture)

from agentfly_kit import toolbox
from agentfly_kit.errors import SandboxError, SettingsError, ToolError
from agentfly_kit.pool.pool import Pool
from agentfly_kit.sandboxes import PythonSandbox, ShellResult, ShellSandbox
from agentfly_kit.tools.context import Context
from agentfly_kit.types import Task

LONG = 90_000_000 + os.getpid()
"""Seconds that no other test run on this machine sleeps."""
STUBBORN = "python -c 'import time\nwhile True:\n  try: time.sleep(9)\n  except BaseException: pass'"


@pytest.fixture(params=few("strict"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_what_a_command_tells(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        result = await sandbox.run("echo out; echo err >&2; false")
        assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 1, False)
        assert result.text == "out\nerr\n[exit status 1]"
        assert repr(result) == "ShellResult(stdout='out\\n', stderr='err\\n', exit_code=1)"
        result = await sandbox.run("printf 'é ☃'")
        assert (result.stdout, result.ok, result.text) == ("é ☃", True, "é ☃")
        assert (await sandbox.run("(exit 77)")).exit_code == 77
        assert (await sandbox.run("")).exit_code == 0
        result = await sandbox.run("if x (")
        assert (result.exit_code, result.died) == (2, False) and "syntax error" in result.stderr
        assert (await sandbox.run('cat; read x; echo "[$x]"')).stdout == "[]\n", "nobody types"
        with pytest.raises(ToolError, match="NUL"):
            await sandbox.run("echo \0")
        with pytest.raises(SettingsError, match="timeout=0"):
            await sandbox.run("true", timeout=0)


async def test_any_text_arrives_as_it_was_written(level: str):
    """Quotes, lines, history marks, backslashes, control characters: nothing is read twice."""
    text = "".join(map(chr, [*range(1, 128), 0xE9, 0x1F600])) + "!! !x $(id) `id` \\x41 'a' \"b\"\n#"
    async with ShellSandbox(isolation=level) as sandbox:
        result = await sandbox.run("cat <<'THE_END'\n" + text + "\nTHE_END")
        assert (result.stdout, result.stderr) == (text + "\n", "")


async def test_the_shell_is_kept(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        home = (await sandbox.run("pwd")).stdout
        await sandbox.run("mkdir d; cd d; A=5; export B=6; f() { echo f$A; }; alias g='echo alias'; shopt -s extglob")
        result = await sandbox.run("f; g; pwd; bash -c 'echo $A$B'")
        assert result.stdout == f"f5\nalias\n{home.strip()}/d\n6\n"
        assert (await sandbox.run("cd -; python -c 'import sys, numpy; print(sys.version_info[0])'")).ok, "this Python"


async def test_time_is_up_and_the_shell_lives(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        await sandbox.run("A=5; sleep 1000 &")
        for command in ("echo begun; sleep 100; echo no", "while true; do :; done", "(sleep 100; echo no) | cat"):
            result = await sandbox.run(command, timeout=0.3)
            assert (result.timed_out, result.limit, result.exit_code, result.died) == (True, "time", 130, False), (
                command
            )
            assert "no" not in result.stdout and result.stderr == ""
            assert result.text.endswith("[stopped: it ran for more than 0.3 s]")
        if level == "landlock":
            return  # no process can be seen there, and so none be killed alone
        result = await sandbox.run(STUBBORN, timeout=0.3)
        assert (result.timed_out, result.exit_code, result.died, result.stderr) == (True, 137, False, "")
        result = await sandbox.run("echo $A; jobs -r | wc -l")
        assert result.stdout == "5\n1\n", "its variables, and the job that was there before"


async def test_a_shell_that_ignores_the_interrupt_is_replaced(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        await sandbox.run("A=5; echo kept > file")
        result = await sandbox.run("trap '' INT; while true; do :; done", timeout=0.3)
        assert result.timed_out and result.died
        assert (await sandbox.run('echo "[$A]"; cat file')).stdout == "[]\nkept\n"


async def test_the_end_of_a_shell_is_told(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        for command, code in (("exit 3", 3), ("kill -9 $$", 137), ("set -e; false", 1), ("exec true", 0)):
            await sandbox.run("A=5")
            result = await sandbox.run(command)
            assert (result.exit_code, result.died, result.stderr) == (code, True, "")
            assert "begins in a new one" in result.text
            assert (await sandbox.run('echo "[$A]"')).stdout == "[]\n"


async def test_killing_what_watches_the_shell(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        result = await sandbox.run("kill -9 $PPID; sleep 1")
        assert (result.exit_code, result.died) == (None, True)
        assert (await sandbox.run("echo back")).stdout == "back\n"


async def test_output_is_cut_and_a_flood_is_stopped(level: str):
    async with ShellSandbox(isolation=level, max_output=1000) as sandbox:
        result = await sandbox.run("head -c 5000 /dev/zero | tr '\\0' a; head -c 5000 /dev/zero | tr '\\0' b >&2")
        assert (len(result.stdout), len(result.stderr), result.truncated, result.ok) == (1000, 1000, True, True)
        result = await sandbox.run("yes")
        assert (result.limit, result.died) == ("output", False)
        assert (await sandbox.run("echo ok")).stdout == "ok\n"


async def test_closing_and_moving_its_own_files_harms_nobody_else(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        await sandbox.run(
            "printf() { :; }; eval() { :; }; builtin() { :; }; for i in $(seq 3 60); do exec {i}>&-; done"
        )
        await sandbox.run("exec 1>&- 2>&-; cd /; rm -rf ~/* ; unset HOME PATH", timeout=0.5)
        await sandbox.reset()
        result = await sandbox.run("printf '%s' \"$HOME\"; ls")
        assert result.ok and result.stdout


async def test_the_processor_limit_is_each_commands_own(level: str):
    async with ShellSandbox(isolation=level, cpu_seconds=1.0) as sandbox:
        loop = "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo done"
        began = time.process_time()
        for _ in range(3):
            assert (await sandbox.run(f"for k in 1 2; do {loop}; done", timeout=30)).stdout == "done\ndone\n"
        assert time.process_time() - began < 5, "the host waited, and did not spin"
        result = await sandbox.run("while true; do :; done", timeout=20)
        assert (result.limit, result.ok, result.timed_out) == ("cpu", False, False)
        assert (await sandbox.run("echo ok")).stdout == "ok\n"


async def test_memory_and_files_have_their_limits():
    async with ShellSandbox(memory_mb=64, disk_mb=4) as sandbox:
        result = await sandbox.run("python -c 'x = bytearray(500 * 2**20)'", timeout=20)
        assert not result.ok
        result = await sandbox.run("head -c 20000000 /dev/zero > big", timeout=20)
        assert not result.ok
        assert (await sandbox.run("echo ok")).stdout == "ok\n"


async def test_a_fork_bomb_ends_with_the_command(level: str):
    if level == "none" and os.geteuid() == 0:
        from agentfly_kit.sandboxes.host import isolation

        if isolation.hierarchy() is None:
            pytest.skip("nothing limits root's processes here")
    async with ShellSandbox(isolation=level, processes=16) as sandbox:
        await sandbox.run("b() { b | b & sleep 0.1; }; b", timeout=1.0)
        await sandbox.reset()
        assert (await sandbox.run("echo ok")).stdout == "ok\n"
        assert len(zygotes()) <= 4


# --- between chains ------------------------------------------------------------------------------


async def test_a_reset_leaves_no_trace(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        await sandbox.run(
            "export MARK=marker-7c; marker() { :; }; alias marker=ls; cd /; echo marker-7c > ~/f; mkdir -p ~/a/b; "
            "(setsid bash -c 'while true; do echo marker-7c; sleep 0.01; done' marker-7c &); "
            "sleep 1000 & trap 'echo marker' EXIT"
        )
        await sandbox.reset()
        result = await sandbox.run(
            "env; set; declare -f; alias; trap; jobs; ls -AR ~; pwd; sleep 0.1; "
            "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
        )
        found = [line for line in result.stdout.splitlines() if "marker" in line]
        assert found == [], "and nothing speaks into the next chain's output"
        assert (await sandbox.run("cd; pwd; ls -A | wc -l")).stdout.splitlines()[1] == "0"


async def test_background_processes_end_with_the_lease(level: str):
    pool = Pool(ShellSandbox, size=1, isolation=level)
    async with pool.lease() as sandbox:
        await sandbox.run(f"sleep {LONG} & (setsid nohup sleep {LONG} >/dev/null 2>&1 &)")
        while sleepers() < 2:
            await asyncio.sleep(0.01)
    assert sleepers() == 0
    await pool.close()


def sleepers() -> int:
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            count += line == f"sleep\0{LONG}\0".encode()
    return count


async def test_64_chains_at_once_share_nothing():
    """16 sandboxes, 64 chains one after another in them: each finds an empty shell, and its own state to the end."""
    pool, rounds = Pool(ShellSandbox, size=16), 2

    async def chain(number: int) -> list[str]:
        async with pool.lease(owner=str(number), timeout=60) as sandbox:
            seen = [(await sandbox.run('echo "$X"; ls -A; type -t f', timeout=30)).stdout]
            await sandbox.run(f"X={number}; echo {number} > file; f() {{ echo f{number}; }}; cd /usr", timeout=30)
            for _ in range(rounds):
                await asyncio.sleep(0)
                seen.append((await sandbox.run("echo $X; cat ~/file; f; pwd", timeout=30)).stdout)
            return seen

    seen = await asyncio.gather(*(chain(number) for number in range(64)))
    for number, (first, *later) in enumerate(seen):
        assert first == "\n"
        assert later == [f"{number}\n{number}\nf{number}\n/usr\n"] * rounds
    await pool.close()


# --- cancellation --------------------------------------------------------------------------------


async def test_a_cancelled_command_is_interrupted_and_the_next_one_runs(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        await sandbox.run("A=5")
        running = asyncio.create_task(sandbox.run(f"sleep {LONG}; echo late", timeout=60))
        while sleepers() == 0:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        result = await sandbox.run("echo $A")
        assert (result.stdout, sleepers()) == ("5\n", 0)


async def test_cancelled_at_any_moment_it_ends(level: str):
    for seconds in (0.0, 0.001, 0.01, 0.03, 0.1):
        sandbox = ShellSandbox(isolation=level)
        running = asyncio.create_task(sandbox.run(f"sleep {LONG}", timeout=60))
        await asyncio.sleep(seconds)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await sandbox.run("echo ok")).stdout == "ok\n"
        await sandbox.close()
        assert sleepers() == 0


async def test_closed_in_the_middle(level: str):
    sandbox = ShellSandbox(isolation=level)
    running = asyncio.create_task(sandbox.run(f"sleep {LONG}", timeout=60))
    while sleepers() == 0:
        await asyncio.sleep(0.01)
    await sandbox.close()
    assert (await running).died
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true")
    assert repr(sandbox) == f"<ShellSandbox {level}, closed>"


async def test_calls_side_by_side_run_in_the_order_of_asking(level: str):
    async with ShellSandbox(isolation=level) as sandbox:
        results = await asyncio.gather(*(sandbox.run(f"X=${{X-}}{i}; echo $X") for i in range(9)))
        assert [result.stdout for result in results][-1] == "012345678\n"


# --- forks ---------------------------------------------------------------------------------------


async def test_a_fork_goes_on_by_itself(level: str):
    async with ShellSandbox(isolation=level) as one, ShellSandbox(isolation=level) as two:
        await two.run("echo old > old; OLD=1; cd /usr")
        await one.run("mkdir -p d; cd d; A='it''s \"5\"'; export B=6; C=(1 'b c'); f() { echo f$A; }; alias g='echo g'")
        await one.run(
            "umask 077; set -u; shopt -s extglob; printf 'x\\0y' > bin; chmod 741 bin; ln -s bin link; mkdir e"
        )
        await one.fork(two)
        # At landlock no process may set times, because that would also apply to files outside the sandbox.
        modified = "" if level == "landlock" else "stat -c %Y bin; "
        look = (
            f'echo "$A|${{C[1]}}|${{OLD-none}}|$-"; f; g; umask; ls -Al --time-style=+; {modified}cat link | od -c; '
            "bash -c 'echo $B'; pwd | sed 's,.*sandbox-[^/]*,,'; ls ~; shopt extglob"
        )
        first, second = await one.run(look), await two.run(look)
        assert first.ok and (first.stdout, first.stderr) == (second.stdout, second.stderr)
        await two.run("A=7; echo more > new")
        assert (await one.run("echo $A; ls")).stdout == 'it\'s "5"\nbin\ne\nlink\n'.replace("it's", "its")


async def test_a_fork_with_a_job_is_refused_by_name(level: str):
    async with ShellSandbox(isolation=level) as one, ShellSandbox(isolation=level) as two:
        await one.run(f"sleep {LONG} &")
        with pytest.raises(SandboxError, match="this ShellSandbox cannot fork: 1 background process still running"):
            await one.fork(two)
        assert (await two.run("ls -A | wc -l")).stdout == "0\n"
        await one.run("kill %1; wait")
        await one.fork(two)
        with pytest.raises(SandboxError, match="another of its kind"):
            await one.fork(one)
        async with PythonSandbox(isolation=level) as other:
            with pytest.raises(SandboxError, match="another of its kind"):
                await one.fork(other)  # type: ignore[arg-type]


async def test_a_chain_that_holds_one_forks():
    pool = Pool(ShellSandbox, size=2)
    async with Context(Task("t", ({"role": "user", "content": "?"},)), pools=[pool]) as context:
        await (await context.sandbox(ShellSandbox)).run("A=5; echo 1 > file")
        async with await context.fork("twin") as twin:
            sandbox = await twin.sandbox(ShellSandbox)
            assert (await sandbox.run("echo $A; cat file")).stdout == "5\n1\n"
    await pool.close()


async def test_the_ready_tool_shows_what_a_model_reads():
    result = await toolbox.shell.try_(command="echo hi; ls nothing")
    assert not result.ok
    assert result.observation.startswith("hi\nls: cannot access 'nothing'") and result.observation.endswith(
        "[exit status 2]"
    )
    assert isinstance(ShellResult().text, str)
