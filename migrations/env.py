"""Runs the migrations on the connection that `app.db` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

# All modules with tables, so that the metadata is whole.
from app.audit_log import models as _audit_log  # noqa: F401
from app.checkpoints import models as _checkpoints  # noqa: F401
from app.files import models as _files  # noqa: F401
from app.jobs import models as _jobs  # noqa: F401
from app.models import Base
from app.policies import models as _policies  # noqa: F401
from app.quotas import models as _quotas  # noqa: F401
from app.uploads import models as _uploads  # noqa: F401
from app.waivers import models as _waivers  # noqa: F401
from app.webhooks import models as _webhooks  # noqa: F401

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite can alter little; a batch copies the table
    transactional_ddl=True,
)

with context.begin_transaction():
    context.run_migrations()
