"""Each kind of work that a request makes a host do keeps to its row of the table in `work`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from disagg.api.base import InvalidValue
from disagg.api.requests import MAX_MESSAGES, MAX_SCHEMA_BYTES, MAX_TOOLS, GenerateBody, PromptBody, Tool, body_limit
from disagg.api.sampling import MAX_BAD_WORDS, MAX_BIASES, Sampling
from disagg.engines.base import Token
from disagg.engines.model.bans import Bans
from disagg.engines.model.format import HarmonyMark, ToolFormat
from disagg.engines.model.stream import StopStrings
from disagg.engines.model.text import HFTokenizer, check_ids
from disagg.errors import ContextLengthExceeded, DisaggError, RequestError
from disagg.http.requests import body_bounds
from disagg.servers.output import tool_calls
from disagg.servers.output.answer import RESUMED_AT_ONCE, GrowingAnswer, _logprob
from disagg.servers.output.grammar import grammar_of
from disagg.servers.output.harmony import Harmony
from disagg.servers.output.marked import Marked, Marks
from disagg.servers.output.part import Output
from tests import tiny_models
from tests.engines.model import test_matchers
from tests.hostile import schemas, texts
from tests.hostile.work import CONTEXT, WORK, Work
from tests.servers.output.texts import Texts

SLOWER = 4.0
"""A machine that runs other tests beside may be so much slower than the table says."""
ARENAS_MIB = 4.0
"""Memory that an allocator takes from the system at a time, whatever the work is."""
SIZE = body_limit(CONTEXT)
THINK = ("<think>", "</think>")
TOOLS = [Tool("f", "", {"type": "object", "properties": {"a": {"type": "object"}}})]
PARSERS = tuple(
    path.stem
    for path in Path(importlib.import_module("mlx_lm.tool_parsers").__path__[0]).glob("*.py")
    if path.stem != "__init__"
)


class Cost(NamedTuple):
    seconds: float
    mib: float


@contextmanager
def cost() -> Iterator[list[Cost]]:
    """What the block takes, of this thread's CPU and, as another thread sees it, of memory."""
    process, done, found = psutil.Process(), threading.Event(), list[Cost]()
    before = peak = process.memory_info().rss

    def look() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    looking = threading.Thread(target=look)
    looking.start()
    began = time.thread_time()
    try:
        yield found
    finally:
        seconds = time.thread_time() - began
        done.set()
        looking.join()
        found.append(Cost(seconds, (peak - before) / (1 << 20)))


def json_bodies() -> Iterator[tuple[str, Callable[[], object]]]:
    marks = body_bounds(CONTEXT).marks
    depth = '{"model": "m", "prompt": "x", "chat_template_kwargs": {"a": %s}}'
    many = '{"model": "m", "messages": [%s]}'
    for name, text in {
        "lists, 10,000 deep": depth % ("[" * 10_000 + "]" * 10_000),
        "objects, 10,000 deep": depth % ('{"a":' * 10_000 + "1" + "}" * 10_000),
        "empty lists": depth % f"[{','.join(['[]'] * (marks - 10))}]",
        "members": depth % "{%s}" % ",".join(f'"{n}":1' for n in range(marks - 10)),
        "numbers": '{"model": "m", "tokens": [' + "1," * (SIZE // 2 - 100) + "1]}",
        "messages": many % ",".join(['{"role":"user"}'] * 40_000),
        "a text": json.dumps({"model": "m", "prompt": "x" * SIZE})[-SIZE:],
    }.items():
        yield name, partial(_try, partial(PromptBody.from_bytes, text.encode()))


def _try(work: Callable[[], object]) -> None:
    with suppress(InvalidValue, DisaggError):
        work()


@cache
def byte_level() -> Tokenizer:
    one = Tokenizer(models.BPE())
    one.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(
        Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"
    )
    one.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return _trained(one, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **_training()))


