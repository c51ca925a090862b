"""A real JupyterLab in a real Chromium, controlled by tests.

All tests share one server and one browser, because starting them takes several seconds, while opening a notebook takes
less than a second. JupyterLab writes only to a temporary folder.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip

_QUIET = 20.0

both = pytest.mark.parametrize(
    "notebook", ["lab", pytest.param("notebook7", marks=pytest.mark.long)], indirect=True, ids=["lab", "notebook7"]
)
"""A test that opens notebooks in JupyterLab, and by `make test-all` in Notebook 7 too."""

_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # Without windowing, all outputs are in the page, even those off-screen.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def missing() -> str | None:
    """Return the reason why browser tests cannot run on this machine, or None."""
    if not Path(CHROMIUM).exists():
        return f"no {CHROMIUM}: apt-get install --no-install-recommends chromium fonts-dejavu-core"
    for module in ("jupyterlab", "playwright"):
        try:
            __import__(module)
        except ImportError:
            return f"no {module}: pip install 'agentfly_kit[lab,test]'"
    return None


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a port for a server, at which only sockets with SO_REUSEADDR can listen, as those of servers."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def expect(locator: Any) -> Any:
    """Return Playwright's assertions about a locator. They wait until they hold, because the kernel answers late."""
    from playwright.sync_api import expect as assertions

    assertions.set_options(timeout=1000 * waiting.GUARD)
    return assertions(locator)


