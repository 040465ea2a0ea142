"""A job is taken by workers alone that have the GPU memory for it, and says so where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, update

from app.db import read, transaction
from app.db.tables import Job, JobStatus
from app.jobs import fleet, lease, needs, scheduling
from app.jobs.fleet import Presence
from app.jobs.needs import Room
from spard.config import Dpo, NoDefense, Recipe, SafeGrad, Spard
from spard.models.memory import GIB, Gpus, Load, Need, TrainedPart, fit
from spard.models.shapes import read_shape
from tests.app.conftest import AddJob
from tests.narrowing import require

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
CLAIMS = 10_000


@pytest.fixture
def large(tmp_path: Path) -> Need:
    return least_need(tmp_path, LLAMA_70B)


@pytest.fixture
def small(tmp_path: Path) -> Need:
    return least_need(tmp_path, LLAMA_8B)


def least_need(folder: Path, config: dict[str, int], recipe: Recipe = Recipe()) -> Need:  # noqa: B008 - it is frozen
    (folder / "config.json").write_text(json.dumps(config))
    return require(needs.least_need(str(folder), recipe, 1 << 20))


def columns(need: Need) -> dict[str, int]:
    return {"memory_bytes": need.alone, "shared_bytes": need.shared}


def test_a_worker_of_24_gib_claims_8_billion_parameters_and_never_70(
    engine: Engine, add_job: AddJob, small: Need, large: Need
) -> None:
    jobs = {add_job(**columns(need)): need for need in (small, large, small)}
    with transaction(engine) as session:
        taken = [lease.claim(session, f"worker-{i}", 60, room=Room(24 * GIB)) for i in range(3)]
    assert [jobs[claim.job_id] if claim else None for claim in taken] == [small, small, None]
    with transaction(engine) as session:
        assert lease.claim(session, "eight", 60, room=Room(80 * GIB, 8))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_in_10_000_claims_from_random_queues_a_worker_of_24_gib_takes_no_job_of_70_billion(
    engine: Engine, add_job: AddJob, tmp_path: Path
) -> None:
    """Before each claim one of the jobs becomes another; what was taken is queued again.

    The statement is that of a claim through `lease.claim`, run again and again as it was sent.
    """
    random, taken = Random(24), 0
    lengths = [Recipe(max_seq_length=tokens) for tokens in (64, 512, 2048)]
    others = [Recipe(quantization="nf4"), Recipe(lora=None)]
    small = [least_need(tmp_path, LLAMA_8B, recipe) for recipe in lengths]
    large = [least_need(tmp_path, LLAMA_70B, recipe) for recipe in (*lengths, *others)]
    jobs = {add_job(**columns(small[0])): small[0] for _ in range(4)}
    statement, values = claim_statement(engine, Room(24 * GIB))
    with transaction(engine) as session:
        run = session.connection().exec_driver_sql
        for _ in range(CLAIMS):
            changed = random.choice([*jobs])
            need = jobs[changed] = random.choice(small if random.random() < 0.2 else large)
            new = (need.alone, need.shared, random.randint(0, 9), changed)
            run("UPDATE jobs SET memory_bytes = ?, shared_bytes = ?, priority = ? WHERE id = ?", new)
            if found := run(statement, values).one_or_none():
                assert jobs[found.id] in small
                run("UPDATE jobs SET status = 'queued' WHERE id = ?", (found.id,))
                taken += 1
            else:
                assert all(need in large for need in jobs.values())
    assert CLAIMS / 4 < taken < CLAIMS * 3 / 4


def claim_statement(engine: Engine, room: Room) -> tuple[str, tuple[Any, ...]]:
    """Return the statement by which a worker claims, and its values; the job that it takes for it is queued again."""
    sent: list[tuple[str, tuple[Any, ...]]] = []

    def keep(connection: Any, cursor: Any, statement: str, values: tuple[Any, ...], *more: Any) -> None:
        sent.append((statement, values))

    event.listen(engine, "before_cursor_execute", keep)
    with transaction(engine) as session:
        taken = require(lease.claim(session, "worker", 60, room=room))
    event.remove(engine, "before_cursor_execute", keep)
    with transaction(engine) as session:
        session.execute(update(Job).where(Job.id == taken.job_id).values(status=JobStatus.queued))
    (claim,) = (each for each in sent if each[0].startswith("UPDATE jobs"))
    return claim


def test_what_random_workers_may_take_is_what_they_have_room_for(
    engine: Engine, add_job: AddJob, small: Need, large: Need
) -> None:
    """The claim's own condition, asked of the database in 10,000 draws of workers and jobs."""
    random, found = Random(11), 0
    sizes = [small, large, Need(30 * GIB, 20 * GIB), Need(24 * GIB, 0)]
    jobs = {add_job(**columns(need)): need for need in sizes} | {add_job(): Need(0, 0)}
    with read(engine) as session:
        for _ in range(CLAIMS // len(jobs)):
            room = Room(random.choice((16, 24, 24, 40, 80, 141)) * GIB, random.choice((1, 1, 2, 4, 8)))
            taken = set(session.scalars(select(Job.id).where(needs.has_room(room))))
            assert taken == {
                job_id for job_id, need in jobs.items() if need.bytes_per_gpu(room.gpus) <= require(room.memory_bytes)
            }
            if room == Room(24 * GIB, 1):
                assert not any(jobs[job_id] is large for job_id in taken)
                found += 1
    assert found


def test_a_worker_without_a_gpu_takes_any_job(engine: Engine, add_job: AddJob, large: Need) -> None:
    job_id = add_job(**columns(large))
    with transaction(engine) as session:
        assert require(lease.claim(session, "worker", 60)).job_id == job_id


def test_a_job_that_no_worker_can_take_says_why_it_waits(engine: Engine, add_job: AddJob, large: Need) -> None:
    waiting, unknown = add_job(**columns(large)), add_job()
    assert reason(engine, waiting) is None  # nobody is there
    join(engine, "small", Room(24 * GIB))
    assert reason(engine, waiting) == "No worker has the GPU memory for it: it needs 148 GiB on a GPU of 24 GiB."
    assert reason(engine, unknown) is None
    join(engine, "eight", Room(80 * GIB, 8))
    assert reason(engine, waiting) is None


def test_plans_are_made_for_the_workers_with_gpus_the_largest_first(engine: Engine) -> None:
    with read(engine) as session:
        assert needs.gpu_rooms(session) == []
    for name, room in (("cpu", Room()), ("small", Room(24 * GIB)), ("large", Room(80 * GIB)), ("too", Room(80 * GIB))):
        join(engine, name, room)
    with read(engine) as session:
        assert needs.gpu_rooms(session) == [Room(80 * GIB), Room(24 * GIB)]


def test_an_estimate_cuts_a_model_that_no_gpu_holds_over_those_that_share_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    plans = [needs.plan_job(str(tmp_path), Recipe(), 16, 2048, [Room(80 * GIB, count)]) for count in (1, 8)]
    assert [(require(plan).fits, require(plan).sharding) for plan in plans] == [(False, "none"), (True, "full")]
    mixed = [Room(80 * GIB), Room(48 * GIB, 8)]
    assert require(needs.plan_job(str(tmp_path), Recipe(), 16, 2048, mixed)).ranks == 8


def test_nf4_is_chosen_where_it_is_allowed_and_no_gpu_holds_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    source, large, sharing = str(tmp_path), Room(80 * GIB), Room(80 * GIB, 8)

    def choose(allowed: str, *rooms: Room, recipe: Recipe = Recipe()) -> str:  # noqa: B008 - it is frozen
        return needs.decide_quantization(allowed, source, recipe, 1 << 20, rooms)

    assert [choose(allowed, large) for allowed in ("never", "if_needed", "always")] == ["none", *["nf4_double"] * 2]
    assert [choose("if_needed", *rooms) for rooms in ([sharing], [])] == ["none"] * 2  # held, and not known
    assert choose("if_needed", large, Room(48 * GIB, 8)) == "none"  # eight smaller GPUs hold it together
    assert choose("always", large, recipe=Recipe(lora=None)) == "none"


def test_in_nf4_a_large_model_is_for_workers_that_hold_it_and_24_gib_do_not(
    engine: Engine, add_job: AddJob, large: Need, tmp_path: Path
) -> None:
    held = require(needs.least_need(str(tmp_path), Recipe(quantization="nf4_double"), 1 << 20))
    assert (round(held.alone / GIB), round(large.alone / GIB)) == (47, 148)
    job_id = add_job(**columns(held))
    random = Random(14)
    rooms = [Room(random.choice((16, 24)) * GIB, random.choice((1, 2, 8))) for _ in range(100)]
    with transaction(engine) as session:
        assert all(lease.claim(session, "small", 60, room=room) is None for room in rooms)
        assert require(lease.claim(session, "large", 60, room=Room(80 * GIB))).job_id == job_id


def test_a_longer_row_needs_more_and_of_an_unknown_model_nothing_is_known(tmp_path: Path) -> None:
    assert needs.least_need(str(tmp_path), Recipe(), 100) is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    short, usual, long = (
        require(needs.least_need(str(tmp_path), Recipe(max_seq_length=limit), 0)).alone for limit in (64, None, 32_768)
    )
    assert 20 * GIB < usual < 24 * GIB
    assert short < usual < long


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(defense=SafeGrad()), Recipe(defense=NoDefense(), dpo=Dpo())])
def test_a_worker_with_what_a_job_needs_has_a_plan_for_it(tmp_path: Path, recipe: Recipe) -> None:
    for config in (LLAMA_8B, LLAMA_70B):
        room = Room(least_need(tmp_path, config, recipe).alone)
        plan = require(needs.plan_job(str(tmp_path), recipe, 16, 2048, [room]))
        assert (plan.fits, plan.micro_batch_size) == (True, 1)


