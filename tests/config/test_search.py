"""Which hosts.toml is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config.hosts_file import CONFIG_VARIABLE, find_hosts_file
from disagg.errors import ConfigError


def test_a_path_of_the_environment_that_is_relative_to_another_folder_is_the_stated_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, "demo/hosts.toml")
    with pytest.raises(ConfigError, match=r"no demo/hosts.toml here, which \$DISAGG_CONFIG names") as caught:
        find_hosts_file()
    assert caught.value.hint == "write its whole path there"
    with pytest.raises(ConfigError, match=r"there is no other.toml"):
        find_hosts_file(Path("other.toml"))
