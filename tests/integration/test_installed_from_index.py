"""Two bare machines: their whole environments come from the package index, and they serve from these alone. One has uv,
which installs torch in a fraction of pip's CPU time; pip installs the other's.

The index is the one that pip uses here, so that the hosts take the very torch that this machine would. The tests build
on one another.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from uv import find_uv_bin

from tests.integration.deployed import ROOT, Operator
from tests.testbed.bed import Bed
from tests.testbed.index import package_index

PREFILL, DECODE = "dgx-spark-1", "dgx-spark-2"  # a Mac of the bed has no MLX that runs there
INSTALL_S = 780.0
HOSTS = """\
[fleet]
name = "bare"

[deploy]
index_url = "{index}"
find_links = ["{index}/torch/"] # which may be torch for CPUs: another file than the lock's

[models.tiny]
context = 2048
[models.tiny.sources]
transformers = "package:demo/models/qwen3-moe-tiny"
mlx = "package:demo/models/qwen3-moe-tiny"
"""
HOST = """
[hosts.{name}]
address = "{address}"
roles = ["{role}"]
model = "tiny"
port = {port}
connector = "ssh"
service = "process"
python = "{python}"
{ports}
[hosts.{name}.engine]
name = "{engine}"
dtype = "float32"
device = "cpu"
threads = 1
{limits}"""

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(machines: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Deployed and started. Afterwards nothing is left: an environment with torch is large."""
    machines.need_links()
    folder = tmp_path_factory.mktemp("operator")
    homes = [machines.hosts[name].home for name in (PREFILL, DECODE)]
    install_uv(homes[0])
    leave_compiling_to_imports(homes[1])
    with package_index(machines) as index, machines.entered():
        made = Operator(machines, folder / "hosts.toml", folder)
        made.config.write_text(hosts_toml(machines, index.url))
        made.run("deploy", "--yes", timeout=INSTALL_S)
        assert index.sent > 50 << 20, "torch alone is larger"
        made.run("start")
        yield made
        made.run("uninstall", "--yes", "--models")
        assert not any((home / ".disagg").exists() for home in homes)
    for home in homes:
        shutil.rmtree(home / ".cache", ignore_errors=True)


def install_uv(home: Path) -> None:
    (home / ".local/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(find_uv_bin(), home / ".local/bin/uv")


def leave_compiling_to_imports(home: Path) -> None:
    """pip would compile every module of transformers: minutes, of which the server needs seconds. Nor need it keep what
    it has downloaded."""
    settings = home / ".config/pip/pip.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[install]\ncompile = no\nno-cache-dir = true\n")


def hosts_toml(bed: Bed, index: str) -> str:
    """No host has more than the Python that the tests' own environment was made with."""
    python = Path(sys.base_prefix).resolve() / "bin" / "python{}.{}".format(*sys.version_info)
    limits = "max_batch = 2\nmax_kv_bytes = 268_435_456\n"
    hosts = (
        HOST.format(name=name, address=bed.hosts[name].address, python=python, **more)
        for name, more in (
            (PREFILL, {"role": "prefill", "port": 8000, "ports": "", "engine": "transformers", "limits": ""}),
            (DECODE, {"role": "decode", "port": 8001, "ports": "kv_port = 9001\n", "engine": "mlx", "limits": limits}),
        )
    )
    return HOSTS.format(index=index) + "".join(hosts)


def test_uv_installs_where_it_is_and_pip_elsewhere(fleet: Operator) -> None:
    made = {name: next(fleet.bed.hosts[name].home.glob(".disagg/envs/*/pyvenv.cfg")) for name in (PREFILL, DECODE)}
    assert {name: "uv = " in file.read_text() for name, file in made.items()} == {PREFILL: True, DECODE: False}


def test_two_bare_hosts_answer_with_what_the_index_gave_them(fleet: Operator) -> None:
    assert {name: one["state"] for name, one in fleet.status().items()} == {PREFILL: "healthy", DECODE: "healthy"}
    prompt = ("generate", "-m", "tiny", "--max-tokens", "8", "--json", "def fibonacci(n):")
    (result,) = json.loads(fleet.run(*prompt).stdout)["results"]
    assert result["metrics"]["method"] == "disaggregated" and result["metrics"]["decode_computed_tokens"] == 1
    assert result["text"]


@pytest.mark.parametrize(("name", "library"), [(PREFILL, "torch/lib/libtorch_cpu.so"), (DECODE, "mlx/lib/libmlx.so")])
def test_a_server_has_loaded_its_own_environment_and_nothing_else(fleet: Operator, name: str, library: str) -> None:
    host = fleet.bed.hosts[name]
    environment = (host.home / ".disagg/hosts" / name / "current/environment").read_text().strip()
    (server,) = (one for one in host.processes() if "disagg.servers" in _command(one))
    own = f"{host.remote_home}/.disagg/envs/{environment}"
    assert _command(server)[0] == f"{own}/bin/python"
    packages = {mapped.path for mapped in server.memory_maps() if "-packages/" in mapped.path}
    assert any(path.endswith(library) for path in packages)
    assert [path for path in packages if not path.startswith(f"{own}/lib/")] == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_second_deploy_finds_all_there_and_writes_nothing(fleet: Operator) -> None:
    fleet.run("stop")  # a server writes its log
    homes = [fleet.bed.hosts[name].home for name in (PREFILL, DECODE)]
    before = stamps(*homes)
    assert len(before) > 10_000, "two environments"
    assert "2 unchanged" in fleet.run("deploy", "--yes").stdout
    assert stamps(*homes) == before


def stamps(*folders: Path) -> dict[str, tuple[int, int, int]]:
    """Of everything in them."""
    paths = (path for folder in folders for path in (folder, *folder.rglob("*")))
    return {str(path): (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path in paths for s in (path.lstat(),)}


def test_a_changed_line_of_code_sends_the_package_alone_and_a_rollback_goes_back(
    fleet: Operator, tmp_path: Path
) -> None:
    deployed = fleet.bed.hosts[PREFILL].home / ".disagg/hosts" / PREFILL
    first = (deployed / "current").resolve()
    environment = deployed.parents[1] / "envs" / (first / "environment").read_text().strip()
    before = stamps(environment)
    edited = replace(fleet, code=str(with_another_line(tmp_path)))
    (report,) = json.loads(edited.run("deploy", "--yes", "--json", "--host", PREFILL).stdout)["hosts"]
    assert [step["name"] for step in report["plan"]["steps"]] == ["prepare", "release", "check", "switch", "tidy"]
    assert report["bytes"] < 2 << 20, "the package, compressed"
    assert (deployed / "previous").resolve() == first != (deployed / "current").resolve()
    assert stamps(environment) == before, "an older one, of whatever was deployed before, may go"
    fleet.run("rollback", "--host", PREFILL)
    assert (deployed / "current").resolve() == first
    assert "1 unchanged" in fleet.run("deploy", "--yes", "--host", PREFILL).stdout


def with_another_line(folder: Path) -> Path:
    """A folder with a disagg that differs from this one by one line."""
    ignore = shutil.ignore_patterns("__pycache__")
    module = shutil.copytree(Path(ROOT, "disagg"), folder / "disagg", ignore=ignore) / "servers/__main__.py"
    module.write_text(f"{module.read_text()}# another line\n")
    return folder
