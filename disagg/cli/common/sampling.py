"""The options of sampling that commands which generate have in common, each stated once."""

from __future__ import annotations

from typing import Annotated

from disagg.cli.common.options import sampling_option

MaxTokens = Annotated[int, sampling_option("max_tokens")]
Temperature = Annotated[float, sampling_option("temperature", "X")]
TopP = Annotated[float, sampling_option("top_p", "X")]
TopK = Annotated[int, sampling_option("top_k")]
MinP = Annotated[float, sampling_option("min_p", "X")]
RepetitionPenalty = Annotated[float, sampling_option("repetition_penalty", "X")]
Seed = Annotated[int | None, sampling_option("seed")]
Stop = Annotated[list[str] | None, sampling_option("stop", "TEXT")]
Logprobs = Annotated[int | None, sampling_option("logprobs")]
