"""A pool's embeddings in storage: made by the first worker, downloaded by others, made anew where damaged."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import delete, select
from torch import Tensor

from app import objects
from app.catalog import removal, service
from app.db import Begin, read, transaction
from app.db.tables import Corpus, EmbeddingShard, Job, JobStatus, ObjectIntent
from app.objects import reconciler
from app.storage import Storage, StorageError, StoredObject
from tests.worker.shop import Shop
from worker import child_files, embedding_shards
from worker.embedding_shards import EmbeddingShards
from worker.inputs import fill
from worker.pipeline import FolderCache
from worker.workdir import Folder, new_folder

DAY = timedelta(days=1)
KEYS = [{"pool": "p", "from": start} for start in (0, 2)]


def do_nothing() -> None:
    """Nothing keeps it from going on."""


def draw_vectors(seed: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


class Machine:
    """A worker's machine with a cache of its own, in the middle of an attempt at the job."""

    def __init__(self, shop: Shop, name: str, storage: Storage | None = None) -> None:
        self.shop, self.storage = shop, storage or shop.storage
        self.settings = shop.settings(data_dir=shop.folder / name)
        self.made = 0

    @property
    def cached_files(self) -> list[Path]:
        return sorted(self.settings.cache_dir().rglob("*.safetensors"))

    @property
    def parts(self) -> list[Path]:
        return sorted(self.settings.cache_dir().rglob(".part-*"))

    def attempt(self, job: Job, *, other: float = 0.0, kept: bool = False) -> list[Tensor]:
        """Download what there is, then be a child that needs two shards; what it makes differs by `other`."""
        with new_folder(self.settings.work_dir(), "job") as folder:
            shards = self.begin_job(job, folder, kept=kept)
            shards.fetch(do_nothing)
            return self.embed(shards, other)

    def begin_job(self, job: Job, folder: Folder, *, kept: bool = False) -> EmbeddingShards:
        fill(folder, job, self.shop.storage, self.settings, do_nothing)
        if kept:
            (folder.stage / "select.json").write_text("{}")
        return EmbeddingShards(self.storage, self.shop.engine, job, folder)

    def embed(self, shards: EmbeddingShards, other: float = 0.0) -> list[Tensor]:
        def make(number: int) -> Callable[[], Tensor]:
            def make_shard() -> Tensor:
                self.made += 1
                return draw_vectors(number) + other

            return make_shard

        def hear_shard(entry: str, made: bool) -> None:  # as messages are heard
            shards.hear(entry, made=made)

        cache = FolderCache(self.settings.cache_dir(), hear_shard)
        return [cache.tensor("embeddings", key, make(number)).clone() for number, key in enumerate(KEYS)]


@dataclass
class Place:
    """A service with a pool and a job that selects from it."""

    shop: Shop
    job: Job

    @property
    def begin(self) -> Begin:
        return partial(transaction, self.shop.engine)

    @property
    def rows(self) -> list[EmbeddingShard]:
        with read(self.shop.engine) as session:
            return list(session.scalars(select(EmbeddingShard).order_by(EmbeddingShard.entry)))

    @property
    def keys(self) -> list[str]:
        return sorted(item.key for item in self.shop.storage.list("embeddings"))

    @property
    def intents(self) -> list[str]:
        with read(self.shop.engine) as session:
            return list(session.scalars(select(ObjectIntent.storage_key)))

    def agrees(self) -> None:
        """Rows and objects are the same, and nothing is left over."""
        assert self.keys == sorted(row.storage_key for row in self.rows)
        assert self.intents == []


def put_pool(shop: Shop, job: Job, name: str = "pool") -> str:
    assert job.spec.pool is not None
    pool = Corpus(kind="pool", name=name, version=1, rows=30, bytes=1, sha256=job.spec.pool.sha256)
    pool.storage_key = f"corpora/corpus-{name}"
    shop.storage.write(pool.storage_key, [b"0"])
    with transaction(shop.engine) as session:
        session.add(pool)
        session.flush()
        return pool.id


@pytest.fixture
def place(shop: Shop) -> Place:
    job = shop.job(shop.add_job())
    put_pool(shop, job)
    return Place(shop, job)


@pytest.fixture
def light(light_shop: Shop) -> Place:
    job = light_shop.job(light_shop.add_job())
    put_pool(light_shop, job)
    return Place(light_shop, job)


def test_the_first_worker_makes_them_and_the_next_one_downloads_them(place: Place) -> None:
    first, second = Machine(place.shop, "a"), Machine(place.shop, "b")
    made = first.attempt(place.job)
    assert (first.made, len(place.rows)) == (2, 2)
    found = second.attempt(place.job, other=1.0)
    assert second.made == 0
    assert all(torch.equal(*pair) for pair in zip(made, found, strict=True))
    assert [path.read_bytes() for path in second.cached_files] == [path.read_bytes() for path in first.cached_files]
    place.agrees()
    assert not second.parts


