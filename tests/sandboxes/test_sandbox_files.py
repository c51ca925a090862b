"""FileSandbox: file operations, error messages, confinement to the folder, initial files, and its shell."""

import asyncio
import os
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import errors
import pytest
from test_sandbox_python import nothing_left  # noqa: F401  (nothing_left is a fixture)
from waiting import until

import agentfly_kit as af

CODE = "def f():\n    return 1\n\n\ndef g():\n    return 1\n"
SEED = {"src/main.py": CODE, "README.md": "# Title\n", "data.bin": b"\0\1\2"}


async def test_read_write_list_grep(level: str):
    async with af.FileSandbox(isolation=level, files=SEED) as sandbox:
        assert await sandbox.list("src") == ("src/main.py",)
        assert await sandbox.read("src/main.py") == CODE
        assert await sandbox.read("src/main.py", 2, 2) == "    return 1\n"
        assert (
            await sandbox.read("./src/../src/main.py", 5, numbers=True) == "     5\tdef g():\n     6\t    return 1\n"
        )
        for text, told in (("é\n\0", "written, 2 lines"), ("b\n", "overwritten, 1 line")):
            assert await sandbox.write("new/deep/a.txt", text) == f"new/deep/a.txt: {told}"
        assert await sandbox.list() == ("README.md", "data.bin", "new/", "new/deep/", "src/", "src/main.py")
        found = await sandbox.grep(r"return \d")
        assert [str(each) for each in found] == ["src/main.py:2:     return 1", "src/main.py:6:     return 1"]
        assert await sandbox.grep("return", max_matches=1) == found[:1]
        assert await sandbox.grep("Title", "README.md") == (("README.md", 1, "# Title"),)
        home = (await sandbox.run("pwd")).stdout.strip()
        assert await sandbox.read(f"{home}/README.md") == "# Title\n"


REFUSALS: list[tuple[Callable[[af.FileSandbox], Awaitable[object]], str]] = [
    (lambda s: s.read("nope.py"), "'nope.py' does not exist"),
    (lambda s: s.read("main.py"), "'main.py' does not exist; did you mean src/main.py?"),
    (lambda s: s.read("src"), "'src' is a folder; list it instead"),
    (lambda s: s.read("data.bin"), "'data.bin' is not text (3 bytes)"),
    (lambda s: s.read("src/main.py", 99), "'src/main.py' has 6 lines; there is no line 99"),
    (
        lambda s: s.read("src/main.py", 3, 2),
        "the first line must be at least 1 and at most the last line, got 3 and 2",
    ),
    (lambda s: s.read("src/main.py/x"), "'main.py' is not a folder"),
    (lambda s: s.write("src", "x"), "'src' is a folder"),
    (lambda s: s.write("src/main.py/x", "x"), "is not a folder"),
    (lambda s: s.list("README.md"), "'README.md' is not a folder; read it instead"),
    (lambda s: s.list("nope"), "'nope' does not exist"),
    (lambda s: s.grep("("), "'(' is not a regular expression"),
    (lambda s: s.undo(), "there is nothing to undo"),
    (lambda s: s.read("a\0b"), "NUL"),
    (
        lambda s: s.edit("src/main.py", "return 1", "return 2"),
        "2 times (lines 2, 6); include more of the surrounding lines",
    ),
    (lambda s: s.edit("src/main.py", "", "x"), "the text to replace must not be empty"),
    (lambda s: s.edit("src/main.py", "def f", "def f"), "nothing would change"),
    (
        lambda s: s.edit("src/main.py", "def f():\n  return 1", "x"),
        "A text that differs only in whitespace is at line 1:\ndef f():\n    r",
    ),
    (lambda s: s.edit("src/main.py", "def ff():\n", "x"), "The most similar line is 1:\ndef f():"),
    (lambda s: s.edit("src/main.py", "zzzzzz", "x"), "even whitespace must match exactly"),
    (lambda s: s.edit("src/main.py", "\n", "x"), "6 times"),
]


