"""Cursor pagination as in OpenAI's API: the cursor is the id of the last row of the page before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select, and_, or_
from sqlalchemy.orm import Session

from app.checkpoints.models import CheckpointPermission, JobCheckpoint
from app.errors import InvalidRequest
from app.models import File, Job, JobEvent
from app.webhooks.models import WebhookDelivery

Row = TypeVar("Row", File, Job, JobEvent, JobCheckpoint, CheckpointPermission, WebhookDelivery)


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows of one page, and whether there are more."""

    data: list[Row]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        return self.data[0].id if self.data else None

    @property
    def last_id(self) -> str | None:
        return self.data[-1].id if self.data else None


def page(
    session: Session, query: Select[Row], model: type[Row], after: str | None, limit: int, *, ascending: bool
) -> Page[Row]:
    """The rows of `query` that follow `after` in order of creation; the cursor must be in `query` itself."""
    order: tuple[Any, ...]
    order = (model.created_at, model.id) if ascending else (model.created_at.desc(), model.id.desc())
    if after is not None:
        cursor = session.scalar(query.where(model.id == after))
        if cursor is None:
            raise invalid_cursor(after)
        at = cursor.created_at
        later = model.created_at > at if ascending else model.created_at < at
        tied = model.id > after if ascending else model.id < after
        query = query.where(or_(later, and_(model.created_at == at, tied)))
    rows = list(session.scalars(query.order_by(*order).limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)


def invalid_cursor(after: str) -> InvalidRequest:
    return InvalidRequest(f"No item {after!r} to continue after.", code="invalid_cursor", param="after")
