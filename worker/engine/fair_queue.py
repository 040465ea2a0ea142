"""A queue of requests in which projects take turns, so that none waits for all that another has asked."""

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


class FairQueue:
    """The waiting requests of all projects; true as long as there are any."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def next(self) -> Waiting:
        """The request that `take` would return."""
        return next(iter(self._queues.values()))[0]

    def add(self, waiting: Waiting) -> None:
        """Add a request to the end of its project's queue."""
        self._queues.setdefault(waiting.project, deque()).append(waiting)

    def take(self) -> Waiting:
        """Remove and return the next request; the next one after it is of another project, if any other waits."""
        project, queue = next(iter(self._queues.items()))
        found = queue.popleft()
        if queue:
            self._queues.move_to_end(project)
        else:
            del self._queues[project]
        return found

    def drop(self, number: int) -> None:
        """Remove a request by its number, if it waits."""
        for project, queue in list(self._queues.items()):
            self._queues[project] = kept = deque(each for each in queue if each.id != number)
            if not kept:
                del self._queues[project]
