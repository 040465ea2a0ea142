"""Routes that all applications of a process share, so that they are built once.

FastAPI builds the validators of a router's routes when an application first looks through them: for all, in 1 s of CPU.
Our routes read what differs between applications from `request.app.state`, so one set serves all of them. Only
FastAPI's `dependency_overrides` belong to an application as well, and are looked up by request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute

from app.http import openapi
from app.http.common_threads import hold_place

_Overrides = dict[Callable[..., Any], Callable[..., Any]]
serving: ContextVar[FastAPI] = ContextVar("serving")  # the application whose request the current task answers


class _OverridesOfRequest:
    """What FastAPI asks for overrides, in place of the one application that it includes a router in."""

    @property
    def dependency_overrides(self) -> _Overrides:
        """Return the overrides of the application that the request came to."""
        return serving.get().dependency_overrides


def include(*routers: APIRouter) -> Sequence[BaseRoute]:
    """Return the routes of the routers, for the `routes` of any number of applications."""
    parent = APIRouter(
        responses=openapi.ERRORS,
        dependencies=[Depends(hold_place, scope="function")],  # released once the transaction has ended
        dependency_overrides_provider=_OverridesOfRequest(),
    )
    for router in routers:
        parent.include_router(router)
    return tuple(parent.routes)


def build(routes: Sequence[BaseRoute]) -> None:
    """Build the routes now, which the first request would have to wait for."""
    for _ in iter_route_contexts(routes):
        pass
