"""Paginate lists as OpenAI's API does: the cursor is the id of the last row of the previous page.

A cursor stays valid after its row has left the list, for example because a client deletes rows while it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session

from app import db
from app.db.tables import DeletedPlace
from app.errors import InvalidRequest


class ListableTable(Protocol):
    """A table that can be listed: `id` is a string and `created_at` a time, as columns on the class."""

    id: Any
    created_at: Any


class Item(Protocol):
    """A row of a list, identified by its id."""

    @property
    def id(self) -> Any:
        """The row's id, a string."""


Places = Sequence[Select[datetime]]  # queries for the creation time of a row that has left the list

Row = TypeVar("Row", bound=ListableTable)
Made = TypeVar("Made", bound=Item)


@dataclass(frozen=True, slots=True)
class Page(Generic[Made]):
    """The rows of one page, and whether more follow."""

    data: list[Made]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        """The id of the first row; None on an empty page."""
        return str(self.data[0].id) if self.data else None

    @property
    def last_id(self) -> str | None:
        """The cursor of the next page; None on an empty page."""
        return str(self.data[-1].id) if self.data else None


def page(
    session: Session,
    query: Select[Row],
    model: type[Row],
    after: str | None,
    limit: int,
    *,
    ascending: bool,
    left: Places = (),
) -> Page[Row]:
    """Return the rows of `query` that follow the row `after` in order of creation.

    `left` holds queries for the creation time of a row that has left the list. Raises `InvalidRequest` if neither the
    list nor `left` contains `after`.
    """
    # One row more than the page has tells if another page follows.
    following = _following(session, query, model, after, left, ascending=ascending)
    rows = list(session.scalars(following.limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)


def row_page(
    reader: db.Reader,
    query: Select[Any],
    model: type[ListableTable],
    after: str | None,
    limit: int,
    made: Callable[[Iterable[Any]], Made],
    left: Places = (),
) -> Page[Made]:
    """Like `page`, newest first, for a query of columns; `made` converts each row to a list item."""
    following = _following(reader, query, model, after, left, ascending=False)
    rows = [made(row) for row in db.rows(reader, following.limit(limit + 1))]
    return Page(rows[:limit], len(rows) > limit)


def _following(
    reader: db.Reader,
    query: Select[Any],
    model: type[ListableTable],
    after: str | None,
    left: Places,
    *,
    ascending: bool,
) -> Select[Any]:
    order = (model.created_at, model.id) if ascending else (model.created_at.desc(), model.id.desc())
    if after is not None:
        at = place(reader, after, query.with_only_columns(model.created_at).where(model.id == after), *left)
        later = model.created_at > at if ascending else model.created_at < at
        # Rows of the same time are ordered by id; without the tie-break some are skipped or repeated.
        tied = model.id > after if ascending else model.id < after
        query = query.where(or_(later, and_(model.created_at == at, tied)))
    return query.order_by(*order)


def place(reader: db.Reader, after: str, *places: Select[datetime]) -> datetime:
    """Return the creation time of the row `after` from the first of the queries `places` that finds it, else raise."""
    for each in places:
        at: datetime | None = db.rows(reader, each).scalar()
        if at is not None:
            return at
    raise invalid_cursor(after)


def note_deleted(session: Session, list_id: str, row_id: str, created_at: datetime) -> None:
    """Store the position of a row in a list from which it is being deleted."""
    session.add(DeletedPlace(id=row_id, list_id=list_id, created_at=created_at))


def select_deleted_position(list_id: str, after: str | None) -> Select[datetime]:
    """Return the query for the stored position of a deleted row in a list."""
    return select(DeletedPlace.created_at).where(DeletedPlace.list_id == list_id, DeletedPlace.id == after)


def invalid_cursor(after: str) -> InvalidRequest:
    """Return the error for a cursor that is not in the list."""
    return InvalidRequest(f"No item {after!r} to continue after.", code="invalid_cursor", param="after")
