"""Images in tasks and tool results: what is accepted, who sees them, and where they are refused."""

import base64
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agents
import dice
import errors
import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
from http_server import Server
from matplotlib.figure import Figure
from paths import ROOT
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit import images, types, widgets
from agentfly_kit.agent.conversations import plain_messages
from agentfly_kit.chat.text_chat import TextChat
from agentfly_kit.envs.judge.judging import Judge
from agentfly_kit.samples import Sample


def picture(colour: str = "red", size: tuple[int, int] = (32, 24), mode: str = "RGB") -> PIL.Image.Image:
    return PIL.Image.new("RGB", size, colour).convert(mode)


def noise(size: tuple[int, int] = (300, 200)) -> PIL.Image.Image:
    return PIL.Image.frombytes("RGB", size, np.random.default_rng(0).bytes(3 * size[0] * size[1]))


def encoded(image: PIL.Image.Image, format: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **settings)
    return file.getvalue()


def task(*parts: Any, **fields: Any) -> af.Task:
    return af.Task("t7", ({"role": "user", "content": list(parts)},), fields)


@af.tool
def look() -> list[Any]:
    """Return a picture with its title."""
    return ["before:", picture("blue"), "after:", picture("green")]


class Reader(af.Engine):
    """Text-only engine that replays texts and reads images."""

    tokens, logprobs, entropies, author, images = "none", "no", "no", "script", 3

    def __init__(self, *script: str) -> None:
        self.script = script

    async def sample(self, ids: Any, sampling: Any, seed: int, *, request: Any = None) -> Sample:
        return Sample(None, None, None, "stop", None, text=self.script[request.turn])


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def reader(*script: str, **settings: Any) -> af.Agent:
    return af.Agent(Reader(*script), chat=TextChat(), tools=[look], **settings)


# --- what is accepted ----------------------------------------------------------------------------


def test_all_sources_and_modes_become_the_same_pixels(tmp_path: Path) -> None:
    whole = af.Image(picture())
    path = tmp_path / "a.png"
    path.write_bytes(whole.png)
    figure = type("Figure", (), {"savefig": lambda self, file, format: picture().save(file, format)})()
    for source in (whole, whole.png, path, str(path), whole.data_url, figure):
        assert af.Image(source) == whole and hash(af.Image(source)) == hash(whole)
    for mode in ("RGBA", "CMYK", "P", "RGB"):
        assert af.Image(picture(mode=mode)) == whole, mode
    assert af.Image(picture("#777777", mode="L")).to_pil().getpixel((0, 0)) == (0x77,) * 3
    deep = PIL.Image.fromarray(np.full((4, 4), 0x8080, np.uint16))
    assert af.Image(encoded(deep)).to_pil().getpixel((0, 0)) == (128,) * 3, "16 bits are scaled, not cut off"
    clear = PIL.Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    for source in (clear, encoded(clear), clear.convert("LA"), encoded(clear.convert("P"), transparency=0)):
        assert af.Image(source).to_pil().getpixel((0, 0)) == (255, 255, 255)
    assert af.Image(picture(size=(24, 32))) != whole, "the size is part of the identity"
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    assert af.Image(encoded(picture(), "JPEG", exif=turned)).size == (24, 32), "the orientation is applied"


