"""Fixtures that many tests share, and which tests are slow."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator

import pytest

from disagg.fleet.machine import process
from disagg.token import MEMORY_FOLDER_VARIABLE
from tests.fleets import KEPT_MODELS, RunningFleet, running, write_hosts, write_kept_hosts
from tests.testbed import bed as testbed

pytest_plugins = ("tests.offline", "tests.selection")


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell runs pytest in the background, which then ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def memory_of_its_own() -> Iterator[None]:
    """Tests that run at the same time do not count each other's memory."""
    with tempfile.TemporaryDirectory(prefix="disagg-tests-memory-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(MEMORY_FOLDER_VARIABLE, folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def spawned_processes_end() -> Iterator[None]:
    """What tests had `disagg` start from this process ends with it, and is waited for."""
    yield
    for child in process._children.values():
        child.kill()
        child.wait(10)


@pytest.fixture(scope="session")
def tiny_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """One prefill and one decode server of a tiny qwen3, called `tiny`; context 4096, small queues."""
    from tests import tiny_models  # torch and transformers: seconds that most tests do without

    folder = tmp_path_factory.mktemp("tiny-fleet")
    model = tiny_models.make("qwen3", folder / "model")
    path = write_hosts(folder, {"tiny": model}, context=4096, decode={"max_batch": 4}, queue_size=8)
    with running(path) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def kept_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Two hosts per role, with four tiny models each and room for two at a time. No model is loaded at first."""
    from tests import tiny_models

    folder = tmp_path_factory.mktemp("kept-fleet")
    path = write_kept_hosts(folder, {name: tiny_models.make(name, folder / name) for name in KEPT_MODELS})
    with running(path) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def whole_run_bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[testbed.Bed]:
    """Four hosts behind SSH, kept for the whole run."""
    with testbed.running(tmp_path_factory.mktemp("bed")) as bed:
        yield bed


@pytest.fixture(scope="module")
def machines(whole_run_bed: testbed.Bed) -> testbed.Bed:
    """Four hosts behind SSH, with nothing on them that another file's tests have left. Tests use them through `bed`."""
    whole_run_bed.empty()
    return whole_run_bed


@pytest.fixture
def bed(machines: testbed.Bed) -> Iterator[testbed.Bed]:
    """Four hosts behind SSH; this test, its HOME and what it starts are on their network."""
    with machines.entered():
        yield machines
