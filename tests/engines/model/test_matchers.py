"""engines/model/matchers: forms are compiled and followed in processes that end without harm to other answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from disagg.engines.model import constraint
from disagg.engines.model.constraint import Constraint, Constraints
from disagg.engines.model.matchers.limits import (
    MAX_DEPTH,
    MAX_MULTIPLE,
    MAX_NESTING,
    MAX_PARTS,
    MIB,
    REBUILDS,
    FormLimits,
    require_bounded,
)
from disagg.errors import DisaggError, Overloaded, RequestError, SchemaTooComplex, ServerUnavailable
from tests.deadlines import wait_until
from tests.hostile import schemas
from tests.hostile.schemas import POISONS, Schema
from tests.values import present

PET: Schema = schemas.closed(name={"type": "string", "maxLength": 5}, legs={"enum": [2, 4]})
SLOW = POISONS["arithmetic"]
CANARY = "Canary"
SMALL = FormLimits(compile_cpu_s=0.2, process_bytes=64 * MIB)
Make = Callable[..., Constraints]


@pytest.fixture(scope="module")
def shared() -> Iterator[Constraints]:
    """With limits that hostile schemas reach soon."""
    made = constraints(SMALL)
    yield made
    made.close()


@pytest.fixture
def make() -> Iterator[Make]:
    """Constraints with other limits; their processes end with the test."""
    made: list[Constraints] = []

    def one(**limits: Any) -> Constraints:
        made.append(constraints(FormLimits(**limits)))
        return made[-1]

    yield one
    for each in made:
        each.close()


def constraints(limits: FormLimits) -> Constraints:
    """Of the vocabulary of bytes."""
    return Constraints(lambda: "byte", 262, frozenset({261}), limits)


BEGUN: list[Constraint] = []


@pytest.fixture(autouse=True)
def answers_end() -> Iterator[None]:
    """Close each at the end of its test, also if the test has."""
    yield
    while BEGUN:
        BEGUN.pop().close()


async def begin(source: Constraints, schema: Schema, answer: bytes = b"", owner: str = "") -> Constraint:
    grammar = f"start: form\nform: %json {schemas.text(schema)}\n"
    BEGUN.append(await source.make(grammar, list(answer), owner=owner))
    return BEGUN[-1]


def processes(source: Constraints) -> list[psutil.Process]:
    """Of the forms."""
    assert source.pid is not None
    return [child for child in psutil.Process(source.pid).children() if memory(child)]


def memory(process: psutil.Process) -> int:
    """Its bytes, 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def possible(constraint: Constraint) -> str:
    """The characters that may come next."""
    allowed = constraint.allowed()
    assert allowed is not None, constraint.error
    return bytes(int(token) for token in np.flatnonzero(allowed) if token < 256).decode("latin-1")


def write(constraint: Constraint, text: bytes) -> None:
    for letter in text:
        assert chr(letter) in possible(constraint)
        constraint.accept(letter)


async def write_at_random(constraint: Constraint) -> None:
    chosen = np.random.default_rng(0)
    for _ in range(40):
        allowed = await asyncio.to_thread(constraint.allowed)
        if allowed is None:
            break
        constraint.accept(int(chosen.choice(np.flatnonzero(allowed))))
    if constraint.error is not None:
        raise constraint.error


@pytest.mark.parametrize("schema", schemas.hostile())
async def test_a_hostile_schema_costs_its_own_request_at_most(shared: Constraints, schema: Schema) -> None:
    neighbour = await begin(shared, PET)
    server = shared.pid
    try:
        hostile = await begin(shared, schema)
        try:
            await write_at_random(hostile)
        finally:
            hostile.close()
    except RequestError as error:
        assert error.message.startswith(("json_schema: ", "the answer left its form: "))
    write(neighbour, b'{"name":"a","legs":4}')
    neighbour.close()
    assert shared.pid == server
    assert all(memory(process) < 128 * MIB for process in processes(shared))


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"a": {"b": schemas.nested(MAX_NESTING, lambda inner: {"c": inner})}}, f"nested over {MAX_NESTING} levels"),
        (schemas.nested(9999, lambda inner: {"items": inner}), f"nested over {MAX_NESTING} levels"),
        (POISONS["references"], f"over {MAX_DEPTH} levels deep"),
        ({"enum": [[]] * 0 + [[] for _ in range(MAX_PARTS)]}, f"over {MAX_PARTS} objects and lists"),
        (schemas.multiples(2, MAX_MULTIPLE + 1), f"multipleOf over {MAX_MULTIPLE}"),
        ({"properties": {"a": {"multipleOf": 1.000001}}}, f"multipleOf over {MAX_MULTIPLE}"),
        ({"multipleOf": 1e400}, f"multipleOf over {MAX_MULTIPLE}"),
    ],
)
def test_a_schema_over_a_bound_is_refused_before_it_is_compiled(schema: Schema, bound: str) -> None:
    with pytest.raises(SchemaTooComplex, match=bound):
        require_bounded(schema)


