"""The table of clients: what a program reports, and what becomes of one that does not end."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from benchmarks.clients import environments, measure
from benchmarks.clients.measure import Feature, Measured, measured
from benchmarks.clients.page import page
from benchmarks.clients.table import CLIENTS, MeasuredClient

PROGRAM = """
from checks import MODEL, URL, need, refused, run
import os, time
def works(): need((URL, MODEL) == ("http://here", "m"), "other settings")
def fails():
    try: raise ValueError("Error code: 400 - x: not supported")
    except ValueError: raise RuntimeError("wrapped | <b>")
def closed(): need(refused(lambda: 1 / 0, "ZeroDivision"), "x")
def proxied(): need(os.environ["HTTPS_PROXY"] == "http://127.0.0.1:9" and "HOME" in os.environ, "it may leave")
def late(): time.sleep(60)
run(works=works, fails=fails, closed=closed, proxied=proxied, late=late)
"""


def test_every_client_has_a_name_and_a_program() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    assert [client.name for client in CLIENTS if not (measure.PROGRAMS / client.file).is_file()] == []


@pytest.mark.slow
def test_a_program_that_does_not_end_has_reported_what_it_had_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "a_client.py").write_text(PROGRAM)
    (programs / "checks.py").write_text((measure.PROGRAMS / "checks.py").read_text())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".ready").touch()
    monkeypatch.setattr(measure, "PROGRAMS", programs)
    found = measured(MeasuredClient("a", "pytest", limit_s=4.0), tmp_path, "http://here", "m")
    assert (found.version, found.problem) == (
        importlib.metadata.version("pytest"),
        "not all features were tried within 4 s",
    )
    assert found.features == (
        Feature("works", True),
        Feature("fails", False, "ValueError: Error code: 400 - x: not supported"),
        Feature("closed", True),
        Feature("proxied", True),
    )


def test_what_cannot_be_installed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_pip", lambda *_: ["bash", "-c", "echo 'ERROR: no such | package' >&2; exit 1"])
    found = measured(MeasuredClient("b", "b"), tmp_path, "", "")
    assert found.problem == "not installed: ERROR: no such | package"
    rows = page(
        [found, Measured(name="c", version="1.0", features=(Feature("json_schema", True), Feature("n", False, "<x>")))]
    )
    assert rows.splitlines()[-2:] == [
        "| b |  |  | not installed: ERROR: no such \\| package |",
        "| c | 1.0 | json schema | **n**: &lt;x> |",
    ]


def test_the_page_keeps_its_sections_after_the_table() -> None:
    again = page([], page([]) + "\n## More\n\ntext\n\n## And more\n")
    assert again == page([]) + "\n## More\n\ntext\n\n## And more\n"
