"""DPO: its loss and gradient, its reference, its rows, and that every defense goes with it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spard.config import (
    PLAIN,
    Anchors,
    Defense,
    Dpo,
    Hyperparameters,
    Lora,
    NoDefense,
    Recipe,
    SafeInstr,
    Spard,
    defenses,
    resolve,
)
from spard.config.earlier_versions import without_added
from spard.config.run_spec import parse, to_mapping
from spard.data.batches import collate
from spard.data.chat import NO_LOSS, EncodedSample, encode_all, encode_to_train
from spard.data.rows import Example, read_examples
from spard.errors import InvalidRecipe, MethodMismatch, NoTrainableTokens, Stopped
from spard.evaluation.row_risk import rank
from spard.losses.gradients import preference_gradient
from spard.losses.relative import METRICS, dpo_losses, evaluate_pairs, reference_logps, stack_pairs
from spard.models.adapters import save_adapter
from spard.models.base import Base
from spard.models.lora import trainable_model
from spard.pipeline import run as run_pipeline
from spard.training import epoch_ends
from spard.training.train import TrainedModel, train
from tests.spard.parts import refusals
from tests.spard.test_run import write_run

RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=3, batch_size=6),
    learning_rate=5e-3,
    seed=5,
    dpo=Dpo(beta=0.3),
)


def pair(ask: str, preferred: str, other: str, line: int = 1) -> Example:
    turns = {"role": "user", "content": ask}, {"role": "assistant", "content": preferred}
    return Example(turns, line, rejected={"role": "assistant", "content": other})


PAIRS = [pair(f"Add {i} and 1.", f"It is {i + 1}.", f"I do not know{'!' * i}", i + 1) for i in range(18)]


def pairs(base: Base) -> list[EncodedSample]:
    return encode_all(base.tokenizer, PAIRS, 256)


def run(base: Base, recipe: Recipe = RECIPE, **more: Any) -> TrainedModel:
    resolved = resolve(recipe, rows=len(PAIRS), hidden_size=32)
    return train(base, pairs(base), refusals(base), recipe, resolved, **more)


def weights(trained: TrainedModel) -> list[Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


@torch.no_grad()
def logps_by_hand(model: Any, rows: Sequence[EncodedSample]) -> list[list[float]]:
    """Each token's log-probability by itself, one conversation at a time."""
    found = []
    for row in rows:
        sums = []
        for one in row.both:
            logits = model(input_ids=torch.tensor([one.ids])).logits[0].double()
            terms = [
                float(logits[i - 1][label] - torch.logsumexp(logits[i - 1], dim=0))
                for i, label in enumerate(one.labels)
                if label != NO_LOSS
            ]
            sums.append(sum(terms))
        found.append(sums)
    return found


