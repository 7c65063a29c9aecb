from __future__ import annotations

import pytest

from tests.fake import run_nothing


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks count as handed in and not run: what is tested comes after their execution."""
    monkeypatch.setattr("grader.sandbox.execute", run_nothing)
