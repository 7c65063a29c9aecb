"""What a keeper does with the processes of its models: load, unload, fail, hang, stop. The processes are stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.api.keeper import KeptModel, MemoryClaim
from disagg.config import load
from disagg.errors import ModelBusy, ModelError, UnknownModel
from disagg.keeper import kept, policy, processes
from disagg.keeper.child import Patience
from disagg.keeper.keeper import Keeper
from disagg.ledger import Ledger
from tests.keeper.keeping import (
    MODEL_BYTES,
    alive,
    begin_request,
    end_request,
    keeping,
    loaded,
    pid,
    states,
    until,
    write,
)
from tests.ports import free_ports


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "HANDOVER_S", 0.05)
    monkeypatch.setattr(kept, "COME_S", 0.3)
    monkeypatch.setattr(processes, "LONGEST_DELAY_S", 0.05)


pytestmark = pytest.mark.slow  # each starts a few interpreters
ROOM_FOR_ONE = f"memory_bytes = {MODEL_BYTES + 1}"
ROOM_FOR_TWO = f"memory_bytes = {2 * MODEL_BYTES + 1}"


IMPATIENT = Patience(silent_s=0.8, load_s=0.8, told_s=0.4, traces_s=0.1)


def _reason(keeper: Keeper) -> str:
    """What is stated of the first model, also while a changed list lets it drain."""
    return keeper.models[0].stated(None, keeper.settings, time.monotonic(), keeper.patience).reason


def stated(keeper: Keeper, model: str) -> KeptModel:
    return next(one for one in keeper.stated() if one.model == model)


async def test_a_model_is_loaded_when_it_is_asked_for_and_says_where_it_is(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"])) as keeper:
        assert states(keeper) == {"a": "asleep", "b": "asleep"}
        events = await loaded(keeper, "a")
        last = events[-1]
        assert (last.state, last.port, last.kv_port) == ("ready", stated(keeper, "a").port, stated(keeper, "a").kv_port)
        assert events[0].state == "asleep" and last.left_s == 0
        assert states(keeper) == {"a": "ready", "b": "asleep"}
        assert [event.state for event in await loaded(keeper, "a")] == ["ready"]
        assert stated(keeper, "a").loads == 1


async def test_one_that_does_not_fit_takes_the_room_of_the_least_recently_used_one(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b", "c"], ROOM_FOR_TWO)) as keeper:
        await loaded(keeper, "a")
        await loaded(keeper, "b")
        await begin_request(keeper, "a")
        end_request(keeper, "a")
        await until(lambda: stated(keeper, "a").running == 0)
        b = keeper.by_name["b"]
        await until(lambda: time.monotonic() > b.ready_at + policy.HANDOVER_S)
        await loaded(keeper, "c")
        assert states(keeper) == {"a": "ready", "b": "asleep", "c": "ready"}
        assert stated(keeper, "b").evictions == {"room": 1}
        assert keeper.used <= keeper.budget


async def test_no_running_request_is_cut_and_the_next_model_gets_its_turn_after_it(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], ROOM_FOR_ONE)) as keeper:
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        first = pid(keeper, "a")
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: states(keeper)["a"] == "draining")
        assert alive(first) and states(keeper)["b"] == "asleep"
        end_request(keeper, "a")
        await waiting
        assert states(keeper) == {"a": "asleep", "b": "ready"} and not alive(first)


async def test_fifty_at_once_are_loaded_in_the_order_in_which_they_came_and_once_each(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b", "c", "d"], ROOM_FOR_ONE)) as keeper:
        order = "cadb"
        ready = list[str]()

        async def one(model: str) -> None:
            await loaded(keeper, model)
            ready.append(model)

        await asyncio.gather(*(one(order[number % 4]) for number in range(50)))
        assert list(dict.fromkeys(ready)) == list(order)
        assert [stated(keeper, model).loads for model in order] == [1, 1, 1, 1]


async def test_who_leaves_gives_the_place_up(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], ROOM_FOR_ONE)) as keeper:
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: stated(keeper, "b").waiting == 1)
        waiting.cancel()
        await until(lambda: stated(keeper, "b").waiting == 0)
        end_request(keeper, "a")
        await loaded(keeper, "a")
        assert stated(keeper, "b").loads == 0


async def test_what_can_never_fit_is_refused_before_anything_goes(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], f"memory_bytes = {MODEL_BYTES - 1}")) as keeper:
        with pytest.raises(ModelError, match=r"a needs .*, and h has room for"):
            await loaded(keeper, "a")
    async with keeping(write(tmp_path, ["a", "b"], ROOM_FOR_ONE + '\npin = ["a"]')) as keeper:
        await loaded(keeper, "a")
        with pytest.raises(ModelError, match="beside what is pinned"):
            await loaded(keeper, "b")
        assert states(keeper)["a"] == "ready"
        keeper.pin("a", pinned=False)
        await loaded(keeper, "b")


async def test_a_model_goes_when_nobody_uses_it_for_as_long_as_was_said(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b", "c"], "idle_ttl = 1")) as keeper:
        await loaded(keeper, "b", -1.0)
        await loaded(keeper, "c")
        await begin_request(keeper, "c")
        await loaded(keeper, "a", 0.0)
        assert stated(keeper, "b").expires_s is None and (stated(keeper, "a").expires_s or 9) < 1
        await until(lambda: states(keeper)["a"] == "asleep")
        assert stated(keeper, "a").evictions == {"asked": 1}
        assert states(keeper) == {"a": "asleep", "b": "ready", "c": "ready"}
        end_request(keeper, "c")
        await until(lambda: states(keeper)["c"] == "asleep")
        assert stated(keeper, "c").evictions == {"idle": 1}
        keeper.keep("b", 0.0)
        keeper.keep("a", 0.0)  # not loaded: nothing happens
        await until(lambda: states(keeper) == dict.fromkeys("abc", "asleep"))


async def test_unload_refuses_what_requests_use_unless_it_is_forced(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a"])) as keeper:
        await keeper.unload("a")
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        with pytest.raises(ModelBusy, match="requests use a"):
            await keeper.unload("a")
        assert states(keeper) == {"a": "ready"} and stated(keeper, "a").evictions == {}
        await keeper.unload("a", force=True)
        assert states(keeper) == {"a": "asleep"}
        with pytest.raises(UnknownModel, match="h has no model 'x': it has a"):
            await keeper.unload("x")


async def test_a_request_that_comes_as_the_model_is_told_to_go_keeps_it(tmp_path: Path) -> None:
    """The keeper thinks that it is idle; its process knows better."""
    async with keeping(write(tmp_path, ["a"])) as keeper:
        await loaded(keeper, "a")
        os.kill(pid(keeper, "a"), signal.SIGUSR1)
        with pytest.raises(ModelBusy):
            await keeper.unload("a")
        await until(lambda: states(keeper) == {"a": "ready"} and stated(keeper, "a").running == 1)
        end_request(keeper, "a")


async def test_unload_of_a_model_that_loads_ends_the_load(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["endless"], 'preload = ["endless"]')) as keeper:
        await until(lambda: states(keeper)["endless"] == "loading")
        first = pid(keeper, "endless")
        await keeper.unload("endless")
        assert not alive(first)


async def test_a_model_that_cannot_be_loaded_fails_for_all_who_wait_and_is_not_tried_again(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["broken", "a"])) as keeper:
        results = await asyncio.gather(*(loaded(keeper, "broken") for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in results] == ["h cannot load broken: it is broken"] * 3
        assert stated(keeper, "broken").state == "failed" and stated(keeper, "broken").reason == "it is broken"
        await loaded(keeper, "a")
        log = (tmp_path / "state" / "logs" / "models" / "broken.log").read_text()
        assert log.count("it is broken") == 1
        with pytest.raises(ModelError, match="it is broken"):  # asked for, it is tried again
            await loaded(keeper, "broken")
        keeper.reload(keeper.fleet)
        assert stated(keeper, "broken").state == "asleep", "hosts.toml may have been at fault"


@pytest.mark.slow
async def test_a_process_that_dies_while_it_loads_is_started_again_but_not_for_ever(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["crashes"])) as keeper:
        with pytest.raises(ModelError, match="ended by SIGSEGV"):
            await loaded(keeper, "crashes")
        assert stated(keeper, "crashes").state == "failed"


async def test_a_process_that_dies_when_it_is_ready_leaves_its_memory_and_is_loaded_at_the_next_request(
    tmp_path: Path,
) -> None:
    async with keeping(write(tmp_path, ["a", "b"])) as keeper:
        await loaded(keeper, "a")
        await loaded(keeper, "b")
        os.kill(pid(keeper, "a"), signal.SIGKILL)
        await until(lambda: states(keeper)["a"] == "asleep")
        assert keeper.used == MODEL_BYTES
        await loaded(keeper, "a")
        assert stated(keeper, "a").loads == 2


@pytest.mark.parametrize("state", ["loading", "ready", "draining"])
async def test_a_process_that_is_frozen_is_ended_and_does_not_hide_behind_the_beat_of_another(
    tmp_path: Path, state: str
) -> None:
    model = "endless" if state == "loading" else "a"
    path = write(tmp_path, [model, "b"], f'preload = ["{model}"]')
    async with keeping(path, patience=IMPATIENT) as keeper:
        await until(lambda: states(keeper)[model] == ("loading" if state == "loading" else "ready"))
        if state != "loading":
            await loaded(keeper, "b")
        if state == "draining":
            await begin_request(keeper, model)
            keeper.reload(load(write(tmp_path, ["b"], ports=ports_of(path))))
            await until(lambda: keeper.models[0].state == "draining")
        frozen = keeper.models[0].child
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        await until(lambda: _reason(keeper).startswith("its process has "))
        await until(lambda: not alive(frozen.pid))
        if state != "loading":
            assert states(keeper)["b"] == "ready"


async def test_a_list_that_has_changed_keeps_processes_and_ports(tmp_path: Path) -> None:
    path = write(tmp_path, ["a", "b"])
    async with keeping(path) as keeper:
        await loaded(keeper, "a")
        await loaded(keeper, "b")
        await begin_request(keeper, "b")
        before = stated(keeper, "a")
        keeper.reload(load(write(tmp_path, ["c", "a"], ports=ports_of(path))))
        assert set(states(keeper)) == {"a", "c"}
        after = stated(keeper, "a")
        assert (after.pid, after.port, after.kv_port) == (before.pid, before.port, before.kv_port)
        with pytest.raises(UnknownModel):
            await loaded(keeper, "b")
        await loaded(keeper, "c")
        assert [one.name for one in keeper.models] == ["a", "b", "c"]
        b = keeper.models[1]
        assert b.state == "draining" and b.child is not None
        os.kill(b.child.pid, signal.SIGUSR2)
        await until(lambda: [one.name for one in keeper.models] == ["a", "c"])


async def test_a_model_that_is_to_run_in_another_way_is_loaded_again(tmp_path: Path) -> None:
    path = write(tmp_path, ["a", "b"])
    async with keeping(path) as keeper:
        await loaded(keeper, "a")
        await loaded(keeper, "b")
        before = {model: pid(keeper, model) for model in "ab"}
        path.write_text(path.read_text() + "[models.a.engine.simulated]\nmax_batch = 3\n")
        keeper.reload(load(path))
        await until(lambda: states(keeper)["a"] == "ready" and pid(keeper, "a") != before["a"])
        assert pid(keeper, "b") == before["b"]


async def test_a_keeper_that_stops_ends_its_processes_side_by_side_also_one_that_loads(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b", "endless"])) as keeper:
        await loaded(keeper, "a")
        await loaded(keeper, "b")
        waiting = asyncio.ensure_future(loaded(keeper, "endless"))
        await until(lambda: states(keeper)["endless"] == "loading")
        pids = [pid(keeper, model) for model in ("a", "b", "endless")]
        keeper.stop()
        await until(lambda: not any(map(alive, pids)))
        with pytest.raises(Exception, match="shutting down"):
            await waiting


async def test_a_preload_is_loaded_at_start_and_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, ["a", "b", "c"], ROOM_FOR_TWO + '\npreload = ["a", "b", "c"]')
    async with keeping(path) as keeper:
        await until(lambda: list(states(keeper).values()).count("ready") == 2)
        assert states(keeper) == {"a": "ready", "b": "ready", "c": "asleep"}


async def test_a_pin_that_was_asked_for_outlives_a_changed_list_and_not_the_keeper(tmp_path: Path) -> None:
    path = write(tmp_path, ["a"])
    async with keeping(path) as keeper:
        keeper.pin("a", pinned=True)
        keeper.reload(load(path))
        assert stated(keeper, "a").pinned
    async with keeping(path) as keeper:
        assert not stated(keeper, "a").pinned


def ports_of(path: Path) -> str:
    keeping = load(path).hosts["h"].keeping
    assert keeping is not None
    return f"{keeping.ports[0]}-{keeping.ports[-1]}"


async def test_a_host_that_lacks_room_gets_what_another_one_of_the_machine_does_not_use(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name, ["a", "b"]))
    room, memory = 2 * MODEL_BYTES, tmp_path / "memory"
    async with keeping(paths[0], room=room, ledger=memory) as one, keeping(paths[1], room=room, ledger=memory) as two:
        await loaded(one, "a")
        await loaded(one, "b")
        await begin_request(one, "b")
        await until(lambda: two.budget == 0)
        await loaded(two, "a")
        assert (states(one), states(two)) == ({"a": "asleep", "b": "ready"}, {"a": "ready", "b": "asleep"})
        assert one.used + two.used <= room
        waiting = asyncio.ensure_future(loaded(two, "b"))  # takes the place of its own
        await waiting
        assert states(two) == {"a": "asleep", "b": "ready"} and states(one)["b"] == "ready"
        end_request(one, "b")


async def test_what_another_host_has_for_good_counts_for_what_can_never_fit(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    other = Ledger(memory)
    claimed = other.claim(MemoryClaim(host="single", model="m", nbytes=MODEL_BYTES, stays=True))
    async with keeping(write(tmp_path, ["a", "b"]), room=2 * MODEL_BYTES - 1, ledger=memory) as keeper:
        await until(lambda: keeper.others)
        with pytest.raises(ModelError, match="h has room for"):
            await loaded(keeper, "a")
        claimed.release()
        await until(lambda: not keeper.others)
        await loaded(keeper, "a")


async def test_who_waits_for_a_model_is_told_when_its_files_are_removed_meanwhile(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], ROOM_FOR_ONE)) as keeper:
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: stated(keeper, "b").waiting == 1)
        keeper.by_name["b"].files = replace(keeper.by_name["b"].files, reason="o/b: not there")
        keeper.wake()
        with pytest.raises(ModelError, match=r"h has no files of b: o/b: not there"):
            await waiting
        end_request(keeper, "a")


async def test_who_waits_for_room_is_told_when_it_is_pinned_meanwhile(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], ROOM_FOR_ONE + "\nmin_stay = 3600")) as keeper:
        await loaded(keeper, "a")
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: stated(keeper, "b").waiting == 1)
        keeper.pin("a", pinned=True)
        with pytest.raises(ModelError, match="beside what is pinned"):
            await waiting


async def test_a_preload_that_is_unloaded_while_it_loads_stays_unloaded(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["endless", "a"], 'preload = ["endless"]')) as keeper:
        await until(lambda: states(keeper)["endless"] == "loading")
        await keeper.unload("endless")
        await loaded(keeper, "a")
        assert states(keeper) == {"endless": "asleep", "a": "ready"}


async def test_a_preload_that_nobody_waits_for_any_more_takes_no_others_room(tmp_path: Path) -> None:
    path = write(tmp_path, ["a", "b"], ROOM_FOR_ONE + '\npreload = ["a", "b"]')
    async with keeping(path) as keeper:
        await until(lambda: states(keeper)["a"] == "ready")
        await begin_request(keeper, "a")
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: stated(keeper, "b").waiting == 1)
        waiting.cancel()
        await until(lambda: stated(keeper, "b").waiting == 0)
        assert keeper.wants == {"b": False} and "b" not in keeper.since
        end_request(keeper, "a")


async def test_the_ports_of_a_model_that_was_taken_off_are_given_on_once_its_process_has_ended(tmp_path: Path) -> None:
    free = free_ports(20)
    first = next(port for port in free if port + 1 in free)
    path = write(tmp_path, ["a"], ports=f"{first}-{first + 1}")
    async with keeping(path) as keeper:
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        process = keeper.by_name["a"].child
        assert process is not None
        keeper.reload(load(write(tmp_path, ["b"], ports=ports_of(path))))
        waiting = asyncio.ensure_future(loaded(keeper, "b"))
        await until(lambda: stated(keeper, "b").waiting == 1 and keeper.by_name["a"].state == "draining")
        assert keeper.by_name["b"].ports == keeper.by_name["a"].ports and keeper.by_name["b"].child is None
        os.kill(process.pid, signal.SIGUSR2)
        await waiting
        assert not alive(process.pid)
