"""The page docs/faults.md, from the results of a run of the whole matrix."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from tests.faults.cells import BOUND_S, IDLE_BOUND_S, Side
from tests.faults.matrix import DEADLINE_S, Result

HEAD = """\
# Faults

What a request does when something fails, as measured by `python -m tests.faults matrix --write docs/faults.md`: two
prefill and two decode servers of a small model on one machine, float32, every connection through a proxy that injects
the fault at a given byte. Each row is one fault at one state of a request, run once greedy and once sampled with a
seed.

A row holds if the request ends within {deadline:g} s, and within {bound:g} s of the fault, {idle:g} s if a prefill host
idles; if a complete answer has exactly the tokens of an undisturbed one; and if afterwards no server has a request, a
byte of KV, a socket or a thread left of it.

Policy: *fallback* is the default; *fail* is `--on-kv-failure fail`; *one decode host*: the other refuses connections;
*no host left*: after the fault every host refuses connections.

Seconds are from the fault to the end of the request, or from its beginning if the fault was there before; next token
is from the fault to the first token after it. *Link cut*, *clock*: on servers in network namespaces of their own,
without proxies; the host's veth is set down, and up again after 2 s, or its wall clock jumps, as the process reads it.
*Frozen*: SIGSTOP. *Engine's thread stopped*: the thread that computes is stopped by ptrace while the rest of
the server goes on, as if its GPU hung. *No memory*: no new mapping; *no descriptors*: no new file or connection;
*disk full*: no file grows. *Killed, every one*: each host that begins with the request is killed. *Sends ...*: prefill
hosts that send wrong KV under a right digest, or idle frames while their engine makes no progress (`tests/hostile`,
[audit.md](audit.md)). *Compiles ...*: the answer's form is a schema that was made to end or to block what compiles it.
*Split*: the prefill host computes two of the model's three layers; bytes are hit in the second of two chunks, and the
prompt goes on after the first.

## One request harms nobody else

Whatever a stranger sends costs that request at most. What stands behind this sentence:

{harmless}

## The matrix
"""

HARMLESS: Final = (
    (
        "a schema that ends or blocks what compiles it",
        "400 `SchemaTooComplex`; it is compiled in a process that is ended",
        "`tests/engines/model/test_matchers.py`, rows *compiles ...*, `python -m tests.faults poison`",
    ),
    (
        "a request that ends its host's process",
        "it is tried on one more host, then refused for 300 s; requests that were caught in it are answered",
        "`tests/integration/test_requests_that_end_hosts.py`, rows *killed, every one*",
    ),
    (
        "a body in a million pieces, or never the rest of it",
        "a refusal; what follows it is dropped unparsed",
        "`tests/http/`, `tests/hostile/test_bodies.py`, `python -m benchmarks.greedy_bodies`",
    ),
    (
        "a request that two readers would read in two ways",
        "a refusal, and the connection is closed",
        "`tests/hostile/test_heads.py`",
    ),
    (
        "hundreds of answers at once",
        "the key's own share of places and time",
        "`tests/test_shares.py`, `tests/integration/test_fair_shares.py`, `python -m benchmarks.fair_shares`",
    ),
    (
        "KV, tokens, counts or texts that a host of the fleet makes up",
        "that attempt; another host goes on",
        "`tests/hostile/test_peers.py`, `test_answers.py`, `test_senders.py`, rows *sends ...* and *trickled*",
    ),
)
"""What a stranger may send, what it costs, and the tests of that."""


def head() -> str:
    """The page up to the table of the matrix."""
    table = [
        "| what is sent | what it costs | tests |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in HARMLESS),
    ]
    return HEAD.format(deadline=DEADLINE_S, bound=BOUND_S, idle=IDLE_BOUND_S, harmless="\n".join(table))


def line(result: Result) -> str:
    """One result as a line of a log."""
    state = "ok " if not result.problems else "BAD"
    problems = f"  <- {'; '.join(result.problems)}" if result.problems else ""
    where = f"{result.cell.id}, {result.sampling}"
    return f"{state} {result.seconds:5.2f} s  {where}: {result.ending} ({result.detail}){problems}"


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    held = sum(not result.problems for result in results)
    rows = [_row(result) for result in results]
    when = datetime.now(UTC).date()
    summary = "\n".join(
        [
            f"**{held} of {len(results)} requests hold.** Run of {when} on {os.cpu_count()} cores.",
            "",
            *_summary(results),
        ]
    )
    table = [
        "| connection or host | fault | state | policy | sampling | outcome | seconds | next token | tokens right |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return head() + f"\n{summary}\n\n" + "\n".join(table) + "\n"


def _summary(results: Sequence[Result]) -> list[str]:
    """How the requests of each side ended, and how long they took."""
    lines = ["| connection or host | requests | answer | answer with a note | error | seconds, median | longest |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for side, kind in SIDES.items():
        of_side = [result for result in results if result.cell.side == side]
        if not of_side:
            continue
        endings = Counter(result.ending for result in of_side)
        seconds = [result.seconds for result in of_side]
        counts = f"{endings['answer']} | {endings['answer with a note']} | {endings['error']}"
        lines.append(f"| {kind} | {len(of_side)} | {counts} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    return lines


SIDES: Final[Mapping[Side, str]] = {"kv": "KV connection", "prefill": "prefill host", "decode": "decode host"}


def _row(result: Result) -> str:
    cell = result.cell
    next_token = "" if result.next_token_s is None else f"{result.next_token_s:.2f}"
    wrong = any(problem.startswith("wrong") for problem in result.problems)
    outcome = f"{result.ending}: {result.detail}".replace("|", "/")
    if result.problems:
        outcome += f" **{'; '.join(result.problems)}**"
    cells = (
        cell.side,
        cell.name,
        cell.state,
        cell.policy,
        result.sampling,
        outcome,
        f"{result.seconds:.2f}",
        next_token,
    )
    return f"| {' | '.join(cells)} | {'no' if wrong else 'yes'} |"
