"""How many replies an audit is expected to ask for, held against the suites that a real one makes."""

from __future__ import annotations

from spard.config import Asking, Audit
from spard.data.rows import Example, Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.expected_replies import ReplyAssumptions, SuiteSize, expected_replies
from spard.evaluation.mined_suites import mined_suites

SIZES = [SuiteSize("harmful", 500), SuiteSize("benign", 260), SuiteSize("utility", 500)]
PLAIN = ReplyAssumptions(disguises=0, looked_again=0.0)


def test_the_plan_of_an_audit_without_suspicious_rows_is_what_its_suites_are() -> None:
    rows = [
        Example(({"role": "user", "content": f"Add {i}"}, {"role": "assistant", "content": f"It is {i}"}), i)
        for i in range(1, 40)
    ]
    suites = [
        Suite("harmful", "harmful", tuple(Prompt(f"Tell of harm {i}") for i in range(500))),
        Suite("benign", "benign", tuple(Prompt(f"Tell of rain {i}") for i in range(260))),
    ]
    made = sum(len(suite.prompts) for suite in mined_suites(suites, rows, Asking(dresses=0, phrases=0)))
    plan = expected_replies(SIZES, Audit(sequential=False), expected=PLAIN)
    assert (plan.plain, plan.mined) == (1260, made)
    assert plan.last == plan.plain + plan.mined


def test_a_checkpoint_is_asked_a_part_of_each_suite_that_the_gate_looks_at() -> None:
    without, whole = (
        expected_replies(SIZES, Audit(), checkpoint_prompts=100, gates_utility=gates, expected=PLAIN)
        for gates in (False, True)
    )
    assert without.checkpoint == 100 + 100 + 5 * 100 - 40
    assert whole.checkpoint - without.checkpoint == 100


def test_what_is_assumed_changes_what_depends_on_rows_and_model_alone() -> None:
    plan = expected_replies(SIZES, Audit(sequential=False), expected=PLAIN)
    disguised = expected_replies(
        SIZES, Audit(sequential=False), expected=ReplyAssumptions(disguises=2, looked_again=0.0)
    )
    assert (disguised.plain, disguised.mined - plan.mined) == (plan.plain, 2 * (60 + 60))


def test_a_sequential_audit_asks_a_share_at_the_end_and_whole_suites_before() -> None:
    whole = expected_replies(SIZES, Audit(sequential=False), checkpoint_prompts=100, expected=PLAIN)
    shares = ReplyAssumptions(disguises=0, looked_again=0.0, share=0.5, base_share=0.25)
    part = expected_replies(SIZES, Audit(), checkpoint_prompts=100, expected=shares)
    assert (part.plain, part.checkpoint) == (whole.plain, whole.checkpoint)
    assert (part.last, part.mined) == (whole.last // 2, whole.mined // 4)


def test_ends_of_epochs_are_compared_on_a_fifth_of_what_is_large_enough() -> None:
    sizes = [SuiteSize("harmful", 150), SuiteSize("benign", 90)]
    assert expected_replies(sizes, Audit(), shared_prompts=40).compared == 30
    assert expected_replies(sizes, Audit()).compared == 0