@cache
def byte_fallback() -> Tokenizer:
    """As sentencepiece's BPE: the whole text is one word."""
    one = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    one.pre_tokenizer = pre_tokenizers.Metaspace()
    _trained(one, trainers.BpeTrainer(**_training(*[f"<0x{byte:02X}>" for byte in range(256)])))
    one.pre_tokenizer = None
    one.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return one


@cache
def unigram() -> Tokenizer:
    one = Tokenizer(models.Unigram())
    one.normalizer = normalizers.NFKC()
    one.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return _trained(one, trainers.UnigramTrainer(unk_token="<unk>", **_training()))


TOKENIZERS = {"byte-level BPE": byte_level, "BPE with byte fallback": byte_fallback, "Unigram": unigram}


def _training(*more: str) -> dict[str, Any]:
    special = ["<unk>", *tiny_models.SPECIALS, *more]
    return {"vocab_size": 1500, "special_tokens": special, "show_progress": False}


def _trained(one: Tokenizer, trainer: Any) -> Tokenizer:
    one.train_from_iterator([Path(inspect.getfile(pytest)).read_text(), texts.KINDS["prose"](10_000)], trainer)
    return one


@cache
def tokenizer(name: str = "byte-level BPE", template: str = tiny_models.CHAT_TEMPLATE) -> HFTokenizer:
    fast = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name](), eos_token="</s>", chat_template=template)
    return HFTokenizer(fast, frozenset({0}), 2000)


def tokenising() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in TOKENIZERS:
        one = tokenizer(name)
        one.encode("warm")
        for kind, text in texts.hostile(SIZE):
            yield f"{kind}, {name}", partial(_try, partial(one.encode, text, limit=CONTEXT))


TEMPLATE = (
    "{%- set ns = namespace(last='') -%}{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}"
    "{{ given | tojson }}"
    "{%- for message in messages[::-1] %}{% if message.role == 'user' %}{% set ns.last = message.content %}{% endif %}"
    "{% endfor -%}{%- for message in messages %}{{ message.content.split('</think>')[-1].strip() }}"
    "{{ message.role }}{% endfor -%}"
)
"""What templates do: tools as JSON, a look back for the last question, the end of earlier reasoning."""


