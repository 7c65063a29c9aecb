"""Which tokens may come next in an answer that must have a form, such as JSON that fits a schema.

llguidance decides; it is an optional package and loaded with the first such request.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from disagg.errors import CapabilityMissing, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Constraint:
    """The form of one answer. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int], after: int | None = None) -> None:
        """after: the token, such as the end of the reasoning, before which the answer is free."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._after = after
        self._ended = False
        self._bits = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        self.error: RequestError | None = None
        """Why the answer cannot go on; `allowed` then allows everything, and its caller ends the request."""

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
            return
        self._ended = self._ended or (token in self._eos_ids and self._matcher.is_accepting())
        if not self._ended and (self._matcher.is_stopped() or not self._matcher.consume_token(token)):
            self._fail()

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Which tokens of the vocabulary may come next, [vocab]; None if all may, as after the end of sequence."""
        from llguidance.numpy import fill_next_token_bitmask

        if self.error is not None or self._after is not None or self._ended:
            return None
        if self._matcher.is_stopped():  # nothing can follow but the end
            mask = np.zeros(self._vocab_size, dtype=np.bool_)
            mask[list(self._eos_ids)] = True
            return mask
        fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            self._fail()
            return None
        bits = np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        return bits.astype(np.bool_)

    def _fail(self) -> None:
        reason = (self._matcher.get_error() or "the token is not allowed").splitlines()[0]
        self.error = RequestError(f"the answer left its form: {reason}", "simplify the JSON schema")


class Constraints:
    """Makes constraints for one tokenizer. Callable from any thread."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: frozenset[int]) -> None:
        """tokenizer_json: the text of tokenizer.json."""
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    def make(self, grammar: str, answer: Sequence[int] = (), after: int | None = None) -> Constraint:
        """A constraint after the first tokens of an answer. grammar: as llguidance reads it. after: see Constraint.
        RequestError if the grammar is not valid or the answer does not fit, CapabilityMissing if this host has no
        llguidance. Takes up to a second."""
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, grammar)
        if matcher.is_error():
            raise RequestError(f"json_schema: {_reason(matcher.get_error())}", "see JSON Schema in llguidance's docs")
        constraint = Constraint(matcher, self._vocab_size, self._eos_ids, after)
        for token in answer:
            constraint.accept(token)
        if constraint.error is not None:
            raise RequestError("answer_tokens: they do not have the form that the answer must have")
        return constraint

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            hint = "pip install 'disagg[structured]'"
            raise CapabilityMissing("llguidance is not installed on this host", hint) from None
        if not self._eos_ids:
            raise RequestError("json_schema: this model has no end-of-sequence token", "ask for text instead")
        return LLTokenizer(self._json(), n_vocab=self._vocab_size, eos_token=self._eos_ids)


def fitted(allowed: np.ndarray[Any, np.dtype[np.bool_]], size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """What is allowed, for logits of this size: some models have more of them than tokens, or fewer."""
    return np.pad(allowed[:size], (0, max(0, size - len(allowed))))


def _reason(error: str) -> str:
    """What is wrong with the schema, without the grammar around it."""
    lines = [line for line in error.splitlines() if line.strip() and not re.match(r"\s*(\d+ \||\^)", line)]
    return re.sub(r"^at \d+\(\d+\): ", "", " ".join(lines))[:300]
