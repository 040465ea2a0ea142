"""Define what all tables share: column types that behave alike on SQLite and PostgreSQL, and constraint names."""

from __future__ import annotations

from datetime import UTC, datetime
from secrets import token_hex

from sqlalchemy import JSON, DateTime, Dialect, MetaData, TypeDecorator
from sqlalchemy.orm import DeclarativeBase


class UtcDateTime(TypeDecorator[datetime]):
    """A time column that is aware UTC in Python on every database, although SQLite stores no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert an aware time to UTC for the database; None stays None."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Add UTC to a time that the database returned without a time zone; None stays None."""
        # SQLite returns the stored UTC time without a zone.
        return value.replace(tzinfo=UTC) if value and value.tzinfo is None else value


Json = JSON(none_as_null=True)  # the type of every JSON column


class Base(DeclarativeBase):
    """The base of all tables: maps Python types to column types, and names constraints."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's form
        datetime: UtcDateTime,
        dict[str, object]: Json,
        dict[str, str]: Json,
        list[str]: Json,
    }
    metadata = MetaData(
        naming_convention={  # a migration can change only named constraints
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        }
    )


def new_id(prefix: str) -> str:
    """Return `prefix` followed by 96 random bits in hexadecimal: an id that cannot be guessed."""
    return f"{prefix}{token_hex(12)}"


def utc_now() -> datetime:
    """Return this machine's time in UTC."""
    return datetime.now(UTC)
