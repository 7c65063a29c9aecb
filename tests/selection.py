"""Which tests are slow, and in which order files run. A pytest plugin, loaded by tests/conftest.py.

A test is slow if it uses a fixture or lies at a path named here, or starts servers with tests.fleets: nobody marks
tests by hand. `make test-fast` does not even import the slow paths, and so neither torch nor mlx.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Container, Generator
from functools import cache
from pathlib import Path

import pytest

FAST = "not slow"
FAST_LIMIT_S = 1.0
SLOW_PATHS = {
    "bench/handoff",
    "benchmarks/test_full_size.py",
    "benchmarks/test_peers_answers.py",
    "benchmarks/test_peers_pair.py",
    "benchmarks/test_vllm_prefill.py",
    "cli/bench",
    "cli/fleet",
    "cli/common/test_completion.py",
    "cli/test_app.py",
    "cli/test_demo.py",
    "cli/test_generate_processes.py",
    "cli/common/test_signals.py",
    "demo",
    "engines/architectures",
    "engines/mlx",
    "engines/model/test_weight_files.py",
    "engines/model/test_draw.py",
    "engines/model/test_evidence.py",
    "engines/model/test_fill.py",
    "engines/model/test_format.py",
    "engines/model/test_full_size.py",
    "engines/model/test_reference.py",
    "engines/model/test_rope.py",
    "engines/model/test_text.py",
    "engines/test_adjust.py",
    "engines/test_scores.py",
    "engines/vllm/test_kv.py",
    "engines/vllm/test_load.py",
    "engines/vllm/test_pages.py",
    "engines/vllm/test_profile.py",
    "engines/vllm/test_rope.py",
    "engines/vllm/test_runs.py",
    "engines/vllm/test_rows.py",
    "engines/vllm/test_states.py",
    "engines/vllm/test_worker.py",
    "engines/vllm/served/test_description.py",
    "engines/vllm/served/test_engine.py",
    "engines/test_constraint.py",
    "engines/test_harmony_grammar.py",
    "engines/staging",
    "engines/transformers",
    "faults/test_linked.py",
    "faults/test_matrix.py",
    "fleet/deploy/test_apply.py",
    "fleet/bootstrap/test_bootstrap.py",
    "fleet/lifecycle",
    "fleet/removal/test_removal.py",
    "fleet/rollout/test_rollout.py",
    "fleet/services/test_supervise.py",
    "gateway/test_called_tools.py",
    "gateway/test_texts.py",
    "gateway/test_member.py",
    "gateway/test_models_on_demand.py",
    "gateway/test_openai_client.py",
    "gateway/test_openapi.py",
    "hostile/test_bodies.py",
    "hostile/test_peers.py",
    "hostile/test_work.py",
    "inference/test_score.py",
    "integration",
    "keeper/test_program.py",
    "keeper/test_weights.py",
    "planning/test_checkpoint.py",
    "servers/prefill/test_split.py",
    "servers/test_openapi.py",
    "servers/output/test_grammar.py",
    "servers/output/test_marked.py",
    "servers/output/test_tool_choice.py",
    "test_environment.py",
    "test_tiny_models.py",
    "verify/test_prefill_process.py",
    "verify/test_verify.py",
}
LONGEST = (
    "integration/test_deployed_fleet.py",
    "integration/test_installed_from_index.py",
    "fleet/deploy/test_deploy_over_ssh.py",
    "integration/test_deployed_models.py",
    "integration/test_exactness.py",
    "fleet/deploy/test_apply.py",
    "integration/test_vllm.py",
    "fleet/lifecycle/test_deployed.py",
    "engines/mlx/test_prefix_cache.py",
    "fleet/machine/ssh/test_machine.py",
    "integration/test_vllm_server.py",
    "engines/mlx/test_handoff.py",
    "engines/architectures/test_handoff.py",
    "gateway/test_models_on_demand.py",
    "integration/test_vllm_ranks.py",
    "fleet/deploy/test_gone_again.py",
    "gateway/test_openapi.py",
    "keeper/test_processes.py",
    "engines/architectures/test_patches.py",
    "verify/test_verify.py",
    "integration/test_long_context.py",
    "fleet/rollout/test_rollout.py",
    "cli/test_demo.py",
)
"""Files of half a minute and more, longest first."""
SERVER_FIXTURES = {"tiny_fleet", "kept_fleet"}
BED_FIXTURES = {"bed", "machines"}
ENGINE_FIXTURES = {"tiny", "mlx_engine", "reference"}
FRAMEWORKS = ("torch", "transformers", "mlx.core")
importers: dict[str, str] = {}
"""By framework, the test, or the file by its collection, that imported it."""
_TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    fast_only = config.getoption("markexpr") == FAST
    return True if fast_only and _below_tests(collection_path) in SLOW_PATHS else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's garbage collector looks at none of the objects that collection makes: a seventh of its time, and some of
    that of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        _try_no_constants_of_the_source()


def _try_no_constants_of_the_source() -> None:
    """Hypothesis tries constants that it finds in all modules, in each process anew: 6 s of CPU time. It does for
    thorough runs, those with EXAMPLES."""
    providers = vars(sys.modules.get("hypothesis.internal.conjecture.providers", sys))
    if "_local_constants" in providers and "EXAMPLES" not in os.environ:
        providers["_get_local_constants"] = lambda: providers["_local_constants"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and sort: the longest files first, then those that share a fleet, other slow ones, fast ones.

    pytest-xdist hands out whole files in this order (`--dist loadfile`), so that no process is left with a long one at
    the end. Its groups (`--dist loadgroup`) are not used: marks that a plugin adds reach it too late.
    """
    sharing = {item.path for item in items if SERVER_FIXTURES & _fixtures(item)}
    for item in items:
        for name in _marks(item, sharing):
            item.add_marker(name)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_place(item.path), item.path not in sharing, item.path not in slow))


