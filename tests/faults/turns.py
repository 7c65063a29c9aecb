"""A conversation: what each turn ships, how long its first token takes, and whether held KV changes its answer."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.inference.client import AsyncClient
from tests.faults.fleet import MODEL, FaultFleet


@dataclass(frozen=True, slots=True)
class Settings:
    """new_tokens: of each turn's question. answer_tokens: of its answer."""

    turns: int = 10
    new_tokens: int = 400
    answer_tokens: int = 40


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. held_tokens: of its prompt, those whose KV the decode host had. right: the answer is that of one decode
    host alone without held KV. host: the decode host."""

    prompt_tokens: int
    held_tokens: int
    kv_bytes: int
    ttft: float
    host: str
    method: str
    right: bool


async def run(fleet: FaultFleet, settings: Settings) -> list[Turn]:
    """The turns in order. Each prompt is the last one with its answer and the next question."""
    tokens: list[int] = []
    turns = []
    async with fleet.client() as client:
        await _ids(client, list(range(10, 300)), 4, salt="warm")
        for number in range(settings.turns):
            tokens += [10 + (number * 97 + n * 31) % 600 for n in range(settings.new_tokens)]
            alone = await _ids(client, tokens, settings.answer_tokens, alone=True, salt=f"reference {number}")
            got = await client.generate(MODEL, tokens=tokens, max_tokens=settings.answer_tokens, ignore_eos=True)
            figures, ids = got.metrics, [token.id for token in got.tokens]
            turns.append(
                Turn(
                    figures.prompt_tokens,
                    figures.held_tokens,
                    figures.kv_bytes,
                    figures.ttft,
                    figures.decode_server or "",
                    figures.method,
                    ids == alone,
                )
            )
            tokens += ids
    return turns


async def _ids(client: AsyncClient, tokens: list[int], count: int, *, salt: str, alone: bool = False) -> list[int]:
    got = await client.generate(
        MODEL, tokens=tokens, max_tokens=count, ignore_eos=True, cache_salt=salt, alone="decode" if alone else None
    )
    return [token.id for token in got.tokens]


def problems(turns: list[Turn]) -> list[str]:
    wrong = [f"turn {number}: another answer" for number, turn in enumerate(turns, 1) if not turn.right]
    lost = [f"turn {number}: nothing was held" for number, turn in enumerate(turns[1:], 2) if not turn.held_tokens]
    return wrong + lost


def table(turns: list[Turn]) -> list[str]:
    lines = ["turn  prompt  held  shipped bytes  TTFT     method         answer"]
    for number, turn in enumerate(turns, 1):
        lines.append(
            f"{number:4d} {turn.prompt_tokens:7d} {turn.held_tokens:5d} {turn.kv_bytes:14,d} {turn.ttft:6.3f} s "
            f"{turn.method:14s} {'equal' if turn.right else 'DIFFERS'} ({turn.host})"
        )
    return [*lines, *(f"  problem: {problem}" for problem in problems(turns))]
