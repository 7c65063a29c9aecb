"""`disagg bench handoff` on this machine; between hosts it runs in tests/integration."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from disagg.api.handoff import HandoffFigures, HandoffSpec
from disagg.fleet.link import handoff
from tests.cli.commandline import run
from tests.fleets import preloaded_command

measured: dict[HandoffSpec, HandoffFigures] = {}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with both frameworks, forks of one that has imported them, measure the same hand-off once."""
    really, here = handoff.measure_handoff, handoff.on_this_machine
    argv, environment = preloaded_command()

    def measure(sender: handoff.EndPlace, receiver: handoff.EndPlace, spec: HandoffSpec, s: float) -> HandoffFigures:
        if spec not in measured:
            measured[spec] = really(sender, receiver, spec, s)
        return measured[spec]

    def forked(name: str) -> handoff.EndPlace:
        return replace(here(name), argv=tuple(argv), environment=environment)

    monkeypatch.setattr(handoff, "measure_handoff", measure)
    monkeypatch.setattr(handoff, "on_this_machine", forked)


SMALL = ("bench", "handoff", "--shape", "llama-3.1-8b", "--tokens", 64, "--rounds", 1)


def test_json_has_the_rates_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert {"handoff_gb_s", "raw_socket_gb_s", "base64_json_gb_s", "ratio_to_raw"} <= set(body)
    assert body["bytes"] == 64 * 131072
    assert (body["from"], body["to"], body["shape"]) == ("this machine", "this machine", "llama-3.1-8b")


def test_the_table_fits_80_columns_and_says_that_no_model_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "No model ran" in out and "hand-off / bare socket" in out


def test_an_error_of_an_end_is_reported_with_the_ends_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--device", "nonsense") == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "this machine (prefill" in err and "nonsense" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "dgx-spark-1"), "go together"),
        (("--shape", "nonsense"), "unknown model shape 'nonsense'"),
        (("--from", "nobody", "--to", "nobody"), "nobody"),
    ],
)
def test_a_mistake_is_reported_before_anything_runs(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "handoff", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_path_that_is_not_there_is_called_a_file_and_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "handoff", "--shape", "/no/such/config.json") == 3
    assert "/no/such/config.json: cannot be read" in capsys.readouterr().err