@pytest.mark.parametrize(
    "schema",
    [
        PET,
        {"$ref": "#"},
        {"$ref": "#/nowhere/1"},
        {
            "$defs": {"tree": schemas.closed(of={"type": "array", "items": {"$ref": "#/$defs/tree"}})},
            "$ref": "#/$defs/tree",
        },
        {"properties": {"multipleOf": {"type": "string"}}, "multipleOf": True},
        schemas.multiples(0.001, 1000, -5),
        {"allOf": [{"$ref": "#/allOf/1"}, INTEGER := {"type": "integer"}, INTEGER]},
    ],
)
def test_an_ordinary_schema_is_not(schema: Schema) -> None:
    require_bounded(schema)


async def test_a_form_that_crashes_its_compiler_is_refused_and_other_answers_go_on(make: Make) -> None:
    source = make()
    answer = await begin(source, PET)
    write(answer, b'{"name":')
    for _ in range(2):
        with pytest.raises(SchemaTooComplex, match="ends the process that compiles it"):
            await begin(source, POISONS["references"])
    write(answer, b'"b","legs":2}')
    answer.close()


@pytest.mark.parametrize(
    ("limits", "bound"),
    [({"compile_cpu_s": 0.1}, "not compiled after 0.1 s"), ({"process_bytes": 32 * MIB}, "takes over 32 MiB")],
)
async def test_a_form_over_its_time_or_memory_is_refused(make: Make, limits: dict[str, Any], bound: str) -> None:
    with pytest.raises(SchemaTooComplex, match=bound):
        await begin(make(**limits), SLOW)


async def test_all_forms_together_have_a_bound_on_their_memory(make: Make) -> None:
    with pytest.raises(SchemaTooComplex, match="takes over"):
        await begin(make(all_bytes=32 * MIB, process_bytes=4096 * MIB), SLOW)


async def test_a_caller_that_leaves_ends_the_compiling(make: Make) -> None:
    source = make(compile_cpu_s=600, process_bytes=16384 * MIB, all_bytes=16384 * MIB)
    await source.ready()
    compiling = asyncio.ensure_future(begin(source, SLOW))
    waits = asyncio.ensure_future(begin(source, SLOW))
    await asyncio.to_thread(wait_until, lambda: bool(processes(source)), 30, "the form's process")
    waits.cancel()
    await asyncio.wait((waits,))
    assert len(processes(source)) == 1  # the other one still needs it
    compiling.cancel()
    await asyncio.wait((compiling,))
    await asyncio.to_thread(wait_until, lambda: not processes(source), 30, "the end of the form's process")


async def test_answers_of_one_form_share_a_process_which_waits_for_the_next_but_not_those_of_two_owners(
    make: Make,
) -> None:
    source = make()
    one, two = await begin(source, PET, owner="a"), await begin(source, PET, b'{"name":"c', owner="a")
    (shared,) = processes(source)
    write(two, b'"')
    write(one, b"{")
    one.close()
    two.close()
    again = await begin(source, PET, owner="a")
    assert processes(source) == [shared]
    other = await begin(source, PET, owner="b")
    assert len(processes(source)) == 2
    again.close()
    other.close()


async def test_few_processes_are_kept_for_later_answers_and_no_large_one(make: Make) -> None:
    source = make(idle=2, idle_bytes=32 * MIB)
    for length in range(4):
        (await begin(source, {"type": "string", "maxLength": length})).close()
    await asyncio.to_thread(wait_until, lambda: len(processes(source)) == 2, 30, "idle processes to end")
    kept = processes(source)
    (await begin(source, schemas.multiples(99991))).close()
    await asyncio.to_thread(wait_until, lambda: processes(source) == kept, 30, "the large process to end")


async def test_an_answer_whose_process_is_killed_goes_on_in_another_from_its_tokens(make: Make) -> None:
    source = make()
    answer = await begin(source, PET, b'{"nam')
    for letter in b'e":"de':
        for process in processes(source)[:REBUILDS] if letter in b":d" else ():
            process.kill()
            process.wait(30)
        write(answer, bytes([letter]))
    write(answer, b'"')
    (last,) = processes(source)
    last.kill()
    last.wait(30)
    answer.accept(ord(","))
    assert answer.allowed() is None and isinstance(answer.error, ServerUnavailable)
    answer.close()


