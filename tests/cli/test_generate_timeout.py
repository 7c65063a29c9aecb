"""`disagg generate --timeout` with values that no request may have, with the real client and no fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import RequestError
from disagg.token import TOKEN_FILE_VARIABLE
from tests.cli.commandline import run, write_fleet


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "86401"])
@pytest.mark.parametrize("models", [("tiny",), ("tiny", "other")])
def test_a_timeout_that_no_request_may_have_is_an_error_with_its_range(
    value: str,
    models: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, token = write_fleet(tmp_path, ("tiny", "other")), tmp_path / "token"
    token.write_text("test-token-of-sixteen-or-more")
    token.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    chosen = [word for model in models for word in ("-m", model)]
    assert run("--config", path, "generate", *chosen, f"--timeout={value}", "hi") == RequestError.exit_code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.count("error: --timeout: ") == err.count("at most 86,400") == len(models)
