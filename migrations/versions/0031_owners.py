"""Add the owner of an API key; unknown (null) for existing keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("owner", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "owner")