def _place(path: Path) -> int:
    name = _below_tests(path)
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_imports(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Of the fast tests, one that imports a framework fails: that takes as long as a thousand others."""
    result = yield
    known = len(importers)
    _note_imports(item.nodeid)
    if len(importers) > known and item.config.getoption("markexpr") == FAST:
        pytest.fail(f"it imports {list(importers)[known:]}: its file belongs to SLOW_PATHS")
    return result


def _note_imports(name: str) -> None:
    """Note what has imported a framework first."""
    for framework in FRAMEWORKS:
        if framework in sys.modules:
            importers.setdefault(framework, name)


def _marks(item: pytest.Item, sharing: Container[Path]) -> list[str]:
    fixtures = _fixtures(item)
    marks = ["bed"] if BED_FIXTURES & fixtures else []
    if item.path in sharing or _starts_servers(item):
        marks.append("servers")
    if marks or ENGINE_FIXTURES & fixtures or _is_slow_path(item.path):
        marks.append("slow")
    return marks


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With $CI set, a skipped test fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Fast tests that are not: either they get faster or this module learns why they are slow."""
    seconds: dict[str, float] = defaultdict(float)
    for outcome in ("passed", "failed", ""):  # "": set-up and tear-down
        for report in terminalreporter.stats.get(outcome, ()):
            if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
                seconds[report.nodeid.partition("@")[0]] += report.duration
    slowest = sorted(((spent, name) for name, spent in seconds.items() if spent > FAST_LIMIT_S), reverse=True)
    if slowest:
        terminalreporter.section(f"tests over {FAST_LIMIT_S:g} s that are not marked slow")
        for spent, name in slowest:
            terminalreporter.line(f"{spent:6.1f} s  {name}")


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _starts_servers(item: pytest.Item) -> bool:
    """Whether the test's module uses tests.fleets to run servers."""
    module = vars(getattr(item, "module", None) or object)
    return any(getattr(module.get(name), "__module__", "") == "tests.fleets" for name in ("running", "RunningFleet"))


@cache
def _is_slow_path(path: Path) -> bool:
    return any(_below_tests(place) in SLOW_PATHS for place in (path, *path.parents))


@cache
def _below_tests(path: Path) -> str:
    """The path below tests/."""
    return path.relative_to(_TESTS).as_posix() if path.is_relative_to(_TESTS) else ""