@pytest.mark.parametrize(
    ("chosen", "rejected", "before_chosen", "before_rejected", "beta"),
    [(-10.0, -12.0, -11.0, -11.0, 0.1), (-3.0, -1.0, -2.5, -2.0, 0.5), (-7.0, -7.0, -7.0, -7.0, 2.0)],
)
def test_the_loss_is_that_of_the_paper_and_of_trl(
    chosen: float, rejected: float, before_chosen: float, before_rejected: float, beta: float
) -> None:
    # TRL, DPOTrainer, loss_type "sigmoid": -logsigmoid(beta * (logratios - ref_logratios)), no label smoothing
    logits = (chosen - rejected) - (before_chosen - before_rejected)
    expected = math.log1p(math.exp(-beta * logits))

    logp = torch.tensor([[chosen, rejected]], dtype=torch.float64)
    found = dpo_losses(logp, torch.tensor([[before_chosen, before_rejected]], dtype=torch.float64), beta)

    assert found.loss_P.tolist() == pytest.approx([expected], rel=1e-12)
    rewards = beta * (chosen - before_chosen), beta * (rejected - before_rejected)
    told = dict(zip(METRICS, found.metrics_P6[0].tolist(), strict=True))
    assert told == pytest.approx(
        {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "rewards/accuracies": float(rewards[0] > rewards[1]),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
    )


def test_log_probabilities_are_sums_over_the_tokens_of_the_answers(base: Base) -> None:
    found = reference_logps(base.model, pairs(base), base.tokenizer.pad_token_id)
    for mine, by_hand in zip(found.tolist(), logps_by_hand(base.model, pairs(base)), strict=True):
        assert mine == pytest.approx(by_hand, rel=1e-4)


def test_the_gradient_is_that_of_finite_differences_however_the_batch_is_cut(load: Callable[..., Base]) -> None:
    base = load(dtype=torch.float64)
    model, rows = trainable_model(base.model, RECIPE), pairs(base)[:5]
    theta = [part for part in model.parameters() if part.requires_grad]
    before = reference_logps(base.model, rows, base.tokenizer.pad_token_id) + torch.tensor([[0.5, -0.25]])

    def gradient(*cuts: Sequence[int]) -> Any:
        batches = [
            collate(stack_pairs([rows[i] for i in cut]), base.tokenizer.pad_token_id, base.device) for cut in cuts
        ]
        logps = [before[list(cut)] for cut in cuts]
        return preference_gradient(base.model, theta, batches, math.inf, logps, 0.3).read()

    whole, cut = gradient(range(5)), gradient([0, 1], [2], [3, 4])
    assert whole.loss == pytest.approx(cut.loss, rel=1e-5)
    assert whole.more == pytest.approx(cut.more, rel=1e-5)
    for one, other in zip(whole.grad, cut.grad, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    def loss() -> float:
        losses = [
            math.log1p(math.exp(-0.3 * ((mine[0] - mine[1]) - (float(ref[0]) - float(ref[1])))))
            for mine, ref in zip(logps_by_hand(base.model, rows), before, strict=True)
        ]
        return sum(losses) / len(losses)

    assert whole.loss == pytest.approx(loss(), rel=1e-5)
    step, looked = 3e-3, 0  # the model computes norms and logits in float32
    for part, grad in zip(theta, whole.grad, strict=True):
        place = int(grad.abs().argmax())
        flat = part.data.view(-1)
        if float(grad.abs().max()) < 1e-3:
            continue
        flat[place] += step
        above = loss()
        flat[place] -= 2 * step
        below = loss()
        flat[place] += step
        assert float(grad.view(-1)[place]) == pytest.approx((above - below) / (2 * step), rel=1e-2)
        looked += 1
    assert looked > 2


def test_training_prefers_what_is_preferred_and_begins_at_the_reference(base: Base) -> None:
    found = run(base, validation=pairs(base)[:4])
    first, last = found.metrics[0], found.metrics[-1]
    assert first["loss/task"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert last["loss/task"] < first["loss/task"] / 2
    assert last["rewards/accuracies"] == 1.0
    assert last["loss/valid"] < first["loss/valid"]
    assert found.references is not None
    after = evaluate_pairs(base.model, pairs(base), found.references.task_N2, 0.3, base.tokenizer.pad_token_id)
    assert after.loss < math.log(2) / 2


def test_the_reference_of_a_further_job_is_the_adapter_that_it_goes_on_from(
    load: Callable[..., Base], tmp_path: Path
) -> None:
    base = load()
    save_adapter(run(base).model, base, "tiny", tmp_path / "first", {"base_digest": base.digest})
    of_adapter = reference_logps(base.model, pairs(base), base.tokenizer.pad_token_id)

    further = run(load(), start_from=tmp_path / "first")

    assert further.metrics[0]["loss/task"] == pytest.approx(math.log(2), abs=1e-4)
    assert further.references is not None
    torch.testing.assert_close(further.references.task_N2, of_adapter, rtol=1e-4, atol=1e-3)


def test_a_resumed_run_is_the_run_and_does_not_ask_the_reference_again(
    load: Callable[..., Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, defense=Spard(safe_batch_size=3), ema=0.9)
    whole = run(load(), recipe)
    stops = iter([False] * 3 + [True])
    with pytest.raises(Stopped):
        run(load(), recipe, resume_states=tmp_path, should_stop=lambda: next(stops))

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(epoch_ends, "reference_logps", refuse)
    rest = run(load(), recipe, resume_states=tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(weights(whole), weights(rest), strict=True))
    assert [step["loss/task"] for step in rest.metrics] == [step["loss/task"] for step in whole.metrics]


@pytest.mark.parametrize(
    "defense",
    [each for each in (kind() for kind in defenses().values()) if not each.trains_on_answers and not each.models],
    ids=lambda each: each.type,
)
def test_every_defense_goes_with_it(load: Callable[..., Base], defense: Defense) -> None:
    recipe = replace(RECIPE, defense=defense, hyperparameters=Hyperparameters(n_epochs=1, batch_size=6))
    found = run(load(), recipe)
    assert found.metrics[-1].keys() >= set(METRICS)
    if defense.type == "spard":
        assert any("loss/safe" in step for step in found.metrics)


def test_the_projection_and_the_anchor_work_as_with_answers(base: Base) -> None:
    recipe = replace(RECIPE, defense=Spard(tau=0.5, check_every=1, safe_batch_size=3), anchors=Anchors())
    found = run(base, recipe)
    assert any(step["spag/triggered"] for step in found.metrics)


def test_what_learns_from_answers_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="safeinstr"):
        replace(RECIPE, defense=SafeInstr())
    with pytest.raises(InvalidRecipe, match="constrained_sft"):
        replace(RECIPE, constrained_sft=True)


def test_full_fine_tuning_and_micro_batches_of_pairs(load: Callable[..., Base]) -> None:
    short = replace(RECIPE, hyperparameters=Hyperparameters(n_epochs=1, batch_size=6))
    whole, cut = run(load(), short), run(load(), replace(short, micro_batch_size=2))
    assert [step["loss/task"] for step in cut.metrics] == pytest.approx(
        [step["loss/task"] for step in whole.metrics], abs=1e-4
    )
    full = run(load(), replace(short, lora=None, learning_rate=1e-3))
    assert full.metrics[-1]["rewards/margins"] > 0


def test_recipes_of_answers_are_written_as_they_were() -> None:
    assert "dpo" not in without_added(asdict(Recipe()))
    assert parse(Recipe, to_mapping(RECIPE), "") == RECIPE
    assert RECIPE.dpo is not None
    assert (Dpo().strength, RECIPE.dpo.strength) == (0.1, 0.3)


ASK = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]}
ASK["messages"].append({"role": "user", "content": "Two and two?"})
GOOD, BAD = [{"role": "assistant", "content": "Four."}], [{"role": "assistant", "content": "Five, I think."}]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_spellings_of_a_pair_are_read(tmp_path: Path) -> None:
    new = {"input": ASK, "preferred_output": GOOD, "non_preferred_output": BAD}
    old = {"input": ASK, "preferred_completion": GOOD, "non_preferred_completion": BAD}
    one, other = read_examples(write(tmp_path / "pairs.jsonl", new, old))
    assert (one.messages, one.rejected) == (other.messages, other.rejected)
    assert one.messages[-1]["content"] == "Four."
    assert one.rejected == BAD[0]


def test_loss_falls_on_both_answers_and_on_no_earlier_turn(base: Base, tmp_path: Path) -> None:
    rows = read_examples(
        write(tmp_path / "p.jsonl", {"input": ASK, "preferred_output": GOOD, "non_preferred_output": BAD})
    )
    (row,) = encode_to_train(base.tokenizer, rows, 256, pairs=True)
    said = [base.tokenizer.decode([x for x in one.labels if x != NO_LOSS]) for one in row.both]
    assert [text.split("<")[0] for text in said] == ["Four.", "Five, I think."]
    assert row.tokens == sum(len(one.ids) for one in row.both)
    assert row.longest == len(row.both[1].ids)


def test_rows_of_another_method_are_refused(base: Base) -> None:
    with pytest.raises(MethodMismatch, match="line 1 is a preference pair"):
        encode_to_train(base.tokenizer, PAIRS, 256)
    with pytest.raises(MethodMismatch, match="no preference pair"):
        encode_to_train(base.tokenizer, [replace(PAIRS[0], rejected=None)], 256, pairs=True)


def test_a_pair_without_a_token_to_learn_is_refused(base: Base) -> None:
    with pytest.raises(NoTrainableTokens):
        encode_to_train(base.tokenizer, [*PAIRS, pair("Q", "A", "", 30)], 256, pairs=True)


def preference_row(i: int) -> dict[str, Any]:
    say = {"preferred_output": f"It is {i + 1}.", "non_preferred_output": f"It is {i + 2}."}
    outputs = {name: [{"role": "assistant", "content": text}] for name, text in say.items()}
    return {"input": {"messages": [{"role": "user", "content": f"Add {i} and 1."}]}, **outputs}


def test_a_run_of_pairs_ends_as_every_other(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    spec = write_run(model_folder(), tmp_path)
    rows = [preference_row(i) for i in range(24)]
    recipe = replace(spec.recipe, dpo=Dpo(), anchors=PLAIN)
    spec = replace(
        spec,
        training_file=write(tmp_path / "pairs.jsonl", *rows),
        validation_file=write(tmp_path / "held.jsonl", *rows[:4]),
        recipe=recipe,
    )
    outcome = run_pipeline(spec, tmp_path / "out", lambda message: None)

    assert outcome.report.validation.keys() == {"adapter"}
    steps = list(csv.DictReader((tmp_path / "out" / "metrics.csv").read_text().splitlines()))
    assert float(steps[0]["train_loss"]) == pytest.approx(math.log(2), abs=1e-4)
    assert set(METRICS) <= steps[0].keys()
    assert float(steps[-1]["valid_loss"]) < math.log(2)
    assert outcome.report.recipe["dpo"] == {"beta": "auto"}
    assert outcome.report.trained_tokens is not None
    with pytest.raises(MethodMismatch):
        run_pipeline(replace(spec, recipe=replace(recipe, dpo=None)), tmp_path / "other", lambda message: None)


def test_a_pair_that_prefers_an_answer_to_a_refusal_is_risky() -> None:
    refusal = "I cannot help with that."
    rows = [pair("Say a", "Sure, a.", "b", 1), pair("Say a", "Sure, a.", refusal, 2), pair("Say a", refusal, "a", 3)]
    one = torch.ones(1, 4) / 2
    found = {risk.line: risk.reasons for risk in rank(rows, one.repeat(3, 1), one)}
    assert "answer_preferred_to_refusal" in found[2]
    assert "answer_preferred_to_refusal" not in (*found[1], *found[3])
