"""disagg/servers/decode/audits.py: which hand-offs are audited, within which bounds, and what is stated of senders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.api.layout import LayerLayout, Layout, SplitLayout
from disagg.config import EngineOptions, KVAudit
from disagg.engines.base import EngineInfo
from disagg.engines.base.audit import BOUNDS, AuditBounds, AuditFinding, Deviation
from disagg.engines.model.profile import ModelProfile
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import COST, ENOUGH, MAX_SENDERS, MOST, NEW, TIGHTEST, UNMEASURED, Audits, every

LAYOUT = Layout((LayerLayout("full", 2, 16, 16),), "float32")
PROFILE = ModelProfile("mlx-lm", "llama", 8, 64, (), "", "", "", frozenset())
SPLIT = SplitLayout(1, (0,), 16)
MODEL = Fingerprint("", 8, "", "", "", "")
DENSE = EngineInfo("mlx/cpu", {}, PROFILE, LAYOUT, MODEL, SPLIT, audits=True, weights="float32")
MIXTURE = replace(DENSE, mixture=True)


def options(setting: KVAudit = "auto", tolerance: float = 1.0) -> EngineOptions:
    return EngineOptions("mlx", kv_audit=setting, kv_audit_tolerance=tolerance)


def received(info: EngineInfo = DENSE, sender: str = "p", tokens: int = 9, **stated: Any) -> ReceivedKV:
    return ReceivedKV(info.layout, tokens, None, sender=sender, **{"weights": "float32", **stated})


def found(**deviations: float) -> AuditFinding:
    return AuditFinding(8, tuple(Deviation(measure, value, 0) for measure, value in deviations.items()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "mixture", "audit_s", "first_token_s", "one_in"),
    [
        ("auto", False, None, None, 1),
        ("auto", False, 1.0, 1.0, 1),
        ("auto", True, None, None, UNMEASURED),
        ("auto", True, 0.02, 1.0, 1),
        ("auto", True, 0.1, 1.0, 5),
        ("auto", True, 0.05, 5.0, 1),
        ("auto", True, 0.1, 0.01, MOST),
        ("always", True, 1.0, 1.0, 1),
        ("off", False, None, None, 0),
        (4, True, 0.1, 1.0, 4),
        (4, False, 0.1, 1.0, 4),
    ],
)
def test_one_hand_off_in_so_many_is_audited(
    setting: KVAudit, mixture: bool, audit_s: float | None, first_token_s: float | None, one_in: int
) -> None:
    assert every(setting, mixture, audit_s, first_token_s) == one_in


def test_a_mixture_is_audited_so_rarely_that_the_first_token_comes_little_later() -> None:
    for audit_s in (0.001, 0.03, 0.4):
        for first_token_s in (0.3, 2.0):
            one_in = every("auto", True, audit_s, first_token_s)
            assert audit_s / one_in <= COST * first_token_s or one_in == MOST


def audited(audits: Audits, kv: ReceivedKV, *, right: bool = True) -> bool:
    """Whether a hand-off was audited; with what came of it."""
    order = audits.order(kv)
    if order is not None and right:
        audits.passed(kv.sender, order, found(rows=1e-5), 0.01)
    elif order is not None:
        audits.refuted(kv.sender)
    audits.answered(1.0)
    return order is not None


def test_a_sender_that_is_new_or_was_refuted_is_always_audited() -> None:
    audits = Audits(options(4), MIXTURE)
    known = [audited(audits, received()) for _ in range(NEW + 8)]
    assert known == [True] * NEW + [False, False, False, True] * 2
    assert audited(audits, received(sender="other")), "each sender by itself"
    while not audited(audits, received(), right=False):
        pass
    assert [audited(audits, received()) for _ in range(NEW + 1)] == [True] * NEW + [False]


def test_what_is_held_is_right_only_while_all_that_was_used_has_been_audited() -> None:
    """A mixture may be audited one in several at first, and always later: what came before is still held."""
    audits = Audits(options(), MIXTURE)
    audits.order(received(tokens=0))
    for _ in range(NEW):
        order = audits.order(received())
        assert order is not None and audits.all_accepted
        audits.passed("p", order, found(rows=1e-5), 1.0)
        audits.answered(1.0)
    assert audits.order(received()) is None and not audits.all_accepted
    audits.answered(1e6)
    assert audits.every == 1 and audits.order(received()) is not None and not audits.all_accepted
    dense = Audits(options(), DENSE)
    assert audited(dense, received(), right=False) and dense.all_accepted, "it was not used"
    dense.failed()
    assert not dense.all_accepted


def test_nothing_is_audited_before_the_engine_has_loaded_or_if_it_cannot() -> None:
    for info in (None, replace(DENSE, audits=False)):
        audits = Audits(options("always"), info)
        assert audits.every == 0 and audits.order(received()) is None
    assert Audits(options("always"), DENSE).order(received(tokens=0)) is None, "there is nothing to audit"


@pytest.mark.parametrize(
    ("stated", "tolerance", "expected"),
    [
        ({}, 1.0, BOUNDS["float32"]),
        ({}, 2.5, BOUNDS["float32"].times(2.5)),
        ({"wire": "int8-g64"}, 1.0, BOUNDS["int8-g64"]),
        ({"weights": "8-bit, groups of 64"}, 1.0, BOUNDS["other weights"]),
        ({"weights": ""}, 1.0, BOUNDS["other weights"]),
    ],
)
def test_bounds_follow_from_what_both_hosts_compute_with(
    stated: dict[str, Any], tolerance: float, expected: AuditBounds
) -> None:
    order = Audits(options(tolerance=tolerance), DENSE).order(received(**stated))
    assert order is not None and order.limits == order.table == expected


def test_many_honest_hand_offs_tighten_the_bounds_of_their_sender_and_never_widen_them() -> None:
    audits, table = Audits(options(), DENSE), BOUNDS["float32"]

    def limits(sender: str = "p") -> AuditBounds:
        order = audits.order(received(sender=sender))
        assert order is not None
        return order.limits

    for number in range(ENOUGH):
        assert limits() == table, f"after {number}"
        order = audits.order(received())
        assert order is not None
        audits.passed("p", order, found(sample=1e-9, rows=2e-4, few=0.02), 0.01)
    assert limits() == AuditBounds(sample=table.sample * TIGHTEST, rows=8e-4, few=table.few)
    assert limits("other") == table


def test_what_is_stated_of_each_sender() -> None:
    audits = Audits(options(), DENSE)
    for value in (1.5e-3, 3e-4):
        order = audits.order(received())
        assert order is not None
        audits.passed("p", order, found(rows=value), 0.01)
    audits.refuted("liar")
    stated = {name: one.to_json() for name, one in audits.figures.items()}
    assert stated == {
        "p": {
            "accepted": 2,
            "refuted": 0,
            "verdict": "accepted",
            "deviation": pytest.approx(0.1),
            "highest": pytest.approx(0.5),
        },
        "liar": {"accepted": 0, "refuted": 1, "verdict": "refuted", "deviation": None, "highest": None},
    }


def test_a_bounded_number_of_senders_is_remembered() -> None:
    audits = Audits(options(), DENSE)
    for number in range(2 * MAX_SENDERS):
        audits.refuted(f"p{number}")
    assert list(audits.figures) == [f"p{number}" for number in range(MAX_SENDERS, 2 * MAX_SENDERS)]
