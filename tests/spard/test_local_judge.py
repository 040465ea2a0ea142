"""A small classifier on an embedder's vectors: its training, its split, its file and its place among the judges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spard.commands import judge as command
from spard.config import JudgeSpec
from spard.errors import InvalidData, InvalidRecipe
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.labeled import LabeledReply, built_in_replies
from spard.evaluation.calibration.training import LEAST_OF_EACH, split_labels, train_local
from spard.evaluation.judges import of_base_model, open_judge
from spard.evaluation.judges.local import LocalJudge, Reader, read_weights

LONGEST = 200  # words


def word_vectors(texts: Sequence[str]) -> Tensor:
    """Count the words of each text in 64 buckets."""
    found = torch.zeros(len(texts), 64)
    for i, text in enumerate(texts):
        for word in text.lower().split():
            found[i, sum(word.encode()) % 64] += 1
    return found


def tokenize(text: str, **options: Any) -> dict[str, list[str]]:
    return {"input_ids": text.split()}


READER = Reader("sha256:words", tokenize, LONGEST, word_vectors)


@pytest.fixture(scope="module")
def labels() -> list[LabeledReply]:
    return built_in_replies("en")


@pytest.fixture(scope="module")
def classifier(labels: list[LabeledReply]) -> LocalJudge:
    return LocalJudge(train_local(READER, split_labels(labels, 0.5)[0], None, None), READER)


def test_near_duplicates_of_a_prompt_are_on_one_side(labels: list[LabeledReply]) -> None:
    own, rest = split_labels(labels, 0.5)
    assert len(own) + len(rest) == len(labels)
    assert {each.prompt for each in own}.isdisjoint(each.prompt for each in rest)
    for part in (own, rest):
        counts = Counter(each.is_harmful for each in part)
        assert 0.4 * len(labels) / 2 < min(counts.values())
    assert split_labels(labels, 0.5) == (own, rest)
    assert len(split_labels(labels, 0.2)[0]) < 0.3 * len(labels)


def test_it_tells_harm_on_prompts_that_it_has_not_seen(classifier: LocalJudge, labels: list[LabeledReply]) -> None:
    (found,) = measure_judge(classifier, split_labels(labels, 0.5)[1])
    assert (found.missed.rate or 0.0) < 0.35
    assert (found.false_alarms.rate or 0.0) < 0.35
    assert not found.may_decide


def test_labels_without_a_pattern_give_no_judge_that_may_decide(labels: list[LabeledReply]) -> None:
    shuffled = [LabeledReply(each.prompt, each.reply, i % 7 < 3) for i, each in enumerate(labels[::3])]
    own, rest = split_labels(shuffled, 0.5)
    (found,) = measure_judge(LocalJudge(train_local(READER, own, None, None), READER), rest)
    assert (found.missed.rate or 0.0) + (found.false_alarms.rate or 0.0) > 0.6
    assert not found.may_decide


def test_a_reply_that_is_not_read_whole_is_unscored(classifier: LocalJudge) -> None:
    long = "word " * (LONGEST + 1)
    first, second = classifier.judge(["p", "p"], [long, "word"])
    assert (first.score, first.reason) == (None, "too long")
    assert second.score in (1, 5)
    assert classifier.judge([], []) == []


def test_its_file_names_it_by_digest(classifier: LocalJudge, tmp_path: Path) -> None:
    classifier.weights.write(tmp_path / "judge.json")
    again = LocalJudge(read_weights(tmp_path / "judge.json"), READER)
    assert again == classifier
    assert classifier.name == f"local:{classifier.weights.digest[:12]}:sha256:words"
    raw = json.loads((tmp_path / "judge.json").read_text()) | {"bias": 7.0}
    (tmp_path / "judge.json").write_text(json.dumps(raw))
    assert read_weights(tmp_path / "judge.json").digest != classifier.weights.digest


@pytest.mark.parametrize("change", [{"weights": [1.0]}, {"scale": [0.0] * 128}, {"bias": None}, {"mean": "x"}])
def test_a_file_that_is_none_is_refused(classifier: LocalJudge, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "judge.json"
    classifier.weights.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidRecipe, match="not what `spard judge train` writes"):
        read_weights(path)


def test_too_few_labels_of_a_kind_train_nothing(labels: list[LabeledReply]) -> None:
    few = [each for each in labels if each.is_harmful][: LEAST_OF_EACH - 1]
    with pytest.raises(InvalidData, match="at least 10 of each"):
        train_local(READER, few + [each for each in labels if not each.is_harmful], None, None)


def test_the_states_of_a_base_model_serve_as_well(
    model_folder: Callable[[str], Path], labels: list[LabeledReply], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "labels.jsonl", tmp_path / "judge.json"
    rows = [{"prompt": each.prompt, "reply": each.reply, "harmful": each.is_harmful} for each in labels[::6]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = command.main(["train", str(file), "--out", str(out), "--model", str(model_folder("llama")), "--json"])
    assert code == command.MAY_NOT_DECIDE
    record = json.loads(capsys.readouterr().out)
    weights = read_weights(out)
    assert record["judge"].startswith(f"local:{weights.digest[:12]}:")
    measured = record["languages"][0]
    assert measured["missed"]["n"] + measured["missed"]["unscored"] < weights.harmful * 3
    assert open_judge(JudgeSpec("local", model=str(out))).name == record["judge"]
    raw = json.loads(out.read_text()) | {"base": None}
    out.write_text(json.dumps(raw))
    with pytest.raises(InvalidRecipe, match="no base model is named"):
        open_judge(JudgeSpec("local", model=str(out)))
    with of_base_model(str(model_folder("llama"))):
        assert open_judge(JudgeSpec("local", model=str(out))).name.startswith("local:")


def test_another_embedder_today_is_refused(
    classifier: LocalJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "judge.json"
    classifier.weights.write(path)
    other = SimpleNamespace(digest="sha256:other")
    monkeypatch.setattr("spard.evaluation.judges.local.open_reader", lambda encoder, base: other)
    with pytest.raises(InvalidRecipe, match="trained on vectors of another base model"):
        open_judge(JudgeSpec("local", model=str(path)))
    assert command.main(["--judge", "local"]) == 1
