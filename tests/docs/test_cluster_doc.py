"""The cells of docs/cluster.md parse and use existing names, and its command starts a server that can be updated."""

import ast
import json
import re
import shlex

import paths

import agentfly_kit as af
from agentfly_kit.engines.http import SERVE_COMMAND
from agentfly_kit.engines.vllm.weight_transfer import TRANSFER_CONFIG

TEXT = (paths.ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def test_its_cells_use_names_that_exist() -> None:
    cells = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(cells) >= 4
    for cell in cells:
        compile(cell, "cluster.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for name in re.findall(r"\baf\.(\w+)", cell):
            assert hasattr(af, name), name


def test_its_command_is_that_of_the_error() -> None:
    (command,) = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    words = set(shlex.split(command))
    assert set(SERVE_COMMAND.replace("<folder>", "path/or/name").split()) <= words
    assert {"VLLM_SERVER_DEV_MODE=1", "agentfly_kit.engines.vllm.worker.WorkerExtension"} <= words
    assert json.dumps(TRANSFER_CONFIG) in words
