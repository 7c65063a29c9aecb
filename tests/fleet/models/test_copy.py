from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import FleetError
from disagg.fleet.facts.python import HostPython
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.models.copy import copy
from disagg.fleet.models.inventory import SERVICES_CACHE, stored_models
from tests.deadlines import LONG_S
from tests.fleet.models.hub_models import REVISION, SOURCE, content, files, own, write_folder, write_hub
from tests.testbed.bed import Bed, BedHost

PYTHON = "/usr/bin/python3"
ROOT = f"{SERVICES_CACHE}/models--someone--tiny-model"


@pytest.fixture
def ends(clean_homes: Bed) -> Iterator[Any]:
    """Two hosts, and a function that copies from the one to the other."""
    bed = clean_homes
    bed.need_links()
    source_host, taker = bed.host("dgx-spark-1"), bed.host("mac-studio-2")
    taking = machine_for(taker)

    def run(source: Any = SOURCE, root: Any = ROOT, report: Any = lambda done, total: None) -> Any:
        giving = machine_for(source_host)
        there = stored_models(giving, PYTHON, source_host, [source])[source]
        return copy(HostPython(source_host, giving, PYTHON), HostPython(taker, taking, PYTHON), there, root, report)

    ends: Any = run
    ends.bed, ends.source_host, ends.taker = bed, bed.hosts["dgx-spark-1"], bed.hosts["mac-studio-2"]
    ends.look = lambda source=SOURCE: stored_models(taking, PYTHON, taker, [source])[source]
    yield ends
    taking.close()


def hub(host: BedHost) -> Path:
    return host.home / ".cache/huggingface/hub"


def put_hub(host: Any, made: Any) -> Path:
    root = write_hub(hub(host), made)
    own(host.home / ".cache")
    return root


def test_a_hub_model_arrives_as_the_hub_itself_would_have_left_it(ends: Any) -> None:
    made = files()
    put_hub(ends.source_host, made)
    copied = ends()
    root = hub(ends.taker) / "models--someone--tiny-model"
    assert content(root / "snapshots" / REVISION) == made
    assert (root / "refs/main").read_text() == REVISION
    assert all(path.is_symlink() for path in (root / "snapshots" / REVISION).iterdir())
    assert copied.bytes == sum(map(len, made.values())) and copied.resumed == 0
    found = ends.look()
    assert found.complete and found.revision == REVISION


def test_a_plain_folder_arrives_at_its_path(ends: Any) -> None:
    made = files()
    write_folder(ends.source_host.home / "models/tiny", made)
    own(ends.source_host.home / "models")
    ends(f"{ends.source_host.remote_home}/models/tiny", f"{ends.taker.remote_home}/models/tiny")
    assert content(ends.taker.home / "models/tiny") == made


@pytest.mark.usefixtures("lost_links_are_noticed_soon")
def test_a_copy_that_was_cut_off_goes_on_where_it_ended(ends: Any) -> None:
    made = files(megabytes=16)
    put_hub(ends.source_host, made)
    under_way, seen = threading.Event(), []

    def report(done: int, total: int) -> None:
        seen.append((done, total))
        if done > 3 << 20:
            under_way.set()

    def cut() -> None:
        assert under_way.wait(LONG_S)
        ends.bed.cut_link("mac-studio-2")

    cutter = threading.Thread(target=cut)
    with ends.bed.limited("mac-studio-2", 25):
        cutter.start()
        try:
            with pytest.raises(FleetError):
                ends(report=report)
        finally:
            under_way.set()
            cutter.join()
            ends.bed.restore_link("mac-studio-2")
    assert not ends.look().complete
    again = ends()
    assert again.resumed > 2 << 20
    assert ends.look().complete
    assert content(hub(ends.taker) / "models--someone--tiny-model/snapshots" / REVISION) == made


def test_a_corrupted_byte_of_what_was_there_is_found_and_the_file_brought_again(ends: Any) -> None:
    made = files()
    root = put_hub(ends.source_host, made)
    blob = max((root / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    damaged = bytearray(blob.read_bytes()[: 300 << 10])
    damaged[1000] ^= 1
    part = hub(ends.taker) / "models--someone--tiny-model/blobs" / f"{blob.name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(damaged)
    own(ends.taker.home / ".cache")
    copied = ends()
    assert copied.repaired == 1
    assert part.with_suffix("").read_bytes() == blob.read_bytes()


def test_a_file_that_is_damaged_at_its_source_is_never_taken_for_whole(ends: Any) -> None:
    root = put_hub(ends.source_host, files())
    blob = max((root / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    spoilt = bytearray(blob.read_bytes())
    spoilt[5000] ^= 1
    blob.write_bytes(spoilt)
    with pytest.raises(FleetError, match="arrives damaged twice"):
        ends()
    assert not (hub(ends.taker) / "models--someone--tiny-model/blobs" / blob.name).exists()
    assert not ends.look().complete


def test_nothing_serves_and_no_secret_is_seen_once_the_copy_is_made(ends: Any) -> None:
    put_hub(ends.source_host, files(megabytes=8))
    lines = []

    def report(done: int, total: int) -> None:
        lines.extend(ends.source_host.command_lines() + ends.taker.command_lines())

    with ends.bed.limited("mac-studio-2", 200):
        ends(report=report)
    programs = [line for line in lines if "DISAGG_PROGRAM" in line]
    assert programs and not any("COPY_TOKEN" in line or len(line) > 300 for line in programs)
    deadline = time.monotonic() + LONG_S
    while any("DISAGG_PROGRAM" in line for line in ends.source_host.command_lines()):
        assert time.monotonic() < deadline, "the server did not end with its copy"
        time.sleep(0.05)


def test_a_full_disk_is_reported_before_anything_is_copied(ends: Any) -> None:
    put_hub(ends.source_host, files(megabytes=4))
    place = ends.taker.home / ".cache"
    place.mkdir()
    own(place)
    ends.taker.as_root("mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", f"{ends.taker.remote_home}/.cache")
    try:
        with pytest.raises(FleetError, match=r"1 MiB are free.*4 MiB are needed"):
            ends()
    finally:
        ends.taker.as_root("umount", f"{ends.taker.remote_home}/.cache")
    assert list(place.iterdir()) == []
