"""Which prompt a prefill host computes next, and how much of it. Pure.

The shortest remaining computation is next, and waiting makes a prompt count as shorter. Prompts of a key that has had
more of the computing lately come after those of the others (disagg/shares.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagg.shares import Claim, Claims, may_take, rank

State = Literal["waiting", "started", "computed"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What `order` and `chunk` go by.

    started: prompts whose KV is in memory, being computed or sent; started_to: of these, for one decode host, so that
    one which takes nothing leaves room for others. Heads take half of the places at most: their decode host may be
    behind with its own layers for long, and whole prompts are not to wait for that. The KV of started prompts stays
    within kv_bytes, and that for one decode host within half of it; a prompt that is alone may exceed both. So no more
    than kv_bytes waits to be sent.
    ageing: seconds of computing that each second of waiting is worth, so that a prompt of 1 s comes before any that
    arrives 4 s after it. queue_tokens: the most prompt tokens that wait to be computed. behind_bytes: a prompt with
    more KV waiting to be sent is not computed further until then.
    chunk_tokens: the longest chunk, shared_chunk_tokens while others wait, or have come in the last lately_s beside the
    prompt: more may come, and each waits for the end of a chunk. A chunk is to take chunk_s, shared_chunk_s meanwhile,
    but is not shorter than least_chunk_tokens: a GPU takes as long for fewer, since it reads all weights.
    together: a step computes all started prompts, so that what may be started is started before any step.
    yields: the host's other threads have a core before the one that computes.
    """

    chunk_tokens: int
    kv_bytes: int
    queue_tokens: int
    started: int = 16
    started_to: int = 8
    ageing: float = 0.25
    behind_bytes: int = 256 << 20
    shared_chunk_tokens: int = 512
    least_chunk_tokens: int = 512
    chunk_s: float = 0.5
    shared_chunk_s: float = 0.5
    lately_s: float = 1.0
    together: bool = False
    yields: bool = False


ON_CPU: Mapping[str, Any] = {"least_chunk_tokens": 64, "chunk_s": 0.15, "shared_chunk_s": 0.03, "yields": True}
"""What a policy has for a CPU, which is as fast with short chunks, and which the threads of HTTP need too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prompt as `order` sees it. remaining: prompt tokens to compute, in tokens of all layers; 0 once its answer is
    generated here. to: the
    decode host that gets its KV. behind: more KV waits to be sent than the policy allows, or the decode host has not
    computed its layers of what was sent. stepped: the number of its
    last step on this host, 0 before the first. key: whose share it counts for. head: only the model's first layers are
    computed here. Times are time.monotonic()."""

    state: State
    arrived: float
    remaining: float
    kv_bytes: int
    to: Hashable = None
    behind: bool = False
    stepped: int = 0
    key: str = ""
    head: bool = False


LONE: Claims = {"": Claim(1)}


def order(
    candidates: Sequence[Candidate], now: float, tokens_s: float, policy: Policy, computing: Claims = LONE
) -> list[int]:
    """The indices of the candidates that may be computed now, the next one first. computing: seconds of computing that
    each key has had lately, of all keys that count now.

    Answers are generated between the pieces of prompts: each gets one token after every piece.
    """
    prompt_step = max((one.stepped for one in candidates if one.remaining), default=0)
    ranks = {key: rank(claim) for key, claim in computing.items()}

    def place(index: int) -> tuple[int, int, float]:
        one = candidates[index]
        if policy.together and one.state == "waiting":
            return -1, ranks[one.key], one.arrived
        if one.remaining == 0 and one.state == "started":
            return 2 if one.stepped > prompt_step else 0, 0, one.stepped
        return 1, ranks[one.key], one.remaining / tokens_s - policy.ageing * (now - one.arrived)

    ranked = sorted((i for i, one in enumerate(candidates) if one.state != "computed" and not one.behind), key=place)
    startable = _startable([candidates[index] for index in ranked], candidates, policy, computing)
    return [index for index, may in zip(ranked, startable, strict=True) if may]


def _startable(ranked: Sequence[Candidate], everyone: Sequence[Candidate], policy: Policy, keys: Claims) -> list[bool]:
    """Whether each may be computed: started ones always, of the waiting ones those that fit. One that does not fit
    holds up the later ones, or they would keep it from ever fitting. A key over its share leaves places for others."""
    started = [one for one in everyone if one.state != "waiting"]
    count, nbytes = len(started), sum(one.kv_bytes for one in started)
    count_to = Counter(one.to for one in started)
    claims = _claims(keys, started)
    claims_to = {to: _claims(keys, [one for one in started if one.to == to]) for to in {one.to for one in ranked}}
    heads = [one for one in started if one.head]
    full = False
    out = []
    for one in ranked:
        if one.state == "started":
            out.append(True)
            continue
        full = full or count >= policy.started or (count > 0 and nbytes + one.kv_bytes > policy.kv_bytes)
        bytes_to = sum(other.kv_bytes for other in started if other.to == one.to)
        too_many_to = not may_take(claims_to[one.to], one.key, policy.started_to)
        too_large_to = count_to[one.to] > 0 and bytes_to + one.kv_bytes > policy.kv_bytes // 2
        may = may_take(claims, one.key, policy.started)
        if one.head:
            heads_to = [other for other in heads if other.to == one.to]
            may = may and may_take(_claims(keys, heads), one.key, policy.started // 2)
            may = may and may_take(_claims(keys, heads_to), one.key, policy.started_to // 2)
        out.append(not full and may and (one.to is None or not (too_many_to or too_large_to)))
    return out


def _claims(keys: Claims, started: Sequence[Candidate]) -> Claims:
    """How many of these prompts each key has."""
    counts = Counter(one.key for one in started)
    return {key: Claim(claim.weight, counts[key]) for key, claim in keys.items()}


def chunk(alone: bool, tokens_s: float, policy: Policy) -> int:
    """The most tokens of the next step. tokens_s: speed of the prompt's last step, which falls as the prompt grows."""
    most = policy.chunk_tokens if alone else min(policy.chunk_tokens, policy.shared_chunk_tokens)
    seconds = policy.chunk_s if alone else policy.shared_chunk_s
    return min(most, max(policy.least_chunk_tokens, int(seconds * tokens_s)))


def is_alone(arrived: float, others: Sequence[float], latest: float, now: float, policy: Policy) -> bool:
    """Whether a prompt that arrived at this time has the thread to itself. others: when those arrived that are not
    computed yet. latest: when the last one arrived, of whichever state."""
    return not others and not (latest > arrived and now - latest < policy.lately_s)
