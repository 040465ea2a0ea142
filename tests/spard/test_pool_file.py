"""A pool that stays in its file: its rows by their offsets, and what a second run on it does not do again."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spard.config import Recipe, Selection
from spard.config.run_spec import RunSpec
from spard.data.rows import read_benign, read_pool
from spard.errors import InvalidPool
from spard.models.base import Base
from spard.pipeline import embed, rows, select
from spard.pipeline.context import Context, NoCache
from spard.pipeline.embed import load_embedder
from spard.pipeline.messages import Reporter
from spard.pipeline.pool import PoolRows, open_pool, search, too_long
from spard.selection.shards import Shards, whole
from tests.spard.test_run import write_rows, write_run

LINES = [
    '{"prompt": "first", "safe": "I cannot."}',
    "",
    '  {"prompt": "caf\u00e9 \u2028 one line", "safe": "No."}\r',
    '{"prompt": "Add 1 and 2", "benign": true}',
    '{"prompt": "last", "safe": "No, thanks."}',
]


class Kept(NoCache):
    """A cache in memory that counts what it had to make."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.made: list[str] = []

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        name = json.dumps([kind, key])
        if name not in self.tensors:
            self.made.append(kind)
            self.tensors[name] = make()
        return self.tensors[name]


class Counted:
    """A tokenizer that notes the texts it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.texts += [text] if isinstance(text, str) else text
        return self._tokenizer(text, **options)


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    pool = [
        {"prompt": f"Do harm number {i}{' again' * (i % 7)}", "safe": f"I cannot help with {i}."} for i in range(40)
    ]
    recipe = Recipe(selection=Selection(min_examples=5))
    return replace(write_run(model_folder(), tmp_path), recipe=recipe, pool=write_rows(tmp_path / "p.jsonl", pool))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_rows_by_offsets_are_the_rows_of_the_file(tmp_path: Path, mark: str, end: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_bytes((mark + "\n".join(LINES) + end).encode())
    starts, lines, benign = search(path)
    for side, read in ((0, read_pool), (1, read_benign)):
        at = [i for i, each in enumerate(benign) if each == side]
        found = PoolRows(path, array("q", [starts[i] for i in at]), array("q", [lines[i] for i in at]))
        assert list(found) == read(path) == found[:] == [found[i] for i in range(len(found))]
        assert found[-1] == found[len(found) - 1]
        with pytest.raises(IndexError):
            found[len(found)]


def test_a_bad_row_is_told_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text('{"prompt": "a", "safe": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(InvalidPool) as ours:
        search(path)
    with pytest.raises(InvalidPool) as theirs:
        read_pool(path)
    assert ours.value.message == theirs.value.message


def test_of_a_pool_no_row_is_tokenized_that_was_not_chosen_but_once_to_embed_it(spec: RunSpec, base: Base) -> None:
    cache, tokenizer = Kept(), Counted(base.tokenizer)
    counted = replace(base, tokenizer=tokenizer)
    assert spec.pool is not None
    prompts = [str(row.messages[0]["content"]) for row in read_pool(spec.pool)]
    found, embedded = [], []
    for _ in range(2):
        tokenizer.texts.clear()
        cache.made.clear()
        found.append(rows.prepare(Context(spec, counted, Reporter(lambda message: None), cache=cache)))
        embedded.append([text for text in tokenizer.texts if text in prompts])
        others = [text for text in tokenizer.texts if text not in prompts]
        tokenized = {i for i in range(40) if any(re.search(rf"(number|with) {i}\b", text) for text in others)}
        selected = found[-1].selected
        assert selected is not None
        assert tokenized == set(selected.indices)
    assert embedded == [prompts, []]
    assert cache.made == []
    assert found[0].selected == found[1].selected
    assert [row.ids for row in found[0].safe] == [row.ids for row in found[1].safe]


def test_shards_of_a_pool_are_its_embeddings(spec: RunSpec, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec.pool is not None
    monkeypatch.setattr(embed, "_CHUNK", 8)
    context = Context(spec, base, Reporter(lambda message: None))
    pool = open_pool(context, spec.pool)
    at_once = embed.pool(context, load_embedder(context), pool.safe, pool.digest)
    monkeypatch.setattr(embed, "SHARD", 16)
    cache = Kept()
    context = replace(context, cache=cache)
    shards = embed.pool(context, load_embedder(context), pool.safe, pool.digest)

    assert isinstance(shards, Shards)
    assert cache.made == ["embeddings"] * 3
    assert torch.equal(whole(shards), whole(at_once))
    assert torch.equal(whole(embed.pool(context, load_embedder(context), pool.safe, pool.digest)), whole(at_once))
    assert len(cache.made) == 3


def test_an_embedding_that_broke_off_goes_on_where_it_was(
    spec: RunSpec, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec.pool is not None
    monkeypatch.setattr(embed, "_CHUNK", 8)
    monkeypatch.setattr(embed, "SHARD", 16)
    cache, done = Kept(), []

    def interrupt_at_third(message: Mapping[str, Any]) -> None:
        if message["kind"] != "progress":
            return
        done.append(message)
        if len(done) == 3:
            raise KeyboardInterrupt

    context = Context(spec, base, Reporter(interrupt_at_third), cache=cache)
    pool = open_pool(context, spec.pool)
    with pytest.raises(KeyboardInterrupt):
        embed.pool(context, load_embedder(context), pool.safe, pool.digest)
    embed.pool(context, load_embedder(context), pool.safe, pool.digest)
    assert [message["done"] for message in done] == [8, 16, 24, 24, 32, 40]


def test_rows_that_are_too_long_are_left_out(spec: RunSpec, base: Base) -> None:
    assert spec.pool is not None
    short = replace(spec, recipe=replace(spec.recipe, max_seq_length=64))
    context = Context(short, base, Reporter(lambda message: None))
    pool = open_pool(context, spec.pool)
    long = too_long(context, pool, range(40))
    assert 0 < len(long) < 40
    prepared = rows.prepare(context)
    assert prepared.selected is not None
    assert not set(prepared.selected.indices) & set(long)
    assert select.read_selected(context) == prepared.selected
