"""The options of a request that the commands which generate have in common, each stated once."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from disagg.api.base import bounds
from disagg.api.layout import MAX_LAYERS
from disagg.api.names import SplitWord
from disagg.api.requests import DEFAULT_DEADLINE_S, GenerateBody, Split
from disagg.api.sampling import Sampling
from disagg.cli.common.options import one_of, sampling_option, within
from disagg.errors import ContextLengthExceeded, DisaggError, KVMemoryExceeded, RequestError, UsageError

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
    split: Annotated[
        str,
        typer.Option(
            metavar="K",
            help="Layers of the prompt that a prefill host computes, while the decode host computes the others: "
            "auto, off or a number.",
        ),
    ] = "auto",
) -> dict[str, Any]:
    """The options as those of a client's request."""
    return {**locals(), "stop": tuple(stop or ()), "split": _split(split)}


def _split(text: str) -> Split:
    """A number of layers, or a word. UsageError if it is neither."""
    if text.isascii() and text.isdecimal() and int(text[:9]) <= MAX_LAYERS:
        return int(text)
    for word in get_args(SplitWord):
        if text == word:
            return word  # type: ignore[no-any-return]  # get_args does not say that it is one
    hint = f"{one_of(get_args(SplitWord))}, or a number of layers from 0 to {MAX_LAYERS}"
    raise UsageError(f"--split: there is no split {text!r}", hint)


def for_command_line(error: DisaggError) -> DisaggError:
    """The same error, naming the option instead of the field of the request: `--top-p: ...` for `top_p: ...`."""
    if isinstance(error, ContextLengthExceeded | KVMemoryExceeded):
        error.message, error.hint = (text.replace("max_tokens", "--max-tokens") for text in (error.message, error.hint))
        return error
    field = error.message.removeprefix("sampling.").partition(":")[0].partition("[")[0]
    if not isinstance(error, RequestError) or field not in {
        *Sampling.__struct_fields__,
        "timeout",
        "deadline_s",
        "split",
    }:
        return error
    option = "timeout" if field == "deadline_s" else field.replace("_", "-")
    return type(error)(f"--{option}:{error.message.partition(':')[2]}", error.hint)
