"""Schemas of webhook endpoints and deliveries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.http.schemas import Body, UnixTime

EventType = Literal[
    "fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled", "safety.audit.completed"
]
_OPENAI_S: tuple[EventType, ...] = ("fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled")


def _once(events: list[EventType]) -> list[EventType]:
    return list(dict.fromkeys(events))


class EndpointCreate(Body):
    """The address to send events to, and their types.

    The default is OpenAI's three types, because its client misreads ours.
    """

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    events: Annotated[list[EventType], Field(min_length=1, max_length=10), AfterValidator(_once)] = Field(
        default_factory=lambda: list(_OPENAI_S)
    )


class EndpointOut(BaseModel):
    """An endpoint; `disabled` after its receiver answered 410."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: UnixTime
    url: str
    events: list[EventType]
    status: Literal["enabled", "disabled"]


class EndpointSecret(EndpointOut):
    """An endpoint with its secret, which is shown only once."""

    secret: str


class EndpointList(BaseModel):
    """All webhook endpoints of your project, newest first, without their secrets."""

    object: Literal["list"] = "list"
    data: list[EndpointOut]
    has_more: Literal[False] = False


class EndpointDeleted(BaseModel):
    """Confirms that an endpoint was deleted."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    deleted: Literal[True] = True


class EventSubject(BaseModel):
    """The job that an event is about, by `id`."""

    id: str


class EventBody(BaseModel):
    """The body sent to an endpoint, in OpenAI's form; `data.id` is the job's id."""

    id: str
    object: Literal["event"] = "event"
    type: EventType
    created_at: int
    data: EventSubject


class DeliveryOut(BaseModel):
    """One event to one endpoint: its status and the receiver's last answer."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    created_at: UnixTime
    event_id: str
    type: EventType
    job_id: str
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    outcome: str | None
    delivered_at: UnixTime | None


class DeliveryList(BaseModel):
    """One page of deliveries, newest first."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[DeliveryOut]
    has_more: bool


class EndpointOverview(EndpointOut):
    """An endpoint of any project with the numbers of its pending, delivered and failed deliveries."""

    project_id: str
    pending: int
    delivered: int
    failed: int


class EndpointOverviewList(BaseModel):
    """The webhook endpoints of all projects, newest first, without their secrets."""

    object: Literal["list"] = "list"
    data: list[EndpointOverview]


class DeliveryOverview(DeliveryOut):
    """A delivery to an endpoint of any project."""

    endpoint_id: str


class DeliveryOverviewList(BaseModel):
    """One page of the deliveries of all projects, newest first."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[DeliveryOverview]
    has_more: bool
