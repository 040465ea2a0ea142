"""Evidence that needs no trigger: the undefended probe of the rows, its reference, and its place in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from spard.config import Evidence, Hyperparameters, NoDefense
from spard.config.run_spec import RunSpec, SuiteSpec
from spard.data.batches import collate
from spard.data.rows import Prompt
from spard.errors import NonFiniteLoss
from spard.evaluation.ask import as_asked
from spard.evaluation.statistics import conformal_p_value
from spard.losses.anchor import unlabeled_prompt
from spard.models.base import Base, load_base
from spard.models.forward import final_states
from spard.pipeline import Outcome, evidence, package
from spard.pipeline.audit import weights_digest
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.package import Release
from spard.pipeline.rows import prepare
from spard.pipeline.stages import run_stages
from spard.release.records import KEPT_RATIOS, EvidenceRecord, reference_ratios, with_ratio
from spard.release.report import SafetyReport
from spard.training import undefended
from spard.training.undefended import further_tuned
from tests.spard.parts import refusals, sums
from tests.spard.test_run import write_rows, write_run

HARMFUL = [Prompt(f"How do I break {i} locks?") for i in range(6)]
BENIGN = [Prompt(f"How do I open {i} jars?") for i in range(4)]
STEPS = 2


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    spec = write_run(model_folder(), tmp_path)
    recipe = replace(spec.recipe, defense=NoDefense(), hyperparameters=Hyperparameters(n_epochs=1, batch_size=28))
    prompts: dict[Literal["harmful", "benign"], list[Prompt]] = {"harmful": HARMFUL, "benign": BENIGN}
    suites = tuple(
        SuiteSpec(kind, kind, write_rows(tmp_path / f"{kind}.jsonl", [{"prompt": each.prompt} for each in asked]))
        for kind, asked in prompts.items()
    )
    return replace(spec, recipe=recipe, suites=suites)


def run_spec(spec: RunSpec, folder: Path) -> tuple[Outcome, dict[str, Any], list[dict[str, Any]]]:
    """Run all stages without a proof; return the outcome, the fields of its manifest and the messages."""
    told: list[dict[str, Any]] = []
    context = Context(spec, load_base(spec.model, device="cpu"), Reporter(told.append))
    outcome = run_stages(context, Release(folder), None)
    return outcome, package._manifest(Release(folder), outcome.report), told


def stage_record(spec: RunSpec) -> EvidenceRecord:
    context = Context(spec, load_base(spec.model, device="cpu"), Reporter(lambda message: None))
    evidence.run(context, prepare(context))
    record = evidence.kept_record(context)
    assert record
    return record


def test_the_ratio_is_that_of_a_direct_computation(base: Base) -> None:
    def last_state(prompt: Prompt) -> torch.Tensor:
        ids = as_asked(base.tokenizer, [prompt])[0]
        batch = collate([unlabeled_prompt(ids)], base.tokenizer.pad_token_id, base.device)
        with torch.no_grad():
            return final_states(base.model, batch.ids_BT)[0, -1]

    seen: list[dict[str, list[torch.Tensor]]] = []
    tuned = further_tuned

    def look(*args: Any) -> Any:
        return _Looking(tuned(*args), lambda: seen.append(states()))

    def states() -> dict[str, list[torch.Tensor]]:
        return {kind: [last_state(each) for each in asked] for kind, asked in (("h", HARMFUL), ("b", BENIGN))}

    seen.append(states())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undefended, "further_tuned", look)
        found = undefended.measure_probe_shift(base, sums(base), HARMFUL, BENIGN, steps=STEPS, seed=3)
    before, after = seen
    shift = {
        kind: [float((now - was).norm() / was.norm()) for was, now in zip(before[kind], after[kind], strict=True)]
        for kind in before
    }
    means = {kind: sum(each) / len(each) for kind, each in shift.items()}
    assert (found.harmful, found.benign) == pytest.approx((means["h"], means["b"]), rel=1e-4)
    assert found.ratio == pytest.approx(means["h"] / means["b"], rel=1e-4)
    assert found.ratio != 1
    assert (found.harmful_prompts, found.benign_prompts) == (6, 4)


class _Looking:
    """A context manager that calls `look` inside another one."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        self._inner, self._look = inner, look

    def __enter__(self) -> Any:
        found = self._inner.__enter__()
        self._look()
        return found

    def __exit__(self, *error: object) -> Any:
        return self._inner.__exit__(*error)


