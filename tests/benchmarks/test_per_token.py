"""benchmarks/per_token.py: what it computes of its rounds, and one short round."""

from __future__ import annotations

import pytest

from benchmarks import per_token


def _run(client: float) -> dict[str, float]:
    return {"client": client, "loop": 20.0, "engine": 3.0, "rest": 5.0, "tokens": 100, "chunk": 1.0, "ms": 4.0}


def test_rows_have_medians_and_a_total_without_the_rest() -> None:
    runs = {("here", "simulated", 1): [_run(10.0), _run(30.0), _run(20.0)], ("against", "simulated", 1): [_run(1.0)]}
    against, here = per_token.summary(runs)
    assert (against["checkout"], here["checkout"]) == ("against", "here")
    assert here["client"] == {"median": 20.0, "low": 10.0, "high": 30.0}
    assert here["total"]["median"] == 43.0
    assert "20 [10, 30]" in [*per_token.table([here], "").columns[3].cells]


@pytest.mark.slow
def test_a_round_measures_client_and_server() -> None:
    runs = per_token.measure({"here": per_token.HERE}, ["simulated"], [2], rounds=1, tokens=60)
    ((measured,),) = runs.values()
    assert 20 <= measured["tokens"] <= 2 * 60
    assert all(measured[part] > 0 for part in ("client", "loop", "engine"))
    assert measured["ms"] > 3.5