async def test_refused_operations():
    async with af.FileSandbox(isolation="none", files=SEED) as sandbox:
        for call, text in REFUSALS:
            await errors.check(lambda: call(sandbox), af.ToolError, text)
        assert await sandbox.read("src/main.py") == CODE


async def test_edit_and_undo(level: str):
    async with af.FileSandbox(isolation=level, files=SEED | {"dos.txt": "a\r\nb\r\n", "overlap": "aaa"}) as sandbox:
        assert (await sandbox.edit("src/main.py", "def g():\n    return 1", "def g():\n    return 2\n")).startswith(
            "src/main.py: replaced at line 5. It now reads:\n     3\t\n     4\t\n     5\tdef g():"
        )
        assert (await sandbox.read("src/main.py")).endswith("return 2\n\n")
        await sandbox.edit("dos.txt", "a\nb", "a\nc")
        assert (await sandbox.run("od -c dos.txt | head -1")).stdout == "0000000   a  \\r  \\n   c  \\r  \\n\n"
        await errors.check(lambda: sandbox.edit("overlap", "aa", "b"), af.ToolError, "overlaps itself")
        await sandbox.write("new.txt", "1")
        mode = (await sandbox.run("chmod 750 new.txt; stat -c %a new.txt")).stdout
        await sandbox.write("new.txt", "2")
        assert (
            (await sandbox.run("stat -c %a new.txt")).stdout == mode == ("644\n" if level == "landlock" else "750\n")
        )
        before = "restored to its state before the last change"
        assert await sandbox.undo("src/main.py") == f"src/main.py: {before}"
        assert await sandbox.read("src/main.py") == CODE
        assert [await sandbox.undo() for _ in range(3)] == [
            f"new.txt: {before}", "new.txt: deleted", f"dos.txt: {before}",
        ]  # fmt: skip
        await errors.check(sandbox.undo, af.ToolError, "nothing to undo")


async def test_a_read_is_never_silently_truncated():
    async with af.FileSandbox(isolation="none", max_output=1000) as sandbox:
        await sandbox.write("long.txt", "".join(f"line {i}\n" for i in range(1, 1001)))
        await errors.check(
            lambda: sandbox.read("long.txt"),
            af.ToolError,
            "more than the maximum of 1000 per call; read a part: lines 1 to 123",
        )
        assert (await sandbox.read("long.txt", 1, 123)).endswith("line 123\n")
        text = 'é"\\\n' * 200
        await sandbox.write("odd.txt", text)
        assert await sandbox.read("odd.txt") == text, (
            "an answer longer than one line of the interpreter comes in pieces"
        )
        await sandbox.run("for i in $(seq 1200); do : > f$i; done")
        names = await sandbox.list()
        assert (len(names), names[-1]) == (1001, "... and 202 more")


# --- confinement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "link folder", "link of links", "folder replaced"])
async def test_paths_outside_the_folder_are_refused(level: str, tmp_path: Path, kind: str):
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's")
    async with af.FileSandbox(isolation=level, files=SEED) as sandbox:
        await sandbox.run("echo outside > ../outside.txt")
        path = {
            "parent": "../outside.txt", "absolute": str(secret), "link": "l", "link folder": "f/outside.txt",
            "link of links": "a/b/c", "folder replaced": "outside.txt",
        }[kind]  # fmt: skip
        await sandbox.run(
            f"ln -s {secret} l; ln -s .. f; mkdir a; ln -s ../f a/b; ln -s ../outside.txt c; ln -s f/c c2"
        )
        if kind == "folder replaced":
            await sandbox.run("cd ..; mv work gone; ln -s . work")
        for call in (
            sandbox.read(path), sandbox.write(path, "x"), sandbox.edit(path, "outside", "x"), sandbox.undo(path),
            sandbox.grep("o", path),
        ):  # fmt: skip
            await errors.check(lambda: call, af.ToolError)
        if kind in ("parent", "link folder", "link of links"):
            for refused in (sandbox.read(path), sandbox.list(os.path.dirname(path))):
                await errors.check(lambda: refused, af.ToolError, "is outside the working folder")
        assert secret.read_text() == "the host's"
        assert (await sandbox.run("cd; cat outside.txt")).stdout == "outside\n"
        if kind != "folder replaced":
            assert not any("outside" in str(each) or "host" in str(each) for each in await sandbox.grep("."))


