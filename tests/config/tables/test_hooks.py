"""Every rule of the [hooks] table, broken once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import Hooks, load
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]
MODELS = '[models."qwen:30b"]'


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ('«before_start» = "x"', 'unknown key "before_start" in [hooks]', 'did you mean "before_restart"?'),
        ("before_deploy = «3»", "before_deploy must be a string, not an integer", 'as in before_deploy = "./hooks/'),
        ('after_deploy = «" "»', "after_deploy is not a command", 'as in after_deploy = "./hooks/after_deploy.sh"'),
        ('on_failure = «"a\\nb"»', "on_failure is not a command", 'as in on_failure = "./hooks/on_failure.sh"'),
        ("timeout_s = «0»", "timeout_s is out of range", "from 1 to 3600"),
        ("timeout_s = «1.5»", "timeout_s must be an integer, not a fraction", "as in timeout_s = 1"),
    ],
)
def test_a_fault_in_the_hooks_table_is_pointed_at(expect_fault: Expect, table: str, message: str, hint: str) -> None:
    if hint.endswith("hooks/"):
        hint += 'before_deploy.sh"'
    expect_fault({MODELS: f"[hooks]\n{table}\n{MODELS}"}, message, hint)


def test_hooks_are_read_and_a_file_without_them_has_none(tmp_path: Path, fleet_text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(fleet_text)
    assert load(path).hooks == Hooks()
    path.write_text(f'{fleet_text}\n[hooks]\nbefore_deploy = "./silence.sh 10m"\ntimeout_s = 5\n')
    assert load(path).hooks == Hooks({"before_deploy": "./silence.sh 10m"}, 5)
