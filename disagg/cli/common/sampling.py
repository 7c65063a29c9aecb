"""The options of a request that the commands which generate have in common, each stated once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from disagg.api.base import bounds
from disagg.api.requests import DEFAULT_DEADLINE_S, GenerateBody
from disagg.api.sampling import Sampling
from disagg.cli.common.options import sampling_option, within
from disagg.errors import ContextLengthExceeded, DisaggError, KVMemoryExceeded, RequestError

MaxTokens = Annotated[int, sampling_option("max_tokens")]
Temperature = Annotated[float, sampling_option("temperature", "X")]
TopP = Annotated[float, sampling_option("top_p", "X")]
TopK = Annotated[int, sampling_option("top_k")]
MinP = Annotated[float, sampling_option("min_p", "X")]
RepetitionPenalty = Annotated[float, sampling_option("repetition_penalty", "X")]
Seed = Annotated[int | None, sampling_option("seed")]
Stop = Annotated[list[str] | None, sampling_option("stop", "TEXT")]
Logprobs = Annotated[int | None, sampling_option("logprobs")]
_SECONDS = bounds(GenerateBody, "deadline_s")
Timeout = Annotated[
    float,
    typer.Option(
        metavar="S",
        help=f"Seconds until the answer must be complete. {_SECONDS.text.capitalize()}.",
        callback=within(_SECONDS),
    ),
]

_DEFAULTS = Sampling()
_Function = Callable[..., None]


def with_request_options(
    max_tokens: int = _DEFAULTS.max_tokens,
) -> Callable[[_Function], _Function]:
    """Give a command the options below in place of its parameter `options`, which gets their values by field.

    typer makes options of a function's signature. max_tokens: the default.
    """

    def decorate(command: _Function) -> _Function:
        shared = dict(inspect.signature(_request_options, eval_str=True).parameters)
        shared = {**shared, "max_tokens": shared["max_tokens"].replace(default=max_tokens)}
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += shared.values() if parameter.name == "options" else [parameter]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            own = {name: value for name, value in values.items() if name not in shared}
            command(**own, options=_request_options(**{name: values[name] for name in shared}))

        vars(run).update(
            __signature__=signature.replace(parameters=parameters),
            __annotations__={parameter.name: parameter.annotation for parameter in parameters},
        )
        return run

    return decorate


def _request_options(
    *,
    max_tokens: MaxTokens = _DEFAULTS.max_tokens,
    temperature: Temperature = _DEFAULTS.temperature,
    top_p: TopP = _DEFAULTS.top_p,
    top_k: TopK = _DEFAULTS.top_k,
    min_p: MinP = _DEFAULTS.min_p,
    repetition_penalty: RepetitionPenalty = _DEFAULTS.repetition_penalty,
    seed: Seed = _DEFAULTS.seed,
    stop: Stop = None,
    timeout: Timeout = DEFAULT_DEADLINE_S,
) -> dict[str, Any]:
    """The options as those of a client's request."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "timeout": timeout,
    }


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
