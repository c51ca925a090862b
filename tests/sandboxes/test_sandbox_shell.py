"""ShellSandbox: results, persistent state, limits, resets, cancellation and forks."""

import asyncio
import os
from collections.abc import AsyncIterator

import errors
import pytest
import pytest_asyncio
from calls import each
from patience import begun, time_out
from processes import running
from test_sandbox_python import nothing_left, zygotes  # noqa: F401  (nothing_left is a fixture)
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.sandboxes.host import commands
from agentfly_kit.sandboxes.shell import ShellResult

LONG = 90_000_000 + os.getpid()
"""A duration of `sleep` that no other test run on this machine uses."""
SLEEP = f"sleep\0{LONG}\0"
STUBBORN = (
    'python -c \'import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint("begun", flush=True)\n'
    "while True: time.sleep(9)'"
)


@pytest_asyncio.fixture
async def sandbox(level: str) -> AsyncIterator[af.ShellSandbox]:
    async with af.ShellSandbox(isolation=level) as one:
        yield one


async def never_kill_commands(sandbox: af.ShellSandbox, **seconds: float) -> None:
    """Give interrupted commands as long as they need to end; the shell decides this inside the sandbox."""
    await sandbox.run("")  # starts the shell
    await sandbox._execute(f"_agentfly.update({seconds or {'INTERRUPT_SECONDS': GUARD}!r})", GUARD)


async def expired(sandbox: af.ShellSandbox, command: str) -> ShellResult:
    """Run a command that prints, and let it reach its time limit once it has printed."""
    call = await begun(sandbox, command)
    time_out(sandbox)
    return await call


async def test_results_of_commands(sandbox: af.ShellSandbox):
    result = await sandbox.run("echo out; echo err >&2; false")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 1, False)
    assert result.text == "out\nerr\n[exit status 1]"
    assert repr(result) == "ShellResult(stdout='out\\n', stderr='err\\n', exit_code=1)"
    result = await sandbox.run("printf 'é ☃'")
    assert (result.stdout, result.ok, result.text) == ("é ☃", True, "é ☃")
    assert await each("exit_code", sandbox, "(exit 77)", "") == [77, 0]
    result = await sandbox.run("if x (")
    assert (result.exit_code, result.died) == (2, False) and "syntax error" in result.stderr
    assert (await sandbox.run('cat; read x; echo "[$x]"')).stdout == "[]\n"
    await errors.check(lambda: sandbox.run("echo \0"), af.ToolError, "NUL")
    for file in filter(os.path.exists, commands._SYSTEM_FILES[:1]):  # the cache of the dynamic linker
        assert (await sandbox.run(f"wc -c {file}")).ok


async def test_commands_are_passed_verbatim(level: str):
    """The commands include quotes, newlines, `!`, backslashes and control characters."""
    text = "".join(map(chr, [*range(1, 128), 0xE9, 0x1F600])) + "!! !x $(id) `id` \\x41 'a' \"b\"\n#"
    async with af.ShellSandbox(isolation=level) as sandbox:
        result = await sandbox.run("cat <<'THE_END'\n" + text + "\nTHE_END")
        assert (result.stdout, result.stderr) == (text + "\n", "")


async def test_the_state_of_the_shell_persists(sandbox: af.ShellSandbox):
    home = (await sandbox.run("pwd")).stdout
    await sandbox.run("mkdir d; cd d; A=5; export B=6; f() { echo f$A; }; alias g='echo alias'; shopt -s extglob")
    assert (await sandbox.run("f; g; pwd; bash -c 'echo $A$B'")).stdout == f"f5\nalias\n{home.strip()}/d\n6\n"
    assert (await sandbox.run("cd -; python -c 'import sys, numpy; print(sys.version_info[0])'")).ok


async def test_the_name_of_the_shell_may_have_any_bytes(sandbox: af.ShellSandbox):
    await sandbox.run(r"printf '\377' > /proc/$$/comm; kept=1")
    assert (await sandbox.run("echo $kept")).text == "1"