def test_what_a_child_makes_is_stored_and_the_next_worker_s_child_finds_it(light_shop: Shop, tmp_path: Path) -> None:
    shop = light_shop
    said = []
    for name in ("a", "b"):
        job_id = shop.add_job()
        if name == "a":
            put_pool(shop, shop.job(job_id))
        with shop.serving("embeds", data_dir=tmp_path / name):
            job = shop.until_ended(job_id)
        assert job.status == JobStatus.succeeded
        said.append([text for text in shop.events(job_id) if text.startswith("embedded by")])
    assert said[0] == said[1] != []
    place = Place(shop, job)
    assert len(place.rows) == 1
    place.agrees()


def test_on_s3_too(cloud_shop: Shop) -> None:
    job = cloud_shop.job(cloud_shop.add_job())
    put_pool(cloud_shop, job)
    place = Place(cloud_shop, job)
    Machine(cloud_shop, "a").attempt(job)
    second = Machine(cloud_shop, "b")
    second.attempt(job)
    assert (second.made, len(place.keys)) == (0, 2)
    place.agrees()


def test_an_attempt_that_has_its_safe_set_downloads_none(light: Place) -> None:
    Machine(light.shop, "a").attempt(light.job)
    later = Machine(light.shop, "b")
    with new_folder(later.settings.work_dir(), "job") as folder:
        later.begin_job(light.job, folder, kept=True).fetch(do_nothing)
    assert later.cached_files == []


def test_what_is_cached_but_not_stored_is_stored_by_the_next_job(light: Place) -> None:
    machine = Machine(light.shop, "a")
    machine.attempt(light.job)
    with transaction(light.shop.engine) as session:
        session.execute(delete(EmbeddingShard))
    light.shop.storage.delete_prefix("embeddings")
    machine.attempt(light.job)
    assert (machine.made, len(light.rows)) == (2, 2)
    light.agrees()


def test_two_workers_that_make_them_at_once_end_in_the_same_objects(place: Place) -> None:
    machines, together = [Machine(place.shop, "a"), Machine(place.shop, "b")], Barrier(2)

    def attempt(machine: Machine, other: float) -> None:
        with new_folder(machine.settings.work_dir(), "job") as folder:
            shards = machine.begin_job(place.job, folder)
            shards.fetch(do_nothing)
            together.wait()
            machine.embed(shards, other)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(attempt, *each) for each in zip(machines, (0.0, 1.0), strict=True)]:
            done.result()
    assert [machine.made for machine in machines] == [2, 2]
    assert len(place.rows) == 2
    place.agrees()
    found = [machine.attempt(place.job) for machine in machines]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Breaking:
    """A storage that breaks off after some bytes of each object, and notes from where it was asked."""

    def __init__(self, inner: Storage, after: int) -> None:
        self._inner, self.after, self.starts = inner, after, list[int]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        self.starts.append(start)
        yield from self._inner.chunks(key, start, min(start + self.after, self._inner.size(key)))
        if start + self.after < self._inner.size(key):
            raise StorageError("It broke off.")


