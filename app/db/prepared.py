"""Compile frequent statements once per database kind and run them on the driver directly.

To read a row by its id SQLite takes about ten microseconds and SQLAlchemy a hundred, most of it for work that is the
same every time: the text, the order of the parameters, and the conversion of columns to Python types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Dialect, Select
from sqlalchemy.exc import DBAPIError, MultipleResultsFound
from sqlalchemy.orm import Session

Made = TypeVar("Made")
Reader = Connection | Session  # either can run a statement in its transaction
_Columns = Select[*tuple[Any, ...]]
_Change = Callable[[Any], Any]  # converts a value from Python's type to the driver's, or back


class PreparedStatement(Generic[Made]):
    """A statement that selects columns; each row is passed to `made`, for example the `_make` of a named tuple.

    Parameters must be single values, because the text of an `IN` depends on the length of the list:

        job_name = Prepared(select(Job.id, Job.model).where(Job.id == bindparam("job_id")), JobName._make)
        found = job_name.one(reader, job_id="ftjob-1")
    """

    def __init__(self, statement: _Columns, made: Callable[[Iterable[Any]], Made]) -> None:
        self._statement, self._made = statement, made
        self._forms: dict[str, _Form] = {}  # by dialect name: all engines of one dialect are configured alike

    def all(self, reader: Reader, **values: object) -> list[Made]:
        """Return all rows; `values` are the statement's parameters by name.

        Raises SQLAlchemy's errors. As with the ORM, a session's pending changes are flushed first.
        """
        if isinstance(reader, Session):
            reader.flush()
            reader = reader.connection()
        form = self._forms.get(reader.dialect.name)
        if form is None:
            form = self._forms[reader.dialect.name] = _Form(self._statement, reader.dialect)
        return [self._made(row) for row in form.rows(reader, values)]

    def one(self, reader: Reader, **values: object) -> Made | None:
        """Return the only row, or None; raise `MultipleResultsFound` if there are several."""
        found = self.all(reader, **values)
        if len(found) > 1:
            raise MultipleResultsFound("several rows where there can be one")
        return found[0] if found else None


class _Form:
    """The statement compiled for one kind of database."""

    def __init__(self, statement: _Columns, dialect: Dialect) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        self._text: str = compiled.string
        self._order: list[str] | None = compiled.positiontup  # None: the driver uses named parameters
        self._parameters: dict[str, _Change | None] = {}
        self._constants: dict[str, object] = {}
        for name, bind in compiled.binds.items():
            if bind.expanding:
                raise ValueError(f"{name} is a list")
            self._parameters[name] = change = bind.type.dialect_impl(dialect).bind_processor(dialect)
            # Literals in the statement are bound parameters with a value; they are converted once, here.
            if not bind.required:
                self._constants[name] = change(bind.value) if change else bind.value
        self._types = [column.type.dialect_impl(dialect) for column in statement.selected_columns]
        self._changes: list[tuple[int, _Change]] | None = None

    def rows(self, connection: Connection, values: Mapping[str, object]) -> list[list[Any]]:
        """Run the statement and return its rows with values converted to Python types; NULL is None."""
        parameters = self._order_parameters(values)
        try:
            # The driver's cursor within SQLAlchemy's transaction: no result object of SQLAlchemy is built.
            cursor = connection.connection.cursor()
            # Listeners on the engine's statements see this one too.
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
        """Return the conversions by column index; known once the driver has described the columns."""
        if self._changes is None:
            changes = (
                type.result_processor(dialect, each[1]) for type, each in zip(self._types, described, strict=True)
            )
            self._changes = [(place, change) for place, change in enumerate(changes) if change is not None]
        return self._changes


def _translate_error(error: Any, connection: Connection, text: str, parameters: Any) -> BaseException:
    """Return SQLAlchemy's error for a driver's error, and invalidate the connection if it is lost."""
    dialect, hides = connection.dialect, connection.engine.hide_parameters
    is_lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    if is_lost:
        connection.invalidate(error)
    found: BaseException = DBAPIError.instance(
        text, parameters, error, dialect.loaded_dbapi.Error, hides, connection_invalidated=is_lost, dialect=dialect
    )
    return found