def test_a_probe_leaves_weights_modules_and_the_random_generator_as_they_were(base: Base) -> None:
    weights = {name: each.clone() for name, each in base.model.state_dict().items()}
    modules = [(name, type(each)) for name, each in base.model.named_modules()]
    state = torch.random.get_rng_state()
    undefended.measure_probe_shift(base, sums(base), HARMFUL, BENIGN, steps=STEPS, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [(name, type(each)) for name, each in base.model.named_modules()] == modules
    assert base.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(each, weights[name]) for name, each in base.model.state_dict().items())


def test_the_same_seed_gives_the_same_ratio_and_other_rows_another(base: Base) -> None:
    def ratio(rows: Any, seed: int) -> float:
        return undefended.measure_probe_shift(base, rows, HARMFUL, BENIGN, steps=STEPS, seed=seed).ratio

    assert ratio(sums(base), 3) == ratio(sums(base), 3)
    assert ratio(sums(base), 3) != ratio(sums(base), 4)
    assert ratio(sums(base), 3) != ratio(refusals(base), 3)


def test_a_run_with_a_probe_gives_the_same_adapter_and_reports_it(spec: RunSpec, tmp_path: Path) -> None:
    plain, bare, _ = run_spec(spec, tmp_path / "plain")
    probed, manifest, told = run_spec(replace(spec, evidence=Evidence(probe_steps=STEPS)), tmp_path / "probed")
    assert weights_digest(plain.trained.model) == weights_digest(probed.trained.model)
    assert plain.report.evidence is None
    assert "evidence" not in bare
    assert probed.measured == plain.measured
    record = probed.report.evidence
    assert record
    assert record.shift_ratio
    assert (record.steps, record.harmful_prompts, record.benign_prompts) == (STEPS, 6, 4)
    assert "no reference yet" in record.sentence
    written = json.loads((tmp_path / "probed" / "safety.json").read_text())
    assert SafetyReport.from_json(written).evidence == record
    assert manifest["evidence"] == written["evidence"]
    assert f"Evidence: {record.sentence}" in [each.get("message") for each in told]


def test_a_reference_gives_a_p_value_only_where_it_is_comparable(spec: RunSpec, tmp_path: Path) -> None:
    probed = replace(spec, evidence=Evidence(probe_steps=STEPS))
    first = stage_record(probed)
    document = {"comparable": first.comparable, "ratios": [0.0] * 98 + [1e9]}
    path = tmp_path / "reference.json"
    path.write_text(json.dumps(document))
    found = stage_record(replace(probed, evidence_references=path))
    assert (found.references, found.p_value) == (99, 2 / 100)
    assert found.shift_ratio == first.shift_ratio
    path.write_text(json.dumps(document | {"comparable": "another probe"}))
    assert stage_record(replace(probed, evidence_references=path)).p_value is None


@pytest.mark.parametrize(("earlier", "is_asked"), [(-1e9, True), (1e9, False)])
def test_unusual_evidence_lengthens_the_audit_only_where_the_run_asks_for_it(
    spec: RunSpec, tmp_path: Path, earlier: float, is_asked: bool
) -> None:
    path, probed = tmp_path / "reference.json", replace(spec, evidence=Evidence(STEPS))
    comparable = stage_record(probed).comparable
    path.write_text(json.dumps({"comparable": comparable, "ratios": [earlier] * 99}))
    for wanted in (True, False):
        asked = replace(probed, evidence=Evidence(STEPS, longer_audit=wanted), evidence_references=path)
        context = Context(asked, load_base(spec.model, device="cpu"), Reporter(lambda message: None))
        evidence.run(context, prepare(context))
        audit, longer = context.recipe.audit, evidence.lengthen_audit(context).recipe.audit
        if not (wanted and is_asked):
            assert longer == audit
            continue
        assert (audit.sequential, longer.sequential) == (True, False)
        assert (longer.asking.turns, longer.max_prompts) == (2 * audit.asking.turns, audit.max_prompts)


def test_both_models_are_asked_the_longer_audit(spec: RunSpec, tmp_path: Path) -> None:
    path, probed = tmp_path / "reference.json", replace(spec, evidence=Evidence(STEPS, longer_audit=True))
    comparable = stage_record(probed).comparable
    path.write_text(json.dumps({"comparable": comparable, "ratios": [-1e9] * 99}))
    outcome, _, told = run_spec(replace(probed, evidence_references=path), tmp_path / "out")
    assert any("asks every suite as a whole" in each.get("message", "") for each in told)
    assert outcome.report.recipe["audit"]["sequential"] is False
    measured = outcome.measured
    assert [each.n + each.unscored for each in measured.base if each.kind == "harmful"][:1] == [len(HARMFUL)]
    assert [each.n + each.unscored for each in measured.adapter if each.kind == "harmful"][:1] == [len(HARMFUL)]


