"""Requests that only read do not wait for the write lock of the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app import deps
from app.dashboard.pages import ROUTERS as PAGES
from app.routes import ROUTERS

WRITING = {deps._session, deps._provider_session, deps._provider_begin}
NOTED_READS = {  # each of them is an entry of the audit log
    "list_stored_replies",
    "retrieve_reply_labels",
    "labels_page",
    "export_reply_labels",
    "export",
}


def dependencies(of: Dependant) -> Iterator[Any]:
    for each in of.dependencies:
        yield each.call
        yield from dependencies(each)


def test_no_route_that_reads_opens_a_session_that_writes() -> None:
    routes = [route for router in (*ROUTERS, *PAGES) for route in router.routes if isinstance(route, APIRoute)]
    reading = [route for route in routes if "GET" in (route.methods or ())]
    assert len(reading) > 50
    writing = {route.name for route in reading if WRITING & {*dependencies(route.dependant)}}
    assert writing == NOTED_READS