def templates() -> Iterator[tuple[str, Callable[[], object]]]:
    one = tokenizer(template=TEMPLATE)
    message = {"role": "user", "content": "hi"}
    deep = json.loads("[" * 900 + "]" * 900)
    wide = {f"p{n}": {"type": "string"} for n in range(40_000)}
    tools = [Tool("f", "", wide).for_template(), *[Tool("f", "").for_template()] * (MAX_TOOLS - 1)]
    asked: Mapping[str, tuple[list[dict[str, str]], dict[str, Any]]] = {
        "most messages": ([{"role": "user", "content": "x" * 200}] * MAX_MESSAGES, {}),
        "marks in a message": ([{"role": "user", "content": "</think>" * (SIZE // 8)}], {}),
        "tools": ([message], {"tools": tools}),
        "a deep variable": ([message], {"given": deep}),
        "a wide variable": ([message], {"given": wide}),
    }
    for name, (messages, variables) in asked.items():
        yield name, partial(_try, partial(one._rendered, messages, variables))


class Pieces:
    """A TextStream of tokens that all have this text."""

    stopped = ""

    def __init__(self, text: str) -> None:
        self._text = text

    def push(self, _: int) -> str:
        return self._text

    def finish(self) -> str:
        return ""


def _streams(text: str) -> Callable[[int], Pieces]:
    return lambda _: Pieces(text)


def parser(name: str) -> ToolFormat:
    one: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(one.tool_call_start, one.tool_call_end, one.parse_tool_call)


def parts() -> Iterator[tuple[str, Callable[[], object]]]:
    """Answers of a whole context, token by token."""
    form = ToolFormat("<tool_call>", "</tool_call>", lambda text, _: json.loads(text))
    for piece in ("</tool_cal", " " * 16, "<tool_call>", "x" * 120):
        for state in ("text", "call"):
            one = Marked(Pieces(piece), Marks(THINK, form), TOOLS)
            if state == "call":
                one._state = "call"
            yield f"{piece[:12]!r} in {state}", partial(_all_of, one)
        marks: Mapping[HarmonyMark, int] = {
            "start": 1,
            "channel": 2,
            "message": 3,
            "end": 4,
            "constrain": 5,
            "call": 6,
            "return": 7,
        }
        harmony = Harmony(_streams(piece), marks, with_tools=True)
        yield f"{piece[:12]!r} in a header", partial(_all_of, harmony)
        called = Harmony(_streams(piece), marks, with_tools=True)
        called._state, called._kind, called._tool = "message", "call", "f"
        yield f"{piece[:12]!r} in arguments", partial(_all_of, called)


def _all_of(output: Output) -> None:
    for _ in range(CONTEXT):
        output.push(0)


def calls_of_tools() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in PARSERS:
        form = parser(name)
        for kind, make in texts.CALLS.items():
            text = make(tool_calls.MAX_CALL_CHARS)
            yield f"{kind}, {name}", partial(tool_calls.parsed, text, form, TOOLS)


def stop_strings() -> Iterator[tuple[str, Callable[[], object]]]:
    almost = [letter * 255 + "!" for letter in "abcdefghijklmnop"]
    for name, stops, piece in (
        ("nearly reached", ["a" * 255 + mark for mark in "bcdefghijklmnopq"], "a" * 16),
        ("never reached", ["a" * (240 + n) + "b" for n in range(16)], "a" * 200 + "c"),
        ("of other letters", almost, "word "),
    ):

        def push(stops: list[str] = stops, piece: str = piece) -> None:
            one = StopStrings(stops)
            for _ in range(CONTEXT):
                one.push(piece)

        yield name, push


def checked_schemas() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, schema in (*schemas.POISONS.items(), *schemas.grown()):
        if len(schemas.text(schema)) <= schemas.MAX_BYTES:
            yield name, partial(_try, partial(_read, schema))


def texts_of_forms() -> Iterator[tuple[str, Callable[[], object]]]:
    for letter in ("/", "\\", "\n", "é"):
        text = letter * ((MAX_SCHEMA_BYTES - 2) // len(json.dumps(letter, ensure_ascii=False).encode()[1:-1]))
        for field in ("regex", "grammar"):
            body = GenerateBody.from_json({"model": "m", "prompt": "x", field: text})
            yield f"{field} of {letter!r}", partial(grammar_of, body, tokenizer().format)


def bad_words() -> Iterator[tuple[str, Callable[[], object]]]:
    for name in TOKENIZERS:
        one = tokenizer(name)
        for kind, text in texts.hostile(256 * MAX_BAD_WORDS):
            words = [text[at : at + 256] for at in range(0, len(text), 256)][:MAX_BAD_WORDS]
            yield f"{kind}, {name}", partial(one.words, words)


def banned() -> Iterator[tuple[str, Callable[[], object]]]:
    words = [[*[7] * (254 - n % 2), n] for n in range(2 * MAX_BAD_WORDS)]

    def follow() -> None:
        one = Bans((1, 2), CONTEXT, words)
        for _ in range(CONTEXT):
            one.add(7)
            one.now(150_000)

    yield "long words", follow


def _read(schema: Any) -> None:
    body = GenerateBody.from_bytes(f'{{"model": "m", "prompt": "x", "json_schema": {schemas.text(schema)}}}'.encode())
    grammar_of(body, tokenizer().format)


def resumed() -> Iterator[tuple[str, Callable[[], object]]]:
    """One turn of the event loop."""
    stops = ["a" * (240 + n) + "b" for n in range(16)]
    answer = GrowingAnswer(Marked(Texts(["a" * 200 + "c"] * RESUMED_AT_ONCE, stops), Marks(THINK), ()))
    turn = range(RESUMED_AT_ONCE)
    yield "with stop strings", lambda: asyncio.run(answer.resume(list(turn), Sampling(max_tokens=CONTEXT), ()))


def one(work: Callable[[], object], times: int = 1) -> Iterator[tuple[str, Callable[[], object]]]:
    def repeat() -> None:
        for _ in range(times):
            work()

    yield "the most", repeat


def log_probabilities() -> Iterator[tuple[str, Callable[[], object]]]:
    one_of = tokenizer().token_bytes
    one_of(5)
    token = Token(5, -1.0, top=tuple((id, -2.0) for id in range(20)))
    return one(lambda: _logprob(token, one_of), CONTEXT)


def images() -> None:
    content = '[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]'
    with pytest.raises(InvalidValue, match="content"):
        PromptBody.from_bytes(f'{{"model": "m", "messages": [{{"role": "user", "content": {content}}}]}}'.encode())


TRIALS: Mapping[str, Callable[[], Iterator[tuple[str, Callable[[], object]]]]] = {
    "JSON of a body": json_bodies,
    "chat template": templates,
    "text to tokens": tokenising,
    "ids of a prompt": lambda: one(lambda: check_ids([7] * (SIZE // 2), 2000)),
    "logit_bias": lambda: one(lambda: check_ids([token for token, _ in [(1, 1.0)] * MAX_BIASES], 2000, "logit_bias")),
    "bad words": bad_words,
    "bans": banned,
    "text of a form, before it is compiled": texts_of_forms,
    "stop strings": stop_strings,
    "log-probabilities": log_probabilities,
    "schema, before it is compiled": checked_schemas,
    "parts of an answer": parts,
    "calls of tools": calls_of_tools,
    "tokens of an answer that goes on": resumed,
    "images": lambda: one(images),
}
"""Hostile input for each row, by name."""
ELSEWHERE = {"form of an answer, with its patterns": test_matchers}
"""Rows that have a test of their own, under the same kits."""


def test_every_kind_of_work_is_under_hostile_input() -> None:
    assert {row.name for row in WORK} == {*TRIALS, *ELSEWHERE}
    assert all("schemas.hostile" in inspect.getsource(module) for module in ELSEWHERE.values())


@pytest.mark.parametrize("bound", sorted({bound for row in WORK for bound in row.bounds}))
def test_every_bound_of_the_table_exists(bound: str) -> None:
    module, _, name = bound.partition(":")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("row", [row for row in WORK if row.name in TRIALS], ids=lambda row: row.name)
def test_work_for_a_hostile_request_keeps_to_its_row(row: Work) -> None:
    over, times = [], CONTEXT if row.per == "token" else 1
    for name, work in TRIALS[row.name]():
        with cost() as found:
            work()
        seconds, mib = found[0].seconds / times, found[0].mib
        if seconds > SLOWER * row.seconds or mib > row.mib + ARENAS_MIB:
            over.append(f"{name}: {seconds:.6f} s, {mib:.0f} MiB")
    assert not over


def test_nothing_on_the_event_loop_takes_long_by_the_table() -> None:
    assert all(row.seconds <= 0.3 for row in WORK if row.place == "event loop" and row.per == "request")
    assert all(row.seconds <= 0.001 for row in WORK if row.place == "event loop" and row.per == "token")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_of_far_too_many_tokens_is_refused_before_most_of_it_is_tokenised(name: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"more than the {CONTEXT} of the model"):
        tokenizer(name).encode(texts.KINDS["random letters"](SIZE), limit=CONTEXT)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_of_few_tokens_is_tokenised_as_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tokenizer(name)
    text = texts.KINDS["prose"](200_000)
    whole = one.encode(text)
    monkeypatch.setattr("disagg.engines.model.text.CHARS_PER_TOKEN", 1)
    assert one.encode(text, limit=len(whole)) == whole and len(text) > len(whole)


class PanicException(BaseException):
    """As tokenizers raises it."""


def test_a_panic_of_the_tokenizer_is_the_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panicking:
        def encode(self, *_: object, **__: object) -> None:
            raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    one = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()), frozenset({0}), 2000)
    monkeypatch.setattr(one, "_backend", Panicking())
    with pytest.raises(RequestError, match="cannot read this prompt"):
        one.encode("text")