async def test_links_within_the_folder_work(level: str):
    async with af.FileSandbox(isolation=level, files=SEED) as sandbox:
        await sandbox.run("ln -s src lib; ln -s main.py src/alias.py")
        assert await sandbox.read("lib/alias.py") == CODE
        await sandbox.edit("lib/alias.py", "def f", "def h")
        assert "def h" in await sandbox.read("src/main.py")
        assert (await sandbox.run("readlink src/alias.py")).stdout == "main.py\n"


async def test_a_concurrently_swapped_link_is_not_followed():
    """While files are written, a background process repeatedly replaces a folder by a link that leads outside."""
    async with af.FileSandbox(files={"d/x": "inside"}) as sandbox:
        await sandbox.run(
            "echo outside > ../x; (while true; do mv d e; ln -s .. d; rm d; mv e d; done) >/dev/null 2>&1 &"
        )
        refused = 0
        for i in range(100):
            try:
                await sandbox.write("d/x", f"inside {i}")
                assert "outside" not in await sandbox.read("d/x")
            except af.ToolError:
                refused += 1
        assert (await sandbox.run("cat ../x")).stdout == "outside\n"
        assert refused < 100


async def test_devices_and_pipes_are_refused(level: str):
    async with af.FileSandbox(isolation=level) as sandbox:
        await sandbox.run("mkfifo p; ln -s /dev/zero z; ln -s loop loop; echo x > x; chmod 000 x")
        for path in ("p", "z", "loop"):
            await errors.check(lambda: sandbox.read(path), af.ToolError)
        assert await sandbox.grep("anything") == ()
        await errors.check(lambda: sandbox.write("p", "x"), af.ToolError, "is not a file")


async def test_a_full_disk_keeps_the_old_file():
    async with af.FileSandbox(disk_mb=2, files={"a": "old"}) as sandbox:
        await errors.check(lambda: sandbox.write("a", "x" * 4_000_000), af.ToolError, "cannot be written")
        assert await sandbox.read("a") == "old"
        assert await sandbox.list() == ("a",), "no half a file is left either"


async def test_grep_has_a_time_limit(never_killed: None):
    async with af.FileSandbox(isolation="none", files={"a": "a" * 40 + "b"}) as sandbox:
        await errors.check(
            lambda: sandbox._request("grep", 0.1, pattern="(a+)+$", path=".", max_matches=1),
            af.ToolError,
            "grep exceeded the time limit of 0.1 s",
        )
        assert await sandbox.read("a") == "a" * 40 + "b"


# --- initial files --------------------------------------------------------------------------------


async def test_initial_files_from_a_folder(level: str, tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "big.bin").write_bytes(random.Random(3).randbytes(700_000))
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("run.sh")
    (tmp_path / "empty").mkdir()
    async with af.FileSandbox(isolation=level, files=tmp_path) as sandbox:
        assert await sandbox.list() == ("empty/", "link", "pkg/", "pkg/big.bin", "run.sh")
        assert (await sandbox.run("./link; sha1sum < pkg/big.bin")).stdout.split() == [
            "ran",
            __import__("hashlib").sha1((tmp_path / "pkg" / "big.bin").read_bytes()).hexdigest(),
            "-",
        ]
        await sandbox.run("echo changed > run.sh; rm -r pkg; echo mark > mark; export MARK=1")
        await sandbox.seed({"task.txt": "one task's own"})
        await sandbox.reset()
        assert await sandbox.list() == ("empty/", "link", "pkg/", "pkg/big.bin", "run.sh")
        assert (await sandbox.run('echo "[$MARK]"; ls ..')).stdout == "[]\nwork\n"
    assert (tmp_path / "run.sh").read_text() == "#!/bin/sh\necho ran\n"


