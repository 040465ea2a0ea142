"""Webhook endpoints and deliveries as their owner sees them."""

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
    """Where to send events, and which: OpenAI's three unless asked, for its client takes ours for others of its own."""

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
    """The job that an event is about, by its `id`."""

    id: str


class EventBody(BaseModel):
    """What is sent to an endpoint, as OpenAI sends it; `data.id` is the job's."""

    id: str
    object: Literal["event"] = "event"
    type: EventType
    created_at: int
    data: EventSubject


class DeliveryOut(BaseModel):
    """One event to one endpoint: whether it arrived, and what the receiver said last."""

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
    """An endpoint of any project with how many of its deliveries wait, arrived and were given up."""

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
