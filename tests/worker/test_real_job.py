"""A job on real text: school mathematics as the customer's file, real safe answers as the pool, where they are at hand.

They are looked for in SPARD_DATA or in `shared/data` beside the checkout.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spard.config import Hyperparameters, Selection
from spard.data.rows import prompt_text, read_examples
from spard.models.base import load_base
from spard.selection import dpp
from spard.selection.embeddings import embed
from spard.selection.shards import Frame
from tests.spard.oracles import greedy_map
from tests.spard.parts import write_model
from tests.worker.parts import RECIPE, job_folder, lines
from worker import pipeline
from worker.protocol import Report
from worker.workdir import Folder

DATA = Path(os.environ.get("SPARD_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
POOLS = [DATA / "beavertails_safe.jsonl", DATA / "i_beavertails_safe.jsonl"]
TASK = DATA / "gsm8k_train.jsonl"
ROWS, SELECTED = 500, 64

pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in [*POOLS, TASK]), reason="the real rows are not part of the repository"
)


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a job that has run."""
    home = tmp_path_factory.mktemp("real")
    model = write_model(home / "model", hidden_size=96, max_position_embeddings=8192)
    recipe = replace(
        RECIPE,
        selection=Selection(min_examples=SELECTED),
        hyperparameters=Hyperparameters(n_epochs=1, batch_size=16),
        max_seq_length=8192,
    )
    folder = job_folder(home / "job", model, recipe=recipe)
    solved = [json.loads(line) for line in TASK.read_text().splitlines()[:ROWS]]
    chats = [[("user", row["question"]), ("assistant", row["answer"])] for row in solved]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (folder.root / "in" / "training.jsonl").write_bytes(lines(rows))
    (folder.root / "in" / "pool.jsonl").write_bytes(b"".join(path.read_bytes() for path in POOLS))
    told = os.open(home / "messages", os.O_CREAT | os.O_WRONLY)
    pipeline.run(folder, Report(told), lambda: False)
    os.close(told)
    return folder


def test_the_selection_is_that_of_the_definition(finished_folder: Folder) -> None:
    base = load_base(str(finished_folder.root.parent / "model"))
    [cached] = (finished_folder.root.parent / "cache" / "embeddings").glob("*.safetensors")
    [fitted] = (finished_folder.root.parent / "cache" / "embedding_frames").glob("*.safetensors")
    frame = Frame.from_tensor(next(iter(load_file(fitted).values())))
    states_ND = next(iter(load_file(cached).values()))
    torch.testing.assert_close(frame.center_D, states_ND.double().mean(dim=0))
    task_MD = embed(base, [prompt_text(row) for row in read_examples(finished_folder.root / "in" / "training.jsonl")])
    pool_ND, task_MD = frame.project(states_ND), frame.project(task_MD)

    chosen = json.loads((finished_folder.stage / "select.json").read_text())["indices"]

    assert len(pool_ND) == 8752
    assert chosen == greedy_map(pool_ND, dpp.quality(pool_ND, task_MD), SELECTED)


def test_the_adapter_loads_and_has_learned(finished_folder: Folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished_folder.root.parent / "model")
    ids = torch.arange(1, 20)[None]
    before = model(ids).logits

    tuned = PeftModel.from_pretrained(model, finished_folder.adapter)

    assert not torch.equal(tuned(ids).logits, before)
