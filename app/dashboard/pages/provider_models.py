"""The provider's page of base models, to offer, check and withdraw them, and of judges with their errors."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.catalog import removal, service
from app.catalog.fitness import fitness, inspect, judge_warnings
from app.catalog.judges import judges
from app.catalog.schemas import BaseModelIn, ModelFitness
from app.dashboard.forms import NO_FAULTS, Faults, Sent, SentDep
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer
from app.deps import LookDep, ProviderBeginDep, ReadDep, SettingsDep
from app.errors import AppError
from app.http.validation_errors import read
from app.policies import service as policies
from app.settings import Settings

router = APIRouter(include_in_schema=False, prefix="/provider/models")


@router.get("")
def models_page(request: Request, viewer: ProviderDep, session: ReadDep, settings: SettingsDep) -> Response:
    """List base models and judges."""
    return _page(request, viewer, session, settings)


@router.post("")
async def offer(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, settings: SettingsDep
) -> Response:
    """Offer a base model, or replace the model of an alias; show warnings, or the error."""

    def offer_model() -> Response:
        try:
            asked = sent.filled_fields("alias", "source", "revision", "learning_rate", "quantization")
            ask = read(BaseModelIn, asked | {"allow_full_fine_tuning": bool(sent.text("allow_full_fine_tuning"))})
            found = inspect(ask)
            with begin() as session:
                entry = service.add_model(session, ask, found)
                limits = policies.current(session, settings).content.thresholds
        except AppError as error:
            return _again(request, sent, look, settings, error)
        warnings = [*found.notes, *judge_warnings(entry.source, entry.digest, settings, limits)]
        with look() as session:
            return _page(request, sent.viewer, session, settings, tried=fitness(entry), warnings=warnings)

    return await sent.viewer.lanes.reads.project_share(sent.viewer.project_id).run(offer_model)


@router.post("/try")
async def try_model(request: Request, sent: SentDep, look: LookDep, settings: SettingsDep) -> Response:
    """Check a base model's files again and show the result."""

    def load_model() -> Response:
        try:
            with look() as session:
                entry = service.base_model(session, sent.text("alias"))
        except AppError as error:
            return _again(request, sent, look, settings, error)
        found = fitness(entry)
        with look() as session:
            return _page(request, sent.viewer, session, settings, tried=found)

    return await sent.viewer.lanes.reads.project_share(sent.viewer.project_id).run(load_model)


@router.post("/withdraw")
def withdraw(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, settings: SettingsDep
) -> Response:
    """Withdraw a base model."""
    try:
        with begin() as session:
            removal.withdraw_model(session, sent.text("alias"))
    except AppError as error:
        return _again(request, sent, look, settings, error)
    return RedirectResponse("/provider/models", 303)


def _again(request: Request, sent: Sent, look: LookDep, settings: Settings, error: AppError) -> Response:
    with look() as session:
        return _page(request, sent.viewer, session, settings, sent=sent, error=error)


def _page(
    request: Request,
    viewer: Viewer,
    session: Session,
    settings: Settings,
    *,
    sent: Sent | None = None,
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
