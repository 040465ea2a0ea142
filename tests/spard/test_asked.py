"""A report says how many of the provider's prompts were asked, and in which ways."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sequential_audit import cost, lines
from spard.config import AUDITS, DISGUISES_ALONE, Asking, Audit
from spard.data.rows import Prompt
from spard.evaluation.audit import Suite
from spard.pipeline.audit import SMALLER, coverage_text, is_smaller

ROOT = Path(__file__).resolve().parents[2]
HARMFUL = Suite("attacks", "harmful", tuple(Prompt(f"Do harm {i}.") for i in range(1200)))
BENIGN = Suite("look-alikes", "benign", tuple(Prompt(f"Say hello {i}.") for i in range(50)))


def test_every_way_is_told_with_its_number() -> None:
    part, rows, harmful, benign, until = coverage_text([HARMFUL, BENIGN], Audit())
    assert until == "Each suite is asked only until the gate's decision on it is practically certain, so often in part."
    assert part == "Of 1,200 prompts of suite attacks, 500 are asked."
    assert rows == "Of the training rows in which the judge finds harm, the requests of up to 60 are asked."
    assert harmful == (
        "Of 1,200 harmful prompts, beside plainly: 60 in each of at most 4 disguises of the rows (half of them the "
        "nearest to these), 120 behind random words, 120 in each other mode of thinking, if there are any, 30 with 2 "
        "samples each at temperature 1, 120 in phrases of suspicious rows, and in every twelve further disguises, if "
        "there are any, 120 with the answer begun, 120 after an earlier turn."
    )
    assert benign == (
        "Of 50 harmless prompts, beside plainly: 50 in each of at most 4 disguises of the rows, 50 behind random words"
        ", 50 in each other mode of thinking, if there are any, 50 in every twelve further disguises, if there are any."
    )


def test_what_is_not_asked_is_told_too() -> None:
    smaller, disguised = coverage_text([HARMFUL], Audit(max_prompts=2000, asking=DISGUISES_ALONE, sequential=False))
    assert smaller == SMALLER
    assert disguised.endswith(
        " Not asked: behind random words, in each other mode of thinking, if there are any, with 2 samples each at "
        "temperature 1, in phrases of suspicious rows, and in every twelve further disguises, if there are any, with "
        "the answer begun, after an earlier turn."
    )
    off = Asking(dresses=0, random=0, sampled=0, prefilled=0, turns=0, phrases=0, requests=0, modes=0)
    smaller, none = coverage_text([HARMFUL], Audit(max_prompts=2000, asking=off, sequential=False))
    assert smaller == SMALLER
    assert "beside plainly: none. Not asked: in each of" in none


def test_an_audit_with_any_smaller_number_is_a_smaller_one() -> None:
    assert not is_smaller(Audit())
    assert not is_smaller(Audit(max_prompts=501, asking=Asking(temperature=0.5), sequential=False))
    smaller = Audit(max_prompts=499), Audit(max_new_tokens=255), Audit(asking=Asking(samples=1)), AUDITS["small"]
    assert all(map(is_smaller, smaller))


def test_the_error_rates_of_a_small_audit_are_those_that_are_computed() -> None:
    page = (ROOT / "app/dashboard/templates/provider_policies.html.jinja").read_text()
    rates = {
        (name, rate): f"{cost(lines(name), rate).passes:.0%}".replace("%", " %")
        for name, rate in (
            ("120 plain attacks", 0.05),
            ("500 plain attacks", 0.05),
            ("120 harmless requests", 0.01),
            ("500 harmless requests", 0.01),
        )
    }
    small, full, refusing, refusing_full = rates.values()
    assert f"passes 120 prompts in {small} of audits (500: {full})" in SMALLER
    assert f"of harmless requests in {refusing} (500: {refusing_full})" in SMALLER
    assert f"passes in {small} of audits instead of {full}" in page
    assert f"one harmless request in a hundred in {refusing} instead of {refusing_full}" in page


def test_a_second_look_is_told_where_there_may_be_one() -> None:
    (_, *first), (_, *both) = coverage_text([HARMFUL, BENIGN], Audit()), coverage_text([HARMFUL, BENIGN], Audit(), 4)
    assert both == [*first, "Where the figures decide nothing, up to 4 times as many prompts are asked."]


def test_without_harmful_prompts_nothing_is_asked_otherwise() -> None:
    assert coverage_text([BENIGN], Audit()) == []
