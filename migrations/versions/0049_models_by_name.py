"""Index fine-tuned models by project and name, which each new job looks up."""

from __future__ import annotations

from alembic import op

revision = "0049"
down_revision = "0048"


def upgrade() -> None:
    op.create_index("ix_jobs_tenant_id_fine_tuned_model", "jobs", ["tenant_id", "fine_tuned_model"])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_id_fine_tuned_model", "jobs")
