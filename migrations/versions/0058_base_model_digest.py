"""Add the digest of a base model's files at the time when it was added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0058"
down_revision = "0057"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("digest", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "digest")
