"""GET /v1/models for customers; base models, pools and suites for keys with the admin scope."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.catalog import imports, removal, service
from app.catalog.fitness import fitness, inspect, judge_warnings
from app.catalog.imports import ImportPreview
from app.catalog.judges import JudgeList, judges
from app.catalog.profile import CorpusProfile
from app.catalog.schemas import (
    BaseModelDeleted,
    BaseModelIn,
    BaseModelList,
    CorpusDeleted,
    CorpusOut,
    ModelFitness,
    ModelList,
    ModelOut,
    OfferedModelOut,
    PoolList,
    PoolOut,
    SuiteList,
)
from app.checkpoints import service as checkpoints
from app.deps import (
    AdminDep,
    BeginDep,
    CustomerDep,
    FormDep,
    LimitsDep,
    LookDep,
    ProviderBeginDep,
    ProviderSessionDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
    StorageDep,
    WritesDep,
)
from app.http.openapi import IMPORT_FORM
from app.jobs.schemas import ModelDeleted
from app.policies import service as policies

models = APIRouter(prefix="/v1/models", tags=["models"])
admin = APIRouter(prefix="/v1/admin", tags=["provider"])

Name = Annotated[str, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@models.get("", response_model=ModelList)
@models.get("/", response_model=ModelList, include_in_schema=False)  # not a model with an empty name
def list_models(session: ReadDep, caller: CustomerDep) -> ModelList:
    """List the base models on offer and your own fine-tuned models."""
    return ModelList(data=service.models(session, caller.project_id))


@models.get("/{model:path}", response_model=ModelOut)
def retrieve_model(model: str, session: ReadDep, caller: CustomerDep) -> ModelOut:
    """Return one model; ids may contain `/` and `:`."""
    return checkpoints.get_model(session, caller.project_id, model)


@models.delete("/{model:path}", response_model=ModelDeleted)
async def delete_model(
    model: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> ModelDeleted:
    """Delete one of your fine-tuned models or checkpoints; the job that made it stays."""
    return await writes.run(partial(checkpoints.delete_model, storage, begin, caller.project_id, model))


@admin.get("/models", response_model=BaseModelList)
def list_base_models(session: ReadDep, caller: AdminDep) -> dict[str, object]:
    """List the base models with their sources."""
    return {"data": service.base_models(session)}


@admin.post("/models", response_model=OfferedModelOut)
async def add_base_model(
    entry: BaseModelIn, begin: ProviderBeginDep, caller: AdminDep, settings: SettingsDep, writes: WritesDep
) -> OfferedModelOut:
    """Offer a base model under an alias, or change the model that an alias names."""

    def add_and_describe() -> OfferedModelOut:
        found = inspect(entry)
        with begin() as session:
            offered = OfferedModelOut.model_validate(service.add_model(session, entry, found))
            limits = policies.current(session, settings).content.thresholds
        warnings = [*found.notes, *judge_warnings(found.source, found.digest, settings, limits)]
        return offered.model_copy(update={"warnings": warnings})

    return await writes.run(add_and_describe)


@admin.get("/models/{alias:path}/fitness", response_model=ModelFitness)
async def retrieve_fitness(alias: str, caller: AdminDep, look: LookDep, reads: ReadsDep) -> Response:
    """Check that a base model has its weights, tokenizer, chat template and end token."""

    def read_fitness() -> ModelFitness:
        with look() as session:
            entry = service.base_model(session, alias)
        return fitness(entry)

    return await reads.answer(read_fitness)


@admin.delete("/models/{alias:path}", response_model=BaseModelDeleted)
def withdraw_base_model(alias: str, session: ProviderSessionDep, caller: AdminDep) -> BaseModelDeleted:
    """Stop offering a base model; refused while a job on it is unfinished."""
    return removal.withdraw_model(session, alias)


@admin.get("/judges", response_model=JudgeList)
def list_judges(session: ReadDep, caller: AdminDep, settings: SettingsDep) -> JudgeList:
    """List the configured judge and the measured quality of judges, by language."""
    return JudgeList(data=judges(session, settings))


@admin.get("/pools", response_model=PoolList)
def list_pools(session: ReadDep, caller: AdminDep) -> PoolList:
    """List every version of every safety pool, newest first."""
    return PoolList(data=service.pools(session))


@admin.post("/pools", response_model=PoolOut, openapi_extra=IMPORT_FORM)
async def import_pool(
    caller: AdminDep,
    name: Name,
    form: FormDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: ProviderBeginDep,
    writes: WritesDep,
) -> PoolOut:
    """Import rows `{"prompt", "safe"}`, or `{"prompt", "benign": true}`.

    Up to a fifth of the safe rows' prompts, and 300 at most, are held out as attacks.
    """
    return await writes.run(partial(imports.import_pool, storage, begin, form, name, limits))


@admin.post("/pools/preview", response_model=ImportPreview, openapi_extra=IMPORT_FORM)
async def preview_pool(
    caller: AdminDep,
    name: Name,
    form: FormDep,
    storage: QuickStorageDep,
    limits: LimitsDep,
    look: LookDep,
    writes: WritesDep,
) -> Response:
    """Show the result of an import of the file; nothing is stored."""
    return await writes.answer(partial(imports.preview, storage, look, form, name, "pool", limits))


@admin.get("/pools/{corpus_id}/profile", response_model=CorpusProfile)
async def profile_pool(
    corpus_id: str, caller: AdminDep, storage: QuickStorageDep, look: LookDep, reads: ReadsDep
) -> Response:
    """Describe the rows of a version: lengths, writing systems, near duplicates."""
    return await reads.answer(partial(imports.profile_version, storage, look, corpus_id, ["pool"]))


@admin.delete("/pools/{corpus_id}", response_model=CorpusDeleted)
async def delete_pool(
    corpus_id: str, caller: AdminDep, storage: StorageDep, begin: ProviderBeginDep, writes: WritesDep
) -> CorpusDeleted:
    """Delete a version that no unfinished job uses, and the suite held out of it.

    The previous version becomes current again.
    """
    return await writes.run(partial(removal.delete, storage, begin, corpus_id, removal.forget_pool))


@admin.get("/suites", response_model=SuiteList)
def list_suites(session: ReadDep, caller: AdminDep) -> dict[str, object]:
    """List every version of every audit suite, newest first."""
    return {"data": service.suites(session)}


@admin.post("/suites", response_model=CorpusOut, openapi_extra=IMPORT_FORM)
async def import_suite(
    caller: AdminDep,
    name: Name,
    kind: Literal["harmful", "benign", "utility"],
    form: FormDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: ProviderBeginDep,
    writes: WritesDep,
) -> CorpusOut:
    """Import rows `{"prompt", "answer"?, "category"?, "language"?}` for audits."""
    return await writes.run(partial(imports.import_suite, storage, begin, form, name, kind, limits))


@admin.post("/suites/preview", response_model=ImportPreview, openapi_extra=IMPORT_FORM)
async def preview_suite(
    caller: AdminDep,
    name: Name,
    kind: Literal["harmful", "benign", "utility"],
    form: FormDep,
    storage: QuickStorageDep,
    limits: LimitsDep,
    look: LookDep,
    writes: WritesDep,
) -> Response:
    """Show the result of an import of the file; nothing is stored."""
    return await writes.answer(partial(imports.preview, storage, look, form, name, kind, limits))


@admin.get("/suites/{corpus_id}/profile", response_model=CorpusProfile)
async def profile_suite(
    corpus_id: str, caller: AdminDep, storage: QuickStorageDep, look: LookDep, reads: ReadsDep
) -> Response:
    """Describe the prompts of a version: lengths, writing systems, near duplicates."""
    kinds = ("harmful", "benign", "utility")
    return await reads.answer(partial(imports.profile_version, storage, look, corpus_id, kinds))


@admin.delete("/suites/{corpus_id}", response_model=CorpusDeleted)
async def delete_suite(
    corpus_id: str, caller: AdminDep, storage: StorageDep, begin: ProviderBeginDep, writes: WritesDep
) -> CorpusDeleted:
    """Delete a version that no unfinished job uses; the previous one becomes current again."""
    return await writes.run(partial(removal.delete, storage, begin, corpus_id, removal.forget_suite))
