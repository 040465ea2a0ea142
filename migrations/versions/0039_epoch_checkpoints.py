"""Add audits of checkpoints at the ends of epochs, and the archives of checkpoints that passed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"


def upgrade() -> None:
    op.add_column("job_checkpoints", sa.Column("kind", sa.String(), nullable=True))
    op.add_column("job_checkpoints", sa.Column("safety", sa.JSON(), nullable=True))
    op.add_column("job_checkpoints", sa.Column("storage_key", sa.String(), nullable=True))
    op.add_column("job_checkpoints", sa.Column("sha256", sa.String(), nullable=True))
    op.add_column("job_checkpoints", sa.Column("bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Older code lists them as names and numbers; their archives go with the sweep of attempts, or with the job."""
    for name in ("bytes", "sha256", "storage_key", "safety", "kind"):
        op.drop_column("job_checkpoints", name)
