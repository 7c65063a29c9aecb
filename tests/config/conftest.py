"""A small fleet to break, and the check that a fault is shown exactly where it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import ConfigError

FLEET = """\
[fleet]
name = "lab"

[models."qwen:30b"]
aliases = ["qwen"]
context = 4096
sources = {transformers = "Qwen/Qwen", mlx = "mlx/Qwen"}

[models.plain]
context = 64
[models.plain.sources]
mlx = "./plain"

[hosts.spark]
address = "10.0.0.1"
roles = ["prefill"]
model = "qwen:30b"
port = 8000

[hosts.spark.engine]
name = "transformers"

[hosts.mac]
address = "10.0.0.2"
roles = ["decode"]
model = "qwen:30b"
port = 8001
kv_port = 9001
engine.name = "mlx"
"""

ExpectFault = Callable[[dict[str, str], str, str], ConfigError]


@pytest.fixture
def fleet_text() -> str:
    return FLEET


@pytest.fixture
def expect_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExpectFault:
    """expect({old: new, ...}, message, hint): in the fleet with each `old` replaced by its `new`, the fault says
    `message`, hints `hint`, and its carets stand under exactly what «» encloses."""
    monkeypatch.chdir(tmp_path)

    def expect(changes: dict[str, str], message: str, hint: str) -> ConfigError:
        marked = FLEET
        for old, new in changes.items():
            assert marked.count(old) == 1, "a change replaces one place"
            marked = marked.replace(old, new)
        return fault_in(marked, message, hint)

    def fault_in(marked: str, message: str, hint: str) -> ConfigError:
        begin = marked.index("«")
        end = marked.index("»") - 1
        text = re.sub("[«»]", "", marked)
        path = Path("hosts.toml")
        path.write_text(text, encoding="utf-8", newline="")
        with pytest.raises(ConfigError) as caught:
            load(path)
        first, source, carets = caught.value.message.split("\n")
        line = text.count("\n", 0, begin) + 1
        column = begin - (text.rfind("\n", 0, begin) + 1) + 1
        assert first == f"hosts.toml:{line}:{column}: {message}"
        assert source == f"  {line} | {text.split(chr(10))[line - 1]}"
        assert carets == f"  {' ' * len(str(line))} | {' ' * (column - 1)}{'^' * (end - begin)}"
        assert caught.value.hint == hint
        return caught.value

    return expect
