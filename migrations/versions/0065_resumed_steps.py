"""Where a job's training was resumed, as data of the event and no longer in its words alone."""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0065"
down_revision = "0064"

_WORDS = re.compile(r"Training goes on after step (\d{1,9})")  # of events up to here


def upgrade() -> None:
    events = sa.table(
        "job_events", sa.column("id", sa.String), sa.column("message", sa.String), sa.column("data", sa.JSON)
    )
    connection = op.get_bind()
    told = connection.execute(
        sa.select(events.c.id, events.c.message).where(events.c.message.startswith("Training goes on "))
    )
    for event_id, message in told.all():
        if found := _WORDS.fullmatch(message):
            data = {"resumed_after_step": int(found[1])}
            connection.execute(events.update().where(events.c.id == event_id).values(data=data))


def downgrade() -> None:
    """Leave the data: earlier versions read the message and nothing else."""
