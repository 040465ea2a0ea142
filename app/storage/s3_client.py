"""Create S3 clients with bounded waits and settings for servers other than Amazon's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts in seconds, and the number of attempts, for a server that does not answer."""

    connect_s: float = 5
    read_s: float = 30
    attempts: int = 4


PATIENT = Patience()
QUICK = Patience(connect_s=2, read_s=5, attempts=2)  # for reads while a client waits for the answer


def s3_client(endpoint_url: str | None, patience: Patience = PATIENT) -> S3Client:
    """Return a client with bounded waits and retries; boto3 finds the credentials in the environment."""
    session = boto3.session.Session()
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
        request_checksum_calculation="when_required",  # other servers do not support the newer checksum trailers
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": patience.attempts},
        connect_timeout=patience.connect_s,
        read_timeout=patience.read_s,
        max_pool_connections=64,
    )
    region = session.region_name or "us-east-1"
    return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)
