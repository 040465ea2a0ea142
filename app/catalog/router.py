"""GET /v1/models for customers; what the provider imports, for keys with the admin scope."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Query

from app.catalog import imports, removal, service
from app.catalog.schemas import (
    BaseModelIn,
    BaseModelList,
    BaseModelOut,
    CorpusDeleted,
    CorpusOut,
    ModelList,
    ModelOut,
    PoolList,
    PoolOut,
    SuiteList,
)
from app.deps import FILE_FORM, AdminDep, BeginDep, CustomerDep, FormDep, LimitsDep, ReadDep, SessionDep, StorageDep
from app.jobs import erasure
from app.jobs.schemas import ModelDeleted
from app.models import BaseModelEntry, Corpus

models = APIRouter(prefix="/v1/models", tags=["models"])
admin = APIRouter(prefix="/v1/admin", tags=["provider"])

Name = Annotated[str, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@models.get("", response_model=ModelList)
def list_models(session: ReadDep, caller: CustomerDep) -> ModelList:
    """The base models on offer and your own fine-tuned ones."""
    return ModelList(data=service.models(session, caller.tenant_id))


@models.get("/{model:path}", response_model=ModelOut)
def retrieve_model(model: str, session: ReadDep, caller: CustomerDep) -> ModelOut:
    """One model; ids may contain `/` and `:`."""
    return service.get_model(session, caller.tenant_id, model)


@models.delete("/{model:path}", response_model=ModelDeleted)
def delete_model(model: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep) -> ModelDeleted:
    """Delete a fine-tuned model of yours; the job that made it stays."""
    return erasure.delete_model(storage, begin, caller.tenant_id, model)


@admin.get("/models", response_model=BaseModelList)
def list_base_models(session: ReadDep, caller: AdminDep) -> dict[str, object]:
    """The base models with where they come from."""
    return {"data": service.base_models(session)}


@admin.post("/models", response_model=BaseModelOut)
def add_base_model(entry: BaseModelIn, session: SessionDep, caller: AdminDep) -> BaseModelEntry:
    """Offer a base model under an alias, or change what an alias stands for."""
    return service.add_model(session, entry)


@admin.get("/pools", response_model=PoolList)
def list_pools(session: ReadDep, caller: AdminDep) -> PoolList:
    """Every version of every safety pool, newest first."""
    return PoolList(data=service.pools(session))


@admin.post("/pools", response_model=PoolOut, openapi_extra=FILE_FORM)
def import_pool(
    caller: AdminDep, name: Name, form: FormDep, storage: StorageDep, limits: LimitsDep, begin: BeginDep
) -> PoolOut:
    """Import rows `{"prompt", "safe"}`; a fifth of the prompts, at most 300, is held out as attacks."""
    return imports.import_pool(storage, begin, form, name, limits)


@admin.delete("/pools/{corpus_id}", response_model=CorpusDeleted)
def delete_pool(
    corpus_id: str, session: SessionDep, caller: AdminDep, storage: StorageDep, after: BackgroundTasks
) -> CorpusDeleted:
    """Delete a version that no unfinished job names, with what was held out of it; the one before is current again."""
    for key in removal.delete_pool(session, corpus_id):
        after.add_task(storage.delete, key)  # runs after the commit
    return CorpusDeleted(id=corpus_id)


@admin.get("/suites", response_model=SuiteList)
def list_suites(session: ReadDep, caller: AdminDep) -> dict[str, object]:
    """Every version of every audit suite, newest first."""
    return {"data": service.suites(session)}


@admin.post("/suites", response_model=CorpusOut, openapi_extra=FILE_FORM)
def import_suite(
    caller: AdminDep,
    name: Name,
    kind: Literal["harmful", "benign", "utility"],
    form: FormDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: BeginDep,
) -> Corpus:
    """Import rows `{"prompt", "answer"?, "category"?}` that adapters are measured with."""
    return imports.import_suite(storage, begin, form, name, kind, limits)


@admin.delete("/suites/{corpus_id}", response_model=CorpusDeleted)
def delete_suite(
    corpus_id: str, session: SessionDep, caller: AdminDep, storage: StorageDep, after: BackgroundTasks
) -> CorpusDeleted:
    """Delete a version that no unfinished job names; the one before is current again."""
    for key in removal.delete_suite(session, corpus_id):
        after.add_task(storage.delete, key)  # runs after the commit
    return CorpusDeleted(id=corpus_id)
