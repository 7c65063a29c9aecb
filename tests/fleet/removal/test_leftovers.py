"""What is left over on a machine, as tables: hosts, environments, models; and what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.fleet.facts.server import FoundHost, MachineContents
from disagg.fleet.removal.leftovers import Scope, leftovers, scope_of
from tests.fleet.facts.fixture_facts import fleet, fleet_of, front, several, spark, studio

A, B, C = "a" * 16, "b" * 16, "c" * 16
OURS, THEIRS = "0" * 64, "f" * 64
MODELS = "/home/nvidia/.disagg/models/carried"


def own(name: str = "spark", **changes: Any) -> FoundHost:
    found = FoundHost(
        name, True, frozenset({"lab"}), 1, frozenset({A}), frozenset({f"{MODELS}/tiny-1"}), token_digests=(OURS,)
    )
    return replace(found, **changes)


def there(*hosts: FoundHost, **changes: Any) -> MachineContents:
    contents = MachineContents("spark/1/2", "/home/nvidia", hosts, (A, B), ("tiny-1", "old-2"), ())
    return replace(contents, **changes)


SCOPE = Scope("lab", frozenset({"spark"}), frozenset({"owner/qwen"}), frozenset({OURS}))


def found(contents: MachineContents, scope: Scope = SCOPE) -> list[str]:
    return [f"{one.kind} {one.name}" for one in leftovers(scope, contents).orphans]


def test_a_machine_with_nothing_but_what_its_hosts_need_has_no_leftovers() -> None:
    left = leftovers(SCOPE, there(own(), environments=(A,), carried=("tiny-1",)))
    assert (left.orphans, left.notes) == ((), ())


def test_what_no_release_needs_is_left_over_with_its_path() -> None:
    environment, model = leftovers(SCOPE, there(own())).orphans
    assert (environment.kind, environment.path) == ("environment", f"/home/nvidia/.disagg/envs/{B}")
    assert (model.kind, model.path) == ("model", f"{MODELS}/old-2")


def test_a_host_that_hosts_toml_no_longer_names_is_left_over_with_what_only_it_needs() -> None:
    old = own("spark-old", environments=frozenset({A, B}), sources=frozenset({f"{MODELS}/old-2"}))
    assert found(there(own(), old)) == ["host spark-old", f"environment {B}", "model old-2"]


@pytest.mark.parametrize(
    ("changes", "stays", "note"),
    [
        ({}, False, ""),
        ({"fleets": frozenset()}, False, ""),
        ({"fleets": frozenset({"other"})}, True, "it is of the fleet other"),
        ({"fleets": frozenset({"other", "lab"})}, False, ""),
        ({"token_digests": (THEIRS,)}, True, "its token ffffffff is not this machine's"),
        ({"token_digests": (THEIRS, OURS)}, False, ""),
        ({"token_digests": ()}, False, ""),
    ],
)
def test_hosts_of_other_fleets_and_operators_stay_with_what_they_need_unless_all_are_meant(
    changes: dict[str, Any], stays: bool, note: str
) -> None:
    other = own("other", environments=frozenset({B}), sources=frozenset({f"{MODELS}/old-2"}), **changes)
    left = leftovers(SCOPE, there(own(), other))
    assert [one.name for one in left.orphans] == ([] if stays else ["other", B, "old-2"])
    assert note in "".join(left.notes) and bool(left.notes) == stays
    assert found(there(own(), other), replace(SCOPE, others=True))[0] == "host other"


def test_a_host_whose_machine_is_not_known_stays() -> None:
    both = replace(SCOPE, names=frozenset({"spark", "moved"}))
    assert "host moved" not in found(there(own(), own("moved")), both)


def test_models_of_the_hubs_cache_are_offered_on_demand_except_those_that_a_host_or_a_release_names() -> None:
    cached = ("models--owner--qwen", "models--owner--old", "models--owner--read")
    reads = own(sources=frozenset({"owner/read"}))
    contents = there(reads, environments=(A,), carried=(), cached=cached)
    without = leftovers(SCOPE, contents)
    assert without.orphans == () and without.notes == (
        "1 model of the hub's cache that no host here names: disagg uninstall --unused --models offers them",
    )
    (model,) = leftovers(replace(SCOPE, cached=True), contents).orphans
    assert (model.name, model.path) == ("owner/old", "/home/nvidia/.cache/huggingface/hub/models--owner--old")


def test_while_a_command_changes_a_host_no_environment_and_no_model_is_left_over() -> None:
    busy = there(own(locked=True), own("spark-old"))
    left = leftovers(SCOPE, busy)
    assert [one.kind for one in left.orphans] == ["host"]
    assert left.notes == ("environments and models stay: a command changes spark and may need them",)
    assert len(leftovers(replace(SCOPE, locked=frozenset({"spark"})), busy).orphans) == 3, "it is this command"


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "-rf", "*"])
def test_a_folder_that_disagg_has_not_named_is_never_left_over(name: str) -> None:
    contents = there(own(), own(name), environments=(A, name), carried=("tiny-1", name), cached=(name,))
    assert found(contents, replace(SCOPE, cached=True)) == []


def test_what_a_host_was_is_shown_before_it_is_removed() -> None:
    described = own("old", releases=2, managers=("systemd", "process"), pid=4711)
    assert leftovers(SCOPE, there(own(), described)).orphans[0].about == (
        "2 releases, token 00000000, a service of systemd, its server runs (pid 4711)"
    )
    bare = FoundHost("old")
    assert leftovers(SCOPE, there(own(), bare)).orphans[0].about == "an empty folder"


def test_the_scope_has_the_hosts_that_may_be_on_the_machine_and_their_sources() -> None:
    lab = fleet(spark(), studio(), front())
    assert scope_of(lab, frozenset()).names == {"dgx-spark-1", "mac-studio-1", "front"}
    here = scope_of(lab, frozenset({"mac-studio-1", "front"}), frozenset({OURS}), cached=True)
    assert here == Scope("lab", frozenset({"dgx-spark-1"}), frozenset({"owner/qwen"}), frozenset({OURS}), cached=True)


def test_every_model_of_a_host_with_several_is_needed() -> None:
    host = several(spark(), "a", "b")
    assert scope_of(fleet_of(("a", "b", "c"), host), frozenset()).sources == {"owner/a", "owner/b"}
