"""Finding the request that makes steps fail: those of a failed step run alone until they pass."""

from collections import deque

from runtime.request import Request, Status


class Trials:
    """Requests of failed steps, in order, each with the length at which its step failed."""

    def __init__(self) -> None:
        """Nobody is suspected."""
        self._suspects: deque[tuple[Request, int]] = deque()

    def suspect(self, request: Request, goal: int) -> None:
        """Let a request run alone until `goal` of its tokens are computed."""
        self._suspects.append((request, goal))

    def __contains__(self, request: Request) -> bool:
        """Whether this request still has to pass."""
        return any(r is request for r, _ in self._suspects)

    def current(self) -> Request | None:
        """The one that is to run alone now, or None. One that ended or lost its pages is let go."""
        while self._suspects:
            request, goal = self._suspects[0]
            if request.status is Status.RUNNING and request.computed < goal:
                return request
            self._suspects.popleft()
        return None
