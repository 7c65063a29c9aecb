"""How tokens are chosen: the one place that states each parameter, its default and its bounds.

CLI help, the HTTP API's validation and the engines all take them from here.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from disagg.api.base import Contract

MAX_TOKENS = 1 << 20
LEAST_TEMPERATURE = 1e-4
"""Lower temperatures count as 0: at this one a token is drawn only if its logit lies within 0.003 of the highest."""

MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_TOP = 20  # likeliest alternatives of a token

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopToken = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Bias = tuple[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)], Annotated[float, Meta(ge=-100, le=100)]]


class Sampling(Contract, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling parameters of one request. The defaults are greedy, and left out, as in GenerateBody."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS, description="The longest answer, in tokens.")] = 256
    temperature: Annotated[float, Meta(ge=0, le=10, description="Under 0.0001 always takes the likeliest token.")] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Sample from this share of the probability.")] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20, description="Sample from this many tokens; 0: all.")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="Least probability, relative to the likeliest token.")] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10, description="Over 1 makes repeats less likely.")] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2, description="Taken from logits of tokens in the answer.")] = (
        0.0
    )
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2, description="The same, times their number there.")] = 0.0
    logit_bias: Annotated[
        tuple[Bias, ...], Meta(max_length=MAX_BIASES, description="(token id, -100 to 100 to add to its logit).")
    ] = ()
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1, description="Makes sampling repeatable.")] | None = None
    stop: Annotated[
        tuple[StopString, ...], Meta(max_length=16, description="End the answer before any of these texts.")
    ] = ()
    stop_token_ids: Annotated[
        tuple[StopToken, ...], Meta(max_length=MAX_STOP_TOKENS, description="End the answer with any of these tokens.")
    ] = ()
    include_stop_str_in_output: Annotated[bool, Meta(description="The text has what ended it.")] = False
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description="Nothing ends the answer before so many.")] = 0
    bad_words: Annotated[
        tuple[StopString, ...], Meta(max_length=MAX_BAD_WORDS, description="Never write the tokens of these texts.")
    ] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP, description="Likeliest alternatives to report.")] | None = None
    fit_context: Annotated[bool, Meta(description="Lower max_tokens to what the context leaves.")] = False
    ignore_eos: Annotated[bool, Meta(description="Go on to max_tokens (benchmarks).")] = False

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one; else tokens are drawn."""
        return self.temperature < LEAST_TEMPERATURE
