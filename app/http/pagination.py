"""Cursor pagination as in OpenAI's API: the cursor is the id of the last row of the page before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import Select, and_, or_
from sqlalchemy.orm import Session

from app import db
from app.errors import InvalidRequest


class Listed(Protocol):
    """A table that can be listed: `id` is a string and `created_at` a time, as columns on the class."""

    id: Any
    created_at: Any


class Item(Protocol):
    """A row of a list, known by its id."""

    @property
    def id(self) -> Any:
        """The id of it, a string."""


Row = TypeVar("Row", bound=Listed)
Made = TypeVar("Made", bound=Item)


@dataclass(frozen=True, slots=True)
class Page(Generic[Made]):
    """Rows of one page, and whether there are more."""

    data: list[Made]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        """The id of the first row; None on an empty page."""
        return str(self.data[0].id) if self.data else None

    @property
    def last_id(self) -> str | None:
        """The cursor of the next page; None on an empty one."""
        return str(self.data[-1].id) if self.data else None


def page(
    session: Session, query: Select[Row], model: type[Row], after: str | None, limit: int, *, ascending: bool
) -> Page[Row]:
    """Return the rows of `query` that follow `after` in order of creation; raise if `query` does not hold `after`."""
    following = _following(session, query, model, after, ascending=ascending)
    rows = list(session.scalars(following.limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)


def row_page(
    reader: db.Reader,
    query: Select[Any],
    model: type[Listed],
    after: str | None,
    limit: int,
    made: Callable[[Iterable[Any]], Made],
) -> Page[Made]:
    """Return the same of a query of columns, the newest first, each row `made` into what is listed."""
    following = _following(reader, query, model, after, ascending=False)
    rows = [made(row) for row in db.rows(reader, following.limit(limit + 1))]
    return Page(rows[:limit], len(rows) > limit)


def _following(
    reader: db.Reader, query: Select[Any], model: type[Listed], after: str | None, *, ascending: bool
) -> Select[Any]:
    order = (model.created_at, model.id) if ascending else (model.created_at.desc(), model.id.desc())
    if after is not None:
        at = db.rows(reader, query.with_only_columns(model.created_at).where(model.id == after)).scalar()
        if at is None:
            raise invalid_cursor(after)
        later = model.created_at > at if ascending else model.created_at < at
        tied = model.id > after if ascending else model.id < after
        query = query.where(or_(later, and_(model.created_at == at, tied)))
    return query.order_by(*order)


def invalid_cursor(after: str) -> InvalidRequest:
    """Return the error for a cursor that is not in the list."""
    return InvalidRequest(f"No item {after!r} to continue after.", code="invalid_cursor", param="after")