def test_safe_rows_may_be_longer_than_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plain, defended = (
        require(needs.least_need(str(tmp_path), Recipe(defense=each), 300)) for each in (NoDefense(), Spard())
    )
    assert plain.alone < defended.alone == least_need(tmp_path, LLAMA_8B).alone


def test_an_estimate_plans_as_the_run_does(tmp_path: Path) -> None:
    """`spard.pipeline.train` knows the rows: here all of them have 1,000 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    recipe, room = Recipe(defense=Spard(safe_batch_size=64), gradient_checkpointing=True), Room(40 * GIB)
    run = fit(
        require(read_shape(str(tmp_path))),
        TrainedPart.from_recipe(recipe),
        Load(4, 1000, safe_tokens=64_000, checkpointing=True),
        Gpus(40 * GIB),
    )
    assert needs.plan_job(str(tmp_path), recipe, 4, 1000, [room]) == run
    assert 4000 <= require(run.pass_tokens) < 64_000


def join(engine: Engine, name: str, room: Room) -> None:
    with transaction(engine) as session:
        fleet.note(session, Presence(name, name, "0", [], [], room.memory_bytes, room.gpus))


def reason(engine: Engine, job_id: str) -> str | None:
    with read(engine) as session:
        return scheduling.places(session, [session.get_one(Job, job_id)])[job_id].reason
