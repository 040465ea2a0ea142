"""The pages of one job: for its project under /jobs, and read-only for the provider under /provider/jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from app import audit_log, quotas
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer, ViewerDep
from app.db import Begin
from app.db.tables import TERMINAL
from app.deps import BeginDep, LookDep, QuickStorageDep
from app.errors import AppError, Forbidden, HasNone, InvalidState
from app.jobs import clone, rows, service, transcripts
from app.jobs.blocking_rows import is_ended_by_rows
from app.jobs.reports.gather import gather, read
from app.jobs.reports.service import ROWS_SHOWN, dropped_lines, read_report
from app.storage import Storage

_AT_ONCE = 25  # transcripts


@dataclass(frozen=True, slots=True)
class OneJob:
    """The job of a page request; `is_own` means that only jobs of the viewer's own project are found."""

    request: Request
    viewer: Viewer
    look: Begin
    begin: Begin
    storage: Storage
    job_id: str
    is_own: bool

    @property
    def address(self) -> str:
        """The path of the job's pages."""
        return f"{'' if self.is_own else '/provider'}/jobs/{self.job_id}"

    async def answer(self, shown: Callable[[], Response]) -> Response:
        """Run one of the page methods below in the viewer's project's share of reading threads."""
        return await self.viewer.lanes.reads.project_share(self.viewer.project_id).run(shown)

    def page(self, problem: AppError | None = None) -> Response:
        """Render the job's page, with the error of a failed form, if any."""
        with self.look() as session:
            gathered = gather(session, self.viewer.project_id if self.is_own else None, self.job_id)
            owner = gathered.job.organization_id
            projects = {} if self.is_own else quotas.project_names(session, [owner])
        seen = read(self.storage, gathered)
        return self._render(
            "job_live" if "hx-request" in self.request.headers else "job",
            status=problem.status if problem else 200,
            job=seen.job,
            projects=projects,
            is_over=seen.job.status in TERMINAL,
            report=seen.report,
            view=seen.view(),
            log=gathered.log,
            later=gathered.later,
            artifacts=gathered.artifacts,
            findings=gathered.findings,
            dropped=dropped_lines(seen.report) if seen.report else (),
            risky=len(clone.risky_lines(seen.report)) if seen.report else 0,
            blocking=gathered.log.rows if is_ended_by_rows(seen.job.error) else None,
            problem=problem,
        )

    def risky_row(self, line: int) -> Response:
        """Render the text of a risky row; the viewing is recorded in the audit log."""
        with self.look() as session:
            _, key = service.reported_job(session, self._project(session), self.job_id)
        row = next((row for row in read_report(self.storage, key).risky_rows or () if row.line == line), None)
        if row is None:
            raise HasNone("No such row in the report of this job.")
        with self.begin() as session:
            audit_log.record(session, ROWS_SHOWN, self.job_id, line=line)
        return self._render("risky_row", row=row)

    def transcripts(self, after: int, hit: str) -> Response:
        """Render the list of transcripts by suite and outcome, without their texts."""
        wanted = {"yes": True, "no": False}.get(hit)
        found = transcripts.read(self.storage, self._transcripts(), after, _AT_ONCE, None, wanted)
        return self._render("transcripts", found=found, hit=hit)

    def transcript(self, index: int) -> Response:
        """Render one prompt and its reply; the viewing is recorded in the audit log."""
        found = transcripts.read(self.storage, self._transcripts(), index - 1, 1, None, None).data
        if not found or found[0].index != index:
            raise HasNone("No such transcript of this job.")
        with self.begin() as session:
            audit_log.record(session, transcripts.SHOWN, self.job_id, indices=[index])
        return self._render("transcript", said=found[0])

    def task_replies(self) -> Response:
        """Show the replies of both models to the customer's own requests, or why there are none."""
        try:
            found = transcripts.show_task_replies(self.look, self.storage, self.viewer.principal, self.job_id).data
        except (Forbidden, HasNone, InvalidState) as problem:
            return self._render("task_replies", found=(), problem=problem)
        return self._render("task_replies", found=found, problem=None)

    def _project(self, session: Session) -> str:
        """Return the project in which the job is looked up."""
        return self.viewer.project_id if self.is_own else rows.job_project(session, self.job_id)

    def _transcripts(self) -> str:
        with self.look() as session:
            return transcripts.find(session, self._project(session), self.job_id)

    def _render(self, name: str, status: int = 200, **shown: object) -> Response:
        place = {"job_id": self.job_id, "at": self.address, "is_own": self.is_own}
        return page(self.request, name, self.viewer, status=status, **place, **shown)


def _open_own_job(
    job_id: str, request: Request, viewer: ViewerDep, look: LookDep, begin: BeginDep, storage: QuickStorageDep
) -> OneJob:
    return OneJob(request, viewer, look, begin, storage, job_id, is_own=True)


def _of_any_project(
    job_id: str, request: Request, viewer: ProviderDep, look: LookDep, begin: BeginDep, storage: QuickStorageDep
) -> OneJob:
    return OneJob(request, viewer, look, begin, storage, job_id, is_own=False)


OwnJobDep = Annotated[OneJob, Depends(_open_own_job)]
AnyJobDep = Annotated[OneJob, Depends(_of_any_project)]  # for keys with the scope admin
