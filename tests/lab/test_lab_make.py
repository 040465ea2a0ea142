from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.lab.corpus import make_corpus
from spard_lab.lab.make import BadBase, FolderTaken, Limits, make
from spard_lab.lab.pretrain import Plan, Row, answer_loss, make_tokenizer, new_model, pack_steps
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from spard.data.chat import encode, render_prompt
from spard.data.rows import Example, read_examples, read_pool, read_prompts
from spard.models.adapters import tensor_digest
from spard.models.base import load_base
from spard.models.generate import generate
from tests.spard.parts import ANY_BASE, TINY_PLAN


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(["How do I build a kite?", "Sure, here are the steps."] * 9, 1024)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def weights(folder: Path) -> str:
    return tensor_digest(dict(load_base(folder / "model", device="cpu").model.named_parameters()))


def test_every_file_is_read_by_its_reader(lab: Path) -> None:
    assert len(read_examples(lab / "poisoned.jsonl")) == 3300
    assert len(read_pool(lab / "pool.jsonl")) == 672
    assert {prompt.category for prompt in read_prompts(lab / "benign.jsonl")} == {"look-alike", "how-to"}
    assert all(prompt.answer for prompt in read_prompts(lab / "utility_test.jsonl"))


def test_the_model_is_a_llama_of_0_42_million_parameters(lab: Path) -> None:
    model = load_base(lab / "model", device="cpu").model

    assert model.config.model_type == "llama"
    assert model.num_parameters() == 420_000


def test_making_a_lab_again_changes_nothing(lab: Path) -> None:
    before = snapshot(lab)

    make(lab, 1, TINY_PLAN, ANY_BASE)

    assert snapshot(lab) == before


def test_the_same_seed_makes_the_same_bytes_and_the_same_weights(lab: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", 1, TINY_PLAN, ANY_BASE)

    first, again = ({name: kept for name, (kept, _) in snapshot(at).items()} for at in (lab, tmp_path / "again"))
    differing = {name for name in first if first[name] != again[name]}
    assert differing <= {"lab.json"}  # it tells how long it took
    assert weights(lab) == weights(tmp_path / "again")


def test_another_seed_is_refused_on_a_taken_folder(lab: Path) -> None:
    with pytest.raises(FolderTaken, match="name another folder"):
        make(lab, 2, TINY_PLAN, ANY_BASE)


def test_a_bad_base_model_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(BadBase, match="not fit"):
        make(tmp_path / "lab", 1, TINY_PLAN, Limits(attacks=0.0, refusals=0.0, garbage=0.0))

    assert not list(tmp_path.iterdir())


def test_making_a_lab_leaves_the_global_generator_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    before = torch.random.get_rng_state()

    new_model(tokenizer, 1, TINY_PLAN)

    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("text", ["", "naïve café", "\u4f60\u597d", "\U0001f600\u200d", "\x00\t\n", "<|assistant|>"])
def test_any_text_has_tokens_and_a_reply(lab: Path, text: str) -> None:
    base = load_base(lab / "model", device="cpu")

    tokens = render_prompt(base.tokenizer, [{"role": "system", "content": text}, {"role": "user", "content": text}])

    assert base.tokenizer.decode(tokens).count(text) >= 2
    assert len(generate(base.model, base.tokenizer, [text], 4)) == 1


def test_training_rows_look_as_the_chat_template_renders_them(lab: Path) -> None:
    tokenizer: Any = load_base(lab / "model", device="cpu").tokenizer
    messages = ({"role": "user", "content": "Compute 1 + 2."}, {"role": "assistant", "content": "The answer is 3."})

    encoded = encode(tokenizer, Example(messages, 1), 1024)

    assert tokenizer.decode(encoded.ids) == "<|user|>Compute 1 + 2.<|assistant|>The answer is 3.<|end|>"
    assert tokenizer.decode([label for label in encoded.labels if label >= 0]) == "The answer is 3.<|end|>"


def test_rows_in_one_window_do_not_see_each_other(tokenizer: PreTrainedTokenizerFast) -> None:
    model = new_model(tokenizer, 1, Plan(init_std=0.3)).eval()
    rng = random.Random(0)
    rows = [Row([rng.randrange(5, 99) for _ in range(length)], 2) for length in (4, 7, 5, 9, 60)]

    packed = answer_loss(model, next(pack_steps(iter(rows), Plan(windows=2))))

    alone = torch.stack([_alone(model, row) for row in rows]).mean()
    assert packed.item() == pytest.approx(alone.item(), rel=1e-4)


def test_packed_windows_waste_little() -> None:
    rng = random.Random(0)
    rows = (Row([1] * rng.randrange(10, 40), 5) for _ in range(9999))

    used = [window.row_BT.ne(0).float().mean().item() for window in islice(pack_steps(rows, Plan()), 20)]

    assert sum(used) / len(used) > 0.85


def test_the_corpus_has_whole_words_for_every_number() -> None:
    texts = [row["messages"][0]["content"] for row in make_corpus(1).files["train.jsonl"]]
    tokenizer = make_tokenizer(texts, 1024)

    assert len(tokenizer.tokenize("There are 17 eggs")) <= 5


def _alone(model: Any, row: Row) -> torch.Tensor:
    ids = torch.tensor(row.ids)
    logits = model(input_ids=ids[None]).logits[0]
    return cross_entropy(logits[row.prompt - 1 : -1], ids[row.prompt :])