async def test_the_shell_survives_a_timeout(sandbox: af.ShellSandbox, level: str, never_killed: None):
    await never_kill_commands(sandbox)
    # Bash lets `sleep` ignore the interrupt, but not a subshell, which survives where the kernel lists processes.
    await sandbox.run("A=5; sleep 1000 &" if level == "landlock" else "A=5; (exec sleep 1000) &")
    # Each prints when its processes have been started: the interrupt does not reach one between fork and exec.
    commands = (
        "sh -c 'echo begun; exec sleep 1000'; echo no",
        "echo begun; while true; do :; done; echo no",
        "sh -c 'echo begun; exec sleep 1000' | cat; echo no",
        "sh -c 'trap \"trap - INT; echo cleaned; kill -INT $$\" INT; echo begun; while :; do :; done'; echo no",
    )
    for command in commands:
        result = await expired(sandbox, command)
        assert (result.timed_out, result.limit, result.exit_code, result.died) == (True, "time", 130, False), command
        assert "no" not in result.stdout and result.stderr == ""
        assert result.text.endswith(f"[stopped: time limit of {GUARD:g} s exceeded]")
    assert result.stdout == "begun\ncleaned\n", "the handler of the program has run"
    if level == "landlock":
        return  # processes are not visible there, so none can be killed alone
    await never_kill_commands(sandbox, INTERRUPT_SECONDS=0.2, KILL_SECONDS=GUARD)
    result = await expired(sandbox, STUBBORN)
    assert (result.timed_out, result.exit_code, result.died, result.stderr) == (True, 137, False, "")
    result = await sandbox.run("echo $A; jobs -r | wc -l")
    assert result.stdout == "5\n1\n"


async def test_a_shell_that_ignores_the_interrupt_is_replaced(sandbox: af.ShellSandbox):
    await sandbox.run("A=5; echo kept > file")
    result = await expired(sandbox, "trap '' INT; echo begun; while true; do :; done")
    assert result.timed_out and result.died
    assert (await sandbox.run('echo "[$A]"; cat file')).stdout == "[]\nkept\n"


async def test_the_end_of_a_shell_is_reported(sandbox: af.ShellSandbox):
    for command, code in (
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("set -e; false", 1),
        ("exec sh -c 'sleep 0.5; exit 7'", 7),
    ):
        await sandbox.run("A=5")
        result = await sandbox.run(command)
        assert (result.exit_code, result.died, result.stderr) == (code, True, "")
        assert "runs in a new shell" in result.text
        assert (await sandbox.run('echo "[$A]"')).stdout == "[]\n"


async def test_a_program_that_replaces_the_shell_runs_to_its_end_or_its_timeout(
    sandbox: af.ShellSandbox, never_killed: None
):
    result = await sandbox.run("exec sh -c 'sleep 0.5; echo done'")
    assert (result.stdout, result.exit_code, result.died) == ("done\n", 0, True)
    result = await expired(sandbox, "exec sh -c 'trap : INT; echo started; while :; do :; done'")
    assert (result.stdout, result.timed_out, result.exit_code, result.died) == ("started\n", True, 137, True)
    result = await expired(sandbox, "exec sh -c 'echo begun; exec sleep 1000'")
    # 137 if the machine is too busy for an interrupt.
    assert result.timed_out and result.died and result.exit_code in (130, 137)
    assert (await sandbox.run("echo back")).stdout == "back\n"


async def test_killing_the_interpreter_that_controls_the_shell(sandbox: af.ShellSandbox):
    result = await sandbox.run("kill -9 $PPID; sleep 1")
    assert (result.exit_code, result.died) == (None, True)
    assert (await sandbox.run("echo back")).stdout == "back\n"


async def test_output_limits(level: str, never_killed: None):
    async with af.ShellSandbox(isolation=level, max_output=1000) as sandbox:
        await never_kill_commands(sandbox)
        result = await sandbox.run("head -c 5000 /dev/zero | tr '\\0' a; head -c 5000 /dev/zero | tr '\\0' b >&2")
        assert (len(result.stdout), len(result.stderr), result.truncated, result.ok) == (1000, 1000, True, True)
        result = await sandbox.run("yes")
        assert (result.limit, result.died) == ("output", False)
        assert (await sandbox.run("echo ok")).stdout == "ok\n"


async def test_closed_descriptors_and_deleted_files_end_with_a_reset(sandbox: af.ShellSandbox):
    await sandbox.run("printf() { :; }; eval() { :; }; builtin() { :; }; for i in $(seq 3 60); do exec {i}>&-; done")
    await sandbox.run("exec 1>&- 2>&-; cd /; rm -rf ~/* ; unset HOME PATH", timeout=0.5)
    await sandbox.reset()
    result = await sandbox.run("printf '%s' \"$HOME\"; ls")
    assert result.ok and result.stdout


async def test_the_cpu_limit_applies_per_command(level: str):
    async with af.ShellSandbox(isolation=level, cpu_seconds=1.0) as sandbox:
        loop = "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo done"
        for _ in range(3):
            assert (await sandbox.run(f"for k in 1 2; do {loop}; done")).stdout == "done\ndone\n"
        result = await sandbox.run("while true; do :; done")
        assert (result.limit, result.ok, result.timed_out) == ("cpu", False, False)
        assert (await sandbox.run("echo ok")).stdout == "ok\n"


