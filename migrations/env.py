"""Runs the migrations on the connection that `app.db` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from app.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite can alter little; a batch copies the table
    transactional_ddl=True,
)

with context.begin_transaction():
    context.run_migrations()
