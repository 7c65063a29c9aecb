"""`disagg deploy` from the command line, against four machines that are only reached by SSH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.cli.app import main
from disagg.config import load
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.services import command
from tests.deadlines import LONG_S, wait_until
from tests.testbed.bed import Bed
from tests.testbed.uv import install_uv

NAMES = ["dgx-spark-1", "dgx-spark-2", "mac-studio-1", "mac-studio-2"]


@dataclass
class Fleet:
    """The bed's hosts with nothing on them, a hosts.toml, and the command line."""

    bed: Bed
    path: Path
    capture: pytest.CaptureFixture[str]

    def disagg(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        with pytest.raises(SystemExit) as ended:
            main(["--config", str(self.path), *arguments])
        out, err = self.capture.readouterr()
        return int(ended.value.code or 0), out, err

    def deploy(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """`disagg deploy --json`: the reports by host, and the exit code under ""."""
        code, out, _ = self.disagg("deploy", "--yes", "--json", *arguments)
        return {"": {"code": code}} | {report["host"]: report for report in json.loads(out)["hosts"]}

    def results(self, *arguments: str) -> list[str]:
        reports = self.deploy(*arguments)
        return [reports[name]["result"] for name in NAMES]

    def current(self, name: str) -> str:
        link = self.bed.hosts[name].home / ".disagg/hosts" / name / "current"
        assert (link / "run").is_file()
        return link.resolve().name

    def stamps(self) -> dict[str, tuple[int, int, int]]:
        """Of everything on all hosts."""
        homes = [host.home for host in self.bed.hosts.values()]
        paths = [path for home in homes for path in (home, *home.rglob("*"))]
        return {str(p): (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p in paths for s in (p.lstat(),)}

    def change(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new, 1))


@pytest.fixture
def fleet(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    install_uv(bed)
    path = bed.write_hosts_toml(tmp_path / "hosts.toml")
    path.write_text('[deploy]\ninstaller = "uv"\ncuda_on_cpu = true\n\n' + path.read_text())
    yield Fleet(bed, path, capsys)
    for host in bed.hosts.values():
        shutil.rmtree(host.home / ".disagg", ignore_errors=True)


def test_four_bare_hosts_are_deployed_and_a_second_run_touches_nothing(fleet: Fleet) -> None:
    code, out, _ = fleet.disagg("deploy", "--dry-run")
    assert code == 0 and "4 planned" in out and "switch to the new release" in out
    assert not any((host.home / ".disagg").exists() for host in fleet.bed.hosts.values())
    code, out, err = fleet.disagg("deploy", "--yes")
    assert code == 0 and "4 changed" in out and "next: disagg start" in out
    assert "mac-studio-2: [1/10] make folders" in err
    before = fleet.stamps()
    code, out, err = fleet.disagg("deploy", "--yes")
    assert (code, err) == (0, "") and "4 unchanged" in out
    assert fleet.stamps() == before


def test_what_was_deployed_serves(fleet: Fleet) -> None:
    """One host, started through its service manager's own command: a Mac, whose server starts in half the time."""
    name = "mac-studio-2"
    assert fleet.deploy("--host", name)[name]["result"] == "changed"
    host, own = load(fleet.path).hosts[name], fleet.bed.hosts[name].home / ".disagg/hosts" / name
    remote = machine_for(host)
    try:
        facts = read_host_facts(remote, host)
        start, stop = (command("process", facts.paths, verb) for verb in ("start", "stop"))
        result = remote.run(start.argv, script=start.script)
        assert result.ok, result.stderr
        token = (own / "token").read_text().strip()

        def healthy() -> bool:
            try:
                headers = {"Authorization": f"Bearer {token}"}
                answer = httpx.get(
                    f"{host.url}/health", headers=headers, timeout=2, trust_env=False, verify=False
                ).json()
            except httpx.HTTPError:
                return False
            return bool(answer.get("status") == "ok")

        try:
            wait_until(healthy)
        except AssertionError as error:
            raise AssertionError((own / "logs/server.log").read_text()) from error
        assert read_host_facts(remote, host).runs == fleet.current(name)
        fleet.change(f"[hosts.{name}.engine]\n", f"[hosts.{name}.engine]\nchunk_tokens = 512\n")
        plan = fleet.deploy("--host", name)[name]["plan"]
        assert plan["needs"] == "restart"
        assert healthy(), "deploying does not restart"
        code, _, _ = fleet.disagg("uninstall", "--yes", "--host", name)
        assert code == 0 and not healthy()
        assert remote.run(stop.argv, script=stop.script).ok
    finally:
        remote.close()


def test_one_hosts_failure_is_its_own_and_the_next_run_repairs_it(fleet: Fleet) -> None:
    broken = fleet.bed.hosts["mac-studio-1"].home / "no-index"
    broken.touch()
    code, out, _ = fleet.disagg("deploy", "--yes")
    broken.unlink()
    assert code == 1 and "3 changed, 1 failed" in out
    assert "error: no index answers" in out and "in step 3 of 10: build the Python" in out and "hint: " in out
    reports = fleet.deploy()
    assert [reports[name]["result"] for name in NAMES] == ["unchanged", "unchanged", "changed", "unchanged"]
    assert reports[""]["code"] == 0


def test_an_unreachable_host_is_reported_and_the_others_are_deployed_unless_all_are_wanted(fleet: Fleet) -> None:
    fleet.bed.need_links()
    with fleet.bed.cut("dgx-spark-2"):
        assert fleet.deploy("--all-or-nothing")[""]["code"] == 4
        assert not (fleet.bed.hosts["dgx-spark-1"].home / ".disagg").exists()
        reports = fleet.deploy()
    assert [reports[name]["result"] for name in NAMES] == ["changed", "failed", "changed", "changed"]
    assert reports[""]["code"] == 4


@contextmanager
def cut_when(fleet: Fleet, name: str, begun: Callable[[], bool]) -> Iterator[None]:
    """Pull a host's cable once something has begun."""

    def pull() -> None:
        wait_until(begun)
        fleet.bed.cut_link(name)

    thread = threading.Thread(target=pull)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        fleet.bed.restore_link(name)


@pytest.mark.usefixtures("lost_links_are_noticed_soon")
def test_a_link_cut_in_the_middle_leaves_the_old_release_and_the_next_run_repairs(fleet: Fleet) -> None:
    fleet.bed.need_links()
    name = "dgx-spark-1"
    assert fleet.deploy("--host", name)[""]["code"] == 0
    old = fleet.current(name)
    weights = fleet.path.parent / "weights"
    shutil.copytree(Path(__file__).parents[3] / "disagg/demo/models/qwen3-moe-tiny", weights)
    (weights / "filling.bin").write_bytes(bytes(range(256)) * (64 << 10))
    fleet.change('transformers = "package:demo/models/qwen3-moe-tiny"', 'transformers = "./weights"')
    mine = fleet.bed.hosts[name].home / ".disagg/hosts" / name
    with fleet.bed.limited(name, 8), cut_when(fleet, name, lambda: any(mine.glob("uploads/*"))):
        report = fleet.deploy("--host", name)[name]
    assert report["result"] == "failed" and report["error"]["code"] == "HostUnreachable", report["error"]
    assert fleet.current(name) == old
    assert (mine / "lock/holder").exists(), "nobody could give it back"
    reports = fleet.deploy("--host", name, "--break-lock")
    assert reports[name]["result"] == "changed", reports[name]["error"]
    assert fleet.current(name) != old
    assert not (mine / "incoming").exists() and not (mine / "lock").exists()
    assert fleet.deploy("--host", name)[name]["result"] == "unchanged"


def test_a_disk_that_fills_up_is_reported_in_the_systems_words_and_repaired_by_the_next_run(fleet: Fleet) -> None:
    fleet.bed.need_links()
    name = "dgx-spark-1"
    host = fleet.bed.hosts[name]
    place = f"{host.remote_home}/.disagg"
    host.as_root("mkdir", place)
    host.as_root("mount", "-t", "tmpfs", "-o", "size=20g,nr_inodes=60,uid=2000,gid=2000,mode=700", "none", place)
    try:
        report = fleet.deploy("--host", name)[name]
        assert report["result"] == "failed"
        assert "No space left on device" in report["error"]["message"]
        assert f"disagg exec --host {name} -- df" in report["error"]["hint"]
        host.as_root("mount", "-o", "remount,nr_inodes=5000", place)
        assert fleet.deploy("--host", name)[name]["result"] == "changed"
        host.as_root("mount", "-o", "remount,size=30m", place)
        fleet.change("port = 8000\n", "port = 8000\nqueue_size = 5\n")
        report = fleet.deploy("--host", name)[name]
        assert report["error"]["code"] == "DeployRefused" and "MiB free" in report["error"]["message"]
    finally:
        host.as_root("umount", "-l", place)


def test_a_read_only_home_is_refused_and_its_release_stays(fleet: Fleet) -> None:
    fleet.bed.need_links()
    name = "mac-studio-2"
    host = fleet.bed.hosts[name]
    assert fleet.deploy("--host", name)[name]["result"] == "changed"
    old = fleet.current(name)
    fleet.change("[hosts.mac-studio-2.engine]\n", "[hosts.mac-studio-2.engine]\nchunk_tokens = 512\n")
    host.as_root("mount", "-o", "remount,bind,ro", host.remote_home)
    try:
        report = fleet.deploy("--host", name)[name]
    finally:
        host.as_root("mount", "-o", "remount,bind,rw", host.remote_home)
    assert (
        report["error"]["code"] == "DeployRefused" and f"{host.remote_home} is read-only" in report["error"]["message"]
    )
    assert fleet.current(name) == old
    assert fleet.deploy("--host", name)[name]["result"] == "changed"


def test_an_interruption_gives_the_lock_back_and_leaves_no_process(fleet: Fleet) -> None:
    fleet.bed.need_links()
    name = "dgx-spark-2"
    mine = fleet.bed.hosts[name].home / ".disagg/hosts" / name
    argv = [
        sys.executable,
        "-P",
        "-m",
        "disagg",
        "--config",
        str(fleet.path),
        "deploy",
        "--yes",
        "--host",
        name,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with fleet.bed.limited(name, 2):
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, env=environment, text=True)
        with process:
            wait_until(lambda: any(mine.glob("uploads/*")) or any(mine.glob("incoming/.model*")))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 130
    assert "interrupted: each host has the release it had, or the whole new one" in err
    assert not (mine / "lock").exists()
    wait_until(lambda: fleet.bed.hosts[name].as_root("pgrep", "-x", "tar", check=False).returncode == 1)
    assert fleet.deploy("--host", name)[name]["result"] == "changed"
    assert not (mine / "incoming").exists()


def test_roles_and_models_choose_hosts(fleet: Fleet) -> None:
    assert [name for name in fleet.deploy("--dry-run", "--role", "decode") if name] == ["mac-studio-1", "mac-studio-2"]
    assert [name for name in fleet.deploy("--dry-run", "--model", "gpt-oss") if name] == ["dgx-spark-2", "mac-studio-1"]
    code, _, err = fleet.disagg("deploy", "--role", "gateway", "--model", "qwen")
    assert code == 2 and "fits these options" in err
    code, _, err = fleet.disagg("deploy", "--role", "cook")
    assert code == 2 and '"cook" is not a role' in err
