"""Grader: correct submissions pass, and no submission reads a test, forges a verdict, or affects the next grade."""

import asyncio
import json
import textwrap
from typing import Any

import errors
import pytest
from agents import chat
from levels import few
from patience import printed, time_out
from test_sandbox_python import nothing_left  # noqa: F401  (nothing_left is a fixture)
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.sandboxes.grader import Grade

SECRET = "the answer is 8431907"
ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 2) == 4"]


@pytest.fixture(params=few("strict", "landlock"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def graded(source: str, *tests: str | tuple[str, str], **more: object) -> Grade:
    async with af.Grader() as grader:
        return await grader.grade(textwrap.dedent(source), tests, **more)  # type: ignore[arg-type]


def passed(grade: Grade) -> list[bool]:
    return [verdict.passed for verdict in grade.verdicts]


# --- correct submissions --------------------------------------------------------------------------


async def test_verdicts(level: str):
    async with af.Grader(isolation=level) as grader:
        grade = await grader.grade(ADD, TESTS)
        assert passed(grade) == [True, True, False] and repr(grade) == "Grade(2 of 3 passed)"
        assert (grade.passed, grade.share, grade.ok, grade.error) == (2, 2 / 3, False, None)
        assert "assert add(1, 2) == 4" in (grade.verdicts[2].error or "")
        assert repr(grader) == f"<Grader {level}, 1 graded>"
        assert (await grader.grade(ADD, TESTS[:2])).ok
        broken = await grader.grade("def add(a, b): return a +", TESTS)
        assert passed(broken) == [False] * 3 and "SyntaxError" in (broken.error or "")
        assert "could not" not in repr(broken) and repr(broken) == "Grade(0 of 3 passed, did not load)"


async def test_forms_of_tests():
    source = """
    import collections, dataclasses
    LIMIT = 10
    class Stack:
        def __init__(self): self.items = []
        def push(self, x): self.items.append(x); return self
        def __len__(self): return len(self.items)
        def __getitem__(self, at): return self.items[at]
        def __iter__(self): return iter(self.items)
        def __contains__(self, x): return x in self.items
        def __str__(self): return f"Stack {self.items}"
    def sum(xs): return 0 if not xs else xs[0] + sum(xs[1:])
    def odd(xs): return (x for x in xs if x % 2)
    def same(x): return x
    def count(xs): return collections.Counter(xs)
    def named(x): return collections.namedtuple("Named", "x")(x)
    def root(x):
        if x < 0: raise ValueError("negative")
        return x ** 0.5
    class Own(Exception): pass
    def own(): raise Own("mine")
    """
    values = (
        "None, True, 0, -(2**70), 1.5, float('inf'), 2j, '\\u00e9', b'\\xff', [1, [2]], (1, (2,)), {1: (2, 'x')}, "
        "{3, 4}, frozenset({5})"
    )
    grade = await graded(
        source,
        "s = Stack().push(1).push('b')\nassert len(s) == 2 and s[1] == 'b' and list(s) == [1, 'b'] and 1 in s\n"
        "assert str(s) == \"Stack [1, 'b']\" and s.items == [1, 'b'] and s",
        "assert sum([1, 2]) == 3",
        "assert LIMIT == 10",
        f"for value in [{values}]:\n    got = same(value)\n    assert got == value and type(got) is type(value), value",
        "assert list(odd([0, 1, 2, 3])) == [1, 3]",
        "assert count('aab') == {'a': 2, 'b': 1} and named(1) == (1,) and type(named(1)) is tuple",
        "try:\n    root(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n    assert False",
        "from solution import root\nimport solution\nassert root(4) == solution.root(4) == two",
        "def test_one(): assert root(9) == 3\ndef test_two(): assert root(16) == 4",
        "def test_one(): assert root(9) == 3\ndef test_two(): assert root(16) == 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertTrue(1.4 < root(2) < 1.5)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(root(2), 1)",
        "def check(candidate):\n    assert candidate(4) == 2\ncheck(root)",
        "own()",
        "nothing_of_that_name()",
        setup="two = 2",
        names=("sum",),
    )
    assert passed(grade) == [True] * 9 + [False, True, False, True, False, False], grade.verdicts
    assert "SubmissionError: Own: mine" in (grade.verdicts[13].error or "")
    assert "NameError: name 'nothing_of_that_name' is not defined" in (grade.verdicts[14].error or "")


async def test_whole_programs():
    source = "import sys\nn = int(input())\nprint(sum(int(x) for x in sys.stdin.read().split()[:n]))\n"
    grade = await graded(source, ("2\n3 4\n", "7\n"), ("1\n5", "5  \n\n"), ("1\n5", "6"), ("", "0"))
    assert passed(grade) == [True, True, False, False]
    assert grade.verdicts[0].stdout == "7\n" and "EOFError" in (grade.verdicts[3].error or "")
    assert (await graded("import os\nprint(os.read(0, 100).decode())\nprint(open(0).read())", ("abc", "abc\n\n"))).ok
    assert passed(await graded("print(1)\nexit(3)", ("", "1"))) == [False]
    assert (await graded("if __name__ == '__main__':\n    print(1)\n    exit()", ("", "1"))).ok


async def test_run_executes_a_whole_program():
    async with af.Grader() as grader:
        result = await grader.run("print(input()[::-1])", "abc")
        assert (result.stdout, result.ok) == ("cba\n", True)
        assert "EOFError" in ((await grader.run("input()")).error or "")
        result = await grader.run("while True: pass", timeout=0.1)
        assert result.timed_out and not result.ok
        assert (await grader.grade(ADD, TESTS)).passed == 2


async def test_files_and_modules():
    grade = await graded(
        "from lib.add import add\nfive = int(open('data.txt').read())",
        "from lib.add import add\nassert add(1, 2) == 3",
        "assert add(five, 1) == 6",
        files={"lib/__init__.py": "", "lib/add.py": ADD, "data.txt": "5"},
        modules=("lib.add",),
    )
    assert grade.ok, grade.verdicts


async def test_invalid_tests_raise_settings_error():
    async with af.Grader() as grader:
        for tests, more, words in [
            ([], {}, "at least one test"),
            (["assert add("], {}, "test 1: SyntaxError"),
            ([("a", 1)], {}, "must be Python code or a pair"),
            (TESTS, {"setup": "import no_such_module"}, "setup failed(.|\n)*no_such_module"),
            (TESTS, {"timeout": 0}, "timeout must be a finite number above 0"),
        ]:
            with pytest.raises(af.errors.SettingsError, match=words):
                await grader.grade(ADD, tests, **more)  # type: ignore[arg-type]
        assert (await grader.grade(ADD, TESTS)).passed == 2
        missing = await grader.grade("x = 1", TESTS, setup="from solution import add")
        assert passed(missing) == [False] * 3 and "in the setup" in (missing.verdicts[0].error or "")


# --- cheats ---------------------------------------------------------------------------------------

CHEATS = {
    "exit when loaded": "import os\nos._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\ndef add(a, b): sys.exit(0)",
    "quiet exception": "def add(a, b): raise StopIteration",
    "an exception that ends loops": "def add(a, b): raise GeneratorExit",
    "always equal": "class Yes:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
    "    __bool__ = lambda s: True\n    __hash__ = lambda s: 0\ndef add(a, b): return Yes()",
    "an int that is always equal": "class Yes(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return Yes(0)",
    "a container that holds all": "class Yes(list):\n    __eq__ = __contains__ = lambda s, o: True\n"
    "def add(a, b): return Yes()",
    "own built-ins": "def all(x): return True\nany = sorted = isinstance = len = all\n"
    "class AssertionError(Exception): pass\n"
    "def add(a, b): return None",
    "patched built-ins": "import builtins, unittest, sys\nbuiltins.all = builtins.len = lambda *a: True\n"
    "builtins.AssertionError = builtins.Exception = ZeroDivisionError\n"
    "unittest.TestCase.assertEqual = lambda *a: None\nsys.modules['unittest'] = sys.modules['pytest'] = None\n"
    "def add(a, b): return None",
    "prints": "print('1 passed')\nprint('{\"end\": null, \"asked\": true}')\n"
    "def add(a, b): print('{\"end\": null}', flush=True)",
    "patched answers": "import json\nreal = json.dumps\n"
    "json.dumps = lambda m, **k: real({'end': None, 'asked': True, 'value': {'end': None}})\ndef add(a, b): return 1",
    "patched program": "import __main__\nspace = __main__._agentfly\n"
    "space['REPLY'].chunk = lambda *a: space['RawRepr']('13 {\"end\": null}')\n"
    "space['handle'] = lambda *a: space['RawRepr']('13 {\"end\": null}')\ndef add(a, b): return 1",
    "a tracer": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = sys.unraisablehook = lambda *a: None\n"
    "def add(a, b): return None",
    "an exit handler": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "long": "def add(a, b): return 'x' * 10**7",
    "no text": "def add(a, b): return '\\ud800'",
    "floods": "def add(a, b):\n    while True: print('x' * 10000)",
    "an interrupt": "def add(a, b): raise KeyboardInterrupt",
    "a lying class": "class Yes:\n    @property\n    def __class__(self): return int\n    __eq__ = lambda s, o: True\n"
    "def add(a, b): return Yes()",
}

# These end or flood every call, so that the form of the test does not matter.
ENDS = (
    "exit when called", "sys.exit", "an exception that ends loops", "patched answers", "an exit handler", "deep",
    "long", "no text", "floods", "an interrupt",
)  # fmt: skip


async def test_cheating_submissions_pass_no_test():
    tests = [
        "assert add(1, 2) == 3",
        "assert all(add(x, 1) == x + 1 for x in [1, 2])",
        "assert all(map(lambda x: add(x, 1) == x + 1, [1, 2]))",
        "assert sorted([add(2, 2), 1]) == [1, 4] and isinstance(add(1, 1), int)",
        "assert add(1, 2) in [3]",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(add(1, 2), 3)",
        "for x in [1, 2]:\n    assert add(x, 1) == x + 1",
    ]
    async with af.Grader() as grader:
        for name, cheat in CHEATS.items():
            chosen = tests[:2] if name in ENDS else tests
            grade = await grader.grade(cheat, chosen, timeout=2.0)
            assert passed(grade) == [False] * len(chosen), (name, grade.verdicts)
        assert (await grader.grade(ADD, tests)).ok


STALL = """
import __main__, time
def _stall(self, *a):
    print("begun", flush=True)
    time.sleep(1000)
__main__._agentfly['ReplyBuffer'].chunk = _stall
"""


@pytest.mark.parametrize(
    "source",
    [
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def add(a, b):\n    print('begun', flush=True)\n    time.sleep(1000)",
        "def add(a, b):\n    print('begun', flush=True)\n    while True: pass",
        STALL,
    ],
    ids=["ignores interrupts", "endless", "does not answer"],
)
async def test_a_time_limit_applies_to_one_test(source: str):
    async with af.Grader() as grader:
        stalls = source == STALL
        task = asyncio.create_task(
            grader.grade(source, ["assert add(1, 2) == 3", *([] if stalls else ["assert True"])])
        )
        await until(lambda: printed(grader._work))
        time_out(grader._work)
        grade = await task
        assert passed(grade) == [False, *([] if stalls else [True])]
        assert grade.verdicts[0].limit == "time"


async def test_memory_limit_and_time_limit_of_all_tests():
    grade = await graded("def add(a, b): return len(bytearray(2**30))", "assert add(1, 2) == 3", "assert True")
    assert (passed(grade), grade.verdicts[0].limit) == ([False, True], "memory")
    many = await graded(
        "def add(a, b):\n    while True: pass", *["assert add(1, 2) == 3"] * 50, timeout=0.3, total=0.5
    )
    assert passed(many) == [False] * 50 and "all tests" in (many.verdicts[-1].error or "")


SPY = """
import gc, glob, os, sys

def seen():
    texts = []
    frame = sys._getframe()
    while frame is not None:
        texts += [repr(frame.f_code.co_consts), repr(list(frame.f_locals.values()))[:100000]]
        frame = frame.f_back
    for each in gc.get_objects():
        if type(each) is dict:
            texts += [x for x in list(each.values()) if type(x) is str]
        elif type(each) in (list, tuple, set):
            texts += [x for x in list(each) if type(x) is str]
        elif hasattr(each, "__code__"):
            texts.append(repr(each.__code__.co_consts))
    for pattern in ("/tmp/**", "/dev/shm/**", "/sandbox/*", "/proc/*/cmdline", "/proc/*/environ", "/proc/*/fd/*",
                    os.environ["HOME"] + "/**", os.getcwd() + "/../agentfly*/*", os.getcwd() + "/**"):
        for path in glob.glob(pattern, recursive=True)[:3000]:
            try:
                if not os.path.isdir(path) and not os.path.samefile(path, "/proc/self/fd/0"):
                    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                        texts.append(repr(file.read(200000)))
            except (OSError, ValueError):
                pass
    for process in glob.glob("/proc/[0-9]*"):
        if process == f"/proc/{os.getpid()}":
            continue
        try:
            with open(process + "/maps") as maps, open(process + "/mem", "rb") as memory:
                for line in maps:
                    low, high = (int(x, 16) for x in line.split()[0].split("-"))
                    memory.seek(low)
                    texts.append(repr(memory.read(high - low)))
        except (OSError, ValueError, OverflowError):
            pass
    return texts

def add(a, b):
    mark = "answer" + " is "
    found = [text[max(0, text.find(mark) - 40):][:100] for text in seen() if mark + "84" in text]
    return found or "nothing found"
"""


@pytest.mark.parametrize("level", [each for each in few("strict", "landlock") if each.values != ("none",)])
async def test_tests_cannot_be_read(level: str):
    """isolation="none" is not tested, because there the spy can read the memory of other processes."""
    async with af.Grader(isolation=level, memory_mb=512) as grader:
        control = await grader.grade(
            SPY + "\nleft = 'the answer' + ' is 84'\nheld = [left]",
            ["assert add(1, 2) != 'nothing found'"],
        )
        assert control.ok, ("it finds what is there to be found", control.verdicts)
        grade = await grader.grade(
            SPY,
            [f"expected = {SECRET!r}\ngot = add(1, 2)\nassert got == 'nothing found' and expected, got"],
            setup=f"answer = {SECRET!r}",
        )
        assert grade.ok, grade.verdicts
        program = await grader.grade(SPY + "\nprint(add(1, 2))", [("", SECRET), ("", "nothing found")])
        assert passed(program) == [False, True]


async def test_grades_are_independent(level: str):
    leave = (
        "import os, sys, builtins, threading, time, __main__\nopen('mark', 'w').write('x')\nbuiltins.mark = 1\n"
        "__main__.mark = 1\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\ndef add(a, b): return a + b\n"
    )
    look = (
        "import builtins, os, __main__\n"
        "def add(a, b): return [os.path.exists('mark'), hasattr(builtins, 'mark'), hasattr(__main__, 'mark')]"
    )
    async with af.Grader(isolation=level) as grader:
        assert (await grader.grade(leave, TESTS[:1])).ok
        assert (await grader.grade(look, ["assert add(1, 2) == [False] * 3"])).ok


# --- in rewards and pools -------------------------------------------------------------------------


async def test_a_reward_uses_a_grader_besides_the_chains_sandbox(nothing_left: None):  # noqa: F811
    @af.reward
    async def solved(final: str | None, tests: list[str], grader: af.Grader) -> float:
        return (await grader.grade(final or "", tests)).share

    spoil = (
        '<tool_call>\n{"name": "python", "arguments": {"code": "import builtins; builtins.all = None"}}\n</tool_call>'
    )
    task = af.Task("t", ({"role": "user", "content": "?"},), {"tests": TESTS})
    pools = [af.Pool(af.PythonSandbox, size=2), af.Pool(af.Grader, size=2)]
    engine = af.ScriptedEngine([spoil, ADD])
    agent = af.Agent(engine, chat=chat(), tools=[af.toolbox.python], reward=solved, pools=pools, max_turns=4)
    rollout = await agent.rollout([task], group_size=3)
    assert [trajectory.reward for trajectory in rollout.trajectories] == [2 / 3] * 3
    assert repr(pools[1]).startswith("<Pool Grader 0 leased, ")
    for pool in pools:
        await pool.close()


async def test_close_cancel_and_kill(nothing_left: None):  # noqa: F811
    pool = af.Pool(af.Grader, size=1)
    lease = await pool.acquire()
    endless = "def add(a, b):\n    print('begun', flush=True)\n    while True: pass"
    loop = asyncio.ensure_future(lease.sandbox.grade(endless, TESTS))
    await until(lambda: printed(lease.sandbox._work))
    await errors.check(lambda: lease.sandbox.grade(ADD, TESTS), af.errors.SettingsError, "already grading")
    loop.cancel()
    await errors.check(lambda: loop, asyncio.CancelledError)
    assert (await lease.sandbox.grade(ADD, TESTS)).passed == 2
    lease.sandbox._work.kill()
    assert not lease.sandbox.alive
    await pool.release(lease)
    async with pool.lease() as grader:
        assert (await grader.grade(ADD, TESTS)).passed == 2
    await pool.close()
    grader = af.Grader()
    await grader.start()
    await grader.close()
    await errors.check(lambda: grader.grade(ADD, TESTS), af.errors.SandboxError, "closed")


# --- processes of the policy -----------------------------------------------------------------------

WATCH = (
    SPY
    + """
import time
if os.fork() == 0:
    os.setsid()
    while True:
        looking = os.fork()  # one process per search, because the data read would fill the memory
        if not looking:
            found = add(0, 0)
            with open("rounds", "a") as file:
                file.write("x" if found != "nothing found" else ".")
            os._exit(0)
        os.waitpid(looking, 0)
        time.sleep(0.02)
"""
)


@pytest.mark.parametrize("level", [each for each in few("strict") if each.values != ("none",)])
async def test_grading_is_hidden_from_processes_of_the_chain(level: str):
    """The submission and a background process of the chain search memory and files for the answer."""
    rounds: list[str] = []

    @af.reward
    async def solved(final: str | None, sandbox: af.PythonSandbox, grader: af.Grader) -> float:
        before = await looked(sandbox)
        grade = await grader.grade(
            final or "",
            [f"expected = {SECRET!r}\ngot = add(1, 2)\nassert got == 'nothing found' and expected, got"],
            setup=f"answer = {SECRET!r}",
            timeout=GUARD,
            total=GUARD,
        )
        assert isinstance(grade, Grade) and grade.error is None, grade
        after = await looked(sandbox)
        rounds.append(after[len(before) :])
        await sandbox.run(f"open('note', 'w').write({SECRET!r})", GUARD)
        rounds.append((await looked(sandbox))[len(after) :])
        return grade.share

    async def looked(sandbox: af.PythonSandbox) -> str:
        """Return what the background process has written, after two more rounds."""
        texts: list[str] = []
        while len(texts) < 2 or len(texts[-1]) < len(texts[0]) + 2:
            texts.append((await sandbox.run("open('rounds').read()", GUARD)).value or "")
            await asyncio.sleep(0.02)
        return texts[-1].strip("'")

    spy = f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': WATCH}})}\n</tool_call>"
    task = af.Task("t", ({"role": "user", "content": "?"},), {})
    settings: dict[str, Any] = {"size": 1, "isolation": level, "memory_mb": 512, "acquire_timeout": GUARD}
    async with af.Pool(af.PythonSandbox, **settings) as chains, af.Pool(af.Grader, **settings) as graders:
        agent = af.Agent(
            af.ScriptedEngine([spy, SPY]), chat=chat(), tools=[af.toolbox.python], reward=solved, max_turns=4,
            pools=[chains, graders],
        )  # fmt: skip
        (trajectory,) = (await agent.rollout([task])).trajectories
    assert (trajectory.reward, trajectory.error) == (1.0, None), trajectory.explain()
    assert set(rounds[0]) == {"."}
    assert "x" in rounds[1], "it finds what is there to be found"