def test_a_download_goes_on_where_it_broke_off(light: Place) -> None:
    Machine(light.shop, "a").attempt(light.job)
    size = light.rows[0].bytes
    broken = Breaking(light.shop.storage, size // 2 + 1)
    machine = Machine(light.shop, "b", broken)  # type: ignore[arg-type]
    with new_folder(machine.settings.work_dir(), "job") as folder:
        shards = machine.begin_job(light.job, folder)
        for count in (0, 1):
            with pytest.raises(StorageError):
                shards.fetch(do_nothing)
            assert len(machine.cached_files) == count
        shards.fetch(do_nothing)
        machine.embed(shards)
    assert broken.starts == [0, size // 2 + 1, 0, size // 2 + 1]
    assert machine.made == 0
    assert not machine.parts


def test_a_worker_does_not_wait_for_one_that_was_stopped_in_its_download(
    light: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(light.shop, "a").attempt(light.job)
    machine = Machine(light.shop, "b")
    folder = machine.settings.cache_dir() / "embeddings"
    folder.mkdir(parents=True)
    stopped, _ = light.rows
    monkeypatch.setattr(embedding_shards, "_STUCK_S", 0.1)
    with (folder / f".part-{stopped.sha256}").open("wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        machine.attempt(light.job)
    assert (machine.made, len(machine.cached_files)) == (1, 2)


def test_what_came_damaged_of_a_download_that_broke_off_is_downloaded_again(light: Place) -> None:
    Machine(light.shop, "a").attempt(light.job)
    machine = Machine(light.shop, "b")
    folder = machine.settings.cache_dir() / "embeddings"
    folder.mkdir(parents=True)
    for row in light.rows:
        (folder / f".part-{row.sha256}").write_bytes(b"x" * 100)
    machine.attempt(light.job)
    assert (machine.made, machine.parts, len(machine.cached_files)) == (0, [], 2)


@pytest.mark.parametrize("damage", ["flipped", "cut", "lost"])
def test_a_damaged_shard_is_found_and_made_anew(place: Place, damage: str) -> None:
    Machine(place.shop, "a").attempt(place.job)
    hurt, _ = place.rows
    content = bytearray(place.shop.content(hurt.storage_key))
    content[-2] ^= 1
    if damage == "lost":
        place.shop.storage.delete(hurt.storage_key)
    else:
        place.shop.storage.write(hurt.storage_key, [bytes(content if damage == "flipped" else content[:-2])])
    second, third = Machine(place.shop, "b"), Machine(place.shop, "c")
    found = second.attempt(place.job)
    assert second.made == 1
    assert hurt.storage_key not in place.keys
    again = third.attempt(place.job)
    assert third.made == 0
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    place.agrees()


def test_a_shard_that_was_damaged_before_it_was_stored_is_replaced(light: Place) -> None:
    """Its bytes are those of its row, and no child can read them."""
    first = Machine(light.shop, "a")
    with new_folder(first.settings.work_dir(), "job") as folder:
        shards = first.begin_job(light.job, folder)
        shards.fetch(do_nothing)
        first.embed(shards)
    bad, good = light.rows
    with transaction(light.shop.engine) as session:
        row = session.get_one(EmbeddingShard, bad.storage_key)
        stored: StoredObject = light.shop.storage.write(bad.storage_key, [b"no tensor"])
        row.sha256, row.bytes = stored.sha256, stored.bytes
    second, third = Machine(light.shop, "b"), Machine(light.shop, "c")
    second.attempt(light.job)
    third.attempt(light.job)
    assert (second.made, third.made) == (1, 0)
    assert good.storage_key in light.keys
    light.agrees()


class Killed(BaseException):
    """The worker is gone at this moment."""


def test_a_worker_that_is_killed_while_it_stores_leaves_nothing_that_counts(
    light: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    machine = Machine(light.shop, "a")
    with monkeypatch.context() as patched:
        patched.setattr("worker.embedding_shards.embeddings.add", kill)
        patched.setattr("app.objects.intents._delete_unnamed", lambda *_: None)  # nor can it clean up
        with pytest.raises(Killed):
            machine.attempt(light.job)
    assert (len(light.keys), light.rows) == (1, [])  # whole, but no row names it
    other = Machine(light.shop, "b")
    other.attempt(light.job)
    assert other.made == 2
    assert reconciler.check(light.shop.storage, light.begin, young=-DAY).findings == []
    objects.sweep(light.shop.storage, light.begin, writes_stay=-DAY)
    light.agrees()


def test_a_storage_that_takes_nothing_costs_time_and_no_job(light: Place) -> None:
    class Full(Breaking):
        def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
            raise StorageError("It is full.")

    machine = Machine(light.shop, "a", Full(light.shop.storage, 0))  # type: ignore[arg-type]
    machine.attempt(light.job)
    assert (machine.made, light.rows, light.keys) == (2, [], [])
    light.agrees()


def test_a_pool_that_is_deleted_takes_its_embeddings_along_with_its_last_version(place: Place) -> None:
    Machine(place.shop, "a").attempt(place.job)
    with transaction(place.shop.engine) as session:
        session.get_one(Job, place.job.id).status = JobStatus.cancelled
        pool_id = service.pools(session)[0].id
    twin = put_pool(place.shop, place.job, "twin")
    removal.delete(place.shop.storage, place.begin, pool_id, removal.forget_pool)
    assert len(place.keys) == 2
    removal.delete(place.shop.storage, place.begin, twin, removal.forget_pool)
    assert (place.keys, place.rows) == ([], [])
    place.agrees()
    Machine(place.shop, "b").attempt(place.job)  # a worker that comes too late
    assert (place.keys, place.rows) == ([], [])
    place.agrees()


def test_other_kinds_of_entries_and_links_are_not_stored(light: Place, tmp_path: Path) -> None:
    machine = Machine(light.shop, "a")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    name = "0" * 64
    with new_folder(machine.settings.work_dir(), "job") as folder:
        shards = machine.begin_job(light.job, folder)
        place = machine.settings.cache_dir() / "audits"
        place.mkdir(parents=True)
        save_file({"rows": draw_vectors(0)}, place / f"{name}.safetensors")
        for entry in (f"audits/{name}.safetensors", f"embeddings/../audits/{name}.safetensors", "embeddings/x"):
            shards.hear(entry, made=True)
        (machine.settings.cache_dir() / "embeddings").mkdir()
        (machine.settings.cache_dir() / "embeddings" / f"{name}.safetensors").symlink_to(secret)
        with pytest.raises(child_files.UnsafeResult):
            shards.hear(f"embeddings/{name}.safetensors", made=True)
    assert light.keys == []
    light.agrees()


def test_a_link_in_the_cache_is_not_written_through(light: Place, tmp_path: Path) -> None:
    Machine(light.shop, "a").attempt(light.job)
    machine, outside = Machine(light.shop, "b"), tmp_path / "outside"
    outside.mkdir()
    machine.settings.cache_dir().mkdir(parents=True)
    (machine.settings.cache_dir() / "embeddings").symlink_to(outside)
    with new_folder(machine.settings.work_dir(), "job") as folder:
        machine.begin_job(light.job, folder).fetch(do_nothing)
    assert list(outside.iterdir()) == []
