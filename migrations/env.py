"""Run the migrations on the connection that `app.db` passes in, within its transaction."""

from __future__ import annotations

from alembic import context

# All modules with tables, so that the metadata is whole.
from app.db import tables as _audit_log  # noqa: F401
from app.db import tables as _checkpoints  # noqa: F401
from app.db import tables as _files  # noqa: F401
from app.db import tables as _jobs  # noqa: F401
from app.db import tables as _policies  # noqa: F401
from app.db import tables as _quotas  # noqa: F401
from app.db import tables as _uploads  # noqa: F401
from app.db import tables as _waivers  # noqa: F401
from app.db import tables as _webhooks  # noqa: F401
from app.db.base import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite can alter little; a batch copies the table
    transactional_ddl=True,
)

with context.begin_transaction():
    context.run_migrations()