class Lab:
    """The Jupyter server, the browser and its pages. `close()` closes all of them."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        settings = folder / "app-settings"
        settings.mkdir()
        (settings / "overrides.json").write_text(json.dumps(_SETTINGS))
        self.url = ""
        own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        self.log = (folder / "server.log").open("wb")
        self.server = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
                "--port=0",  # any free one
                "--IdentityProvider.token=", "--ServerApp.password=",
                f"--ServerApp.root_dir={self.root}", "--LabApp.expose_app_in_browser=True",
                "--LabApp.extension_manager=readonly", f"--LabApp.app_settings_dir={settings}",
                f"--LabApp.user_settings_dir={folder / 'user-settings'}",
                f"--LabApp.workspaces_dir={folder / 'workspaces'}",
                # The same server also provides Notebook 7 at /notebooks if Notebook 7 is installed.
                "--JupyterNotebookApp.expose_app_in_browser=True",
                f"--JupyterNotebookApp.app_settings_dir={settings}",
                f"--JupyterNotebookApp.user_settings_dir={folder / 'user-settings'}",
            ],
            env={**os.environ, **own, **(environment or {}), "OMP_NUM_THREADS": "1"},
            stdout=self.log, stderr=subprocess.STDOUT, cwd=self.root,
        )  # fmt: skip
        atexit.register(self.close)  # so that interrupted tests leave no server running
        self.playwright: Any = None
        self.browser: Any = None
        try:
            waiting.blocking_until(self._responds)
        except BaseException:
            self.close()
            raise

    def start_browser(self) -> None:
        from playwright.sync_api import sync_playwright

        self.playwright = sync_playwright().start()
        self.browser = self.playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)

    def stop_browser(self) -> None:
        """Stop the browser and playwright, whose event loop in this thread prevents `async def` tests from running."""
        for end in (self.browser and self.browser.close, self.playwright and self.playwright.stop):
            if end:
                end()
        self.browser = self.playwright = None

    def _responds(self) -> bool:
        assert self.server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
        about = self.folder / "runtime" / f"jpserver-{self.server.pid}.json"
        try:
            self.url = f"http://127.0.0.1:{json.loads(about.read_text())['port']}"
            with urllib.request.urlopen(f"{self.url}/api/status", timeout=waiting.GUARD):
                return True
        except (OSError, ValueError):  # the file is not there, or not complete
            return False

    def open(
        self,
        name: str,
        cells: list[str],
        *,
        size: tuple[int, int] = (1280, 1100),
        outputs: Any = None,
        app: str = "lab",
    ) -> Notebook:
        """Open a notebook with these code cells and connect it to a kernel, without running it.

        Args:
            app: "lab" or "notebook7".
        """
        path = self.root / f"{name}.ipynb"
        write(path, cells, outputs)
        return Notebook(self, path, *size, app=app)

    def trust(self, *paths: Path) -> None:
        """Trust notebooks like `jupyter trust`, in the data folder of the server."""
        own = {f"JUPYTER_{name}_DIR": str(self.folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        subprocess.run(
            [sys.executable, "-m", "nbformat.sign", *map(str, paths)],
            check=True,
            env={**os.environ, **own},
            capture_output=True,
        )

    def close(self) -> None:
        atexit.unregister(self.close)
        self.stop_browser()
        if self.server.poll() is None:
            self.server.terminate()
            try:
                self.server.wait(10)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def write(path: Path, cells: list[str], outputs: dict[int, list[Any]] | None = None) -> None:
    nodes = [
        {
            "cell_type": "code", "id": f"cell{i}", "metadata": {}, "source": source, "execution_count": None,
            "outputs": (outputs or {}).get(i, []),
        }
        for i, source in enumerate(cells)
    ]  # fmt: skip
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.write_text(
        json.dumps({"cells": nodes, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )


class Notebook:
    """An open notebook. `errors` collects the console and script errors of the page, and must stay empty."""

    # JavaScript that defines `panel`, the panel of the notebook.
    _PANEL = """const app = window.jupyterapp; const panel = app.shell.currentWidget;"""

    def __init__(self, lab: Lab, path: Path, width: int, height: int, app: str = "lab") -> None:
        self.lab = lab
        self.path = path
        self.context = lab.browser.new_context(viewport={"width": width, "height": height})
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * waiting.GUARD)
        self.errors: list[str] = []
        self.late = 0  # number of models for which anywidget timed out
        self.page.on("console", lambda m: self.errors.append(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", self._raised)
        where = {"lab": f"lab/workspaces/{path.stem}/tree", "notebook7": "notebooks"}[app]
        self.page.goto(f"{lab.url}/{where}/{path.name}")
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.wait_for_function("() => window.jupyterapp.shell.currentWidget?.context")
        self.page.evaluate(
            f"""async () => {{ await window.jupyterapp.restored; {self._PANEL}
            await panel.context.ready; await panel.sessionContext.ready;
            await panel.sessionContext.session.kernel.info; }}"""
        )

    def _raised(self, error: Any) -> None:
        # Notebook 7.6 sometimes raises these errors at startup, before any cell has run.
        its_own = ("(reading 'schema')", "'filebrowser:open-path' not registered")
        if any(text in error.message for text in its_own) and "/static/notebook/" in (error.stack or ""):
            return
        # JupyterLab raises this if a kernel ends while a subshell is being requested.
        if "Canceled future for create_subshell_request" in error.message:
            return
        # anywidget waits only two seconds for a model, even on a busy machine. A missing view fails its own test.
        if error.message == "[anywidget] Failed to initialize model.":
            self.late += 1
            return
        self.errors.append(f"page: {error}")

    def run(self, *, wait: bool = True) -> Any:
        """Run all cells and return the page. Raise AssertionError with the tracebacks if a cell raised an exception."""
        self.page.evaluate(
            """() => { window.ran = false;
            window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ran = true; }); }"""
        )
        if wait:
            self.finish()
        return self.page

    def press(self, *keys: str) -> None:
        """Press keys, one after another."""
        for key in keys:
            self.page.keyboard.press(key)

    def finish(self) -> None:
        until, quiet = time.monotonic() + waiting.GUARD, None
        while not self.page.evaluate("() => window.ran"):
            now = time.monotonic()
            assert now < until, f"not run to its end in {waiting.GUARD:g} s: {self._where()}; {self.errors}"
            status, _, _, _, *states = self._where()
            quiet = (quiet or now) if status == "idle" else None
            counts = [count for count, state in states if state is not None]  # of the code cells
            # On a busy machine JupyterLab occasionally misses the replies to cells: the kernel is idle and has run all
            # cells, but these stay [*] forever. All outputs are present.
            first = next((count - i for i, count in enumerate(counts) if count is not None), 1)
            if quiet and now - quiet > _QUIET and self.python("get_ipython().execution_count") >= first + len(counts):
                print(f"a reply was lost: {states}")
                break
            self.page.wait_for_timeout(50)
        raised = self.page.evaluate(
            f"""() => {{ {self._PANEL} const out = [];
            for (const cell of panel.content.model.cells) {{
              const errors = (cell.outputs?.toJSON() ?? []).filter((o) => o.output_type === 'error');
              out.push(...errors.map((o) => o.traceback.join('\\n')));
            }} return out; }}"""
        )
        if raised:
            raise AssertionError("\n".join(raised))

    def _where(self) -> Any:
        """Return the progress of a run: the state of the kernel and the execution count of each cell."""
        return self.page.evaluate(
            f"""() => {{ {self._PANEL} const session = panel.sessionContext; return [
              session.session?.kernel?.status, session.session?.kernel?.connectionStatus, session.pendingInput,
              document.querySelector('.jp-Dialog')?.textContent,
              ...[...panel.content.model.cells].map((c) => [c.executionCount, c.executionState])]; }}"""
        )

    def without_sidebar(self) -> None:
        """Collapse the sidebar to make room for the notebook."""
        self.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        self.page.wait_for_function("() => window.jupyterapp.shell.leftCollapsed")

    def execute(self, code: str) -> None:
        """Run code in the kernel without using a cell."""
        self.python("None", code)

    def python(self, expression: str, code: str = "") -> Any:
        """Evaluate an expression in the kernel. Its value must be a literal (numbers, strings, lists of them)."""
        import zmq
        from jupyter_client.session import Session

        # A connection of its own, because JupyterLab misses replies on a busy machine.
        number = self.page.evaluate(f"() => {{ {self._PANEL} return panel.sessionContext.session.kernel.id; }}")
        kernel = json.loads((self.lab.folder / "runtime" / f"kernel-{number}.json").read_text())
        session = Session(key=kernel["key"].encode(), signature_scheme=kernel["signature_scheme"])
        with zmq.Context.instance().socket(zmq.DEALER) as shell:
            shell.connect(f"{kernel['transport']}://{kernel['ip']}:{kernel['shell_port']}")
            request = {
                "code": code,
                "user_expressions": {"value": expression},
                "store_history": False,
                "silent": False,
            }
            session.send(shell, "execute_request", request | {"allow_stdin": False})
            assert shell.poll(1000 * waiting.GUARD), f"no reply: {expression}"
            reply = session.recv(shell, 0)[1]["content"]
        value = reply.get("user_expressions", {}).get("value")
        if reply["status"] != "ok" or value is None or value["status"] != "ok":
            raise AssertionError(f"in the kernel: {value or reply}")
        return ast.literal_eval(value["data"]["text/plain"])

    def _evaluated(self, expression: str) -> Any:
        try:
            return self.python(expression)
        except AssertionError as error:
            return error

    def wait_python(self, expression: str, wanted: Any) -> None:
        """Wait until an expression in the kernel, which may still raise, has the wanted value."""
        end = time.monotonic() + waiting.GUARD
        while (got := self._evaluated(expression)) != wanted:
            assert time.monotonic() < end, f"{expression} is {got!r}, wanted {wanted!r}"
            self.page.wait_for_timeout(50)

    def theme(self, name: str) -> None:
        """Switch JupyterLab's theme to "Light" or "Dark"."""
        self.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", f"JupyterLab {name}"
        )
        dark = "false" if name == "Dark" else "true"
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{dark}'")

    def command(self, name: str, args: Any = None) -> None:
        """Start a JupyterLab command without waiting for it, because it may open a dialog."""
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, args or {}]
        )

    def shut_down(self) -> None:
        """Shut down the kernel. The page stays open."""
        self.page.evaluate(f"async () => {{ {self._PANEL} await panel.sessionContext.shutdown(); }}")

    def close(self) -> None:
        # A kernel cannot be shut down during a restart; in this case the server shuts it down later.
        self.page.evaluate(
            f"async () => {{ {self._PANEL} await panel.sessionContext.shutdown().catch(() => {{}}); }}"
        )
        self.context.close()
