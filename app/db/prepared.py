"""Statements that are asked all the time: compiled once for each database, and then asked of its driver.

For a row by its id SQLite takes some ten microseconds and SQLAlchemy a hundred, most of it to prepare what is the same
every time: the text, the order of its parameters, which columns have to be turned into Python's types and how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Dialect, Select
from sqlalchemy.exc import DBAPIError, MultipleResultsFound
from sqlalchemy.orm import Session

Made = TypeVar("Made")
Reader = Connection | Session  # of which either can be asked, within its transaction
_Columns = Select[*tuple[Any, ...]]
_Change = Callable[[Any], Any]  # of a value, from Python's type to the driver's or back


class Prepared(Generic[Made]):
    """A statement of columns whose rows are `made` into what callers take, as by the `_make` of a named tuple.

    Its parameters are single values: an `IN` of a list has another text for each length of the list.
    """

    def __init__(self, statement: _Columns, made: Callable[[Iterable[Any]], Made]) -> None:
        self._statement, self._made = statement, made
        self._forms: dict[str, _Form] = {}  # by the dialect's name: `make_engine` makes all of one name alike

    def all(self, reader: Reader, **values: object) -> list[Made]:
        """Return all rows; `values` are those of the statement's parameters.

        Errors are SQLAlchemy's. As with the ORM, what a session has not written yet is written first.
        """
        if isinstance(reader, Session):
            reader.flush()
            reader = reader.connection()
        form = self._forms.get(reader.dialect.name)
        if form is None:
            form = self._forms[reader.dialect.name] = _Form(self._statement, reader.dialect)
        return [self._made(row) for row in form.rows(reader, values)]

    def one(self, reader: Reader, **values: object) -> Made | None:
        """Return the only row; None if there is none."""
        found = self.all(reader, **values)
        if len(found) > 1:
            raise MultipleResultsFound("several rows where there can be one")
        return found[0] if found else None


class _Form:
    """The statement as one kind of database takes it."""

    def __init__(self, statement: _Columns, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        self._text: str = compiled.string
        self._order: list[str] | None = compiled.positiontup  # None: the driver takes parameters by name
        self._parameters: dict[str, _Change | None] = {}
        self._constants: dict[str, object] = {}
        for name, bind in compiled.binds.items():
            if bind.expanding:
                raise ValueError(f"{name} is a list")
            self._parameters[name] = change = bind.type.dialect_impl(dialect).bind_processor(dialect)
            if not bind.required:
                self._constants[name] = change(bind.value) if change else bind.value
        self._types = [column.type.dialect_impl(dialect) for column in statement.selected_columns]
        self._changes: list[tuple[int, _Change]] | None = None

    def rows(self, connection: Connection, values: Mapping[str, object]) -> list[list[Any]]:
        """Return what the database finds, in Python's types; NULL is None in all of them."""
        parameters = self._order_parameters(values)
        try:
            cursor = connection.connection.cursor()
            # Who watches what the engine sends sees this too.
            connection.engine.dispatch.before_cursor_execute(connection, cursor, self._text, parameters, None, False)
            cursor.execute(self._text, parameters)
            found = cursor.fetchall()
        except connection.dialect.loaded_dbapi.Error as error:
            raise _translate_error(error, connection, self._text, parameters) from error
        changes = self._column_changes(cursor.description, connection.dialect)
        cursor.close()
        rows = [list(row) for row in found]
        for row in rows:
            for place, change in changes:
                if row[place] is not None:
                    row[place] = change(row[place])
        return rows

    def _order_parameters(self, values: Mapping[str, object]) -> Any:
        found = self._constants.copy()
        for name, value in values.items():
            change = self._parameters[name]
            found[name] = value if change is None else change(value)
        return found if self._order is None else [found[name] for name in self._order]

    def _column_changes(self, described: Sequence[Any], dialect: Dialect) -> list[tuple[int, _Change]]:
        """Return how columns are changed, which is known once the driver has described them."""
        if self._changes is None:
            changes = (
                type.result_processor(dialect, each[1]) for type, each in zip(self._types, described, strict=True)
            )
            self._changes = [(place, change) for place, change in enumerate(changes) if change is not None]
        return self._changes


def _translate_error(error: Any, connection: Connection, text: str, parameters: Any) -> BaseException:
    """Return SQLAlchemy's error for a driver's; a connection that is lost is not used again."""
    dialect, hides = connection.dialect, connection.engine.hide_parameters
    is_lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    if is_lost:
        connection.invalidate(error)
    found: BaseException = DBAPIError.instance(
        text, parameters, error, dialect.loaded_dbapi.Error, hides, connection_invalidated=is_lost, dialect=dialect
    )
    return found
