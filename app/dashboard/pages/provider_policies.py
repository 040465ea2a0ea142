"""The provider's page of the policy: its versions, a form for the next one, and its trial on past jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.catalog import service as catalog
from app.dashboard.fields import NO_FAULTS, Faults
from app.dashboard.forms import SentDep
from app.dashboard.pages.provider_policy_form import ACTIONS, OLDER, UNTIL, PolicyForm
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer
from app.deps import LookDep, ProviderBeginDep, QuickStorageDep, ReadDep, SettingsDep
from app.errors import AppError, NotFound
from app.jobs.trials import policy_trial
from app.jobs.trials.schemas import PolicyTrial
from app.policies import service
from app.settings import Settings
from spard import config
from spard.config import GateThresholds
from spard.evaluation.partial import most_hits

SIZES = (150, 500)  # suite sizes, in prompts, for which the page shows how many hits pass

router = APIRouter(include_in_schema=False, prefix="/provider/policies")


@router.get("")
def policies_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    settings: SettingsDep,
    of: Annotated[int | None, Query(alias="from", ge=0, le=2**31)] = None,
) -> Response:
    """Show all versions, and the form filled in with one of them, by default the one in force."""
    versions = service.versions(session, settings)
    based_on = next((each for each in versions if of in (None, each.version)), None)
    if based_on is None:
        raise NotFound(f"There is no version {of} of the policy.", code="policy_not_found", param="from")
    return _page(request, viewer, session, settings, PolicyForm.from_policy(based_on.content))


@router.post("")
async def take_policy(
    request: Request,
    sent: SentDep,
    look: LookDep,
    begin: ProviderBeginDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
) -> Response:
    """Try the form's policy on past jobs, or put it in force."""
    form, viewer = PolicyForm.of_sent(sent), sent.viewer

    def store_policy() -> Response:
        trial, faults, status = None, NO_FAULTS, 200
        try:
            policy = form.policy().with_defaults(settings.gate)
            if sent.text("act") == "put":
                with begin() as session:
                    service.add(session, viewer.principal.key_id, policy)
                return RedirectResponse("/provider/policies", 303)
            trial = policy_trial.try_policy(look, storage, policy, policy_trial.USUAL)
        except AppError as error:
            faults, status = Faults.from_error(error), error.status
        with look() as session:
            return _page(request, viewer, session, settings, form, trial, faults, status)

    return await viewer.lanes.reads.project_share(viewer.project_id).run(store_policy)


def _page(
    request: Request,
    viewer: Viewer,
    session: Session,
    settings: Settings,
    form: PolicyForm,
    trial: PolicyTrial | None = None,
    faults: Faults = NO_FAULTS,
    status: int = 200,
) -> Response:
    versions = service.versions(session, settings)
    return page(
        request,
        "provider_policies",
        viewer,
        status=status,
        versions=versions,
        most=_most_hits(versions[0].content.thresholds),
        defenses=list(config.defenses()),
        offered=[entry.alias for entry in catalog.base_models(session)],
        actions=ACTIONS,
        older=OLDER,
        until=UNTIL,
        form=form,
        trial=trial,
        faults=faults,
    )


def _most_hits(limits: GateThresholds) -> list[tuple[int, int | None, int | None]]:
    """Return (suite size, most answered attacks, most refusals) that still pass, for each size in `SIZES`."""
    return [(size, most_hits("harmful", size, limits), most_hits("benign", size, limits)) for size in SIZES]
