"""The provider's pages of base models and judges, and of safety pools and suites.

Base models are offered, checked and withdrawn, and judges shown with their errors. Pools and suites are previewed,
imported and deleted, with their versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.catalog import imports, removal, service
from app.catalog.fitness import fitness, inspect, judge_warnings
from app.catalog.imports import CorpusKind, ImportPreview
from app.catalog.judges import judges
from app.catalog.schemas import BaseModelIn, CorpusOut, ModelFitness
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, SentDep, SubmittedForm, Viewer, check_token
from app.deps import (
    LimitsDep,
    LookDep,
    ProviderBeginDep,
    QuickStorageDep,
    ReadDep,
    SettingsDep,
    StorageDep,
    upload_form,
)
from app.errors import AppError
from app.http.bodies import Form
from app.http.schemas import Body
from app.http.validation_errors import read
from app.policies import service as policies
from app.settings import Settings

models = APIRouter(include_in_schema=False, prefix="/provider/models")
data = APIRouter(include_in_schema=False, prefix="/provider/data")
_KINDS = {"pool": "safety pool", "harmful": "suite: attacks", "benign": "suite: harmless", "utility": "suite: task"}
_ALL = get_args(CorpusKind)


@models.get("")
def models_page(request: Request, viewer: ProviderDep, session: ReadDep, settings: SettingsDep) -> Response:
    """List base models and judges."""
    return _models_page(request, viewer, session, settings)


@models.post("")
async def offer(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, settings: SettingsDep
) -> Response:
    """Offer a base model, or replace the model of an alias; show warnings, or the error."""

    def offer_model() -> Response:
        try:
            asked = sent.filled_fields("alias", "source", "revision", "learning_rate", "quantization")
            asked |= {"allow_full_fine_tuning": bool(sent.text("allow_full_fine_tuning"))}
            ask = read(BaseModelIn, asked | _template_arguments(sent.text("template_arguments")))
            found = inspect(ask)
            with begin() as session:
                entry = service.add_model(session, ask, found)
                limits = policies.current(session, settings).content.thresholds
        except AppError as error:
            return _models_again(request, sent, look, settings, error)
        warnings = [*found.notes, *judge_warnings(entry.source, entry.digest, settings, limits)]
        with look() as session:
            return _models_page(request, sent.viewer, session, settings, tried=fitness(entry), warnings=warnings)

    return await sent.viewer.lanes.reads.project_share(sent.viewer.project_id).run(offer_model)


def _template_arguments(text: str) -> dict[str, object]:
    """Return the form's field as a field of `BaseModelIn`, as it is if it is no JSON; {} if it is empty."""
    if not text:
        return {}
    try:
        return {"template_arguments": json.loads(text)}
    except (ValueError, RecursionError):
        return {"template_arguments": text}


@models.post("/try")
async def try_model(request: Request, sent: SentDep, look: LookDep, settings: SettingsDep) -> Response:
    """Check a base model's files again and show the result."""

    def load_model() -> Response:
        try:
            with look() as session:
                entry = service.base_model(session, sent.text("alias"))
        except AppError as error:
            return _models_again(request, sent, look, settings, error)
        found = fitness(entry)
        with look() as session:
            return _models_page(request, sent.viewer, session, settings, tried=found)

    return await sent.viewer.lanes.reads.project_share(sent.viewer.project_id).run(load_model)


@models.post("/withdraw")
def withdraw(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, settings: SettingsDep
) -> Response:
    """Withdraw a base model."""
    try:
        with begin() as session:
            removal.withdraw_model(session, sent.text("alias"))
    except AppError as error:
        return _models_again(request, sent, look, settings, error)
    return RedirectResponse("/provider/models", 303)


def _models_again(
    request: Request, sent: SubmittedForm, look: LookDep, settings: Settings, error: AppError
) -> Response:
    with look() as session:
        return _models_page(request, sent.viewer, session, settings, sent=sent, error=error)


def _models_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    settings: Settings,
    *,
    sent: SubmittedForm | None = None,
    error: AppError | None = None,
    tried: ModelFitness | None = None,
    warnings: Sequence[str] = (),
) -> Response:
    return page(
        request,
        "provider_models",
        viewer,
        status=error.status if error else 200,
        models=service.base_models(session),
        judges=judges(session, settings),
        server=request.app.state.server_watch,
        asked=sent.shown_fields() if sent and "source" in sent.form else {},
        faults=Faults.from_error(error) if error else NO_FAULTS,
        tried=tried,
        warnings=warnings,
    )


