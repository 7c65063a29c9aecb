"""What a release is made of, and what changes its name."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Fleet, Host, Model, load
from disagg.fleet.deploy.release import (
    Installation,
    ModelSource,
    TargetState,
    fleet_file,
    package_files,
    release_hash,
    run_script,
    source,
    target_state,
)
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.paths import HostPaths
from tests.fleet.facts.fixture_facts import NEEDS, facts, fleet, fleet_of, front, here, several, spark, studio, wanted
from tests.values import of_type

HOSTILE = ["a b", "it's", 'a"b', "a;b", "$(touch owned)", "`touch owned`", "a\\b", "*", "-n", "%h $HOME"]


def made(local: Installation, host: Host) -> TargetState:
    result = target_state(local, host, facts("spark_bare"))
    assert isinstance(result, TargetState), result
    return result


def test_the_package_goes_without_caches_and_weights() -> None:
    files = package_files()
    assert {"disagg/__init__.py", "disagg/fleet/constraints.txt", "disagg/fleet/scripts/host.sh"} <= files.keys()
    assert not [name for name in files if "__pycache__" in name or "demo/models" in name]
    assert sum(map(len, files.values())) < 4 << 20


def test_its_name_is_over_names_and_contents() -> None:
    assert release_hash({"a": b"1", "b": b"2"}) == release_hash({"b": b"2", "a": b"1"})
    assert len({release_hash({"a": b"1"}), release_hash({"a": b"2"}), release_hash({"b": b"1"}), release_hash({})}) == 4


def test_another_hosts_change_makes_a_new_release_only_where_it_is_heeded() -> None:
    prefill, decode = spark(), studio()
    slower, moved = replace(prefill, port=8055), replace(decode, kv_port=9055)
    assert made(here(fleet(prefill, decode)), decode).hash == made(here(fleet(slower, decode)), decode).hash
    assert made(here(fleet(prefill, decode)), prefill).hash != made(here(fleet(prefill, moved)), prefill).hash, (
        "KV goes"
    )


def test_a_prefill_host_knows_where_it_may_deliver_kv(tmp_path: Path) -> None:
    prefill, decode = spark(), studio()
    (tmp_path / "hosts.toml").write_text(fleet_file(fleet(prefill, decode), prefill, {"qwen": ModelSource("/m")}))
    loaded = load(tmp_path / "hosts.toml")
    assert [host.name for host in loaded.serving("qwen", "decode")] == ["mac-studio-1"]
    assert loaded.models["qwen"].sources["transformers"] == "/m"


def test_the_token_and_a_new_version_of_a_service_file_have_their_part() -> None:
    local = here(fleet(spark()))
    assert made(local, spark()).hash == made(replace(local, tokens=("another",)), spark()).hash, "never in a release"
    assert "service/disagg-dgx-spark-1.service" in made(local, spark()).files
    assert "supervise" in made(local, spark(service="systemd")).files, "a supervisor from before must be stopped by it"


def test_a_hosts_own_file_loads_and_names_the_model_as_it_is_there(tmp_path: Path) -> None:
    host = studio()
    (tmp_path / "hosts.toml").write_text(fleet_file(fleet(), host, {"qwen": ModelSource("/home/x/models/qwen")}))
    loaded = load(tmp_path / "hosts.toml")
    assert list(loaded.hosts) == ["mac-studio-1"]
    assert loaded.models["qwen"].sources == {"mlx": "/home/x/models/qwen"}
    (tmp_path / "hosts.toml").write_text(fleet_file(fleet(spark(), host), spark(), {"qwen": ModelSource("/m")}))
    loaded = load(tmp_path / "hosts.toml")
    assert list(loaded.hosts) == ["dgx-spark-1", "mac-studio-1"]
    assert loaded.models["qwen"].sources == {"transformers": "/m", "mlx": str(Path.home() / "models/qwen")}


def test_a_gateway_knows_the_whole_fleet_and_is_served_by_a_program_of_its_own(tmp_path: Path) -> None:
    target = made(here(fleet(spark(), studio(), front())), front())
    loaded = listed(target, tmp_path)
    assert list(loaded.hosts) == ["dgx-spark-1", "mac-studio-1", "front"]
    assert list(loaded.models) == ["qwen"]
    assert b"\nprogram=disagg.gateway\n" in target.files["run"] and b"config=list/hosts.toml\n" in target.files["run"]
    assert b'-m "$program" --config' in target.files["run"]
    assert target.sources == ()


@pytest.mark.parametrize(
    ("written", "text"),
    [("owner/model", "owner/model"), ("/data/m", "/data/m"), ("~/m", "/home/nvidia/m"), ("~bob/m", "~bob/m")],
)
def test_a_model_that_is_there_is_read_from_there(written: str, text: str) -> None:
    model = Model("qwen", {"transformers": "/resolved/here"}, 1, (), {"transformers": written})
    assert source(replace(fleet(), models={"qwen": model}), spark(), HostPaths("/home/nvidia", "h")) == ModelSource(
        text
    )


def test_a_carried_folder_is_read_once_for_all_hosts_and_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("qwen", {"transformers": str(tmp_path / "m")}, 1, (), {"transformers": "./m"})
    (tmp_path / "m").mkdir()
    (tmp_path / "m/weights").write_bytes(b"1")
    of = replace(fleet(), models={"qwen": model})
    read: list[Path] = []
    opened = Path.open

    def noted(path: Path, mode: str = "r") -> object:
        read.append(path)
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", noted)
    names = {of_type(source(of, spark(), HostPaths(home, "h")), ModelSource).name for home in ("/a", "/b", "/c")}
    assert read == [tmp_path / "m/weights"] and len(names) == 1
    monkeypatch.undo()
    (tmp_path / "m/weights").write_bytes(b"22")
    assert of_type(source(of, spark(), HostPaths("/a", "h")), ModelSource).name not in names


def test_the_target_state_of_the_same_facts_is_computed_once() -> None:
    here_, host, found = here(fleet(spark())), spark(), facts("spark_bare")
    assert target_state(here_, host, found) is target_state(here_, host, found)
    assert target_state(here_, host, replace(found)) is not target_state(here_, host, found)


def test_a_model_folder_beside_hosts_toml_is_carried_under_the_name_of_its_content(tmp_path: Path) -> None:
    model = Model("qwen", {"transformers": str(tmp_path / "my model")}, 1, (), {"transformers": "./my model"})
    of: Fleet = replace(fleet(), models={"qwen": model})
    paths = HostPaths("/home/nvidia", "h")
    refusal = source(of, spark(), paths)
    assert isinstance(refusal, Refusal) and "there is no model folder" in refusal.cause
    (tmp_path / "my model/sub").mkdir(parents=True)
    (tmp_path / "my model/sub/a.bin").write_bytes(b"1")
    first = source(of, spark(), paths)
    assert isinstance(first, ModelSource) and first.text == f"/home/nvidia/.disagg/models/carried/{first.name}"
    assert list(first.files) == ["sub/a.bin"]
    (tmp_path / "my model/sub/a.bin").write_bytes(b"2")
    second = source(of, spark(), paths)
    assert isinstance(second, ModelSource) and second.name != first.name
    with (tmp_path / "my model/big.bin").open("wb") as big:
        big.truncate(300 << 20)
    refusal = source(of, spark(), paths)
    assert isinstance(refusal, Refusal) and "300 MiB, more than deploying copies" in refusal.cause


@pytest.mark.parametrize("name", HOSTILE)
def test_the_run_script_serves_from_folders_of_any_name_and_runs_nothing_else(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    paths = HostPaths(str(home), "h")
    release = Path(paths.release("1" * 16))
    release.mkdir(parents=True)
    Path(paths.logs).mkdir()
    python = home / "python"
    python.write_text(
        f'#!/bin/sh\nprintf \'%s\\n\' "$@" "$PYTHONPATH" "$DISAGG_TOKEN_FILE" >{shlex.quote(str(home))}/said\n'
    )
    python.chmod(0o755)
    (release / "run").write_text(run_script(paths, replace(spark(), name="h"), str(python)))
    Path(paths.current).symlink_to(f"releases/{'1' * 16}")
    subprocess.run(["/bin/sh", f"{paths.current}/run"], check=True, cwd=tmp_path, timeout=20)
    argv = ["-P", "-u", "-m", "disagg.servers", "--config", f"{release}/hosts.toml", "--host", "h"]
    assert (home / "said").read_text().split("\n")[:-1] == [*argv, str(release), paths.token]
    line = json.loads(Path(paths.logs, "server.log").read_text())
    assert (line["event"], line["release"]) == ("starting", "1" * 16)
    assert Path(paths.folder, "serving").read_text().split()[1] == "1" * 16
    assert not list(tmp_path.rglob("owned"))


def test_a_long_log_is_put_aside_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.fleet.deploy.release.LOG_BYTES", 10)
    paths = HostPaths(str(tmp_path), "h")
    release = Path(paths.release("1" * 16))
    release.mkdir(parents=True)
    Path(paths.logs).mkdir()
    (release / "run").write_text(run_script(paths, replace(spark(), name="h"), "/bin/true"))
    for _ in range(2):
        subprocess.run(["/bin/sh", str(release / "run")], check=True, timeout=20)
    logs = sorted(path.name for path in Path(paths.logs).iterdir())
    assert logs == ["server.log", "server.log.1"]


def test_two_hosts_of_one_role_share_an_environment() -> None:
    one, other = spark(), spark(name="dgx-spark-2", address="10.0.0.4")
    found = wanted(one, facts("spark_bare")), wanted(other, facts("spark_bare", "dgx-spark-2"))
    assert found[0].environment.hash == found[1].environment.hash
    assert found[0].hash != found[1].hash
    assert NEEDS.locked in of_type(found[0].environment.files["constraints.txt"], bytes).decode()


NAMES = ("a", "b", "c")


def listed(target: TargetState, folder: Path) -> Fleet:
    (folder / "hosts.toml").write_bytes(target.listed)
    return load(folder / "hosts.toml")


def test_the_list_of_a_host_with_several_models_is_no_part_of_its_release(tmp_path: Path) -> None:
    host, shorter = several(studio(), *NAMES), several(studio(), "a", "b", ports=8100)
    shorter = replace(shorter, keeping=host.keeping)
    target, other = (made(here(fleet_of(NAMES, one)), one) for one in (host, shorter))
    assert target.hash == other.hash
    assert "hosts.toml" not in target.files and target.listed != other.listed
    assert list(listed(target, tmp_path).served) == [f"mac-studio-1/{name}" for name in NAMES]
    assert made(here(fleet_of(NAMES, host)), replace(host, port=8099)).hash != target.hash
    run = target.files["run"].decode()
    assert "program=disagg.keeper\n" in run and "config=list/hosts.toml\n" in run
    assert made(here(fleet()), studio()).files["run"].decode().count("config=hosts.toml\n") == 1


def test_a_host_with_several_models_reads_each_where_it_is() -> None:
    host = several(studio(), "a", "b")
    assert [one.text for one in made(here(fleet_of(NAMES, host)), host).sources] == ["mlx/a", "mlx/b"]


def test_a_prefill_host_with_one_model_knows_that_one_of_a_decode_host_with_several(tmp_path: Path) -> None:
    prefill, decode = spark(model="a"), several(studio(), *NAMES)
    target = made(here(fleet_of(NAMES, prefill, decode)), prefill)
    (tmp_path / "hosts.toml").write_bytes(target.files["hosts.toml"])
    known = load(tmp_path / "hosts.toml")
    assert list(known.served) == ["dgx-spark-1", "mac-studio-1/a"]
    assert known.served["mac-studio-1/a"].kv_ports == range(8100, 8106)
    longer = replace(decode, models=("a", "c"))
    assert made(here(fleet_of(NAMES, prefill, longer)), prefill).hash == target.hash


def test_a_prefill_host_with_several_models_knows_every_decode_host_with_several(tmp_path: Path) -> None:
    prefill, decode, alone = several(spark(), "a"), several(studio(), "b", "c"), studio(name="mac-2", model="c")
    known = listed(made(here(fleet_of(NAMES, prefill, decode, alone)), prefill), tmp_path)
    assert list(known.hosts) == ["dgx-spark-1", "mac-studio-1"]
    assert {model.name: model.sources for model in known.models.values()} == {
        "a": {"transformers": "owner/a"},
        "b": {"mlx": "mlx/b"},
        "c": {"mlx": "mlx/c"},
    }


def test_one_quantized_model_brings_the_packages_for_it() -> None:
    host = several(spark(), "a", "b")
    of = fleet_of(NAMES, host)
    quantized = replace(of.models["b"], engine={"transformers": {"quantization": "int8"}})
    assert "quantize" in made(here(replace(of, models={**of.models, "b": quantized})), host).environment.extras
    assert "quantize" not in made(here(of), host).environment.extras
