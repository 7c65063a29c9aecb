from __future__ import annotations

import pytest

from tests import selection
from tests.deadlines import ends_by_itself


def test_every_path_named_here_exists() -> None:
    paths = {*selection.SLOW_PATHS, *selection.LONGEST}
    assert [path for path in paths if not (selection._TESTS / path).exists()] == []
    assert [path for path in selection.LONGEST if not (selection._TESTS / path).is_file()] == []


def test_the_longest_files_run_first() -> None:
    files = ["kv/test_frames.py", "fleet/deploy/test_apply.py", "integration/test_deployed_fleet.py"]
    ordered = sorted((selection._TESTS / file for file in files), key=selection._place)
    assert [path.name for path in ordered] == ["test_deployed_fleet.py", "test_apply.py", "test_frames.py"]


def test_files_of_slow_folders_and_slow_files_are_slow() -> None:
    assert selection._is_slow_path(selection._TESTS / "integration/test_any.py")
    assert selection._is_slow_path(selection._TESTS / "fleet/lifecycle/status/test_any.py")
    assert selection._is_slow_path(selection._TESTS / "cli/test_demo.py")
    assert not selection._is_slow_path(selection._TESTS / "kv/test_frames.py")


def test_a_test_without_servers_hosts_or_engines_is_not_slow(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None


def test_fast_files_import_no_framework(request: pytest.FixtureRequest) -> None:
    """Each process of a run would spend seconds on it: such files belong to SLOW_PATHS."""
    fast_only = request.config.getoption("markexpr") == selection.FAST
    assert not fast_only or selection.importers == {}


def test_a_block_that_takes_as_long_as_what_it_must_not_wait_for_fails() -> None:
    with pytest.raises(AssertionError, match="took 0 s or more"), ends_by_itself(0):
        pass
