"""Plans from fixture facts: nothing here touches a machine."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Deploy, EngineOptions, Fleet, GatewaySettings, Host
from disagg.fleet.conditions.table import Subject, judged
from disagg.fleet.deploy import plan as planning
from disagg.fleet.deploy.deployment import planner
from disagg.fleet.deploy.release import Installation, ModelSource, TargetState, target_state
from disagg.fleet.deploy.requirements import installed_requirements
from disagg.fleet.deploy.rollback import list_releases, rollback, rollback_to
from disagg.fleet.deploy.steps import Plan, PutTree, Refusal, WriteFile
from disagg.fleet.facts.host import HostFacts, InstalledService, Python, Release
from disagg.fleet.machine.upload import LargeFile
from disagg.fleet.removal.removal import uninstall
from disagg.fleet.services.base import RunScript
from disagg.token import token_digest
from tests.fleet.facts.fixture_facts import facts, fleet, fleet_of, front, here, names, several, spark, studio, wanted
from tests.values import of_type, present

RAN = "c" * 16


def done(made: TargetState, before: HostFacts) -> HostFacts:
    """The facts once a plan has been carried out."""
    return replace(
        before,
        folder=True,
        current=made.hash,
        service=made.hash,
        previous=before.current,
        releases=(*before.releases, Release(made.host.name, made.hash, made.environment.hash)),
        environments={**before.environments, made.environment.hash: True},
        token_digests=tuple(map(token_digest, made.tokens)),
        token_mode="-rw-------",
        installed={one.key: InstalledService(one.digest, True) for one in made.definitions},
        leftovers=(),
        lists={made.hash: hashlib.sha256(made.listed).hexdigest()} if made.listed else {},
    )


def made(local: Installation, host: Host, found: HostFacts) -> TargetState:
    result = target_state(local, host, found)
    assert isinstance(result, TargetState), result
    return result


def planned(found: HostFacts, host: Host | None = None) -> Plan:
    host = host or spark()
    return planning.plan(wanted(host, found), found)


def deployed_now(found: HostFacts) -> Plan:
    """The plan if what the host has as `current` is what this machine deploys."""
    return planning.plan(replace(wanted(spark(), found), hash=found.current), found)


def test_a_bare_spark_gets_everything_in_order() -> None:
    plan = planned(facts("spark_bare"))
    assert " ".join(names(plan)) == "prepare requirements environment token release check unit service switch tidy"
    assert plan.needs == "start"
    assert plan.refusals == () and plan.notes == ()


def test_a_bare_studio_installs_a_daemon_and_names_sudo() -> None:
    found = facts("studio_bare", "mac-studio-1")
    plan = planned(found, studio(wired_limit_mb=400_000))
    assert " ".join(names(plan)) == "prepare requirements environment token release check service switch tidy"
    assert "sudo asks for a password" in plan.notes[0]
    service = next(step for step in plan.steps if step.name == "service")
    assert "ssh -t 10.0.0.1 \"sudo sh '/Users/studio/.disagg/hosts/mac-studio-1/releases/" in service.hint
    build = next(step for step in plan.steps if step.name == "environment").action
    assert isinstance(build, RunScript) and build.environment == {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    assert wanted(studio(wired_limit_mb=400_000), found).files["service/disagg.mac-studio-1.wired-limit.plist"]


def test_the_command_for_root_has_user_port_and_key_of_hosts_toml() -> None:
    host = studio(user="studio", ssh_port=2222, key="/keys/of mine")
    service = next(one for one in planned(facts("studio_bare", "mac-studio-1"), host).steps if one.name == "service")
    assert "ssh -t -p 2222 -i '/keys/of mine' studio@10.0.0.1 \"sudo sh '" in service.hint


def test_a_plan_states_that_a_plain_process_does_not_survive_a_reboot() -> None:
    before = facts("spark_bare")
    (note,) = planned(before, spark(service="process")).notes
    assert "after a reboot" in note
    after = done(wanted(spark(service="process"), before), before)
    assert planned(after, spark(service="process")).notes == ()


def test_a_host_that_has_everything_has_no_steps() -> None:
    for host, name in ((spark(), "spark_bare"), (studio(), "studio_bare"), (spark(service="process"), "spark_bare")):
        before = facts(name, host.name)
        desired = wanted(host, before)
        after = done(desired, before)
        assert planning.plan(wanted(host, after), after).steps == ()


def test_a_changed_line_of_code_changes_the_release_and_nothing_else() -> None:
    before = facts("spark_bare")
    after = done(wanted(spark(), before), before)
    changed = here(fleet(spark()), {"disagg/__init__.py": b"VERSION = 2\n"})
    desired = made(changed, spark(), after)
    plan = planning.plan(desired, after)
    assert names(plan) == ["prepare", "release", "check", "switch", "tidy"]
    assert [step.name for step in plan.steps if isinstance(step.action, PutTree)] == ["release"]


def test_a_changed_token_is_written_alone_and_needs_a_restart() -> None:
    before = facts("spark_bare")
    desired = wanted(spark(), before)
    after = replace(done(desired, before), pid=7, release=desired.hash)
    changed = made(here(fleet(spark()), token="another-secret-of-the-fleet"), spark(), after)
    plan = planning.plan(changed, after)
    assert names(plan) == ["prepare", "token", "tidy"]
    assert plan.needs == "restart"
    write = plan.steps[1].action
    assert isinstance(write, WriteFile) and write.mode == 0o600
    assert "another-secret" not in repr(plan) and "another-secret" not in str(plan.to_json())


def test_a_token_that_others_can_read_is_written_again() -> None:
    before = facts("spark_bare")
    after = replace(done(wanted(spark(), before), before), token_mode="-rw-r--r--")
    assert "token" in names(planned(after))


def test_a_half_finished_deployment_is_cleared_and_goes_on() -> None:
    found = facts("spark_half")
    plan = planned(found, spark(service="process"))
    prepare = plan.steps[0]
    assert isinstance(prepare.action, RunScript)
    assert prepare.action.argv[2:] == (
        "/home/nvidia/.disagg/hosts/dgx-spark-1/incoming",
        "/home/nvidia/.disagg/hosts/dgx-spark-1/releases/.1111111111111111.part.77",
    )
    assert "environment" in names(plan)


def test_leftovers_alone_are_reason_enough_to_tidy() -> None:
    before = facts("spark_bare")
    after = replace(done(wanted(spark(), before), before), leftovers=("incoming",))
    assert names(planned(after)) == ["prepare", "tidy"]


def test_an_upload_that_broke_off_needs_room_for_the_rest_only_and_parts_of_other_files_go(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with weights.open("wb") as file:
        file.truncate(30 << 30)
    part, stale = LargeFile.of("weights", weights).part, "0" * 32
    found = facts("spark_bare", disk_free=20 << 30, uploads={part: 20 << 30, stale: 1 << 30})
    desired = replace(wanted(spark(), found), sources=(ModelSource("/here/model", "model-1", tmp_path),))
    plan = planning.plan(desired, found)
    prepare = plan.steps[0].action
    assert plan.refusals == () and isinstance(prepare, RunScript)
    assert prepare.argv[2:] == (f"{found.paths.uploads}/{stale}",)
    assert planning.plan(desired, replace(found, uploads={})).refusals[0].cause.endswith("needs about 39.1 GiB")


def test_parts_that_no_upload_goes_on_with_are_removed_though_the_host_has_everything() -> None:
    before = facts("spark_bare")
    after = replace(done(wanted(spark(), before), before), uploads={"0" * 32: 4 << 20})
    plan = planned(after)
    assert names(plan) == ["prepare", "tidy"] and plan.steps[0].what == "remove what an interrupted deployment left"


def test_old_releases_and_environments_of_no_release_go_but_two_releases_stay() -> None:
    found = facts("spark_deployed", pid=None, release="")
    plan = planned(found)
    tidy = plan.steps[-1].action
    assert isinstance(tidy, RunScript)
    folder = "/home/nvidia/.disagg"
    assert set(tidy.argv[2:]) == {
        f"{folder}/hosts/dgx-spark-1/releases/{'2' * 16}",
        f"{folder}/envs/{'b' * 16}",
        f"{folder}/envs/{'d' * 16}",
    }, "release 1 becomes the previous one; another host's environment stays"


def test_what_a_server_still_runs_stays_however_often_was_deployed_since() -> None:
    found = facts("spark_deployed")
    assert (found.pid, found.release) == (4242, "2" * 16)
    tidy = planned(found).steps[-1].action
    assert isinstance(tidy, RunScript)
    root = "/home/nvidia/.disagg"
    never_ran = (f"{root}/hosts/dgx-spark-1/releases/{'1' * 16}", f"{root}/envs/{'a' * 16}")
    assert tidy.argv[2:] == (*never_ran, f"{root}/envs/{'d' * 16}")


def with_locks(host: Host, deploy: Deploy | None = None) -> Installation:
    """This installation, whose locks state the sizes of packages."""
    return replace(here(fleet(host, deploy=deploy)), requirements=installed_requirements())


def test_gigabytes_for_cuda_are_refused_on_a_host_that_computes_on_its_cpu() -> None:
    found = facts("spark_bare")
    on_cpu = replace(spark(), engine=replace(spark().engine, device="cpu"))

    def refused(host: Host, deploy: Deploy | None = None, found: HostFacts = found) -> list[Refusal]:
        wanted = target_state(with_locks(host, deploy), host, found)
        return [wanted] if isinstance(wanted, Refusal) else []

    (refusal,) = refused(on_cpu)
    assert "GB to download, most of it for CUDA" in refusal.cause and "cuda_on_cpu = true" in refusal.hint
    assert not refused(spark()), "it has a GPU"
    assert not refused(on_cpu, Deploy(find_links=("/srv/wheels",))), "there may be smaller packages"
    assert refused(on_cpu, Deploy(index_url="http://mirror/simple")), "of a mirror, the lock's files are installed"
    there = {made(with_locks(on_cpu, Deploy(cuda_on_cpu=True)), on_cpu, found).environment.hash: True}
    assert not refused(on_cpu, found=replace(found, environments=there)), "nothing is downloaded"


@pytest.mark.parametrize(
    ("deploy", "hint"), [(Deploy(), "of the public one"), (Deploy(find_links=("/srv/wheels",)), "reachable there?")]
)
def test_a_build_from_locked_files_alone_has_a_hint_of_its_own(deploy: Deploy, hint: str) -> None:
    found = facts("spark_bare")
    plan = planning.plan(made(with_locks(spark(), deploy), spark(), found), found)
    (build,) = [step for step in plan.steps if step.name == "environment"]
    assert hint in build.hint


def test_a_host_beside_a_vllm_serve_takes_its_packages_and_downloads_none() -> None:
    engine = EngineOptions("vllm-server", url="http://127.0.0.1:8100")
    own = Python("/opt/vllm/bin/python", (3, 12, 3), configured=True)
    found = replace(facts("spark_bare"), pythons=(own,))
    beside = spark(engine=engine, python=own.path, site_packages=True)
    one = replace(with_locks(beside), fleet=with_source("vllm-server", beside))
    plan = planning.plan(made(one, beside, found), found)
    (build,) = [step for step in plan.steps if step.name == "environment"]
    assert plan.refusals == () and "to download" not in build.what
    assert isinstance(build.action, RunScript) and build.action.argv[3:6] == (own.path, "", "1")
    (check,) = [step for step in plan.steps if step.name == "check"]
    assert isinstance(check.action, RunScript) and check.action.argv[-2:] == ("torch", "vllm")


def with_source(engine: str, host: Host) -> Fleet:
    """The fleet of this host, whose model has a source for its engine."""
    lab = fleet(host)
    model = lab.models["qwen"]
    return replace(lab, models={"qwen": replace(model, sources={**model.sources, engine: "owner/qwen-fp8"})})


@pytest.mark.parametrize("allowed", [True, False])
def test_only_hosts_toml_allows_gigabytes_for_cuda_on_a_cpu(allowed: bool) -> None:
    on_cpu = replace(spark(), engine=replace(spark().engine, device="cpu"))
    plan = planner(with_locks(on_cpu, Deploy(cuda_on_cpu=allowed)))(on_cpu, facts("spark_bare"))
    assert any("for CUDA" in refusal.cause for refusal in plan.refusals) is not allowed


def with_earlier(*environments: str) -> HostFacts:
    """A deployed Spark on which release 1 runs, with earlier releases c, d, ... in these environments, the newest
    first."""
    found = facts("spark_deployed", pid=7, release="1" * 16, previous="")
    earlier = [Release(found.host, letter * 16, own * 16) for letter, own in zip("cdefg", environments, strict=False)]
    sent = {one.hash: 1000 - number for number, one in enumerate(earlier)}
    kept = [one for one in found.releases if one.hash != "2" * 16]
    return replace(found, releases=(*kept, *earlier), sent=sent)


@pytest.mark.parametrize(
    ("environments", "gone"),
    [
        ("", ""),
        ("aa", ""),
        ("aaaa", "ef"),
        ("baa", "c"),
        ("bbb", "cde"),
    ],
)
def test_three_earlier_releases_stay_if_they_need_no_environment_of_their_own(environments: str, gone: str) -> None:
    tidy = planned(with_earlier(*environments)).steps[-1].action
    assert isinstance(tidy, RunScript)
    removed = {path.rpartition("/")[2][0] for path in tidy.argv[2:] if "/releases/" in path}
    assert removed == set(gone), "release 1 becomes the previous one, which is one of the three"


def test_a_release_whose_files_have_changed_does_not_stay() -> None:
    tidy = planned(replace(with_earlier("a"), damaged=frozenset({"c" * 16}))).steps[-1].action
    assert isinstance(tidy, RunScript) and any("/releases/cccc" in path for path in tidy.argv)


def test_environments_stay_while_another_host_of_the_machine_is_deployed() -> None:
    tidy = planned(facts("spark_deployed", others_deploy=True)).steps[-1].action
    assert isinstance(tidy, RunScript) and not any("/envs/" in path for path in tidy.argv)


def test_linger_is_asked_for_before_anything_is_built() -> None:
    plan = planned(facts("spark_half", uv=""))
    assert names(plan)[:2] == ["prepare", "linger"]
    assert "sudo loginctl enable-linger nvidia" in plan.steps[1].hint


def test_a_unit_that_was_changed_by_hand_is_written_again() -> None:
    before = facts("spark_bare")
    after = replace(done(wanted(spark(), before), before), installed={"systemd": InstalledService("0" * 64, True)})
    assert names(planned(after)) == ["prepare", "unit", "service", "tidy"]
    disabled = done(wanted(spark(), before), before)
    unit = disabled.installed["systemd"]
    assert "service" in names(planned(replace(disabled, installed={"systemd": replace(unit, enabled=False)})))


def test_what_the_service_needs_is_told_from_what_it_serves() -> None:
    before = facts("spark_bare")
    desired = wanted(spark(), before)
    after = done(desired, before)
    assert planned(after).needs == "start"
    assert planned(replace(after, pid=7, release=desired.hash)).needs == ""
    assert planned(replace(after, pid=7, release="f" * 16)).needs == "restart"
    assert planned(replace(after, pid=None, release=desired.hash)).needs == "start"


@pytest.mark.parametrize(
    ("host", "name", "changes", "cause", "hint"),
    [
        (spark(), "spark_bare", {"os": "FreeBSD"}, "neither Linux nor macOS", "disagg serves on those two"),
        (spark(), "spark_bare", {"writable": False}, "/home/nvidia is read-only", "read-write"),
        (spark(), "spark_bare", {"home": "/home/a\nb"}, "contains characters that PATH cannot hold", "another account"),
        (spark(), "spark_bare", {"home": "/home/a:b"}, "contains characters that PATH cannot hold", "another account"),
        (spark(), "spark_bare", {"systemd": None}, "systemd does not run there", 'service = "process"'),
        (spark(service="launchd"), "spark_bare", {}, "there is no launchd", 'service = "process"'),
        (spark(), "studio_bare", {}, "macOS has no CUDA", '"mps" or "cpu"'),
        (studio(), "spark_bare", {}, "MLX reaches no GPU on Linux", "decode on a Mac"),
        (studio(), "studio_bare", {"arch": "x86_64"}, "Apple silicon", "decode elsewhere"),
        (spark(engine=EngineOptions("transformers", device="mps")), "spark_bare", {}, "no mps device", '"cuda"'),
    ],
)
def test_a_host_that_cannot_serve_is_refused_with_its_mend(
    host: Host, name: str, changes: dict[str, object], cause: str, hint: str
) -> None:
    found = facts(name, host.name, **changes)
    matching = [refusal for refusal in judged(Subject(fleet(host), host, found))[0] if cause in refusal.text]
    assert len(matching) == 1
    assert hint in matching[0].hint


def test_a_lingering_user_whose_systemd_is_silent_is_refused() -> None:
    found = facts("spark_bare")
    silent = replace(found, systemd=replace(present(found.systemd), usable=False))
    assert "sudo systemctl start user@1000.service" in judged(Subject(fleet(), spark(), silent))[0][0].hint


def test_too_little_disk_is_refused_before_anything_is_sent() -> None:
    plan = planned(facts("spark_bare", disk_free=2 << 30))
    assert plan.steps == ()
    assert "2.0 GiB free, and this needs about 9.1 GiB" in plan.refusals[0].cause
    before = facts("spark_bare")
    built = replace(done(wanted(spark(), before), before), current="", disk_free=80 << 20)
    assert planned(built).refusals == (), "the environment is there already: a release needs little"


def test_rollback_switches_to_the_previous_release_and_nothing_else() -> None:
    plan = rollback(spark(), facts("spark_deployed"))
    assert names(plan) == ["switch"]
    assert plan.release == "2" * 16
    assert plan.needs == "", "that very release is still being served"
    action = plan.steps[0].action
    assert isinstance(action, RunScript)
    assert action.argv[-2:] == ("current", "2" * 16)


def test_a_plan_and_a_rollback_state_which_release_runs_and_which_is_pending() -> None:
    found = facts("spark_deployed", switched=1_772_373_900)
    pending = deployed_now(found).notes[0]
    assert pending.startswith("release 11111111 pending since 2026-03-01 ") and "22222222 runs" in pending
    assert rollback(spark(), found).notes == ("22222222 runs already: 11111111 was deployed and never started",)
    started = replace(found, pid=7, release="1" * 16)
    assert not any("pending" in note for note in deployed_now(started).notes)
    assert not any("pending" in note for note in planned(found).notes), "this plan replaces 11111111"
    assert rollback(spark(), started).notes == ("11111111 runs until: disagg restart --host dgx-spark-1",)
    stopped = rollback(spark(), replace(found, pid=None, release=""))
    assert stopped.notes == ("nothing runs there: disagg start --host dgx-spark-1 runs 22222222",)


def test_rollback_without_a_whole_previous_release_is_refused() -> None:
    refusal = rollback(spark(), facts("spark_bare")).refusals[0]
    assert "no release to go back to" in refusal.cause and refusal.hint == "disagg deploy --host dgx-spark-1"
    found = facts("spark_deployed")
    only = rollback(spark(), replace(found, previous="")).refusals[0]
    assert "only the current one is there" in only.hint, "deploying alone would change nothing"
    gone = replace(found, environments={"a" * 16: True})
    assert f"environment {'b' * 16}, which no longer exists" in rollback(spark(), gone).refusals[0].cause


def test_rollback_goes_to_the_release_that_is_named_by_the_beginning_of_its_name() -> None:
    found = replace(with_earlier("a", "a"), sent={"1" * 16: 1_772_373_900})
    plan = rollback_to(["ffff", "dddd"])(spark(), found)
    assert (names(plan), plan.release, plan.needs) == (["switch"], "d" * 16, "restart")
    refusal = rollback_to(["ffff"])(spark(), found).refusals[0]
    assert refusal.cause == "it has no release ffff"
    assert (
        "11111111 of 2026-03-01 " in refusal.hint and "(current, runs)" in refusal.hint and "cccccccc" in refusal.hint
    )
    two = rollback_to(["c", "d"])(spark(), found).refusals[0]
    assert two.cause == "c or d is the beginning of 2 releases"
    assert list_releases(spark(), found).notes == (refusal.hint,)


def test_uninstall_leaves_other_hosts_and_models_alone() -> None:
    plan = uninstall(spark(), facts("spark_deployed"), models=False)
    assert names(plan) == ["service", "end", "remove"]
    action = plan.steps[2].action
    assert isinstance(action, RunScript)
    root = "/home/nvidia/.disagg"
    assert action.argv == (root, "dgx-spark-1", "0", *(f"{root}/envs/{x * 16}" for x in "abd"))


def test_uninstall_leaves_environments_while_another_host_of_the_machine_is_deployed() -> None:
    plan = uninstall(spark(), facts("spark_deployed", others_deploy=True), models=False)
    action = plan.steps[-1].action
    assert isinstance(action, RunScript) and not any("/envs/" in path for path in action.argv)


def test_uninstall_leaves_models_while_another_host_of_the_machine_is_changed_and_states_it() -> None:
    alone = facts("spark_deployed")
    assert of_type(uninstall(spark(), alone, models=True).steps[-1].action, RunScript).argv[2] == "1"
    plan = uninstall(spark(), replace(alone, others_deploy=True), models=True)
    assert of_type(plan.steps[-1].action, RunScript).argv[2] == "0" and "models" not in plan.steps[-1].what
    (note,) = plan.notes
    assert "models stay" in note and note.endswith("disagg uninstall --models --host dgx-spark-1")


def test_uninstall_takes_every_manager_away_that_ever_kept_the_server() -> None:
    unit = facts("spark_deployed").installed["systemd"]
    found = facts("spark_deployed", installed={"systemd": unit, "process": InstalledService("", True)})
    plan = uninstall(spark(service="process"), found, models=False)
    assert names(plan) == ["service", "service", "end", "remove"]
    assert [of_type(step.action, RunScript).argv[:2] for step in plan.steps[:2]] == [
        ("remove", "disagg-dgx-spark-1.service"),
        ("/home/nvidia/.disagg/hosts/dgx-spark-1", "stop"),
    ]


def test_another_service_manager_takes_the_start_at_boot_from_the_one_before() -> None:
    before = facts("spark_bare")
    process = spark(service="process")
    unit = done(wanted(spark(), before), before).installed["systemd"]
    after = replace(done(wanted(process, before), before), installed={"systemd": unit})
    assert names(planned(after, process)) == ["prepare", "retire", "tidy"]
    assert planned(replace(after, installed={"systemd": replace(unit, enabled=False)}), process).steps == ()
    daemons = {"launchd:mac-studio-1": unit, "launchd:mac-studio-1.wired-limit": unit}
    mac = facts("studio_bare", "mac-studio-1", installed=daemons)
    (note,) = planned(mac, studio()).notes[1:]
    assert note.endswith("sudo rm /Library/LaunchDaemons/disagg.mac-studio-1.wired-limit.plist")


def test_uninstall_ends_a_server_that_no_service_manager_has() -> None:
    found = facts("spark_deployed", installed={})
    assert found.pid is not None
    plan = uninstall(spark(), found, models=False)
    assert names(plan) == ["end", "remove"] and of_type(plan.steps[0].action, RunScript).argv == ("4242",)


def test_uninstall_ends_what_still_runs_after_the_managers_have_stopped_theirs() -> None:
    plan = uninstall(spark(), facts("spark_deployed"), models=False)
    assert names(plan) == ["service", "end", "remove"]
    assert plan.steps[1].what == "end the server of dgx-spark-1 if it still runs"
    assert of_type(plan.steps[1].action, RunScript).argv == ("4242",)
    stopped = facts("spark_deployed", pid=None, release="")
    assert names(uninstall(spark(), stopped, models=False)) == ["service", "remove"]


def test_uninstall_where_nothing_is_has_no_steps() -> None:
    assert uninstall(spark(), facts("spark_bare"), models=True).steps == ()


def test_no_value_of_hosts_toml_is_part_of_a_script(tmp_path: Path) -> None:
    evil = "$(touch /tmp/owned); 'x' \"y\" `z`"
    model_name = f"qwen {evil}"
    base = fleet(spark())
    model = replace(base.models["qwen"], name=model_name, aliases=(evil,))
    host = spark(model=model_name, python=f"/opt/{evil}/python", engine=EngineOptions("transformers", device="cuda"))
    evil_fleet = replace(
        base, models={model_name: model}, hosts={host.name: host}, deploy=Deploy(find_links=(f"/opt/{evil}",))
    )
    python = Python(f"/opt/{evil}/python", (3, 12, 1), configured=True)
    found = facts("spark_bare", pythons=(python,))
    plan = planning.plan(made(here(evil_fleet), host, found), found)
    scripts = [step.action.script for step in plan.steps if isinstance(step.action, RunScript)]
    assert scripts and not any("owned" in script for script in scripts)


def test_a_gateway_gets_its_packages_and_its_clients_keys_and_no_model() -> None:
    found = facts("spark_bare", "front")
    installation = replace(here(fleet(spark(), front())), keys=b"{}")
    target = made(installation, front(), found)
    plan = planning.plan(target, found)
    assert (
        " ".join(names(plan))
        == "prepare requirements environment token keys release list check unit service switch tidy"
    )
    assert target.environment.requirements == ("anyio>=4.5", "prometheus-client>=0.21")
    keys = of_type(next(step.action for step in plan.steps if step.name == "keys"), WriteFile)
    assert (keys.path, keys.mode) == (found.paths.keys, 0o600)
    deployed = replace(done(target, found), keys_digest=hashlib.sha256(b"{}").hexdigest())
    assert planning.plan(target, deployed).steps == ()


def test_a_gateway_that_has_keys_keeps_them_since_others_may_have_added_some() -> None:
    found = facts("spark_bare", "front")
    installation = replace(here(fleet(spark(), front())), keys=b"{}")
    deployed = replace(done(made(installation, front(), found), found), keys_digest=hashlib.sha256(b"{}").hexdigest())
    assert planning.plan(made(replace(installation, keys=b"{ }"), front(), found), deployed).steps == ()


def test_a_host_that_is_no_gateway_gets_no_keys() -> None:
    found = facts("spark_bare")
    assert "keys" not in names(planning.plan(made(replace(here(fleet()), keys=b"{}"), spark(), found), found))


def test_the_plan_of_a_gateway_with_a_certificate_says_where_to_write_it() -> None:
    settings = GatewaySettings(tls_cert="/etc/gateway.pem", tls_key="~/gateway.key")
    found, host = facts("spark_bare", "front"), front(settings=settings)
    assert planning.plan(made(here(fleet(spark(), host)), host, found), found).notes == (
        "its certificate is not deployed: write it there into /etc/gateway.pem, its key into ~/gateway.key, "
        "and run: chmod 600 ~/gateway.key",
    )


def test_the_plan_of_a_remote_gateway_says_where_to_write_the_keys_that_are_not_deployed() -> None:
    found, engine = (
        facts("spark_bare", "front"),
        EngineOptions("openai", url="http://h/v1", key_file="~/.config/mini.key"),
    )
    whole = replace(spark(), name="mini", roles=("whole",), engine=engine)
    installation = here(fleet(spark(), front(), whole))
    (note,) = planning.plan(made(installation, front(), found), found).notes
    assert note == (
        "the key of mini is not deployed: write it there into ~/.config/mini.key, and run: chmod 600 ~/.config/mini.key"
    )
    here_too = replace(front(), connector="local")
    assert planning.plan(made(installation, here_too, found), found).notes == ()
    assert not any(
        "mini" in one for one in planning.plan(made(installation, spark(), facts("spark_bare")), found).notes
    )


@pytest.mark.parametrize(
    ("last", "cut_off", "down"),
    [
        ("restart", True, "its server does not run, and nobody has stopped it: `disagg restart` has not ended there"),
        ("rollout", False, "its server does not run, and nobody has stopped it"),
        ("stop", False, ""),
        ("uninstall", True, ""),
    ],
)
def test_a_server_that_does_not_run_and_that_nobody_has_stopped_is_down(last: str, cut_off: bool, down: str) -> None:
    """A restart that was killed between its stop and its start leaves the host so."""
    found = facts("spark_deployed", pid=None, release=RAN, last_command=last, cut_off=cut_off)
    assert planned(found).down == down
    assert planned(replace(found, pid=7, release=RAN)).down == ""
    assert planned(replace(found, pid=None, release="", service="")).down == "", "it has never run"


@pytest.mark.parametrize("count", [1, 2])
def test_a_host_with_two_tokens_is_in_a_rotation(count: int) -> None:
    assert planned(facts("spark_deployed", token_digests=("a" * 64, "b" * 64)[:count])).rotating == (count == 2)


def test_a_changed_list_of_models_is_written_beside_the_release_and_leaves_nothing_pending() -> None:
    before, host = facts("spark_bare"), several(spark(), "a", "b")
    first = made(here(fleet_of(("a", "b", "c"), host)), host, before)
    everything = "prepare requirements environment token release list check unit service switch tidy"
    assert " ".join(names(planning.plan(first, before))) == everything
    after = replace(done(first, before), pid=7, release=first.hash)
    assert planning.plan(first, after).steps == ()
    longer = replace(host, models=("a", "b", "c"))
    changed = made(here(fleet_of(("a", "b", "c"), longer)), longer, after)
    plan = planning.plan(changed, after)
    assert (names(plan), plan.needs) == (["prepare", "list", "tidy"], "")
    (step,) = [one for one in plan.steps if one.name == "list"]
    assert step.action == WriteFile(f"{after.paths.release(first.hash)}/list/hosts.toml", changed.listed)


def test_a_gateway_is_sent_a_changed_list_of_models_and_goes_on() -> None:
    before, host = facts("spark_bare", "front"), several(studio(), "a", "b")
    first = made(here(fleet_of(("a", "b", "c"), host, front())), front(), before)
    after = replace(done(first, before), pid=7, release=first.hash)
    longer = replace(host, models=("a", "b", "c"))
    changed = made(here(fleet_of(("a", "b", "c"), longer, front())), front(), after)
    plan = planning.plan(changed, after)
    assert (names(plan), plan.needs, changed.listed == first.listed) == (["prepare", "list", "tidy"], "", False)
    elsewhere = replace(longer, port=8099)
    assert made(here(fleet_of(("a", "b", "c"), elsewhere, front())), front(), after).hash != first.hash


def test_a_release_whose_files_have_changed_gets_its_list_again() -> None:
    before, host = facts("spark_bare"), several(spark(), "a", "b")
    desired = made(here(fleet_of(("a", "b"), host)), host, before)
    damaged = replace(done(desired, before), damaged=frozenset({desired.hash}))
    assert names(planning.plan(desired, damaged))[1:3] == ["release", "list"]