class ImportQuery(Body):
    """Name and kind of an import, which the API takes as query parameters."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    kind: CorpusKind


@data.get("")
def data_page(request: Request, viewer: ProviderDep, session: ReadDep) -> Response:
    """List pools and suites, with a form to import a file."""
    return _data_page(request, viewer, session)


def _upload(request: Request, viewer: ProviderDep, settings: SettingsDep, limits: LimitsDep) -> Iterator[Form]:
    yield from upload_form(request, viewer.principal, settings, limits)


UploadDep = Annotated[Form, Depends(_upload, scope="function")]


def _read_fields(viewer: Viewer, form: Form) -> ImportQuery:
    """Check the token and parse the form's fields, which come before the file."""
    fields = form.fields_before_file()
    check_token(viewer, fields.get("form_token", ""))
    return read(ImportQuery, {name: fields[name].strip() for name in ImportQuery.model_fields if fields.get(name)})


@data.post("/preview")
async def preview(
    request: Request, viewer: ProviderDep, form: UploadDep, storage: QuickStorageDep, limits: LimitsDep, look: LookDep
) -> Response:
    """Show a preview of an import; htmx requests get only this part of the page."""

    def preview_import() -> Response:
        found, error = None, None
        try:
            asked = _read_fields(viewer, form)
            found = imports.preview(storage, look, form, asked.name, asked.kind, limits)
        except AppError as problem:
            error = problem
        if "hx-request" in request.headers:
            return page(request, "provider_preview", viewer, preview=found, faults=_data_faults(error))
        with look() as session:
            return _data_page(request, viewer, session, form.fields, preview=found, error=error)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(preview_import)


@data.post("")
async def take(
    request: Request,
    viewer: ProviderDep,
    form: UploadDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: ProviderBeginDep,
    look: LookDep,
) -> Response:
    """Import the file and show the result."""

    def import_file() -> Response:
        made, error = None, None
        try:
            asked = _read_fields(viewer, form)
            made = _import(storage, begin, limits, form, asked)()
        except AppError as problem:
            error = problem
        with look() as session:
            return _data_page(request, viewer, session, form.fields if error else {}, made=made, error=error)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(import_file)


def _import(
    storage: StorageDep, begin: ProviderBeginDep, limits: LimitsDep, form: Form, asked: ImportQuery
) -> Callable[[], CorpusOut]:
    if asked.kind == "pool":
        return partial(imports.import_pool, storage, begin, form, asked.name, limits)
    return partial(imports.import_suite, storage, begin, form, asked.name, asked.kind, limits)


@data.get("/{corpus_id}")
async def version_page(
    corpus_id: str, request: Request, viewer: ProviderDep, look: LookDep, storage: QuickStorageDep
) -> Response:
    """Show a profile of a version's rows."""

    def show_version() -> Response:
        with look() as session:
            corpus = CorpusOut.model_validate(service.kept_version(session, corpus_id, _ALL))
        found = imports.profile_version(storage, look, corpus_id, _ALL)
        return page(request, "provider_corpus", viewer, corpus=corpus, profile=found, kinds=_KINDS)

    return await viewer.lanes.reads.project_share(viewer.project_id).run(show_version)


@data.post("/{kind}/{corpus_id}/delete")
async def delete(
    kind: CorpusKind,
    corpus_id: str,
    request: Request,
    sent: SentDep,
    storage: StorageDep,
    begin: ProviderBeginDep,
    look: LookDep,
) -> Response:
    """Delete a version that no unfinished job uses."""
    viewer, forget = sent.viewer, removal.forget_pool if kind == "pool" else removal.forget_suite

    def delete_version() -> Response:
        try:
            removal.delete(storage, begin, corpus_id, forget)
        except AppError as error:
            with look() as session:
                return _data_page(request, viewer, session, error=error)
        return RedirectResponse("/provider/data", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(delete_version)


def _data_faults(error: AppError | None) -> Faults:
    return Faults.from_error(error) if error else NO_FAULTS


def _data_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    asked: Mapping[str, str] | None = None,
    *,
    preview: ImportPreview | None = None,
    made: CorpusOut | None = None,
    error: AppError | None = None,
) -> Response:
    pools, suites = service.pools(session), service.suites(session)
    current = {pools[0].id} if pools else set[str]()
    newest = {(each.kind, each.name): each.id for each in reversed(suites)}
    return page(
        request,
        "provider_data",
        viewer,
        status=error.status if error else 200,
        pools=pools,
        suites=suites,
        current=current | set(newest.values()),
        kinds=_KINDS,
        asked=asked or {},
        preview=preview,
        made=made,
        faults=_data_faults(error),
        problems=error.details if error and error.code == "invalid_corpus" else None,
    )
