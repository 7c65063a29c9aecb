"""Which Output a request gets, by the model's format and what was asked for.

Plain: text. Marked: text with reasoning and calls between marks such as <think>. Harmony: the channels of gpt-oss.
Forced: an answer that is held to be a call of a tool. Enveloped: one that is held to be a call or a form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from disagg.api.requests import GenerateBody
from disagg.engines.model.format import AnswerFormat
from disagg.engines.model.text import PromptTokenizer, TextStream
from disagg.errors import CapabilityMissing, RequestError
from disagg.servers.output.forced import Enveloped, Forced
from disagg.servers.output.grammar import opening
from disagg.servers.output.harmony import Harmony
from disagg.servers.output.marked import Marked, Marks
from disagg.servers.output.part import Output, Plain

LAST_TOKENS = 16  # of a prompt; a mark that opens the answer's reasoning is among them


def output_of(body: GenerateBody, prompt: Sequence[int], tokenizer: PromptTokenizer) -> Output:
    """A new Output for the answer to this prompt. Only answers to chats have parts. Raises RequestError if tools are
    given and the model's calls cannot be read, CapabilityMissing if this host alone cannot read them. With a form, all
    models' calls can."""
    if body.messages is None:
        return Plain(_stream(body, tokenizer))
    form = tokenizer.format
    if body.must_call:
        return Forced(_output(body, prompt, tokenizer, calls=False))
    if body.tools and not form.harmony and form.tools is None:
        hint = "leave out tools, or name those that the answer must call, which works with every model"
        if form.parsers and body.form is not None:
            return Enveloped(_output(body, prompt, tokenizer, calls=False), [opening(tool) for tool in body.tools])
        if form.parsers:
            raise RequestError("tools: this model writes calls in a form that mlx-lm has no parser for", hint)
        raise CapabilityMissing("tool calls cannot be read on this host: mlx-lm is not installed", hint)
    return _output(body, prompt, tokenizer, calls=bool(body.tools))


def _output(body: GenerateBody, prompt: Sequence[int], tokenizer: PromptTokenizer, *, calls: bool) -> Output:
    form = tokenizer.format
    if form.harmony:
        stream = partial(_stream, body, tokenizer)
        return Harmony(stream, form.harmony, with_tools=calls, within=body.continue_final_message)
    if form.think is None and not calls:
        return Plain(_stream(body, tokenizer))
    tools = form.tools if calls else None
    opened = thinking(prompt, tokenizer, form)
    marks = Marks(form.think, tools, form.hidden)
    return Marked(_stream(body, tokenizer, marks=True), marks, body.tools, thinking=opened)


def _stream(body: GenerateBody, tokenizer: PromptTokenizer, pushed: int = 0, *, marks: bool = False) -> TextStream:
    """A stream for the answer after its first `pushed` tokens."""
    sampling = body.sampling
    after = max(0, sampling.min_tokens - pushed)
    return tokenizer.stream(sampling.stop, marks=marks, kept=sampling.include_stop_str_in_output, after=after)


def thinking(prompt: Sequence[int], tokenizer: PromptTokenizer, form: AnswerFormat) -> bool:
    """Whether the prompt ends with the mark that opens reasoning, as some templates do. What a user has written cannot:
    the template's own words follow it."""
    if form.think is None:
        return False
    stream = tokenizer.stream(marks=True)
    text = "".join(stream.push(token) for token in prompt[-LAST_TOKENS:]) + stream.finish()
    return text.rstrip().endswith(form.think[0])
