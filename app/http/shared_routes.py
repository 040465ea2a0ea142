"""Build routes once for all applications of a process.

FastAPI builds the validators of all routes when an application first matches a request, which takes 1 s of CPU. Our
routes read what differs between applications from `request.app.state`, so all applications share one set of routes.
FastAPI's `dependency_overrides`, which also belong to an application, are looked up per request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute

from app.http import openapi
from app.http.lanes import hold_place

_Overrides = dict[Callable[..., Any], Callable[..., Any]]
serving: ContextVar[FastAPI] = ContextVar("serving")  # the application whose request the current task answers


class _OverridesOfRequest:
    """Provides FastAPI with the overrides of the current request's application."""

    @property
    def dependency_overrides(self) -> _Overrides:
        """The overrides of the application that received the request."""
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
    """Build the routes now, so that the first request does not wait for it."""
    for _ in iter_route_contexts(routes):
        pass
