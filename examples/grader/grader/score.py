"""Points from the four layers. Pure, and never outside the rubric, whatever the models answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from grader.compare import Comparison, share
from grader.injection import Find
from grader.prompts import Assessment
from grader.rubric import Rubric, Section
from grader.validate import Validation


class SectionScore(BaseModel):
    """points: 0 to `maximum`, two decimals. shares: 0 to 1 per layer that counted. review: why a person should look."""

    model_config = ConfigDict(frozen=True)

    section: str
    points: float
    maximum: int
    shares: Mapping[str, float]
    comments: Mapping[str, str] = {}
    review: tuple[str, ...] = ()


class Score(BaseModel):
    """points: the sum of the sections'. review: of the notebook as a whole."""

    model_config = ConfigDict(frozen=True)

    points: float
    maximum: int
    sections: tuple[SectionScore, ...]
    review: tuple[str, ...] = ()

    @property
    def needs_review(self) -> bool:
        return bool(self.review) or any(section.review for section in self.sections)


def score(
    rubric: Rubric,
    validations: Sequence[Validation],
    comparisons: Sequence[Comparison],
    assessments: Mapping[str, Assessment | None],
    finds: Sequence[Find],
    *,
    unread: Sequence[str] = (),
) -> Score:
    """assessments: of `code` and `writing`; None where the model gave no usable answer. unread: what was not read."""
    sections = tuple(
        _section(rubric, section, validation, share(comparisons, section.id), assessments, suspicious=bool(finds))
        for section, validation in zip(rubric.sections, validations, strict=True)
    )
    review = [f"cell {one.cell + 1} addresses the models: {one.excerpt}" for one in finds] + [*unread]
    for layer, assessment in assessments.items():
        review += _sum_faults(layer, assessment)
    points = round(sum(section.points for section in sections), 2)
    return Score(points=points, maximum=rubric.points, sections=sections, review=tuple(review))


def _section(
    rubric: Rubric,
    section: Section,
    validation: Validation,
    outputs: float | None,
    assessments: Mapping[str, Assessment | None],
    *,
    suspicious: bool,
) -> SectionScore:
    if not validation.present:
        return SectionScore(section=section.id, points=0, maximum=section.points, shares={"validation": 0.0})
    shares = {"validation": validation.share} | ({} if outputs is None else {"outputs": outputs})
    measured = _mean(rubric, shares)
    review, comments = [], {}
    for layer, assessment in assessments.items():
        judgement = assessment.sections.get(section.id) if assessment else None
        if judgement is None:
            review.append(f"{layer}: no usable answer")
            continue
        comments[layer] = judgement.comment
        shares[layer], reason = bounded(judgement.points, section.points, measured, rubric.agreement, suspicious)
        if reason:
            review.append(f"{layer}: {reason}")
    points = round(min(section.points, max(0.0, section.points * _mean(rubric, shares))), 2)
    return SectionScore(
        section=section.id,
        points=points,
        maximum=section.points,
        shares={layer: round(value, 4) for layer, value in shares.items()},
        comments=comments,
        review=tuple(review),
    )


def bounded(points: int, maximum: int, measured: float, agreement: float, suspicious: bool) -> tuple[float, str]:
    """A model's points as a share of `maximum`, and why it is not the model's own.

    measured: the share by layers 1 and 2, from which it may differ by `agreement`; not upwards if the notebook is
    suspicious.
    """
    own = points / maximum
    low, high = max(0.0, measured - agreement), min(1.0, measured + (0.0 if suspicious else agreement))
    if not 0 <= points <= maximum:
        return min(high, max(low, own)), f"{points} points of {maximum}"
    if own > high or own < low:
        return min(high, max(low, own)), f"{points} of {maximum} points, where {measured:.0%} is measured"
    return own, ""


def _mean(rubric: Rubric, shares: Mapping[str, float]) -> float:
    """Weighted by the rubric; the weight of a layer that is missing goes to the others."""
    weights = {layer: getattr(rubric.weights, layer) for layer in shares}
    total = sum(weights.values())
    if total == 0:
        return sum(shares.values()) / len(shares)
    return float(sum(shares[layer] * weights[layer] for layer in shares) / total)


def _sum_faults(layer: str, assessment: Assessment | None) -> list[str]:
    if assessment is None:
        return []
    total = sum(judgement.points for judgement in assessment.sections.values())
    return (
        [] if total == assessment.total else [f"{layer}: states {assessment.total} points in all, its sections {total}"]
    )