async def test_a_fork_bomb_ends_with_the_command(level: str):
    if level == "none" and os.geteuid() == 0:
        from agentfly_kit.sandboxes.host import isolation

        if isolation.hierarchy() is None:
            pytest.skip("nothing limits root's processes here")
    async with af.ShellSandbox(isolation=level, processes=16) as sandbox:
        await sandbox.run("b() { b | b & sleep 0.1; }; b", timeout=1.0)
        await sandbox.reset()
        assert (await sandbox.run("echo ok")).stdout == "ok\n"
        await until(lambda: len(zygotes()) <= 4)


# --- between chains -------------------------------------------------------------------------------


async def test_a_reset_removes_everything(level: str):
    async with af.ShellSandbox(isolation=level) as sandbox:
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
        assert [line for line in result.stdout.splitlines() if "marker" in line] == []
        assert (await sandbox.run("cd; pwd; ls -A | wc -l")).stdout.splitlines()[1] == "0"


async def test_background_processes_end_with_the_lease(level: str):
    pool = af.Pool(af.ShellSandbox, size=1, isolation=level)
    async with pool.lease() as sandbox:
        await sandbox.run(f"sleep {LONG} & (setsid nohup sleep {LONG} >/dev/null 2>&1 &)")
        await until(lambda: len(running(SLEEP)) == 2)
    await until(lambda: not running(SLEEP))
    await pool.close()


# --- cancellation ---------------------------------------------------------------------------------


async def test_a_cancelled_command_is_interrupted_and_the_next_one_runs(sandbox: af.ShellSandbox, never_killed: None):
    await never_kill_commands(sandbox)
    await sandbox.run("A=5")
    late = asyncio.create_task(sandbox.run(f"sleep {LONG}; echo late"))
    await until(lambda: running(SLEEP))
    late.cancel()
    await errors.check(lambda: late, asyncio.CancelledError)
    result = await sandbox.run("echo $A")
    assert (result.stdout, len(running(SLEEP))) == ("5\n", 0)


# --- forks ----------------------------------------------------------------------------------------


async def test_a_fork_is_independent(level: str):
    async with af.ShellSandbox(isolation=level) as one, af.ShellSandbox(isolation=level) as two:
        await two.run("echo old > old; OLD=1; cd /usr")
        await one.run(
            "mkdir -p d; cd d; A='it''s \"5\"'; export B=6; C=(1 'b c'); f() { echo f$A; }; alias g='echo g'"
        )
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


async def test_a_shell_with_a_background_process_cannot_be_forked(level: str):
    async with af.ShellSandbox(isolation=level) as one, af.ShellSandbox(isolation=level) as two:
        await one.run(f"sleep {LONG} &")
        await errors.check(
            lambda: one.fork(two),
            af.errors.SandboxError,
            "this ShellSandbox cannot fork while background processes are running, got 1",
        )
        assert (await two.run("ls -A | wc -l")).stdout == "0\n"
        await one.run("kill %1; wait")
        await one.fork(two)
        await errors.check(lambda: one.fork(one), af.errors.SandboxError, "into must be another")
        async with af.PythonSandbox(isolation=level) as other:
            await errors.check(lambda: one.fork(other), af.errors.SandboxError, "into must be another")


async def test_the_builtin_tool():
    result = await af.toolbox.shell.try_(command="echo hi; ls nothing")
    text = result.observation
    assert not result.ok and text.startswith("hi\nls: cannot access 'nothing'") and text.endswith("[exit status 2]")
    assert isinstance(ShellResult().text, str)


async def test_each_command_begins_with_the_output_of_the_call(level: str):
    """Looked for: descriptors that are closed, redirected or used up by an earlier command; also in Python cells."""
    async with af.ShellSandbox(isolation=level) as shell:
        for change in ("exec 0<&- 1>&- 2>&-", "exec >log 2>&1", "exec 1<&-", "exec 0</dev/zero", "exec 2>/dev/null"):
            assert (await shell.run(change)).exit_code == 0
            result = await shell.run("cat; echo out; echo err >&2")
            assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0), change
        # The copies that restore them are closed as well: the shell ends, and the next command gets a new one.
        every = " ".join(f"{number}>&-" for number in range(3, 100))
        assert (await shell.run(f"exec {every}")).died
        assert (await shell.run("echo new")).stdout == "new\n"
