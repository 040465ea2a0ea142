"""A queue of requests in which projects take turns, so that one project's many requests do not delay the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from app.inference.protocol import Ask


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that has no row in the batch yet; `ids` are its prompt's tokens, if a process has made them already."""

    id: int
    project: str
    ask: Ask
    ids: list[int] | None = None


class FairQueue:
    """The waiting requests of all projects; truthy while there are any."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def projects(self) -> list[str]:
        """The projects with waiting requests, in the order of their turns."""
        return list(self._queues)

    def peek(self, project: str) -> Waiting | None:
        """Return a project's next request without removing it, or None."""
        return self._queues[project][0] if project in self._queues else None

    def add(self, waiting: Waiting) -> None:
        """Add a request to the end of its project's queue."""
        self._queues.setdefault(waiting.project, deque()).append(waiting)

    def take(self) -> Waiting:
        """Remove and return the next request, and end its project's turn."""
        return self.pop(next(iter(self._queues)))

    def take_first(self, may: Callable[[str], bool]) -> Waiting | None:
        """Remove and return the next request of the first project for which `may` is true; None if there is none."""
        project = next((each for each in self._queues if may(each)), None)
        return None if project is None else self.pop(project)

    def pop(self, project: str) -> Waiting:
        """Remove and return a project's next request, and move the project to the end of the turns."""
        queue = self._queues[project]
        found = queue.popleft()
        if queue:
            self._queues.move_to_end(project)
        else:
            del self._queues[project]
        return found

    def drop(self, number: int) -> None:
        """Remove the request with this number, if it is in the queue."""
        for project, queue in list(self._queues.items()):
            self._queues[project] = kept = deque(each for each in queue if each.id != number)
            if not kept:
                del self._queues[project]
