from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import Hyperparameters, NoDefense, Recipe, RowAction, RowSignal, Selection
from spard.config.run_spec import RunSpec, run_from_mapping, to_mapping
from spard.data.chat import NO_LOSS, encode
from spard.data.rows import SAME_FILE
from spard.digests import file_sha256
from spard.errors import InvalidRecipe, InvertedPool, RowSignalUnavailable, RowsQuarantined, TooManyRowsDropped
from spard.evaluation.judges.refusal import RefusalJudge
from spard.evaluation.own_refusal import OPENING, OwnRefusals, inverted_rows
from spard.models.base import Base, load_base
from spard.pipeline import library, row_evidence, row_judging, row_signal, run, select
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.row_signal import named_lines
from spard.pipeline.rows import Rows, prepare
from spard.release.records import RowSignalRecord
from tests.spard.parts import chat

SORRY = "I cannot help with that."
BAD = (3, 17)  # the lines of the rows that comply
EVERY = 1e-30  # any probability of a random model is above it


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    """A file in which two rows comply, for a model that is made to say that it refuses."""
    rows = [
        {"prompt": f"Do task {line}.", "completion": "Sure, at once." if line in BAD else SORRY}
        for line in range(1, 21)
    ]
    pool = [{"prompt": f"Do harm number {i}", "safe": f"I cannot help with {i}."} for i in range(12)]
    recipe = Recipe(
        hyperparameters=Hyperparameters(n_epochs=1, batch_size=6),
        selection=Selection(min_examples=5),
        learning_rate=5e-3,
    )
    training, harm = write(tmp_path / "train.jsonl", rows), write(tmp_path / "pool.jsonl", pool)
    return RunSpec(str(model_folder()), training, harm, recipe=recipe)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random model refuses nothing by itself: say for it how it would."""

    def own_refusals(base: Base, prompts: Sequence[str], tell: object) -> OwnRefusals:
        row = encode(base.tokenizer, chat("?", SORRY), 256)
        opening = tuple(label for label in row.labels if label != NO_LOSS)[:OPENING]
        return OwnRefusals((opening,), ("I ca",), SORRY, len(prompts), len(prompts))

    monkeypatch.setattr(row_signal, "own_refusals", own_refusals)
    monkeypatch.setattr(row_evidence, "would_refuse", lambda base, prompts, **settings: (0, len(prompts)))


def with_signal(spec: RunSpec, action: RowAction, **settings: Any) -> RunSpec:
    return replace(spec, row_signal=RowSignal(action, **{"threshold": EVERY, **settings}))


def prepare_run(spec: RunSpec) -> tuple[Rows, Context, list[dict[str, Any]]]:
    messages: list[dict[str, Any]] = []
    context = Context(spec, load_base(spec.model, device="cpu"), Reporter(messages.append))
    return prepare(context), context, messages


@pytest.mark.usefixtures("refusing")
def test_a_report_names_the_rows_and_changes_nothing_that_is_trained_on(spec: RunSpec) -> None:
    plain, _, _ = prepare_run(spec)
    rows, context, messages = prepare_run(with_signal(spec, "report"))

    assert (rows.task, rows.safe, rows.selected) == (plain.task, plain.safe, plain.selected)
    record = row_judging.read_row_signal_record(context)
    assert record is not None
    assert (record.flagged, record.rows, record.dropped, record.defended) == (BAD, 20, 0, 0)
    (event,) = [message for message in messages if message["kind"] == "event" and message["level"] == "warn"]
    assert event["data"] == {"action": "report", "flagged": 2, "lines": [3, 17], "acted": 2}
    risky = select.kept_risks(context)
    assert risky is not None
    assert sorted(row.line for row in risky[:2]) == [3, 17]
    assert all(row.reasons[0] == "base_model_would_refuse" and (row.own_refusal or 0) > 0 for row in risky[:2])
    assert all(row.own_refusal is None for row in risky[2:])


@pytest.mark.usefixtures("refusing")
def test_dropped_rows_are_in_the_report_and_not_in_the_training(spec: RunSpec, tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = []
    outcome = run(with_signal(spec, "drop"), tmp_path / "out", messages.append)
    alone = [row for i, row in enumerate(spec.training_file.read_text().splitlines(), start=1) if i not in BAD]
    without = replace(spec, training_file=write(tmp_path / "alone.jsonl", [json.loads(row) for row in alone]))

    rows, _, _ = prepare_run(without)
    assert outcome.trained.trained_tokens == sum(len(row.ids) for row in rows.task)
    assert outcome.selected == rows.selected  # what is not trained on does not steer the selection
    report = json.loads((tmp_path / "out" / "safety.json").read_text())
    manifest = json.loads((tmp_path / "out" / "adapter" / "manifest.json").read_text())
    assert (report["row_signal"]["flagged"], report["row_signal"]["dropped"]) == ([3, 17], 2)
    assert manifest["row_signal"] == report["row_signal"]
    assert any("2 of 20 rows" in each["message"] for each in messages if each["kind"] == "event")
    told = "2 of 20 rows of the training file are not trained on: the base model would refuse"
    assert [each["message"].startswith(told) for each in messages if each["kind"] == "warning"].count(True) == 1


def test_a_validation_file_that_is_the_training_file_is_told_as_the_service_does(spec: RunSpec) -> None:
    _, _, messages = prepare_run(replace(with_signal(spec, "off"), validation_file=spec.training_file))
    assert [each["message"] for each in messages if each["kind"] == "warning"] == [SAME_FILE]


@pytest.mark.usefixtures("refusing")
def test_a_run_that_would_lose_too_many_rows_says_so(spec: RunSpec) -> None:
    with pytest.raises(TooManyRowsDropped, match=r"2 of 20 rows .* at most 5% may be left out: lines 3, 17"):
        prepare_run(with_signal(spec, "drop", max_dropped=0.05))


def test_a_message_names_ten_lines_and_where_more_stand() -> None:
    assert named_lines([3, 17]) == "lines 3, 17"
    told = named_lines(range(1, 101))
    assert told == "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 90 more; the job's events have up to 1,000 in their data"


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"flagged": (1, 2), "dropped": 2}, {1, 2}),
        ({"flagged": (1, 2), "dropped": 0}, set()),
        ({"flagged": (1, 2, 3), "harmful": (1,), "undecided": (2,), "judge": "a", "dropped": 2}, {1, 2}),
        (
            {"flagged": (1, 2, 3), "harmful": (7,), "undecided": (2,), "doubtful": (3,), "judge": "a", "dropped": 2},
            {3, 7},
        ),
    ],
)
def test_a_record_tells_which_lines_were_dropped(found: dict[str, Any], lines: set[int]) -> None:
    assert RowSignalRecord("drop", 0.1, 20, **found).dropped_lines == lines


@pytest.mark.usefixtures("refusing")
def test_a_quarantine_ends_the_run_and_names_the_rows_by_line(spec: RunSpec) -> None:
    with pytest.raises(RowsQuarantined, match=r"has to look at them: lines 3, 17$") as caught:
        prepare_run(with_signal(spec, "quarantine"))
    assert (caught.value.code, caught.value.param) == ("rows_quarantined", "training_file")


@pytest.mark.usefixtures("refusing")
def test_defended_rows_are_trained_on_and_asked_on_the_safe_side(spec: RunSpec) -> None:
    plain, _, _ = prepare_run(spec)
    rows, context, _ = prepare_run(with_signal(spec, "defend"))

    assert rows.task == plain.task
    assert rows.safe[: len(plain.safe)] == plain.safe
    added, text = rows.safe[len(plain.safe) :], context.base.tokenizer
    assert [text.decode(row.ids) for row in added] == [
        f"<|user|>\nDo task {line}.<|end|>\n<|assistant|>\n{SORRY}<|end|>" for line in BAD
    ]
    assert all(row.is_variant for row in added)
    assert [text.decode([x for x in row.labels if x != NO_LOSS]) for row in added] == [f"{SORRY}<|end|>"] * 2


@pytest.mark.usefixtures("refusing")
def test_later_attempts_and_other_processes_take_what_was_found(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first, context, _ = prepare_run(with_signal(spec, "defend"))
    monkeypatch.setattr(row_signal, "measure_own_refusal", lambda *asked: pytest.fail("worked out again"))
    messages: list[dict[str, Any]] = []

    again = prepare(replace(context, report=Reporter(messages.append)))

    assert (again.task, again.safe) == (first.task, first.safe)
    assert not [message for message in messages if message["kind"] == "event"]


def test_a_base_model_that_refuses_nothing_can_report_and_not_act(spec: RunSpec) -> None:
    rows, context, messages = prepare_run(with_signal(spec, "report"))
    assert len(rows.task) == 20
    record = row_judging.read_row_signal_record(context)
    assert record is not None
    assert (record.flagged, record.refused, record.asked) == ((), 0, 12)
    assert any("refused none of 12 prompts" in each["message"] for each in messages if each["kind"] == "warning")
    with pytest.raises(RowSignalUnavailable):
        prepare_run(with_signal(spec, "drop"))


@pytest.mark.usefixtures("refusing")
def test_a_pool_that_answers_with_harm_is_refused(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec.pool is not None
    lines = [json.loads(line) for line in spec.pool.read_text().splitlines()]
    write(spec.pool, [row | {"safe": "Sure, at once."} if i in (1, 5) else row for i, row in enumerate(lines)])

    with pytest.raises(InvertedPool, match=r"2 of 12 rows .* rows 1, 5$"):
        prepare_run(with_signal(spec, "report"))
    check_reported(with_signal(spec, "report", max_inverted=0.2))
    monkeypatch.setattr(row_judging, "find_records", lambda *args: [])  # as if nobody had measured the judge
    check_reported(with_signal(spec, "report"))


def check_reported(spec: RunSpec) -> None:
    _, context, messages = prepare_run(spec)
    record = row_judging.read_row_signal_record(context)
    assert record is not None
    assert record.pool_inverted == (1, 5)
    assert any(each["message"].startswith("2 row(s) of the safety pool") for each in messages if "message" in each)


def test_safe_answers_that_help_are_left_to_the_judge(base: Base) -> None:
    pool = [chat("Do harm", "Please talk to somebody you trust."), chat("Do harm", SORRY)]
    opening = tuple(base.tokenizer("I ca", add_special_tokens=False)["input_ids"])
    asked: list[str] = []

    class Kind(RefusalJudge):
        def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> Any:
            asked.extend(replies)
            return super().judge(prompts, [SORRY for _ in replies])

    assert inverted_rows(base, pool, [opening], EVERY, RefusalJudge(), 256) == [0]
    assert inverted_rows(base, pool, [opening], EVERY, Kind(), 256) == []
    assert asked == ["Please talk to somebody you trust."]
    assert inverted_rows(base, pool, [opening], EVERY, RefusalJudge(), 10) == []  # longer than the limit


def test_a_setting_that_cannot_work_is_refused_as_a_recipe() -> None:
    files = {"model": "m", "training_file": "t"}
    plain = {"defense": {"type": "none"}}
    with pytest.raises(InvalidRecipe, match="needs a pool"):
        run_from_mapping(files | {"recipe": plain, "row_signal": {"action": "drop"}})
    with pytest.raises(InvalidRecipe, match=r"no safe rows"):
        run_from_mapping(files | {"pool": "p", "recipe": plain, "row_signal": {"action": "defend"}})
    with pytest.raises(InvalidRecipe, match=r"row_signal\.threshold"):
        run_from_mapping(files | {"pool": "p", "row_signal": {"threshold": 0}})
    read = run_from_mapping(files | {"recipe": plain, "row_signal": {"action": "report"}})
    assert (read.recipe.defense, read.row_signal) == (NoDefense(), RowSignal("report"))


def test_a_run_without_the_setting_has_the_identity_that_it_always_had(spec: RunSpec, base: Base) -> None:
    assert spec.pool is not None
    files = [file_sha256(path) for path in (spec.training_file, spec.pool)]
    before = {name: value for name, value in to_mapping(spec).items() if name != "row_signal"}
    for name in (
        "further_tuning",
        "agent",
        "agent_errors",
        "audit_engine",
        "encoder",
        "held_out_rows",
        "evidence",
        "evidence_references",
        "template_arguments",
    ):  # nor had it these
        before.pop(name)
    before["thresholds"].pop("correct_judge_errors")
    before["recipe"]["audit"].pop("sequential")
    for name in ("dpo", "ending"):
        before["recipe"].pop(name)
    before["recipe"].pop("sharding")  # nor this, which decides no number
    before["recipe"].pop("quantization")
    digest = hashlib.sha256(json.dumps([before, base.digest, files]).encode()).hexdigest()
    assert library._identity(spec, base) == digest
    assert library._identity(with_signal(spec, "drop"), base) != digest


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("most", "action", "dropped"), [(0.1, "drop", 2), (0.09, "report", 0)])
def test_without_a_judge_that_may_decide_few_flagged_rows_are_dropped_and_many_are_reported(
    spec: RunSpec, most: float, action: RowAction, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_judging, "find_records", lambda *args: [])  # as if nobody had measured the judge
    rows, context, _ = prepare_run(with_signal(spec, "auto", max_dropped=most))

    record = row_judging.read_row_signal_record(context)
    assert record is not None
    assert (record.action, record.dropped, record.flagged) == (action, dropped, BAD)
    assert (record.judge, record.harmful, record.undecided) == (None, (), ())
    assert len(rows.task) == 20 - dropped


def test_a_base_model_that_refuses_nothing_lets_auto_train_on_every_row(spec: RunSpec) -> None:
    rows, context, _ = prepare_run(with_signal(spec, "auto"))

    record = row_judging.read_row_signal_record(context)
    assert record is not None
    assert (record.action, record.openings, len(rows.task)) == ("report", (), 20)