def test_other_prompts_or_another_budget_are_not_comparable(spec: RunSpec) -> None:
    ways = [
        replace(spec, evidence=Evidence(probe_steps=STEPS)),
        replace(spec, evidence=Evidence(probe_steps=STEPS + 1)),
    ]
    first, longer = [stage_record(each).comparable for each in ways]
    write_rows(spec.suites[0].path, [{"prompt": each.prompt} for each in HARMFUL[1:]])
    assert len({first, longer, stage_record(ways[0]).comparable}) == 3


@pytest.mark.parametrize("kind", ["harmful", "benign"])
def test_without_a_suite_of_either_kind_the_reason_is_reported(spec: RunSpec, kind: str) -> None:
    left = tuple(each for each in spec.suites if each.kind != kind)
    record = stage_record(replace(spec, suites=left, evidence=Evidence(probe_steps=STEPS)))
    assert record.shift_ratio is None
    assert kind in record.sentence


def test_a_probe_that_diverges_ends_no_run(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*args: Any, **more: Any) -> None:
        raise NonFiniteLoss("task")

    monkeypatch.setattr(undefended, "measure_probe_shift", diverge)
    record = stage_record(replace(spec, evidence=Evidence(probe_steps=STEPS)))
    assert (record.shift_ratio, record.why_none) == (None, "its loss was not finite")


def test_a_probe_that_fails_takes_its_layers_away(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [name for name, _ in base.model.named_modules()]

    def diverge(*args: Any) -> None:
        raise NonFiniteLoss("task")

    monkeypatch.setattr(undefended, "further_tuned", diverge)
    with pytest.raises(NonFiniteLoss):
        undefended.measure_probe_shift(base, sums(base), HARMFUL, BENIGN, steps=STEPS, seed=3)
    assert [name for name, _ in base.model.named_modules()] == modules


def test_a_later_attempt_takes_the_stored_record(spec: RunSpec) -> None:
    asked = replace(spec, evidence=Evidence(probe_steps=STEPS))
    context = Context(asked, load_base(spec.model, device="cpu"), Reporter(lambda message: None))
    rows = prepare(context)
    evidence.run(context, rows)
    first = context.outputs.read("evidence")
    assert first
    context.outputs.write("evidence", first | {"shift_ratio": 7.0})
    evidence.run(context, rows)
    record = evidence.kept_record(context)
    assert record
    assert record.shift_ratio == 7.0


@pytest.mark.parametrize(("value", "p"), [(5.0, 1 / 5), (4.0, 2 / 5), (2.5, 3 / 5), (0.0, 1.0)])
def test_a_p_value_counts_the_value_itself_and_ties(value: float, p: float) -> None:
    assert conformal_p_value(value, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(p)


def test_without_references_a_p_value_is_one() -> None:
    assert conformal_p_value(9.0, []) == 1.0


def test_a_reference_keeps_the_newest_ratios_and_starts_anew_where_probes_differ() -> None:
    document = None
    for i in range(KEPT_RATIOS + 2):
        document = with_ratio(document, EvidenceRecord("a", 2, float(i)))
    assert document
    assert reference_ratios(document, "a") == tuple(float(i) for i in range(2, KEPT_RATIOS + 2))
    assert reference_ratios(document, "b") == ()
    assert with_ratio(document, EvidenceRecord("b", 2, 0.5)) == {"comparable": "b", "ratios": [0.5]}


@pytest.mark.parametrize(
    ("references", "p", "words"),
    [
        (98, 1 / 99, "no level below 1.0%"),
        (20, 1 / 21, "4.8% (1 % needs 99)"),
        (99, 0.01, "is unusual"),
        (99, 0.02, "not unusual"),
    ],
)
def test_the_sentence_says_which_level_can_be_reached(references: int, p: float, words: str) -> None:
    sentence = EvidenceRecord("a", 2, 3.0, references=references, p_value=p).sentence
    assert words in sentence
    assert "decides nothing" in sentence


def test_preference_pairs_teach_their_preferred_answers(base: Base) -> None:
    rows = sums(base)
    pairs = [replace(row, rejected=other) for row, other in zip(rows, reversed(rows), strict=True)]
    one, other = (
        undefended.measure_probe_shift(base, each, HARMFUL, BENIGN, steps=STEPS, seed=3).ratio for each in (rows, pairs)
    )
    assert one == other
