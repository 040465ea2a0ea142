"""Jobs that are cancelled with the wish that their last ends of epochs are audited before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("audits_last", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("jobs", "audits_last")
