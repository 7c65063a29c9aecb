"""Which decode hosts hold the KV of the beginning of a prompt, as far as this client has caused it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from disagg.api.requests import ChatMessage, PromptBody

BLOCK_BYTES = 256  # about 64 tokens: a shorter common beginning saves less than another host costs
MAX_BLOCKS = 1024  # of one prompt
MAX_ENTRIES = 32_768
MAX_HOLDERS = 4
BYTES_PER_TOKEN = 4  # a guess; only used for prompts that no host has counted


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as routing sees it. chain: hashes of its beginnings, one per block, shortest first. tokens: an
    estimate."""

    content: bytes
    chain: tuple[bytes, ...]
    tokens: int


def prompt_of(body: PromptBody) -> RoutedPrompt:
    """The prompt of a request. Prompts of different models or salts have no hash in common."""
    content = content_of(body)
    tokens = len(body.tokens) if body.tokens is not None else len(content) // BYTES_PER_TOKEN + 1
    return RoutedPrompt(content, chain(content, f"{body.model}\0{body.cache_salt}"), tokens + len(body.answer_tokens))


def content_of(body: PromptBody, answer: str = "", answer_tokens: Sequence[int] = ()) -> bytes:
    """The bytes that the prompt is compared by; with its answer, those with which its next turn begins."""
    if body.tokens is not None:
        return array("I", (*body.tokens, *answer_tokens)).tobytes()
    if body.messages is None:
        return ((body.prompt or "") + answer).encode()
    before = msgspec.json.encode((body.tools, body.chat_template_kwargs)).decode() if body.template else ""
    turns = [f"{message.role}\x1f{_said(message)}\x1e" for message in body.messages]
    return "".join((before, *turns, f"assistant\x1f{answer}\x1e" if answer else "")).encode()


def _said(message: ChatMessage) -> str:
    calls = msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else ""
    return f"{message.content}{calls}"


def chain(content: bytes, key: str) -> tuple[bytes, ...]:
    """The hash of each beginning of `content` that is a whole number of blocks long."""
    digest = blake2b(key.encode(), digest_size=8)
    hashes = []
    for start in range(0, min(len(content), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(content[start : start + BLOCK_BYTES])
        hashes.append(digest.digest())
    return tuple(hashes)


@dataclass(slots=True)
class Affinity:
    """A bounded memory, least recently used first out: beginning of a prompt -> tokens held, by decode host."""

    limit: int = MAX_ENTRIES
    _holders: OrderedDict[bytes, dict[str, int]] = field(default_factory=OrderedDict)

    def held(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of the prompt's tokens each host holds. Hosts that hold none are left out."""
        found: dict[str, int] = {}
        for one in reversed(hashes):
            for host, tokens in self._holders.get(one, {}).items():
                found.setdefault(host, tokens)
            if len(found) >= MAX_HOLDERS:
                break
        return found

    def remember(self, hashes: Sequence[bytes], host: str, tokens: int, nbytes: int) -> None:
        """The host holds the KV of these `tokens` tokens, whose content is `nbytes` long."""
        for number, one in enumerate(hashes, 1):
            holders = self._holders.setdefault(one, {})
            holders.pop(host, None)
            holders[host] = int(tokens * number * BLOCK_BYTES / max(1, nbytes))
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
            self._holders.move_to_end(one)
        while len(self._holders) > self.limit:
            self._holders.popitem(last=False)

    def forget(self, host: str) -> None:
        """The host has restarted: it holds nothing."""
        for one in [key for key, holders in self._holders.items() if host in holders]:
            del self._holders[one][host]
            if not self._holders[one]:
                del self._holders[one]

    def __len__(self) -> int:
        return len(self._holders)
