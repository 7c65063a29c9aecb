"""Prompts (text, chat messages or token ids) to token ids, with the checkpoint's tokenizer.

`HFTokenizer.load(path)` needs transformers, but neither torch nor mlx. `stream` has the way back, ids to text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from disagg.api.requests import Ending, Messages
from disagg.api.sampling import MAX_TOKENS
from disagg.engines.model import fill, format
from disagg.engines.model.constraint import Constraint, Constraints
from disagg.engines.model.format import AnswerFormat
from disagg.engines.model.stream import DetokenizedStream, StopStrings, token_bytes
from disagg.errors import ContextLengthExceeded, ModelError, RequestError, first_line
from disagg.kv.fingerprint import short_hash
from disagg.planning.checkpoint import read_object

NOTHING: Mapping[str, Any] = MappingProxyType({})
_OPTIONS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Parameters of transformers' apply_chat_template, which no caller may set."""
CHARS_PER_TOKEN: Final = 4
"""A text that has more for each token of the limit is counted in parts first. Prose has about so many."""
PART_CHARS: Final = 1 << 16
ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptTokenizer(Protocol):
    """The tokenizer of one model. Safe to use from several threads."""

    @property
    def digest(self) -> str:
        """Short hash of vocabulary, merges, normaliser and pre-tokeniser."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def format(self) -> AnswerFormat:
        """How the model marks reasoning and tool calls."""
        ...

    def encode(
        self,
        prompt: str | Messages | Sequence[int],
        template: Mapping[str, Any] = NOTHING,
        *,
        limit: int = MAX_TOKENS,
        ending: Ending = "begun",
        suffix: str = "",
    ) -> list[int]:
        """Token ids of a text prompt, of chat messages through the chat template, or the ids given. template: its
        variables beside the messages. limit: a text of far more tokens is not tokenised as a whole. ending: of chat
        messages. suffix: what follows the gap after a text prompt; empty: there is no gap. RequestError for an empty
        prompt, unusable messages or ids outside the vocabulary, ContextLengthExceeded for a text of far too many
        tokens."""
        ...

    @property
    def ends_of_fill(self) -> Sequence[int]:
        """The tokens that end what fills a gap."""
        ...

    def stream(
        self, stop: Sequence[str] = (), *, marks: bool = False, kept: bool = False, after: int = 0
    ) -> TextStream:
        """A new detokenizer for one answer. marks: with the text of special tokens but the end of sequence. kept: the
        stop string is part of the text. after: no stop string is looked for in so many tokens."""
        ...

    def words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The tokens of each of these texts, as they are at the beginning of a text and after a space."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        ...

    async def constrain(
        self, grammar: str, answer: Sequence[int], after: str = "", owner: str = "", field: str = "json_schema"
    ) -> Constraint:
        """A new constraint for one answer, after its first tokens. after: a mark before which it is free. See
        Constraints.make."""
        ...


class TextStream(Protocol):
    """Incremental detokenizer with stop strings. Never returns half a character or what may begin a stop string."""

    def push(self, token: int) -> str:
        """Text that became certain with this token, possibly empty."""
        ...

    def finish(self) -> str:
        """The text held back, at the end of the answer."""
        ...

    @property
    def stopped(self) -> str:
        """The stop string that was reached, "" until then: the text returned so far ends right before it."""
        ...


class HFTokenizer:
    """A PromptTokenizer over the tokenizer files of a checkpoint."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        """tokenizer: one of transformers' fast tokenizers. vocab_size: prompts may contain ids below it."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Set once, here: transformers would set them on each call, which is not thread-safe.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.digest = short_hash(_canonical(_vocabulary(self._backend)))
        self.chat_template_digest = short_hash(_canonical(tokenizer.chat_template))
        """The hash of null if there is none."""
        special = [tokenizer.bos_token_id, sorted(eos_ids), sorted(tokenizer.all_special_ids)]
        self.special_tokens_digest = short_hash(_canonical(special))
        """A hash of the ids of beginning- and end-of-sequence tokens and of all other special tokens."""
        self._constraints = Constraints(self._backend.to_str, vocab_size, eos_ids)

    @staticmethod
    def load(path: Path, configuration: Any = None) -> HFTokenizer:
        """The tokenizer of the checkpoint in folder `path`. ModelError if it has no usable one. configuration:
        transformers' of this model; None: as it reads it itself."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, config=configuration, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"{path}: no usable tokenizer: {first_line(error)}",
                "the folder needs tokenizer.json and tokenizer_config.json",
            ) from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(
                f"{path}: {type(tokenizer).__name__} has no tokenizer.json form", "convert it with transformers first"
            )
        config = read_object(path / "config.json")
        eos_ids = {*_ids(tokenizer.eos_token_id), *_ids(config.get("eos_token_id"))}
        if (path / "generation_config.json").is_file():
            eos_ids.update(_ids(read_object(path / "generation_config.json").get("eos_token_id")))
        return HFTokenizer(tokenizer, frozenset(eos_ids), int(config.get("vocab_size") or len(tokenizer)))

    @cached_property
    def format(self) -> AnswerFormat:
        return format.find(self._tokenizer)

    def encode(
        self,
        prompt: str | Messages | Sequence[int],
        template: Mapping[str, Any] = NOTHING,
        *,
        limit: int = MAX_TOKENS,
        ending: Ending = "begun",
        suffix: str = "",
    ) -> list[int]:
        if isinstance(prompt, str):
            if suffix:
                prompt = self._with_gap(prompt, suffix)
            # Without text, a tokenizer that adds a beginning-of-sequence token would return one.
            ids = self._ids(prompt, limit, special=True) if prompt else []
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._ids(self._rendered(prompt, template, ending), limit, special=False)
        else:
            ids = check_ids(prompt, self.vocab_size)
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token of text, or one message")
        return ids

    def stream(
        self, stop: Sequence[str] = (), *, marks: bool = False, kept: bool = False, after: int = 0
    ) -> TextStream:
        stops = StopStrings(stop, kept=kept)
        return DetokenizedStream(self._backend, hidden=self.eos_ids, stops=stops, after=after, marks=marks)

    def words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return word_tokens(texts, lambda text: self._tokens(text, special=False))

    def token_bytes(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        return self._bytes_of(text) if text is not None else b""

    async def constrain(
        self, grammar: str, answer: Sequence[int], after: str = "", owner: str = "", field: str = "json_schema"
    ) -> Constraint:
        mark = self._backend.token_to_id(after) if after else None
        return await self._constraints.make(grammar, answer, mark, owner, field)

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        return token_bytes(json.loads(self._backend.to_str()))

    @cached_property
    def ends_of_fill(self) -> Sequence[int]:
        return fill.ends_of_fill(self._tokenizer.get_added_vocab())

    def _with_gap(self, before: str, after: str) -> str:
        marks = fill.marks_of(self._tokenizer.get_added_vocab())
        if marks is None:
            raise fill.not_known()
        return marks.prompt(before, after)

    def _ids(self, text: str, limit: int, *, special: bool) -> list[int]:
        if len(text) > CHARS_PER_TOKEN * limit:
            self._require_room(text, limit)
        return self._tokens(text, special)

    def _require_room(self, text: str, limit: int) -> None:
        """Raise ContextLengthExceeded if the text has far more tokens than `limit`. Only the parts until then are
        tokenised: a token takes 200 to 400 bytes of memory meanwhile, and a text may have 64 times `limit`. Where a
        text is cut changes the tokens around the cut, by far fewer than the second `limit`."""
        tokens = 0
        for start in range(0, len(text), PART_CHARS):
            tokens += len(self._tokens(text[start : start + PART_CHARS], special=False))
            if tokens > 2 * limit:
                raise ContextLengthExceeded(
                    f"the prompt has over {tokens} tokens, more than the {limit} of the model", "shorten the prompt"
                )

    def _tokens(self, text: str, special: bool) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            # tokenizers' own panics are no Exception. A regular expression panics at a run of over 10,000,000 letters.
            if isinstance(error, Exception) or type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"the tokenizer cannot read this prompt: {first_line(error)}", "shorten runs of one kind of character"
            ) from None

    def _rendered(self, messages: Sequence[Any], template: Mapping[str, Any], ending: Ending = "begun") -> str:
        check_template(template)
        for index, message in enumerate(messages):
            check_message(index, message)
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template", "send a text prompt instead of messages")
        written = [dict(message) for message in messages]
        if ending == "within":
            written[-1]["content"] += _CUT
        try:
            rendered = self._tokenizer.apply_chat_template(
                written, tokenize=False, add_generation_prompt=ending == "begun", **template
            )
        except Exception as error:  # a template is a program of the model and may raise anything
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "check the order and the roles"
            ) from error
        return _cut(str(rendered)) if ending == "within" else str(rendered)


_CUT: Final = "\N{REPLACEMENT CHARACTER}the answer goes on here\N{REPLACEMENT CHARACTER}"
"""Behind a message that the answer goes on with, to find its end in the rendered prompt, which is cut there: a template
may write that text elsewhere, too, and changes white space at the end of a message."""


def _cut(rendered: str) -> str:
    before, *after = rendered.split(_CUT)
    if len(after) != 1:
        raise RequestError(
            "continue_final_message: the model's chat template does not write the last message once, as it is",
            "leave the message out, and ask for its beginning in a message of the user",
        )
    return before


def word_tokens(texts: Sequence[str], encode: Callable[[str], list[int]]) -> Sequence[Sequence[int]]:
    """The tokens of each text, as they are at the beginning of a text and after a space."""
    found = [tuple(encode(f"{space}{text.lstrip()}")) for text in texts for space in ("", " ")]
    return [word for word in dict.fromkeys(found) if word]


def check_ids(ids: Sequence[Any], vocab_size: int, name: str = "prompt") -> list[int]:
    """The ids as a list. RequestError for a value that is not a token id or lies outside the vocabulary."""
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(
                f"{name}[{index}] is {type(token).__name__}", "a prompt is text, a list of messages or of token ids"
            )
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name}[{index}] is token {token}, outside the vocabulary",
                f"this model's tokens are 0 to {vocab_size - 1}",
            )
    return list(ids)


def check_template(template: Mapping[str, Any]) -> None:
    """Raise RequestError for a name that is no variable of the template but an option of transformers."""
    if taken := _OPTIONS & template.keys():
        raise RequestError(f"chat_template_kwargs: {min(taken)} is not a variable of chat templates", "leave it out")


def check_message(index: int, message: Any) -> None:
    """Raise RequestError if `message` is not a chat message."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} is {type(message).__name__}", 'a message is {"role": ..., "content": ...}')
    if message.get("role") not in ROLES:
        raise RequestError(f"{name}.role is {message.get('role')!r}", f"use one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise RequestError(f"{name}.content is not text", "content is a string")


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _vocabulary(backend: Any) -> dict[str, Any]:
    """The parts of tokenizer.json that determine how text becomes ids, in one form for all versions of the format."""
    whole = json.loads(backend.to_str())
    model = whole["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    added = sorted((t["id"], t["content"], t["special"]) for t in whole.get("added_tokens") or [])
    return {
        "type": model.get("type"),
        "vocab": model.get("vocab"),
        "merges": merges,
        "normalizer": whole.get("normalizer"),
        "pre_tokenizer": whole.get("pre_tokenizer"),
        "added_tokens": added,
    }


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
