from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Fleet, Host, load
from disagg.errors import FleetError
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult
from disagg.fleet.models.inventory import ModelInventory, RequiredModel, StoredModel, neighbours, remove
from disagg.fleet.models.pull import Models, plan
from tests.fleet.models.hub_models import REVISION, SOURCE, files, own, write_folder, write_hub
from tests.testbed.bed import HOSTS_TOML, Bed
from tests.values import of_type, present

PYTHON = "/usr/bin/python3"


def inventory(
    host: Any,
    source: Any = SOURCE,
    state: Any = "absent",
    size: int = 0,
    *,
    hub: str = "/env/bin/python",
    python: Any = PYTHON,
    carried: bool = False,
) -> Any:
    return ModelInventory(RequiredModel(host, source, carried), {source: StoredModel(source, state, size)}, python, hub)


@pytest.fixture
def hosts() -> list[Host]:
    fleet = load(HOSTS_TOML)
    return [fleet.hosts[name] for name in ("dgx-spark-1", "dgx-spark-2", "mac-studio-1")]


def ignored(host: Any, what: Any, how: Any) -> None:
    """A report of progress that nobody watches."""


def test_one_host_downloads_and_the_others_copy_from_it(hosts: list[Host]) -> None:
    tasks = plan([inventory(host) for host in hosts], hosts)
    assert [(task.host, task.source_host) for task in tasks] == [
        (hosts[0], None),
        (hosts[1], hosts[0]),
        (hosts[2], hosts[0]),
    ]


def test_what_any_host_has_is_copied_and_not_downloaded(hosts: list[Host]) -> None:
    inventories = [inventory(hosts[0]), inventory(hosts[1], state="complete", size=9), inventory(hosts[2])]
    assert {task.host.name: task.source_host for task in plan(inventories, hosts)} == {
        "dgx-spark-1": hosts[1],
        "mac-studio-1": hosts[1],
    }


def test_a_host_that_is_not_asked_for_still_gives(hosts: list[Host]) -> None:
    inventories = [inventory(hosts[0]), inventory(hosts[1], state="complete", size=9)]
    (task,) = plan(inventories, hosts[:1])
    assert (task.host, task.source_host) == (hosts[0], hosts[1])


def test_who_has_most_of_it_downloads_the_rest(hosts: list[Host]) -> None:
    inventories = [
        inventory(hosts[0]),
        inventory(hosts[1], state="partial", size=500),
        inventory(hosts[2], state="partial", size=20),
    ]
    downloads = [task.host for task in plan(inventories, hosts) if task.source_host is None]
    assert downloads == [hosts[1]]


def test_different_sources_are_downloaded_each_on_its_own_host(hosts: list[Host]) -> None:
    tasks = plan([inventory(hosts[0], "a/x"), inventory(hosts[1], "a/y")], hosts)
    assert [(task.source, task.source_host) for task in tasks] == [("a/x", None), ("a/y", None)]


def test_what_is_there_or_comes_with_a_deployment_is_left_alone(hosts: list[Host]) -> None:
    assert plan([inventory(hosts[0], state="complete"), inventory(hosts[1], carried=True)], hosts) == []


def test_two_hosts_of_one_machine_bring_a_model_once(hosts: list[Host]) -> None:
    twin = replace(hosts[1], name="twin", address=hosts[0].address)
    tasks = plan([inventory(hosts[0]), inventory(twin)], [hosts[0], twin])
    assert [task.host.name for task in tasks] == ["dgx-spark-1"]


def test_a_folder_that_no_host_has_cannot_be_brought_and_the_command_that_puts_it_there_is_named(
    hosts: list[Host],
) -> None:
    (task,) = plan([inventory(hosts[0], "/models/own")], hosts)
    assert "no host of the fleet has /models/own" in present(task.error).message
    assert present(task.error).hint.startswith("rsync -a FOLDER/ 169.254.150.103:/models/own/")


def test_a_bare_host_cannot_download_before_it_is_deployed(hosts: list[Host]) -> None:
    (task,) = plan([inventory(hosts[0], hub="")], hosts)
    assert present(task.error).hint == "disagg deploy --host dgx-spark-1"


