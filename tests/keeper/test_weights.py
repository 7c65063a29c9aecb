"""The files of a keeper's models: pulled from a hub, looked at, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from disagg.api.keeper import PullEvent
from disagg.errors import FleetError, ModelBusy, ModelError
from disagg.keeper import processes, weights
from disagg.keeper.keeper import Keeper
from disagg.keeper.weights import hub_id, require_hub_id
from tests import tiny_models
from tests.hub import serving
from tests.keeper.keeping import begin_request, end_request, keeping, loaded, states, until
from tests.ports import free_ports, free_range

REPOSITORY = "org/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """hosts.toml with the host h, of which two names stand for one model of a hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    ports = free_range(4)
    path = tmp_path / "hosts.toml"
    path.write_text(
        '[fleet]\nname = "t"\n'
        + "".join(f'[models.{name}]\ncontext = 256\nsources = {{mlx = "{REPOSITORY}"}}\n' for name in ("a", "b"))
        + f'[hosts.h]\naddress = "127.0.0.1"\nport = 9\nroles = ["decode"]\nconnector = "local"\nservice = "process"\n'
        f'models = ["a", "b"]\nports = "{ports[0]}-{ports[-1]}"\n'
        'engine = {name = "mlx", device = "cpu", max_kv_bytes = 1000000}\n'
    )
    return path


@pytest.mark.slow
async def test_a_pulled_model_can_be_loaded_and_a_deleted_one_cannot(
    path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(REPOSITORY, model) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        async with keeping(path) as keeper:
            await until(lambda: states(keeper) == {"a": "absent", "b": "absent"})
            with pytest.raises(ModelError, match="h has no files of a: org/tiny: not there"):
                await loaded(keeper, "a")
            events = [event async for event in keeper.pull("a")]
            assert (events[0].status, events[-1].status) == ("pulling manifest", "success")
            files = {one.digest: one for one in events if one.digest}
            weights = max(files.values(), key=lambda one: one.total)
            assert weights.completed == weights.total == (model / "model.safetensors").stat().st_size
            assert states(keeper) == {"a": "asleep", "b": "asleep"}
            facts = keeper.stated()[0].facts
            assert facts is not None and facts.architecture == "llama"
            await loaded(keeper, "b")
            with pytest.raises(ModelBusy, match="h: b uses org/tiny"):
                await keeper.delete("a")
            await begin_request(keeper, "b")
            with pytest.raises(ModelBusy, match="requests use b"):
                await keeper.delete("b")
            end_request(keeper, "b")
            await until(lambda: keeper.stated()[1].running == 0)
            await keeper.delete("b")
            assert states(keeper) == {"a": "absent", "b": "absent"}


@pytest.mark.slow
async def test_files_that_are_removed_while_the_model_sleeps_are_missed_before_anything_goes_for_it(
    path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serving(REPOSITORY, model) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        async with keeping(path) as keeper:
            assert [event async for event in keeper.pull("a")][-1].status == "success"
            (file,) = (tmp_path / "cache").rglob("config.json")
            away = file.rename(file.with_name("away"))
            with pytest.raises(ModelError, match="was removed"):
                await loaded(keeper, "a")
            await until(lambda: states(keeper)["a"] == "absent")
            away.rename(file)
            await loaded(keeper, "a")  # which looks at them once more


@pytest.mark.slow
async def test_a_hub_that_does_not_answer_is_one_clear_error_and_a_caller_that_leaves_ends_the_pull(
    path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeping(path) as keeper:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
        with pytest.raises(FleetError, match="org/tiny cannot be downloaded from the hub"):
            _ = [event async for event in keeper.pull("a")]
        with serving(REPOSITORY, model) as url:
            monkeypatch.setenv("HF_ENDPOINT", url)
            async with aclosing(keeper.pull("a")) as events:
                await anext(events)
                await anext(events)
        assert states(keeper)["a"] == "absent" or keeper.stated()[0].total_bytes > 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", "org/name"),
        ("/cache/hub/models--org--name-1/snapshots/abc", "org/name-1"),
        ("/home/me/model", ""),
    ],
)
def test_a_folder_of_the_hubs_cache_is_known_by_the_models_id(source: str, expected: str) -> None:
    assert hub_id(source) == expected


@pytest.mark.slow
async def test_two_that_pull_one_model_take_turns_and_nothing_is_loaded_or_pulled_while_it_is_deleted(
    path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(REPOSITORY, model) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        async with keeping(path) as keeper:
            await until(lambda: states(keeper) == {"a": "absent", "b": "absent"})
            first = asyncio.ensure_future(pulled(keeper, "a"))
            await until(lambda: keeper.changing == {REPOSITORY})
            with pytest.raises(ModelBusy, match="org/tiny is being pulled or deleted"):
                await keeper.delete("b")
            second = await pulled(keeper, "b")
            assert second[0].status == "waiting for another pull of it" and second[-1].status == "success"
            assert (await first)[-1].status == "success" and first.done()

            removed_of = list[str]()

            async def removed(source: str) -> int:
                removed_of.append(source)
                with pytest.raises(ModelError, match="org/tiny is being removed"):
                    await loaded(keeper, "b")
                raise FleetError("its disk does not answer", "")

            monkeypatch.setattr(weights, "remove", removed)
            with pytest.raises(FleetError, match="its disk does not answer"):
                await keeper.delete("a")
            assert removed_of == [REPOSITORY] and states(keeper) == {"a": "asleep", "b": "asleep"}


async def pulled(keeper: Keeper, name: str) -> list[PullEvent]:
    return [event async for event in keeper.pull(name)]


async def test_a_look_that_cannot_be_made_is_made_again_and_holds_nothing_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "LOOK_AGAIN_S", 0.1)
    asked = list[str]()

    async def cannot(verb: str, sources: Collection[str]) -> dict[str, Any]:
        asked.append(verb)
        raise BlockingIOError("no process can be started")

    looks = weights._inventory
    monkeypatch.setattr(weights, "_inventory", cannot)
    async with keeping(path) as keeper:
        await until(lambda: len(asked) > 1)
        assert states(keeper) == {"a": "asleep", "b": "asleep"} and "files_not_known" in caplog.text
        monkeypatch.setattr(weights, "_inventory", looks)
        await until(lambda: states(keeper) == {"a": "absent", "b": "absent"})


def test_files_that_disagg_has_not_brought_are_refused_by_what_they_are() -> None:
    assert require_hub_id("h", "org/x", "remove") == "org/x"
    with pytest.raises(FleetError, match="h: /models/x is a folder of your own"):
        require_hub_id("h", "/models/x", "remove")
    with pytest.raises(FleetError, match="h: its engine loads no files of models"):
        require_hub_id("h", "", "remove")


@pytest.mark.slow
async def test_a_keeper_that_stops_while_it_looks_leaves_no_program(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(weights, "INVENTORY", endless)

    def looks() -> bool:
        return any(str(endless) in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))

    async with keeping(path):
        await until(looks)
    assert not looks()
