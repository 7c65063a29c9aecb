"""What follows from a host's connector."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from disagg.config import EngineOptions, Host
from disagg.config.schema import SERVER_KINDS, Connector, ServerKind

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("connector", "engine", "role", "kind"),
    [
        ("ssh", "mlx", "decode", ServerKind(ssh=True, deployed=True, spawned=False)),
        ("local", "mlx", "decode", ServerKind(ssh=False, deployed=False, spawned=True)),
        ("ssh", "openai", "whole", ServerKind(ssh=False, deployed=False, spawned=False)),
    ],
)
def test_a_host_is_deployed_to_over_ssh_or_spawned_here_or_only_asked(
    connector: Connector, engine: str, role: str, kind: ServerKind
) -> None:
    host = Host("h", "10.0.0.1", (role,), "m", EngineOptions(engine), 8000, connector=connector)  # type: ignore[arg-type]  # of parameters
    assert host.server_kind == kind


def test_every_connector_has_a_placement() -> None:
    assert set(SERVER_KINDS) == set(get_args(Connector))


def test_no_other_code_compares_connectors() -> None:
    code = {path: path.read_text() for path in (ROOT / "disagg").rglob("*.py")}
    assert [path for path, text in code.items() if "connector ==" in text or "connector !=" in text] == []