def shared_source(bed: Bed, folder: Path, source: Any = SOURCE) -> Fleet:
    """The bed's fleet with one source for both engines of qwen."""
    path = bed.write_hosts_toml(folder / "hosts.toml")
    text = path.read_text()
    old = 'transformers = "package:demo/models/qwen3-moe-tiny"\nmlx = "package:demo/models/qwen3-moe-tiny"'
    assert old in text
    path.write_text(text.replace(old, f'transformers = "{source}"\nmlx = "{source}"'))
    return load(path)


def surveyed(models: Models, hosts: Sequence[Host]) -> list[ModelInventory]:
    """The inventories of hosts that all answer."""
    return [of_type(inventory, ModelInventory) for inventory in models.survey(hosts)]


def test_pulling_copies_from_host_to_host_and_a_second_time_changes_nothing(clean_homes: Bed, tmp_path: Path) -> None:
    bed = clean_homes
    bed.need_links()
    fleet = shared_source(bed, tmp_path)
    source_host = bed.hosts["dgx-spark-1"]
    write_hub(source_host.home / ".cache/huggingface/hub", files())
    own(source_host.home / ".cache")
    wanted = fleet.serving("qwen3-coder:30b", "prefill") + fleet.serving("qwen3-coder:30b", "decode")
    with Models(fleet) as models:
        first = models.pull(surveyed(models, wanted), wanted, ignored)
        second = models.pull(surveyed(models, wanted), wanted, ignored)
    assert [(one.result, one.source_host) for one in first] == [("there", ""), ("copied", "dgx-spark-1")]
    assert [one.result for one in second] == ["there", "there"]


def test_a_path_with_a_home_of_its_own_on_each_host_is_copied_between_them(clean_homes: Bed, tmp_path: Path) -> None:
    bed = clean_homes
    bed.need_links()
    fleet = shared_source(bed, tmp_path, "~/models/tiny")
    source_host = bed.hosts["mac-studio-2"]
    write_folder(source_host.home / "models/tiny", files())
    own(source_host.home / "models")
    wanted = fleet.serving("qwen3-coder:30b", "prefill") + fleet.serving("qwen3-coder:30b", "decode")
    with Models(fleet) as models:
        done = models.pull(surveyed(models, wanted), wanted, ignored)
        inventories = surveyed(models, wanted)
        assert [(one.result, one.source_host) for one in done] == [("copied", "mac-studio-2"), ("there", "")]
        with pytest.raises(FleetError, match="folder of your own"):
            remove(models.machines[wanted[0]], inventories[0])
    assert (bed.hosts["dgx-spark-1"].home / "models/tiny/config.json").exists()


def test_removing_takes_the_whole_model_and_nothing_else(clean_homes: Bed, tmp_path: Path) -> None:
    bed = clean_homes
    bed.need_links()
    fleet = shared_source(bed, tmp_path)
    place = bed.hosts["dgx-spark-1"].home / ".cache/huggingface/hub"
    root, other = write_hub(place, files()), write_hub(place, files(), "someone/else")
    own(place.parents[1])
    host = fleet.hosts["dgx-spark-1"]
    with Models(fleet) as models:
        (there,) = surveyed(models, [host])
        assert there.model.revision == REVISION
        assert remove(models.machines[host], there) > 2 << 20
        assert not root.exists() and other.exists()
        (gone,) = surveyed(models, [host])
    assert gone.model.state == "absent"


