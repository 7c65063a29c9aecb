"""`grade` in a terminal: a bar per layer, and one for the notebooks. Without a kernel and with a made-up gateway."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from grader import cli, rubric
from grader.pipeline import LAYERS
from grader.store import Store
from tests.fake import FakeGateway

ROOT = Path(__file__).parents[1]
SAMPLE = rubric.load(ROOT / "assignments" / "sample")
EMPTY = (ROOT / "samples" / "empty.ipynb").read_bytes()
pytestmark = pytest.mark.usefixtures("no_kernel", "gateway")


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up one, and a terminal that is wide enough for each bar to be one line."""
    monkeypatch.setattr(cli, "Gateway", lambda url, key: FakeGateway())
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "grader.db")
    for name, data in (("one", EMPTY), ("two", EMPTY), ("three", b"{")):
        store.add("b", SAMPLE.name, name, data)
    yield store
    store.close()


def bars(printed: str) -> dict[str, str]:
    """How far each bar has come."""
    return dict(re.findall(r"^ *(\w+) \S.*? (\d+/\d+) ", printed, re.MULTILINE))


def far(notebooks: str, layers: str) -> dict[str, str]:
    return {"notebooks": notebooks} | dict.fromkeys([str(layer) for layer in LAYERS], layers)


async def test_a_bar_counts_the_notebooks_that_have_passed_its_layer(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cli.run(store, SAMPLE, "b", "http://127.0.0.1:9/v1") == 1
    printed = capsys.readouterr().err
    assert bars(printed) == far("3/3", "2/3")
    assert "qwen on p and d" in next(line for line in printed.splitlines() if " code " in line)
    assert "three: " in printed.splitlines()[-1] and "not JSON" in printed


async def test_the_bars_of_a_batch_that_goes_on_begin_with_what_was_graded(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    await cli.run(store, SAMPLE, "b", "http://127.0.0.1:9/v1")
    capsys.readouterr()
    store.add("b", SAMPLE.name, "four", EMPTY)
    store.requeue("b", ("running", "failed"))
    assert await cli.run(store, SAMPLE, "b", "http://127.0.0.1:9/v1") == 1
    assert bars(capsys.readouterr().err) == far("4/4", "3/4")


@pytest.mark.parametrize("columns", [60, 80])
def test_on_a_narrow_terminal_names_and_counts_are_whole_and_the_detail_is_cut(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=False)
    with console.capture() as captured, cli.layer_bars(console) as shown:
        for layer in LAYERS:
            shown.add_task(layer, total=200, completed=7, detail="x" * 100)
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines if line] == list(LAYERS)
    assert all(" 7/200 " in line and len(line) <= columns for line in lines if line)
