"""The options of a request that the commands which generate have in common, each stated once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from disagg.api.base import bounds
from disagg.api.requests import DEFAULT_DEADLINE_S, GenerateBody
from disagg.api.sampling import Sampling
from disagg.cli.common.options import sampling_option, within
from disagg.errors import ContextLengthExceeded, DisaggError, KVMemoryExceeded, RequestError

Logprobs = Annotated[int | None, sampling_option("logprobs")]
_SECONDS = bounds(GenerateBody, "deadline_s")
_DEFAULTS = Sampling()


def request_options(
    *,
    max_tokens: Annotated[int, sampling_option("max_tokens")] = _DEFAULTS.max_tokens,
    temperature: Annotated[float, sampling_option("temperature", "X")] = _DEFAULTS.temperature,
    top_p: Annotated[float, sampling_option("top_p", "X")] = _DEFAULTS.top_p,
    top_k: Annotated[int, sampling_option("top_k")] = _DEFAULTS.top_k,
    min_p: Annotated[float, sampling_option("min_p", "X")] = _DEFAULTS.min_p,
    repetition_penalty: Annotated[float, sampling_option("repetition_penalty", "X")] = _DEFAULTS.repetition_penalty,
    seed: Annotated[int | None, sampling_option("seed")] = _DEFAULTS.seed,
    stop: Annotated[list[str] | None, sampling_option("stop", "TEXT")] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="S",
            help=f"Seconds until the answer must be complete. {_SECONDS.text.capitalize()}.",
            callback=within(_SECONDS),
        ),
    ] = DEFAULT_DEADLINE_S,
) -> dict[str, Any]:
    """The options as those of a client's request."""
    return {**locals(), "stop": tuple(stop or ())}


def for_command_line(error: DisaggError) -> DisaggError:
    """The same error, naming the option instead of the field of the request: `--top-p: ...` for `top_p: ...`."""
    if isinstance(error, ContextLengthExceeded | KVMemoryExceeded):
        error.message, error.hint = (text.replace("max_tokens", "--max-tokens") for text in (error.message, error.hint))
        return error
    field = error.message.removeprefix("sampling.").partition(":")[0].partition("[")[0]
    if not isinstance(error, RequestError) or field not in {*Sampling.__struct_fields__, "timeout", "deadline_s"}:
        return error
    option = "timeout" if field == "deadline_s" else field.replace("_", "-")
    return type(error)(f"--{option}:{error.message.partition(':')[2]}", error.hint)