def test_a_model_that_a_server_of_the_same_machine_reads_stays(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = shared_source(bed, tmp_path)
    host = fleet.hosts["dgx-spark-1"]
    twin = replace(host, name="twin")
    monkeypatch.setenv("HOME", str(tmp_path))
    root = write_hub(tmp_path / ".cache/huggingface/hub", files())
    own_folder = tmp_path / ".disagg/hosts/twin"
    own_folder.mkdir(parents=True)
    server = [sys.executable, "-c", "input()", f"{own_folder}/"]
    pair = replace(fleet, hosts={host.name: host, "twin": twin})
    with (
        Models(pair, connect=lambda one: LocalMachine(one.name)) as models,
        subprocess.Popen(server, stdin=subprocess.PIPE) as process,
    ):
        (own_folder / "serving").write_text(f"{process.pid} {'1' * 16}\n")
        read, _ = surveyed(models, neighbours(pair, [host]))
        with pytest.raises(FleetError, match=r"the running server of twin uses .* \(disagg stop --host twin"):
            remove(models.machines[host], read)
        process.communicate(b"\n")
        idle, _ = surveyed(models, neighbours(pair, [host]))
        assert root.exists() and remove(models.machines[host], idle) > 2 << 20
    assert not root.exists()


def test_a_hub_that_does_not_answer_is_a_clear_error_with_what_to_do(
    clean_homes: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own program, with the hub at an address that refuses."""
    bed = clean_homes
    fleet = shared_source(bed, tmp_path)
    host = fleet.hosts["dgx-spark-1"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = []
    with Models(fleet, connect=lambda one: LocalMachine(one.name)) as models:
        ready = ModelInventory(
            RequiredModel(host, SOURCE), {SOURCE: StoredModel(SOURCE, "absent")}, sys.executable, sys.executable
        )
        (done,) = models.pull([ready], [host], lambda where, what, how: lines.append(what))
    assert done.result == "failed"
    assert "someone/tiny-model cannot be downloaded from the hub" in present(done.error).message
    assert "HF_ENDPOINT" in present(done.error).hint
    assert lines == ["read config.json of someone/tiny-model"]


class Hub:
    """Stands for the program that downloads: each host's calls, and what it prints of config.json."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
        self.config, self.asked = config, list[str]()
        monkeypatch.setattr("disagg.fleet.models.pull.run_program", self)
        monkeypatch.setattr(
            "disagg.fleet.models.pull.stored_models", lambda *_: {SOURCE: StoredModel(SOURCE, "complete", 9)}
        )

    def __call__(self, machine: Any, python: str, program: Path, argv: Sequence[str], **options: Any) -> CommandResult:
        self.asked.append(f"{machine.name}: {'config' if argv[-1] == 'config' else 'all of it'}")
        return CommandResult(0, f'{{"config": {self.config}}}\n', "")


def pulled(inventories: list[Any], wanted: list[Host], **options: Any) -> list[Any]:
    with Models(load(HOSTS_TOML), lambda host: LocalMachine(host.name)) as models:
        return models.pull(inventories, wanted, ignored, **options)


def test_a_model_that_cannot_be_served_is_not_downloaded_beyond_its_config(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, '{"model_type": "minimax"}')
    done = pulled([inventory(host) for host in hosts], hosts)
    assert [one.result for one in done] == ["failed"] * 3
    error = present(done[0].error)
    assert error.message == f"dgx-spark-1: {SOURCE} is not pulled: mlx-lm has another model of this name, MiniMax-M2"
    assert error.hint == "use another model; to pull it all the same: disagg models pull --anyway"
    assert hub.asked == ["dgx-spark-1: config"]


def test_what_cannot_be_served_is_pulled_if_that_is_wanted_all_the_same(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, '{"model_type": "minimax"}')
    (done,) = pulled([inventory(hosts[0])], hosts[:1], anyway=True)
    assert (done.result, done.bytes) == ("downloaded", 9)
    assert hub.asked == ["dgx-spark-1: all of it"]


def test_a_host_whose_engine_cannot_serve_a_model_gets_none_and_the_others_do(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, '{"model_type": "minicpm3"}')
    with_vllm = replace(hosts[0], engine=replace(hosts[0].engine, name="vllm"))
    done = pulled([inventory(with_vllm, size=5), inventory(hosts[2])], [with_vllm, hosts[2]])
    assert [one.result for one in done] == ["failed", "downloaded"]
    assert "vLLM keeps the keys and values of every head" in present(done[0].error).message
    assert hub.asked == ["dgx-spark-1: config", "mac-studio-1: all of it"]


def test_a_copy_from_a_host_that_has_the_model_is_refused_likewise(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, "{}")
    there = inventory(hosts[1], state="complete", size=9)
    config = {"model_type": "recurrent_gemma"}
    there = replace(there, stored={SOURCE: replace(there.stored[SOURCE], config=config)})
    (done,) = pulled([inventory(hosts[0]), there], hosts[:1])
    assert "transformers keeps the states of one prompt at a time" in present(done.error).message
    assert hub.asked == []


def test_a_host_on_the_machine_of_one_whose_download_failed_has_nothing_either(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, "[]")
    twin = replace(hosts[1], name="twin", address=hosts[0].address)
    done = pulled([inventory(hosts[0]), inventory(twin)], [hosts[0], twin])
    assert [one.result for one in done] == ["failed", "failed"]
    assert [one.error is not None for one in done] == [True, False], "one message is enough"
