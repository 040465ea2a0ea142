"""Requests that wait, by project: these take turns, so that none waits for all that another has asked."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from app.inference.protocol import Ask


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was taken and has no row yet; `ids` are its prompt's tokens, where these were read already."""

    id: int
    project: str
    ask: Ask
    ids: list[int] | None = None


class Turns:
    """What waits; true as long as anything does."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def next(self) -> Waiting:
        """The request whose turn it is."""
        return next(iter(self._queues.values()))[0]

    def add(self, waiting: Waiting) -> None:
        """Let a request wait behind those of its project."""
        self._queues.setdefault(waiting.project, deque()).append(waiting)

    def take(self) -> Waiting:
        """Return the request whose turn it is, which waits no longer; another project is next."""
        project, queue = next(iter(self._queues.items()))
        found = queue.popleft()
        if queue:
            self._queues.move_to_end(project)
        else:
            del self._queues[project]
        return found

    def drop(self, number: int) -> None:
        """Let a request wait no longer, if it does."""
        for project, queue in list(self._queues.items()):
            self._queues[project] = kept = deque(each for each in queue if each.id != number)
            if not kept:
                del self._queues[project]
