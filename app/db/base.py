"""What all tables share: types that read alike on SQLite and PostgreSQL, and names for constraints."""

from __future__ import annotations

from datetime import UTC, datetime
from secrets import token_hex

from sqlalchemy import JSON, DateTime, Dialect, MetaData, TypeDecorator
from sqlalchemy.orm import DeclarativeBase


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in Python on every database; SQLite would drop the zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Turn an aware time into UTC for the database; None stays None."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Add UTC to a time that the database returned without a zone; None stays None."""
        return value.replace(tzinfo=UTC) if value and value.tzinfo is None else value


Json = JSON(none_as_null=True)  # of any column that holds JSON


class Base(DeclarativeBase):
    """How Python's types are stored, and how constraints are named."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's form
        datetime: UtcDateTime,
        dict[str, object]: Json,
        dict[str, str]: Json,
        list[str]: Json,
    }
    metadata = MetaData(
        naming_convention={  # a migration can only change what has a name
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        }
    )


def new_id(prefix: str) -> str:
    """Return `prefix` and 96 random bits in hexadecimal: an id that cannot be guessed."""
    return f"{prefix}{token_hex(12)}"


def utc_now() -> datetime:
    """Return this machine's time in UTC."""
    return datetime.now(UTC)
