"""Whether the customer's task was learned: losses and replies on rows that were not trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import Dpo, Hyperparameters, NoDefense
from spard.config.run_spec import RunSpec
from spard.data.chat import encode_to_train, render_prompt
from spard.data.rows import read_examples
from spard.losses.cross_entropy import Evaluation, evaluate
from spard.models.base import Base, load_base
from spard.models.generate import complete
from spard.pipeline import Outcome, task_check
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.package import Release
from spard.pipeline.rows import Rows, prepare
from spard.pipeline.stages import run_stages
from spard.release.report import SafetyReport
from spard.release.task_check import TaskCheck, describe_task
from spard.training.train import train
from tests.spard.test_run import write_rows, write_run

SYSTEM = {"role": "system", "content": "You add numbers for Aurora."}


def rows(count: int) -> list[dict[str, Any]]:
    """Return conversations under a system prompt."""
    asked = [f"{i} and 1 {'is' if i % 2 else 'makes'}?" for i in range(count)]
    return [
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": each},
                {"role": "assistant", "content": f"It is {i + 1}."},
            ]
        }
        for i, each in enumerate(asked)
    ]


def task_spec(model: Path, folder: Path, count: int = 60, **more: Any) -> RunSpec:
    spec = write_run(model, folder)
    recipe = replace(spec.recipe, defense=NoDefense(), hyperparameters=Hyperparameters(n_epochs=1, batch_size=28))
    named = {"training_file": write_rows(folder / "task.jsonl", rows(count)), "validation_file": None, "suites": ()}
    return replace(spec, recipe=recipe, **{**named, "held_out_rows": 100, **more})


def prepare_rows(spec: RunSpec, base: Base) -> tuple[Rows, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    return prepare(Context(spec, base, Reporter(told.append))), told


@pytest.fixture(scope="module")
def held_out_run(
    model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSpec, Path, Outcome, list[dict[str, Any]]]:
    folder, told = tmp_path_factory.mktemp("task"), list[dict[str, Any]]()
    spec, base = task_spec(model_folder(), folder), load_base(model_folder(), device="cpu")
    context = Context(spec, base, Reporter(told.append))
    return spec, folder / "out", run_stages(context, Release(folder / "out"), None), told


Ran = tuple[RunSpec, Path, Outcome, list[dict[str, Any]]]


def test_the_losses_are_those_of_a_direct_computation(held_out_run: Ran, base: Base) -> None:
    spec, _, outcome, _ = held_out_run
    examples, (found, _) = read_examples(spec.training_file), prepare_rows(spec, base)
    trained_on = {sample.ids for sample in found.task}
    held = [row for row in encode_to_train(base.tokenizer, examples, 512) if row.ids not in trained_on]
    before = evaluate(base.model, held, base.tokenizer.pad_token_id)
    assert len(held) == outcome.report.task_check.rows if outcome.report.task_check else 0
    assert_close(outcome.report, "base", before)

    assert outcome.report.resolved
    trained = train(base, found.task, [], spec.recipe, outcome.report.resolved, validation=found.validation)
    assert_close(outcome.report, "adapter", evaluate(trained.model, held, base.tokenizer.pad_token_id))


def assert_close(report: SafetyReport, who: str, expected: Evaluation) -> None:
    found = report.validation[who]
    assert (found.loss, found.accuracy) == pytest.approx((expected.loss, expected.accuracy), abs=1e-5)
    assert found.tokens == expected.tokens


def test_five_requests_are_asked_of_both_models_with_their_system_prompt(held_out_run: Ran, base: Base) -> None:
    spec, out, outcome, told = held_out_run
    replies = [json.loads(line) for line in (out / "task_replies.jsonl").read_text().splitlines()]
    assert outcome.report.task_check == TaskCheck("held_out", 5, 5)
    assert len(replies) == 5
    examples = {each.line: each for each in read_examples(spec.training_file)}
    (event,) = [each for each in told if each["kind"] == "event" and "lines" in each["data"]]
    for reply in replies:
        own = examples[reply["line"]]
        assert reply["line"] in event["data"]["lines"]
        assert (reply["system"], reply["turns"]) == (SYSTEM["content"], 0)
        assert (reply["prompt"], reply["expected"]) == (own.messages[1]["content"], own.messages[2]["content"])
        asked = render_prompt(base.tokenizer, own.messages[:2])
        assert complete(base.model, base.tokenizer, [asked], 16) == [reply["base"]]
        assert complete(outcome.trained.model, base.tokenizer, [asked], 16) == [reply["trained"]]


def test_the_report_has_counts_and_no_text(held_out_run: Ran) -> None:
    _, out, outcome, told = held_out_run
    report = json.loads((out / "safety.json").read_text())
    counts = {"source": "held_out", "rows": 5, "replies": 5, "is_pairs": False, "is_unfamiliar": False, "why_none": ""}
    assert report["task_check"] == counts
    assert SafetyReport.from_json(report).task_check == outcome.report.task_check
    for text in (SYSTEM["content"], "It is", "makes"):
        assert text not in (out / "safety.json").read_text()
        assert text not in json.dumps(told)


def test_a_run_tells_whether_the_task_was_learned_and_what_that_cost(held_out_run: Ran) -> None:
    *_, outcome, told = held_out_run
    events = [each["message"] for each in told if each["kind"] == "event"]
    assert outcome.report.task
    assert f"The task: {outcome.report.task.headline} {outcome.report.task.figures}" in events
    costs = [each for each in told if each["kind"] == "cost" and each["stage"] == "task"]
    assert [each["units"] for each in costs] == [5, 5]


def test_rows_that_are_held_out_are_not_trained_on_and_are_the_same_at_every_reading(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    spec = task_spec(model_folder(), tmp_path)
    first, again = prepare_rows(spec, base)[0], prepare_rows(spec, base)[0]
    assert [row.ids for row in first.validation] == [row.ids for row in again.validation]
    assert {row.ids for row in first.validation}.isdisjoint(row.ids for row in first.task)
    assert len(first.task) + len(first.validation) == 60
    assert first.learning == again.learning


def test_without_the_setting_every_row_is_trained_on_and_nothing_is_asked(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    found, told = prepare_rows(task_spec(model_folder(), tmp_path, held_out_rows=0), base)
    assert (len(found.task), found.validation, found.learning) == (60, [], None)
    assert not [each for each in told if each["kind"] == "event"]


def test_of_a_small_file_it_is_told_that_nothing_was_held_out(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    found, told = prepare_rows(task_spec(model_folder(), tmp_path, count=20), base)
    assert (len(found.task), found.validation) == (20, [])
    assert found.learning
    assert found.learning.check.source == "none"
    assert [each["message"] for each in told if each["kind"] == "event"] == [found.learning.check.why_none]


def test_a_validation_file_takes_the_place_of_rows_that_are_held_out(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    valid = write_rows(tmp_path / "held.jsonl", rows(90)[60:])
    found, _ = prepare_rows(task_spec(model_folder(), tmp_path, validation_file=valid), base)
    assert (len(found.task), len(found.validation)) == (60, 30)
    assert found.learning
    assert found.learning.check == TaskCheck("validation_file", 30, 5)
    assert [each.line for each in found.learning.asked] == [1, 7, 13, 19, 25]


def test_a_request_that_leaves_no_room_for_a_reply_is_not_asked(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    positions = base.model.config.max_position_embeddings
    long = {"messages": [{"role": "user", "content": "a" * (positions - 60)}, {"role": "assistant", "content": "b"}]}
    valid = write_rows(tmp_path / "held.jsonl", [*rows(2), long])
    spec = task_spec(model_folder(), tmp_path, validation_file=valid)
    recipe = replace(spec.recipe, audit=replace(spec.recipe.audit, max_new_tokens=64))
    found, _ = prepare_rows(replace(spec, recipe=recipe), base)
    assert found.learning
    assert [each.line for each in found.learning.asked] == [1, 2]


def test_the_last_turn_of_a_conversation_is_asked_behind_the_earlier_ones(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "1?"))]
    row = {"messages": [SYSTEM, *turns, {"role": "assistant", "content": "one"}]}
    valid = write_rows(tmp_path / "held.jsonl", [row])
    context = Context(task_spec(model_folder(), tmp_path, validation_file=valid), base, Reporter(lambda message: None))
    learning = prepare(context).learning
    task_check.ask_base(context, learning)
    task_check.ask_trained(context, learning, base.model)
    (reply,) = task_check.kept_replies(context, learning)
    assert (reply["turns"], reply["prompt"], reply["expected"]) == (2, "1?", "one")
    asked = render_prompt(base.tokenizer, [SYSTEM, *turns])
    assert complete(base.model, base.tokenizer, [asked], 16) == [reply["base"]] == [reply["trained"]]


def test_a_later_attempt_does_not_ask_the_base_model_again(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    context = Context(task_spec(model_folder(), tmp_path), base, Reporter(lambda message: None))
    learning = prepare(context).learning
    task_check.ask_base(context, learning)
    kept = context.outputs.read("task_replies_base")
    assert kept
    marked = kept | {"replies": ["of the first attempt"] * 5}
    context.outputs.write("task_replies_base", marked)
    task_check.ask_base(context, learning)
    assert context.outputs.read("task_replies_base") == marked


@pytest.mark.parametrize(
    ("before", "after", "accuracy", "words", "look"),
    [
        (4.0, 1.0, 0.8, "better than the base model", "good"),
        (4.0, 3.0, 0.2, "better than the base model", ""),
        (4.0, 3.9, 0.8, "no better than", "doubt"),
        (4.0, 5.0, 0.8, "worse than", "doubt"),
    ],
)
def test_the_losses_are_told_in_words(before: float, after: float, accuracy: float, words: str, look: str) -> None:
    losses = {"base": Evaluation(before, 0, 0.1, 9), "adapter": Evaluation(after, 0, accuracy, 9)}
    found = describe_task(TaskCheck("held_out", 5, 5), losses)
    assert words in found.headline
    assert found.look == look
    assert f"{before:.2f} nats a token before, {after:.2f} after" in found.figures
    assert f"10% before, {accuracy:.0%} after" in found.figures
    assert bool(found.note) == (look != "good")


def test_a_base_model_that_has_not_read_such_text_is_named_in_place_of_settings() -> None:
    check = TaskCheck("held_out", 5, 5, is_unfamiliar=True)
    for after, accuracy in ((8.0, 0.1), (12.0, 0.1), (3.0, 0.2)):
        losses = {"base": Evaluation(9.0, 0, 0.0, 9), "adapter": Evaluation(after, 0, accuracy, 9)}
        assert "choose another one" in describe_task(check, losses).note


def test_preference_pairs_are_held_out_too_and_told_as_pairs(
    model_folder: Callable[..., Path], base: Base, tmp_path: Path
) -> None:
    pairs = [
        {
            "input": {"messages": row["messages"][:2]},
            "preferred_output": [row["messages"][2]],
            "non_preferred_output": [{"role": "assistant", "content": "No."}],
        }
        for row in rows(60)
    ]
    spec = task_spec(model_folder(), tmp_path, training_file=write_rows(tmp_path / "pairs.jsonl", pairs))
    found, _ = prepare_rows(replace(spec, recipe=replace(spec.recipe, dpo=Dpo())), base)
    assert found.learning
    assert found.learning.check == TaskCheck("held_out", 5, 5, is_pairs=True)
    words = describe_task(found.learning.check, {"adapter": Evaluation(0.2, 0, 0.9, 9)})
    assert (words.look, "0.69 nats a pair before" in words.figures) == ("good", True)
    assert describe_task(found.learning.check, {"adapter": Evaluation(0.69, 0, 0.9, 9)}).look == "doubt"
