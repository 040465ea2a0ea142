"""The embedder of a run: which one, what is kept of its vectors, what reports say, and runs of earlier versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spard.config import Recipe, Selection
from spard.config.earlier_versions import from_stored, to_stored, without_added
from spard.config.run_spec import RunSpec, load_recipe, parse, to_mapping
from spard.data.rows import prompt_text, read_examples, read_pool
from spard.models.base import Base
from spard.models.folder.encoder import encoder_digest
from spard.pipeline import embed, library, rows
from spard.pipeline.context import Context, open_outputs
from spard.pipeline.embed import load_embedder
from spard.pipeline.messages import Message, Reporter
from spard.pipeline.pool import open_pool
from spard.selection import embeddings
from spard.selection.embeddings import encode, load_encoder
from spard.selection.select import choose
from tests.spard.encoder_folders import write_encoder
from tests.spard.test_pool_file import Kept
from tests.spard.test_run import write_rows, write_run

K = 5


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    pool = [{"prompt": f"Do harm number {i}{' again' * (i % 7)}", "safe": "I cannot help."} for i in range(80)]
    return replace(write_run(model_folder(), tmp_path), pool=write_rows(tmp_path / "p.jsonl", pool))


def with_embedder(spec: RunSpec, embedder: str) -> RunSpec:
    return replace(spec, recipe=Recipe(selection=Selection(min_examples=K, embedder=embedder)))


def texts(spec: RunSpec) -> tuple[list[str], list[str]]:
    assert spec.pool is not None
    return [prompt_text(row) for row in read_pool(spec.pool)], [
        prompt_text(row) for row in read_examples(spec.training_file)
    ]


def test_states_as_they_are_choose_what_earlier_versions_chose(spec: RunSpec, base: Base) -> None:
    run = with_embedder(spec, "states")
    found = rows.prepare(Context(run, base, Reporter(lambda message: None))).selected
    pool_ND, task_MD = (embeddings.embed(base, each) for each in texts(spec))
    assert found is not None
    assert list(found.indices) == choose(pool_ND, task_MD, K, run.recipe.selection, 0).indices


def test_the_default_compares_states_in_the_frame_of_the_pool(spec: RunSpec, base: Base) -> None:
    context = Context(with_embedder(spec, "auto"), base, Reporter(lambda message: None))
    found = rows.prepare(context).selected
    pool_ND, task_MD = (embeddings.embed(base, each) for each in texts(spec))
    assert spec.pool is not None
    frame = embed.frame(context, load_embedder(context), pool_ND, open_pool(context, spec.pool).digest)
    assert found is not None
    assert frame is not None
    seen = frame.project(pool_ND), frame.project(task_MD)
    assert list(found.indices) == choose(*seen, K, context.recipe.selection, 0).indices
    record = embed.kept_record(context)
    assert record is not None
    assert (record.name, record.digest, record.width) == ("centered_states", base.digest, pool_ND.shape[1])
    assert record.directions == len(frame.removed_KD) == 1
    assert not record.is_narrow


def test_a_sentence_encoder_chooses_by_its_own_vectors(spec: RunSpec, base: Base, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "mini")
    context = Context(with_embedder(spec, str(folder)), base, Reporter(lambda message: None))
    found = rows.prepare(context).selected
    encoder = load_encoder(folder, "cpu")
    pool_ND, task_MD = (encode(encoder, each) for each in texts(spec))
    assert found is not None
    assert list(found.indices) == choose(pool_ND, task_MD, K, context.recipe.selection, 0).indices
    record = embed.kept_record(context)
    assert record is not None
    assert (record.name, record.digest, record.directions) == ("mini", encoder_digest(folder), 0)


def test_the_files_of_an_encoder_may_lie_elsewhere_than_its_name_says(
    spec: RunSpec, base: Base, tmp_path: Path
) -> None:
    run = replace(with_embedder(spec, "mini"), encoder=str(write_encoder(tmp_path / "folder")))
    embedder = load_embedder(Context(run, base, Reporter(lambda message: None)))
    assert embedder.name == "mini"


def test_vectors_are_kept_for_each_embedder_and_the_frame_for_each_pool(
    spec: RunSpec, base: Base, tmp_path: Path
) -> None:
    cache, folder = Kept(), str(write_encoder(tmp_path / "mini"))
    made = []
    for embedder in ("states", "auto", "centered_states", folder, folder):
        cache.made.clear()
        rows.prepare(Context(with_embedder(spec, embedder), base, Reporter(lambda message: None), cache=cache))
        made.append([each for each in cache.made if each.startswith("embedding")])
    both = ["embeddings", "embedding_sums"]
    assert made == [both, ["embedding_frames"], [], both, []]


def test_a_narrow_cone_is_warned_of(spec: RunSpec, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Message] = []
    context = Context(with_embedder(spec, "states"), base, Reporter(heard.append))
    embedder = load_embedder(context)
    for shift, expected in ((0.0, 0), (5.0, 1)):
        heard.clear()
        vectors = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)) + shift
        embed.keep_record(context, embedder, vectors, None)
        assert sum("narrow cone" in str(message) for message in heard) == expected
        record = embed.kept_record(context)
        assert record is not None
        assert record.is_narrow == bool(expected)


def test_a_stored_recipe_without_an_embedder_compares_the_states_as_they_are() -> None:
    states, default = Recipe(selection=Selection(embedder="states")), Recipe()
    stored = to_stored(to_mapping(states))
    assert "embedder" not in stored["selection"]
    assert parse(Recipe, from_stored(stored), "recipe") == states
    assert parse(Recipe, from_stored(to_stored(to_mapping(default))), "recipe") == default
    without = {name: value for name, value in stored.items() if name != "selection"}
    assert parse(Recipe, from_stored(without), "recipe").selection == Selection(embedder="states")
    assert without_added(to_mapping(default))["selection"]["embedder"] == "auto"


def test_a_run_that_an_earlier_version_began_goes_on_by_the_states(spec: RunSpec, base: Base, tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    run = with_embedder(spec, "auto")
    assert library._as_begun(run, base, stages) == run
    open_outputs(stages, library._identity(with_embedder(spec, "states"), base))
    assert library._as_begun(run, base, stages) == with_embedder(spec, "states")
    open_outputs(stages, library._identity(run, base))
    assert library._as_begun(run, base, stages) == run


def test_an_encoder_beside_a_recipe_file_is_found(spec: RunSpec, tmp_path: Path) -> None:
    write_encoder(tmp_path / "mini")
    text = 'model = "m"\ntraining_file = "t.jsonl"\npool = "p.jsonl"\n[recipe.selection]\nembedder = "{}"\n'
    (tmp_path / "run.toml").write_text(text.format("mini"))
    assert load_recipe(tmp_path / "run.toml").recipe.selection.encoder == str(tmp_path / "mini")
    (tmp_path / "run.toml").write_text(text.format("states"))
    assert load_recipe(tmp_path / "run.toml").recipe.selection.embedder == "states"
