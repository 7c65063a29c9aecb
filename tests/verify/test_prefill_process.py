"""The prefill engine's process, with a program in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from disagg.api.events import TokenLogprob
from disagg.api.verify import PrefillCall, PrefillReady, PrefillReply
from disagg.errors import DisaggError, ModelError, ProtocolError
from disagg.verify.prefill import PrefillProcess, PrefillSpec
from tests.programs import python_program

READY = PrefillReady(backend="fake/cpu", context=8).to_bytes().decode()
ANSWER = [TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.0))), TokenLogprob(8, -0.25)]
TOKENS = PrefillReply(tokens=tuple(ANSWER)).to_bytes().decode()
REFUSED = PrefillReply(error={"code": "ModelError", "message": "too small", "hint": "use more"}).to_bytes().decode()


def spec(folder: Path, *lines: str) -> PrefillSpec:
    """A prefill engine that writes these lines, each but the first once it has read a call; then it exits with 4."""
    program = folder / "python"
    code = (
        "import sys\n"
        f"for number, line in enumerate({lines!r}):\n"
        f"    call = sys.stdin.readline() if number else ''\n"
        f"    open({str(folder / 'calls')!r}, 'a').write(call)\n"
        f"    print(line, flush=True)\n"
        "sys.exit(4)\n"
    )
    python_program(program, code)
    return PrefillSpec("vllm", "folder", 8, "float32", python=str(program))


def test_a_call_is_a_line_and_its_reply_another(tmp_path: Path) -> None:
    with PrefillProcess(spec(tmp_path, READY, TOKENS)) as process:
        assert process.ready() == PrefillReady(backend="fake/cpu", context=8)
        assert process.answer([1, 2, 3], 2) == ANSWER
    assert PrefillCall.from_bytes((tmp_path / "calls").read_bytes()) == PrefillCall(
        call="answer", tokens=(1, 2, 3), count=2
    )


def test_an_error_of_a_call_is_raised_with_its_type_and_the_process_serves_on(tmp_path: Path) -> None:
    with PrefillProcess(spec(tmp_path, READY, REFUSED, TOKENS)) as process:
        process.ready()
        with pytest.raises(ModelError, match="too small") as raised:
            process.answer([1], 2)
        assert raised.value.hint == "use more"
        assert process.answer([1], 2) == ANSWER


def test_a_model_that_cannot_be_loaded_is_the_engines_own_error(tmp_path: Path) -> None:
    error = ModelError("no weights", "download them").to_json()
    with (
        PrefillProcess(spec(tmp_path, PrefillReady(error=error).to_bytes().decode())) as process,
        pytest.raises(ModelError, match="no weights"),
    ):
        process.ready()


def test_a_process_that_ends_is_an_error_with_its_exit_code(tmp_path: Path) -> None:
    with PrefillProcess(spec(tmp_path, READY)) as process:
        process.ready()
        with pytest.raises(ModelError, match="ended with code 4"):
            process.answer([1], 2)


def test_a_line_of_something_else_is_refused(tmp_path: Path) -> None:
    with PrefillProcess(spec(tmp_path, "Loading shards: 100 %")) as process, pytest.raises(ProtocolError):
        process.ready()


def test_an_interpreter_that_is_not_there_is_an_error_with_the_option_to_set(tmp_path: Path) -> None:
    with pytest.raises(DisaggError, match="cannot run") as raised:
        PrefillProcess(PrefillSpec("vllm", "folder", 8, "float32", python=str(tmp_path / "nope")))
    assert "--prefill-python" in raised.value.hint


def test_the_process_is_ended_after_an_error_though_it_computes(tmp_path: Path) -> None:
    program = tmp_path / "python"
    python_program(program, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    sleeping = PrefillSpec("vllm", "folder", 8, "float32", python=str(program))
    with pytest.raises(ProtocolError), PrefillProcess(sleeping) as process:
        pid = process._process.pid
        process.ready()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("quantization", "tail"), [(None, []), ("int8", ["--quantization", "int8"])], ids=["plain", "quantized"]
)
def test_the_command_names_engine_model_and_dtype(quantization: str | None, tail: list[str]) -> None:
    argv = PrefillSpec("transformers", "model", 8, "float16", quantization=quantization).argv
    options = ["--engine", "transformers", "--context", "8", "--dtype", "float16", "--device", "auto"]
    assert argv == [sys.executable, "-P", "-m", "disagg.verify.prefill", "model", *options, *tail]
