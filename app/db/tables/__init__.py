"""Collect every table of the service; domains import them from here."""

from __future__ import annotations

from app.db.tables.catalog import BaseModelEntry, Corpus, EmbeddingShard, PolicyVersion
from app.db.tables.files import (
    CondemnedObject,
    DeletedPlace,
    File,
    ObjectFinding,
    ObjectIntent,
    ObjectMark,
    Upload,
    UploadPart,
)
from app.db.tables.inference import InferenceCall, ServedAdapter, StoredReply
from app.db.tables.jobs import (
    TERMINAL,
    AuditResult,
    CheckpointPermission,
    DeletedModel,
    IdempotencyKey,
    Job,
    JobCheckpoint,
    JobEvent,
    JobMetric,
    JobStatus,
    LaterAudit,
    Outbox,
    SweptJob,
    Tombstone,
    WorkerRow,
)
from app.db.tables.projects import ApiKey, AuditEntry, BrowserSession, Project, Quota, WebhookDelivery, WebhookEndpoint
from app.db.tables.reviews import HeldAdapter, ReplyLabel, SampledReply, Waiver

__all__ = [
    "TERMINAL",
    "ApiKey",
    "AuditEntry",
    "AuditResult",
    "BaseModelEntry",
    "BrowserSession",
    "CheckpointPermission",
    "CondemnedObject",
    "Corpus",
    "DeletedModel",
    "DeletedPlace",
    "EmbeddingShard",
    "File",
    "HeldAdapter",
    "IdempotencyKey",
    "InferenceCall",
    "Job",
    "JobCheckpoint",
    "JobEvent",
    "JobMetric",
    "JobStatus",
    "LaterAudit",
    "ObjectFinding",
    "ObjectIntent",
    "ObjectMark",
    "Outbox",
    "PolicyVersion",
    "Project",
    "Quota",
    "ReplyLabel",
    "SampledReply",
    "ServedAdapter",
    "StoredReply",
    "SweptJob",
    "Tombstone",
    "Upload",
    "UploadPart",
    "Waiver",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WorkerRow",
]