async def test_files_survive_the_interpreter_only(level: str):
    async with af.FileSandbox(isolation=level, files=SEED) as sandbox:
        await sandbox.run("kill -9 $PPID; sleep 1")
        assert await sandbox.read("README.md") == "# Title\n"
        os.kill(sandbox.pid or 0, 9)
        await until(lambda: not sandbox.alive)
        error, text = (
            (af.ToolError, "the code terminated the sandbox")
            if level == "none"
            else (af.errors.SandboxError, "ended from outside")
        )
        await errors.check(lambda: sandbox.read("README.md"), error, re.compile(text))
        await sandbox.start()
        assert await sandbox.read("README.md") == "# Title\n"


# --- with a pool ----------------------------------------------------------------------------------


async def test_one_pool_serves_file_and_shell_tools():
    pool = af.Pool(af.FileSandbox, size=1, files={"test_a.py": "def test():\n    assert 1 + 1 == 3\n"})
    tools = af.ToolSet(af.toolbox.code)
    assert tools.sandbox_types == (af.FileSandbox, af.ShellSandbox)
    async with af.Context(af.Task("t", ({"role": "user", "content": "?"},)), pools=[pool]) as context:
        assert await context.sandbox(af.FileSandbox) is await context.sandbox(af.ShellSandbox)

        async def call(name: str, **arguments: object) -> str:
            result = await tools.call(af.ToolCall("", name, arguments), context)
            return f"{result.ok} {result.observation}"

        assert await call("list_files") == "True test_a.py"
        ran = "python -c 'import test_a; test_a.test()'"
        assert "AssertionError" in await call("shell", command=ran)
        assert await call("edit_file", path="test_a.py", old="1 == 3 ", new="") == (
            "False the text to replace is not in test_a.py; even whitespace must match exactly."
            " The most similar line is 2:\n    assert 1 + 1 == 3"
        )
        assert "replaced at line 2" in await call("edit_file", path="test_a.py", old="== 3", new="== 2")
        assert await call("shell", command=ran) == "True "
        assert "test_a.py:2:" in await call("search_files", pattern="assert")
        assert await call("read_file", path="test_a.py", first_line=2) == "True      2\t    assert 1 + 1 == 2\n"
        assert "restored" in await call("undo_edit")
        assert await call("write_file", path="b/c.txt", text="x") == "True b/c.txt: written, 1 line"
    await pool.close()


async def test_a_fork_has_files_shell_and_nothing_in_common(level: str):
    async with af.FileSandbox(isolation=level, files=SEED) as one, af.FileSandbox(isolation=level, files=SEED) as two:
        await one.edit("README.md", "Title", "Fork")
        await one.run("rm data.bin; cd src; X=4")
        await one.fork(two)
        assert await two.read("README.md") == "# Fork\n"
        assert await two.list() == await one.list() == ("README.md", "src/", "src/main.py")
        assert (await two.run("echo $X; basename $PWD")).stdout == "4\nsrc\n"
        await two.write("README.md", "other")
        assert await one.read("README.md") == "# Fork\n"
        await one.run("mkfifo pipe")
        await errors.check(
            lambda: one.fork(two), af.errors.SandboxError, "'work/src/pipe' is a pipe, socket or device"
        )
        assert await two.list() == ("README.md", "data.bin", "src/", "src/main.py")


async def test_a_call_after_a_cancelled_one(level: str, never_killed: None):
    async with af.FileSandbox(isolation=level, files=SEED) as sandbox:
        for i in range(0, 20, 2):
            writing = asyncio.create_task(sandbox.write("a.txt", f"{i} " * 20_000))
            await asyncio.sleep(i / 4000)
            writing.cancel()
            await asyncio.wait([writing])
            assert await sandbox.read("README.md") == "# Title\n"
        assert set(await sandbox.list()) <= {"README.md", "data.bin", "src/", "src/main.py", "a.txt"}
