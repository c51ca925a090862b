"""Benchmark the widgets: first paint, scrolling, transferred data, the view of a busy pool, and many views.

Uses a real JupyterLab and Chromium, with the requirements of tests/browser.py. Writes JSON to standard output; `met`
states whether each limit in `BARS` is met. Under load, Chromium's counters are more reliable than wall-clock times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "widgets"))

import browser
import test_browser

BARS = {
    "token_view_paint_ms": 300,
    "trajectory_view_paint_ms": 1000,
    "pool_view_core_share": 0.05,
    "updates_a_second": 10.5,
    "kernel_mib_a_view": 0.2,
}

POOL = """
import time
from agentfly_kit.pool.pool import Pool
pool = Pool(Box, size=256)
leases = [await pool.acquire(owner=f"calc-{i // 8}/{i % 8}") for i in range(256)]

async def churn(seconds):
    '''Release and lease fifty times per second, and return the fraction of a core that this process used.'''
    end, began, cpu = time.perf_counter() + seconds, time.perf_counter(), time.process_time()
    i = 0
    while time.perf_counter() < end:
        lease = leases[i % 256]
        await pool.release(lease)
        leases[i % 256] = await pool.acquire(owner=f"calc-{i // 8}/{i % 8} again")
        i += 1
        await asyncio.sleep(0.02)
    return (time.process_time() - cpu) / (time.perf_counter() - began)
"""


COUNTED = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "LayoutCount")

SENT = """
import json
from ipywidgets.widgets.widget import _remove_buffers

def sent(view):
    # bytes of JSON, bytes of buffers, and the most numbers in one list of the JSON
    state, _, buffers = _remove_buffers(view.get_state())
    kept = {k: v for k, v in state.items() if k not in ("_esm", "_css", "layout")}

    def longest(x):
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
        inside = [longest(y) for y in parts]
        own = sum(isinstance(y, (int, float)) for y in x) if isinstance(x, (list, tuple)) else 0
        return max([own, *inside])

    return len(json.dumps(kept, default=str)), sum(len(bytes(b)) for b in buffers), longest(kept)
