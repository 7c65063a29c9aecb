"""The options of sampling that commands which generate have in common, each stated once."""

from __future__ import annotations

from typing import Annotated

from disagg.api.sampling import Sampling
from disagg.cli.common.options import sampling_option
from disagg.errors import DisaggError, RequestError

MaxTokens = Annotated[int, sampling_option("max_tokens")]
Temperature = Annotated[float, sampling_option("temperature", "X")]
TopP = Annotated[float, sampling_option("top_p", "X")]
TopK = Annotated[int, sampling_option("top_k")]
MinP = Annotated[float, sampling_option("min_p", "X")]
RepetitionPenalty = Annotated[float, sampling_option("repetition_penalty", "X")]
Seed = Annotated[int | None, sampling_option("seed")]
Stop = Annotated[list[str] | None, sampling_option("stop", "TEXT")]
Logprobs = Annotated[int | None, sampling_option("logprobs")]


def for_command_line(error: DisaggError) -> DisaggError:
    """The same error, naming the option instead of the field of the request: `--top-p: ...` for `top_p: ...`."""
    field = error.message.removeprefix("sampling.").partition(":")[0].partition("[")[0]
    if not isinstance(error, RequestError) or field not in {*Sampling.__struct_fields__, "timeout", "deadline_s"}:
        return error
    option = "timeout" if field == "deadline_s" else field.replace("_", "-")
    return type(error)(f"--{option}:{error.message.partition(':')[2]}", error.hint)
