"""What follows from a host's connector."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from disagg.config import EngineOptions, Host
from disagg.config.placement import PLACEMENTS, Connector, ServerPlacement

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("connector", "engine", "role", "placement"),
    [
        ("ssh", "mlx", "decode", ServerPlacement(ssh=True, deployed=True, spawned=False)),
        ("local", "mlx", "decode", ServerPlacement(ssh=False, deployed=False, spawned=True)),
        ("ssh", "openai", "whole", ServerPlacement(ssh=False, deployed=False, spawned=False)),
    ],
)
def test_a_host_is_deployed_to_over_ssh_or_spawned_here_or_only_asked(
    connector: Connector, engine: str, role: str, placement: ServerPlacement
) -> None:
    host = Host("h", "10.0.0.1", (role,), "m", EngineOptions(engine), 8000, connector=connector)  # type: ignore[arg-type]  # of parameters
    assert host.placement == placement


def test_every_connector_has_a_placement() -> None:
    assert set(PLACEMENTS) == set(get_args(Connector))


def test_no_other_code_compares_connectors() -> None:
    code = {path: path.read_text() for path in (ROOT / "disagg").rglob("*.py")}
    assert [path for path, text in code.items() if "connector ==" in text or "connector !=" in text] == []