"""


def payload(nb: browser.Notebook) -> dict[str, int]:
    nb.execute(SENT)
    text, buffers, longest = nb.python("sent(view)")
    return {"json_bytes": text, "buffer_bytes": buffers, "numbers_in_longest_json_list": longest}


def counters(nb: browser.Notebook) -> Any:
    """Return a function that returns the changes in Chromium's counters since its last call (durations in ms)."""
    session = nb.context.new_cdp_session(nb.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, which other load does not affect
    last: dict[str, float] = {}

    def since() -> dict[str, int]:
        now = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        out = {
            name: round((now[name] - last.get(name, 0.0)) * (1000 if name.endswith("Duration") else 1))
            for name in COUNTED
        }
        last.update(now)
        return out

    return since


def paint(nb: browser.Notebook, label: str) -> float:
    nb.page.wait_for_function(
        "(name) => performance.getEntriesByName(name).length", arg=f"afk {label}", timeout=60_000
    )
    return float(nb.page.evaluate("(name) => performance.getEntriesByName(name).at(-1).duration", f"afk {label}"))


SCROLL = """async () => {
  const box = document.querySelector('.afk-tokens');
  const took = [];
  for (let i = 0; i < 120; i++) {
    const began = performance.now();
    box.scrollTop += 400;
    await new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)));
    took.push(performance.now() - began);
  }
  took.sort((a, b) => a - b);
  return [took[60], took[119]];
}"""


def token_view(lab: browser.Lab, rounds: int) -> dict[str, Any]:
    took, jumps, counted = [], [], []
    for k in range(rounds):
        nb = lab.open(
            f"tokens{k}",
            [test_browser.RECORDS, "ts = [trajectory(i, 8, 4) for i in range(31)]\nstats = step(ts)",
             "view = w.TokenView(stats, signal='ratio')\nview"],
        )  # fmt: skip
        nb.run()
        took.append(paint(nb, "Tokens by signal"))
        tokens = nb.python("view.tokens")
        since = counters(nb)
        since()
        jumps.append(nb.page.evaluate(SCROLL))
        counted.append(since())
        travels = payload(nb)
        nb.close()
        assert nb.errors == [], nb.errors
    return {
        "tokens": tokens, "token_view_paint_ms": round(statistics.median(took)), "each": [round(x) for x in took],
        # Time to scroll by one screen and draw two frames, which takes 33 ms without delays.
        "scroll_ms_median_and_slowest": [[round(x) for x in each] for each in jumps],
        "scroll_chromium": counted[-1], "payload": travels,
    }  # fmt: skip


def trajectory_view(lab: browser.Lab, rounds: int) -> dict[str, Any]:
    took = []
    for k in range(rounds):
        nb = lab.open(
            f"trajectories{k}",
            [test_browser.RECORDS, "from agentfly_kit.agent.rollout import Rollout",
             "rollout = Rollout.from_trajectories([trajectory(i, 1) for i in range(5000)])",
             "view = w.TrajectoryView(rollout)\nview"],
        )  # fmt: skip
        nb.run(wait=False)
        nb.finish(300)
        nb.page.wait_for_function(
            "() => performance.getEntriesByType('measure').some((x) => x.name.startsWith('afk '))"
        )
        took.append(
            float(
                nb.page.evaluate(
                    "() => performance.getEntriesByType('measure').findLast((x) => x.name.startsWith('afk ')).duration"
                )
            )
        )
        travels = payload(nb)
        nb.close()
        assert nb.errors == [], nb.errors
    return {
        "trajectory_view_paint_ms": round(statistics.median(took)), "each": [round(x) for x in took],
        "payload": travels,
    }  # fmt: skip


def pool_view(lab: browser.Lab, rounds: int) -> dict[str, Any]:
    nb = lab.open("pool", [test_browser.RECORDS, POOL, "view = w.PoolView(pool)\nview"], size=(1280, 1400))
    nb.run()
    nb.page.wait_for_selector(".afk-poolview .afk-tile")
    shares = []
    for _ in range(rounds):
        nb.execute("view.close()")
        nb.execute("alone = await churn(6)")
        nb.execute("view = w.PoolView(pool); display(view)")
        nb.page.evaluate("""() => { const panel = window.jupyterapp.shell.currentWidget;
            panel.content.activeCellIndex = 2; return window.jupyterapp.commands.execute('notebook:run-cell'); }""")
        nb.page.wait_for_timeout(1500)
        nb.execute("before = view.updates")
        nb.execute("shown = await churn(6)")
        alone, shown, updates = nb.python("(alone, shown, view.updates - before)")
        shares.append((shown - alone, alone, updates / 6))
    dropped = nb.page.evaluate("() => document.body.innerText.includes('rate limit')")
    travels = payload(nb)
    nb.execute("for lease in leases:\n    await pool.release(lease)\nawait pool.close()")
    nb.close()
    assert nb.errors == [], nb.errors
    share, alone, rate = min(shares)
    return {
        "pool_view_core_share": round(share, 4), "without_view": round(alone, 4), "updates_a_second": round(rate, 1),
        "rate_limit_hit": dropped, "each": [round(x[0], 4) for x in shares], "payload": travels,
    }  # fmt: skip


def many_views(lab: browser.Lab) -> dict[str, Any]:
    rss = "int(open('/proc/self/statm').read().split()[1]) * 4096"
    nb = lab.open(
        "many",
        [test_browser.RECORDS, "ts = [trajectory(i, 8, 4) for i in range(2)]",
         "def show(n):\n    for _ in range(n):\n        display(w.TokenView(ts, signal='logprob'))\n"
         "w.TokenView(ts)._repr_mimebundle_()\nshow(1)"],
    )  # fmt: skip
    nb.run()
    start = nb.python(rss)
    out: dict[str, Any] = {"tokens_a_view": nb.python("w.TokenView(ts).tokens")}
    cell = """async () => { const nb = window.jupyterapp.shell.currentWidget.content;
        nb.activeCellIndex = 2; nb.activeCell.model.sharedModel.setSource("show(20)");
        await window.jupyterapp.commands.execute('notebook:run-cell'); }"""
    sizes, heaps = [], []
    for _ in range(10):  # re-run the same cell; its earlier views stay alive
        nb.page.evaluate(cell)
        nb.page.wait_for_timeout(700)
        sizes.append(nb.python(rss) - start)
        heaps.append(nb.page.evaluate("() => performance.memory.usedJSHeapSize"))
    out["kernel_mib_a_view"] = round(sizes[-1] / 2**20 / 200, 3)
    out["kernel_mib_after_each_20_views"] = [round(x / 2**20, 1) for x in sizes]
    out["page_mib_after_each_20_views"] = [round(x / 2**20) for x in heaps]
    out["models_not_waited_for"] = nb.late  # number of models for which anywidget timed out after two seconds
    nb.close()
    assert nb.errors == [], nb.errors
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="token, trajectory, pool or many")
    given = parser.parse_args()
    if why := browser.missing():
        sys.exit(f"bench_widgets: {why}")
    out: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory(prefix="agentfly-bench-") as folder:
        lab = browser.Lab(Path(folder) / "lab")
        try:
            lab.start_browser()
            if given.only in ("", "token"):
                out["token_view"] = token_view(lab, given.rounds)
            if given.only in ("", "trajectory"):
                out["trajectory_view"] = trajectory_view(lab, given.rounds)
            if given.only in ("", "pool"):
                out["pool_view"] = pool_view(lab, given.rounds)
            if given.only in ("", "many"):
                out["many_views"] = many_views(lab)
        finally:
            lab.close()
    out["bars"] = BARS
    figures = {name: value for part in out.values() if isinstance(part, dict) for name, value in part.items()}
    out["met"] = {name: bool(figures[name] <= bar) for name, bar in BARS.items() if name in figures}
    if "rate_limit_hit" in figures:
        out["met"]["no rate limit"] = not figures["rate_limit_hit"]
    for name in ("token_view", "trajectory_view"):
        if name in out:
            out["met"][f"{name}: numbers travel as bytes"] = (
                out[name]["payload"]["numbers_in_longest_json_list"] < 100
            )
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
