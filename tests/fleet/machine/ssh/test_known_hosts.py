"""known_hosts files, checked against what ssh-keygen makes and finds."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from disagg.errors import FleetError
from disagg.fleet.machine.ssh.known_hosts import HostKey, KnownHosts, add, host_name, remove_commands
from tests.programs import need


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[HostKey]:
    """Two ed25519 keys and an ECDSA one, and the first's fingerprint as ssh-keygen tells it."""
    need("ssh-keygen")
    folder = tmp_path_factory.mktemp("keys")
    made = []
    for number, kind in enumerate(("ed25519", "ed25519", "ecdsa")):
        path = folder / str(number)
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
        name, blob, *_ = path.with_suffix(".pub").read_text().split()
        made.append(HostKey(name, base64.b64decode(blob)))
        listed = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True).stdout
        assert made[-1].fingerprint == listed.split()[1]
    return made


def line(names: str, key: HostKey) -> str:
    return f"{names} {key.kind} {base64.b64encode(key.blob).decode()} a comment\n"


def known(tmp_path: Path, *lines: str) -> KnownHosts:
    path = tmp_path / "known_hosts"
    path.write_text("".join(lines))
    return KnownHosts.read([path, tmp_path / "missing"])


def test_a_key_is_known_changed_or_unknown(tmp_path: Path, keys: list[HostKey]) -> None:
    there = known(tmp_path, line("spark,10.0.0.1", keys[0]))
    assert there.check("10.0.0.1", keys[0]) == "known"
    assert there.check("spark", keys[1]) == "changed"
    assert there.check("other", keys[0]) == "unknown"


def test_a_key_of_another_kind_is_a_changed_key(tmp_path: Path, keys: list[HostKey]) -> None:
    assert known(tmp_path, line("spark", keys[0])).check("spark", keys[2]) == "changed"
    assert known(tmp_path, line("spark", keys[0]), line("spark", keys[2])).check("spark", keys[2]) == "known"


def test_a_revoked_key_is_refused_wherever_else_it_stands(tmp_path: Path, keys: list[HostKey]) -> None:
    there = known(tmp_path, line("spark", keys[0]), "@revoked " + line("*", keys[0]))
    assert there.check("spark", keys[0]) == "revoked"
    assert there.check("spark", keys[1]) == "changed"


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        ("*.lan", "spark.lan", True),
        ("*.lan", "lan", False),
        ("*.lan,!mac.lan", "mac.lan", False),
        ("spark?", "spark1", True),
        ("[spark]:2222", "[spark]:2222", True),
        ("[spark]:2222", "s", False),
        ("[*]:2222", "[10.0.0.1]:2222", True),
        ("Spark", "spark", True),
    ],
)
def test_patterns_and_ports_match_as_ssh_has_them(
    tmp_path: Path, keys: list[HostKey], names: str, name: str, expected: bool
) -> None:
    verdict = known(tmp_path, line(names, keys[0])).check(name, keys[0])
    assert verdict == ("known" if expected else "unknown")


def test_hashed_names_match_also_with_a_port(tmp_path: Path, keys: list[HostKey]) -> None:
    known(tmp_path, line("10.0.0.1", keys[0]), line("[10.0.0.1]:2222", keys[1]))
    path = tmp_path / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    assert "10.0.0.1" not in path.read_text()
    there = KnownHosts.read([path])
    assert there.check(host_name("10.0.0.1"), keys[0]) == "known"
    assert there.check(host_name("10.0.0.1", 2222), keys[1]) == "known"
    assert there.check(host_name("10.0.0.2"), keys[1]) == "unknown"


def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path, keys: list[HostKey]) -> None:
    rubbish = [
        "# comment\n",
        "\n",
        "spark\n",
        "spark ssh-ed25519 !!!\n",
        "|1|x ssh-ed25519 AAAA\n",
        "@cert-authority * a b\n",
    ]
    assert known(tmp_path, *rubbish, line("spark", keys[0])).check("spark", keys[0]) == "known"


def test_an_added_key_is_found_by_ssh_keygen(tmp_path: Path, keys: list[HostKey]) -> None:
    path = tmp_path / ".ssh/known_hosts"
    add(path, host_name("10.0.0.1", 2222), keys[0])
    add(path, host_name("10.0.0.2"), keys[1])
    found = subprocess.run(["ssh-keygen", "-F", "[10.0.0.1]:2222", "-f", path], check=True, capture_output=True)
    assert base64.b64encode(keys[0].blob) in found.stdout
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_is_added_after_a_line_without_an_end(tmp_path: Path, keys: list[HostKey]) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(line("spark", keys[0]).rstrip("\n"))
    add(path, "mac", keys[1])
    there = KnownHosts.read([path])
    assert (there.check("spark", keys[0]), there.check("mac", keys[1])) == ("known", "known")


def test_the_command_that_removes_a_host_does(tmp_path: Path, keys: list[HostKey]) -> None:
    there = known(tmp_path, line("[10.0.0.1]:22222", keys[0]))
    subprocess.run(["sh", "-c", remove_commands(there.of("[10.0.0.1]:22222"), "[10.0.0.1]:22222")], check=True)
    assert KnownHosts.read([tmp_path / "known_hosts"]).entries == ()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, keys: list[HostKey]) -> None:
    (tmp_path / "known_hosts").mkdir()
    with pytest.raises(FleetError, match="cannot add to"):
        add(tmp_path / "known_hosts", "spark", keys[0])
