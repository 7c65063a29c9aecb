"""plan, deploy, rollback, uninstall from the command line, where no machine is needed."""

import pytest
from commandline import run, write_fleet


@pytest.mark.parametrize("command", [("plan",), ("deploy",), ("rollback",), ("uninstall", "--yes")])
def test_a_fleet_of_local_hosts_has_nothing_to_deploy(tmp_path, capsys, command) -> None:
    path = write_fleet(tmp_path)
    assert run("--config", path, *command) == 2
    said = capsys.readouterr().err
    assert 'prefill-1, decode-1: connector is "local"' in said
    assert "disagg start" in said


def test_a_host_that_is_not_in_the_file_is_a_usage_error(tmp_path, capsys) -> None:
    path = write_fleet(tmp_path, connector="ssh")
    assert run("--config", path, "deploy", "--host", "nobody") == 2
    assert "has no host nobody" in capsys.readouterr().err


def test_uninstall_does_not_go_on_unasked(tmp_path, capsys) -> None:
    path = write_fleet(tmp_path, connector="ssh")
    for arguments in (("uninstall",), ("uninstall", "--json")):
        assert run("--config", path, *arguments) == 2
        assert "--yes" in capsys.readouterr().err


def test_a_dry_run_makes_no_token_here(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_fleet(tmp_path, connector="ssh")
    assert run("--config", path, "plan", "--host", "prefill-1") == 4
    assert "cannot be deployed" in capsys.readouterr().out
    assert not (tmp_path / "state").exists()