async def test_an_answer_whose_new_process_is_late_goes_on_at_another_host(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that was followed until its process was killed is not too complex."""
    source = make()
    answer = await begin(source, PET)
    for process in processes(source):
        process.kill()
        process.wait(30)
    link = present(answer._link)
    await asyncio.to_thread(wait_until, lambda: link._poll.poll(0), 30, "its end to be told")
    for wait in ("STEP_S", "_LEAST_WAIT_S"):
        monkeypatch.setattr(constraint, wait, 0.0)
    answer.accept(ord("{"))
    assert answer.allowed() is None and isinstance(answer.error, ServerUnavailable)


async def test_a_killed_fork_server_is_replaced_for_the_next_answer(make: Make) -> None:
    source = make()
    answer = await begin(source, PET)
    assert source.pid is not None
    before = psutil.Process(source.pid)
    os.kill(source.pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: before.status() == psutil.STATUS_ZOMBIE, 30, "its end")
    next_answer = await begin(source, PET)
    write(next_answer, b'{"name":')
    answer.close()
    next_answer.close()


async def test_an_answer_whose_mask_does_not_come_ends_and_those_of_other_forms_go_on(make: Make) -> None:
    source = make()
    stopped = await begin(source, PET)
    (process,) = processes(source)
    other = await begin(source, {"enum": ["abc"]})
    process.suspend()
    stopped.accept(ord("{"))
    assert stopped.allowed() is None and isinstance(stopped.error, SchemaTooComplex)
    write(other, b'"abc"')
    stopped.close()
    other.close()


async def test_an_answer_that_has_ended_while_its_engine_works_is_an_error_of_its_own(make: Make) -> None:
    answer = await begin(make(), PET)
    answer.close()
    assert answer.allowed() is None and isinstance(answer.error, DisaggError)
    answer.accept(ord("{"))


async def test_more_forms_than_may_wait_are_refused_until_some_are_compiled(make: Make) -> None:
    source = make(compiling=1, waiting=1, compile_cpu_s=600, process_bytes=16384 * MIB, all_bytes=16384 * MIB)
    slow = asyncio.ensure_future(begin(source, SLOW))
    await asyncio.to_thread(wait_until, lambda: source.pid is not None and bool(processes(source)), 30, "its process")
    waiting = {asyncio.ensure_future(begin(source, schema)) for schema in (PET, {"enum": ["one too many"]})}
    (refused,), waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(refused.exception(), Overloaded) and not slow.done()
    slow.cancel()
    await asyncio.gather(*waiting)


async def test_many_answers_at_once_each_keep_their_form(make: Make) -> None:
    source = make()
    forms: list[Schema] = [PET, {"enum": ["abc", "abd"]}, {"type": "integer", "minimum": 3, "maximum": 77}]
    answers = await asyncio.gather(*(begin(source, forms[number % 3]) for number in range(48)))
    for number, answer in enumerate(answers):
        text = b""
        while (allowed := answer.allowed()) is not None:
            token = int(np.flatnonzero(allowed)[-1 if text else number % int(allowed.sum())])
            answer.accept(token)
            text += bytes([token]) if token < 256 else b""
        value = json.loads(text)
        assert (value if number % 3 else set(value)) in ({"name", "legs"}, "abc", "abd", *range(3, 78))
        answer.close()


def test_a_server_that_is_killed_leaves_no_process_behind() -> None:
    program = """
import asyncio, sys
from disagg.engines.model.constraint import Constraints
from disagg.engines.model.matchers.limits import FormLimits
async def main():
    limits = FormLimits(compile_cpu_s=600, process_bytes=1 << 40, all_bytes=1 << 40)
    source = Constraints(lambda: "byte", 262, frozenset({261}), limits)
    answer = await source.make('start: "a"')
    print(source.pid, flush=True)
    await source.make(sys.argv[1])
asyncio.run(main())
"""
    slow = f"start: form\nform: %json {json.dumps(SLOW)}\n"
    server = subprocess.Popen([sys.executable, "-c", program, slow], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    fork_server = psutil.Process(int(server.stdout.readline()))
    wait_until(lambda: len(fork_server.children()) == 2, 30, "both forms' processes")
    family = [fork_server, *fork_server.children()]
    server.kill()
    server.wait()
    server.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


UNFOLLOWED: list[Schema] = [
    {"type": CANARY},
    {"type": "string", "format": CANARY},
    {"type": "string", "pattern": f"({CANARY}"},
    {"type": "string", "pattern": f"(?={CANARY})"},
    {"$ref": f"#/{CANARY}"},
    {"$ref": f"http://{CANARY}"},
    {"$schema": CANARY},
    {"not": {"const": CANARY}},
    {"required": CANARY},
    {"minimum": CANARY, "type": "number"},
    {"type": "object", "properties": {CANARY: False}, "required": [CANARY]},
    {"patternProperties": {f"^{CANARY}": {}, f"^{CANARY}a": {}}},
    {"enum": [CANARY], "type": "integer"},
    {"title": CANARY, **schemas.multiples(*schemas.PRIMES)},
]


@pytest.mark.parametrize("schema", UNFOLLOWED, ids=lambda schema: str(schema)[:40])
async def test_no_error_has_text_of_the_schema(shared: Constraints, schema: Schema) -> None:
    with pytest.raises(RequestError) as raised:
        await begin(shared, schema)
    assert CANARY.lower() not in str(raised.value).lower()
    assert raised.value.message != "json_schema: llguidance cannot follow it"