def test_invalid_images() -> None:
    big, frames = b"data:image/png;base64," + b"A" * 64, [picture("red"), picture("blue")]
    rows: list[tuple[Any, str]] = [
        (b"", "must be a PNG, JPEG, GIF, WebP or BMP file"),
        (b"<svg/>", "must be a PNG, JPEG, GIF, WebP or BMP file"),
        (encoded(picture(), "TIFF"), "must be a PNG, JPEG, GIF, WebP or BMP file"),
        (encoded(noise())[:5000], "cannot be decoded"),
        (encoded(picture(), "GIF", save_all=True, append_images=frames), "must not be animated"),
        (encoded(picture(), "PNG", save_all=True, append_images=frames), "must not be animated"),
        (picture(size=(0, 4)), "got 0 x 4"),
        (picture(size=(9000, 1)), "got 9000 x 1"),
        (PIL.Image.new("1", (4000, 4000)), "got 4000 x 4000"),
        (PIL.Image.new("F", (2, 2)), "must not have mode 'F'"),
        ("https://example.org/a.png", "images are not downloaded"),
        ("missing.png", "cannot be read"),
        ("data:text/plain;base64,AAAA", "must begin with 'data:image/png;base64,'"),
        ("data:image/png;base64,A*", "not valid base64"),
        (big.decode(), "must be a PNG"),
        (bytes(images.MAX_BYTES + 1), "at most 16,777,216 bytes"),
        (5, "got int"),
    ]
    for source, text in rows:
        errors.check(lambda: af.Image(source), af.errors.SettingsError, text)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_broken_images_never_crash_and_nothing_large_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are cut, bytes are changed, and headers state other sizes."""
    rng, decoded, load = random.Random(dice.seed()), [], PIL.ImageFile.ImageFile.load

    def spy(self: Any) -> Any:
        decoded.append(self.size)
        return load(self)

    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", spy)
    files = [encoded(noise((40, 30)).convert(m), f) for f in images._FORMATS for m in ("RGB", "L")]
    outcomes = {True: 0, False: 0}
    for _ in range(1000):
        data = bytearray(rng.choice(files))
        if rng.random() < 0.3:  # the size in the header of a PNG
            data[16:24] = rng.randrange(2**31).to_bytes(4, "big") + rng.randrange(2**31).to_bytes(4, "big")
        for _ in range(rng.randrange(8)):
            data[rng.randrange(min(len(data), rng.choice([64, 10**6])))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            af.Image(bytes(data))
            outcomes[True] += 1
        except af.errors.SettingsError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 50 and len(decoded) > 50
    assert all(w * h <= images.MAX_PIXELS and max(w, h) <= images.MAX_SIDE for w, h in decoded)


def test_parts_of_messages() -> None:
    whole = af.Image(picture())
    url = {"type": "image_url", "image_url": {"url": whole.data_url, "detail": "low"}}
    for part in (
        url,
        {"type": "image", "image": picture()},
        picture(),
        whole,
        {"type": "image_url", "image_url": whole},
    ):
        (message,) = task("What", {"type": "text", "text": " is"}, part).messages
        assert message["content"] == ("What is", whole)
        assert types.text_of(message) == "What is\n[image 32 x 24]" and types.images_of([message]) == (whole,)
    assert task("a", whole) == task("a", url) != task("a", af.Image(picture("blue")))
    assert task("a", "b").messages[0]["content"] == "ab"
    assert types.first_image([{"role": "assistant"}, *task("a", whole).messages]) == "message 1 (from 'user')"
    for part in ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, {"type": "image", "image": "a.png"}):
        errors.check(
            lambda: task(part), af.errors.TaskError, "message 0 (role 'user'): an image part must be a data URL"
        )
    ids = [
        af.tasks_from([{"question": [{"role": "user", "content": [picture(c)]}]}])[0].id
        for c in ("red", "red", "blue")
    ]
    assert ids[0] == ids[1] != ids[2]
    same = [af.tasks_from([{"question": "?", "image": picture(size=size)}])[0].id for size in ((4, 6), (6, 4))]
    assert same[0] != same[1], "the bytes of both are equal"


async def test_results_of_tools() -> None:
    def result(value: Any) -> Any:
        return af.tool(lambda: value, name="f", description="Return a value.").try_()

    mixed = await look.try_()
    assert mixed.observation == "before:\n[image 1]\nafter:\n[image 2]"
    assert mixed.images == (af.Image(picture("blue")), af.Image(picture("green"))) and "[image 32 x 24]" in repr(
        mixed
    )
    alone = await result(picture())
    assert (alone.observation, alone.images) == ("", (af.Image(picture()),))
    assert (await result(["a plot:", Figure(figsize=(2, 1))])).images[0].size == (200, 100)
    assert (await result(af.Image(picture()))) == alone == await result(af.ToolResult(True, "", images=[picture()]))
    large = await result(picture(size=(9000, 1)))
    assert not large.ok and large.error is not None and "got 9000 x 1" in large.error.message
    assert "at most 16 images, got 17" in str((await result([picture()] * 17)).error)


# --- rollouts ------------------------------------------------------------------------------------


async def test_a_rollout_keeps_its_images(tmp_path: Path) -> None:
    rollout = await reader(CALL, "two").rollout(task("Look", picture(), reference=af.Image(picture())), 2)
    (first, _) = rollout.trajectories
    assert first.stop == "answered" and [len(types.images_of(turn.messages)) for turn in first.turns] == [1, 0, 2, 0]
    file = rollout.save(tmp_path / "a.jsonl")
    names = sorted((tmp_path / "rollout_images").iterdir())
    assert len(names) == 3, "each image is written once"
    loaded = af.Rollout.load(file)
    assert loaded.trajectories == rollout.trajectories
    assert json.loads(file.read_text().splitlines()[0])["version"] == 4
    before = [name.stat().st_mtime_ns for name in names]
    loaded.save(tmp_path / "b.jsonl")
    assert [name.stat().st_mtime_ns for name in names] == before
    image = loaded.trajectories[0].task.fields["reference"]
    assert image.to_pil().getpixel((0, 0)) == (255, 0, 0) and "data:image/png" in loaded.trajectories[0]._repr_html_()
    names[0].write_bytes(encoded(picture("black")))
    changed = images.Image.stored(tmp_path / "rollout_images", names[0].stem, 32, 24)
    errors.check(changed.to_pil, af.errors.RunError, "was changed after the rollout was saved")
    for name in names:
        name.unlink()
    missing = af.Rollout.load(file).trajectories[0]
    words = re.compile(r"rollout_images/[0-9a-f]{32}\.png")
    errors.check(lambda: missing.task.messages[0]["content"][1].png, af.errors.RunError, words)
    assert "[image 32 x 24]" in missing._repr_html_()


async def test_an_engine_that_reads_no_images_refuses_them_before_sampling() -> None:
    pictured, refused = task("Look", picture()), "task 't7': message 0 (from 'user') has an image, but LocalEngine"
    agent = agents.agent()
    for call in (
        lambda: agent.rollout(pictured),
        lambda: agent.chain(pictured),
        lambda: agents.scripted(["x"]).chain(pictured),
    ):
        await errors.check(call, af.errors.SettingsError, "message 0 (from 'user') has an image, but ")
    await errors.check(lambda: agent.rollout([agents.tasks(1)[0], pictured]), af.errors.SettingsError, refused)
    errors.check(
        lambda: agents.chat().prompt(pictured.messages), af.errors.SettingsError, "this chat reads no images"
    )
    await errors.check(
        lambda: reader("x").rollout(task(*[picture()] * 4)),
        af.errors.SettingsError,
        "at most 3 images for Reader(), got 4",
    )
    for call in (
        lambda: af.trl.dataset([pictured]),
        lambda: af.trl.rollout_func(agent, [pictured]),
        lambda: af.from_tokens([1, 2], [0, 1], [0, -1.0], task=pictured),
    ):
        errors.check(call, ValueError, re.compile(r"^task 't7': message 0 .* has an image, but .* reads? no images"))
    judge = Judge(af.ScriptedEngine(["x"]), rubric={"short": "short"})
    await errors.check(
        lambda: judge.score(pictured, "x"),
        af.errors.SettingsError,
        "task 't7': the judge ScriptedEngine(1 turns) reads no images, got 1",
    )
    part = {"type": "image_url", "image_url": {"url": "x"}}
    errors.check(
        lambda: plain_messages([{"role": "user", "content": [part]}], {}), af.errors.SettingsError, "message 0"
    )
    (t,) = (await agents.scripted([CALL, "x"], tools=[look]).rollout(agents.tasks(1))).trajectories
    assert t.stop == "error" and "(from 'look') has an image, but ScriptedEngine" in str(t.error)


async def test_more_images_than_the_engine_reads_fill_the_context() -> None:
    def keep_one(chain: Any) -> None:
        chain.compact([{"role": "user", "content": ["Go on", picture()]}])

    agent = reader(CALL, CALL, "x")
    (t,) = (await agent.rollout(task("Look", picture()))).trajectories
    assert t.stop == "context_full" and len(t.actions) == 2
    (t,) = (await agent.replace(on_context_full=keep_one).rollout(task("Look", picture()))).trajectories
    assert t.stop == "answered" and len(t.rows) == 2
    windowed = reader(CALL, CALL, CALL, "x", before_turn=af.hooks.sliding_window(0))
    (t,) = (await windowed.rollout(task("Look", picture()))).trajectories
    assert t.stop == "answered" and [len(types.images_of(row.messages)) for row in t.rows] == [3, 5, 5, 3]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


async def test_a_server_gets_data_urls(server: Server) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        message = {"role": "assistant", "content": ""} | ({} if len(server.got) > 1 else {"tool_calls": [call]})
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    server.answer = answer
    engine = af.OpenAIEngine(server.url, "tiny", timeout=GUARD)
    agent = af.Agent(engine, chat=engine.chat, tools=[look])
    await agent.rollout(task("Look", picture()))
    user, _, tool, shown = server.got[1][1]["messages"]
    part = {"type": "image_url", "image_url": {"url": af.Image(picture()).data_url}}
    assert user["content"] == [{"type": "text", "text": "Look"}, part]
    assert (tool["role"], tool["content"]) == ("tool", "before:\n[image 1]\nafter:\n[image 2]")
    assert shown["role"] == "user" and [p["type"] for p in shown["content"]] == ["text", "image_url", "image_url"]
    assert (
        base64.b64decode(shown["content"][1]["image_url"]["url"].partition(",")[2]) == af.Image(picture("blue")).png
    )
    await Judge(engine, rubric={"short": "short"}, attempts=1).score(task("Look", picture()), "x")
    assert [p["type"] for p in server.got[2][1]["messages"][1]["content"]] == ["text", "image_url", "text"]
    refused = af.OpenAIEngine(server.url, "tiny", images=0)
    await errors.check(
        lambda: agent.replace(engine=refused).rollout(task(picture())),
        af.errors.SettingsError,
        "created with images=0",
    )
    assert "accepts no images" in af.Fleet([af.OpenAIEngine(server.url, "tiny", tokens="exact")]).image_obstacle
    await engine.close()


# --- views ---------------------------------------------------------------------------------------


async def test_views_show_images_also_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = reader(CALL, "two")
    rollout = await agent.rollout(task("Look", noise()))
    (t,) = rollout.trajectories
    view = widgets.TrajectoryView(rollout)
    view.select(t)
    shown = [m["images"] for turn in view._detail["columns"][0]["turns"] for m in turn["messages"]]
    assert [[alt for _, alt in each] for each in shown] == [["[image 300 x 200]"], [], ["[image 32 x 24]"] * 2, []]
    assert shown[0][0][0].startswith("data:image/jpeg;base64,") and len(shown[0][0][0]) < 40_000
    stepper = widgets.ChainStepper(agent, t)
    form = widgets.ToolForm(af.tool(lambda: [noise()], name="f", description="Return noise."))
    await form.call()
    for page in (form._static(), view._static(), stepper._static(), t._repr_html_(), t.task._repr_html_()):
        assert re.search(r'<img [^>]*alt="\[image 300 x 200\]"', page)
    assert "data:image/png" in t.tool_calls[0]._repr_html_() and len(t.task._repr_html_()) < 40_000
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    del t.task.messages[0]["content"][1].__dict__["preview"]
    assert "<img" not in t.task._repr_html_() and "[image 300 x 200]" in t.task._repr_html_()
    errors.check(lambda: af.Image(b"x"), af.errors.SettingsError, "pip install 'agentfly_kit[images]'")


# --- structure -----------------------------------------------------------------------------------


def test_content_is_read_by_one_helper() -> None:
    """Content may be a tuple, so only `types`, and chats, which encode text, index a message with "content"."""
    known = (
        "types.py", "chat/", "endpoint/", "agent/settings.py", "agent/turns.py", "agent/conversations.py",
        "agent/hooks.py", "agent/rollout_io.py", "engines/chat_messages.py", "engines/openai.py",
        "integrations/rollout_files.py", "integrations/message_logs.py",
    )  # fmt: skip
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("agentfly_kit", "widgets")
        for path in (ROOT / folder).rglob("*.py")
        if not path.relative_to(ROOT / folder).as_posix().startswith(known) and path.name != "_saved.py"
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"""\["content"\]|\['content'\]|get\("content"\)""", line) and "_on_message" not in line
    ]
    assert [line for line in found if "_base.py" not in line] == []


def test_a_program_without_images_loads_nothing_of_them() -> None:
    code = (
        "import agentfly_kit as af, sys\n"
        "t = af.Task('a', ({'role': 'user', 'content': [{'type': 'text', 'text': 'x'}]},))\n"
        "af.ToolResult(True, 'x'); t._repr_html_()\n"
        "print([name for name in sys.modules if name.startswith('PIL') or 'images' in name])\n"
        "af.LocalEngine(af.tiny.policy('calculator')).images\n"
        "print([name for name in sys.modules if name.startswith('agentfly') and name.endswith(('images', 'vision'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD)
    assert done.stdout.split() == ["[]", "[]"], done.stderr
