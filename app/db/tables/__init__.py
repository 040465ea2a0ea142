"""Collect every table of the service; domains import them from here."""

from __future__ import annotations

from app.db.tables.adapters_served import ServedAdapter
from app.db.tables.audit_log import AuditEntry
from app.db.tables.catalog import BaseModelEntry, Corpus, EmbeddingShard
from app.db.tables.checkpoints import CheckpointPermission, JobCheckpoint
from app.db.tables.deleted_places import DeletedPlace
from app.db.tables.files import CondemnedObject, File, Upload, UploadPart
from app.db.tables.inference import InferenceCall, StoredReply
from app.db.tables.jobs import (
    TERMINAL,
    AuditResult,
    DeletedModel,
    IdempotencyKey,
    Job,
    JobEvent,
    JobMetric,
    JobStatus,
    LaterAudit,
    SweptJob,
    Tombstone,
)
from app.db.tables.objects import ObjectFinding, ObjectIntent, ObjectMark
from app.db.tables.policies import PolicyVersion
from app.db.tables.projects import ApiKey, BrowserSession, Project, Quota
from app.db.tables.reply_labels import ReplyLabel, SampledReply
from app.db.tables.waivers import HeldAdapter, Waiver
from app.db.tables.webhooks import WebhookDelivery, WebhookEndpoint
from app.db.tables.workers import Outbox, WorkerRow

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
