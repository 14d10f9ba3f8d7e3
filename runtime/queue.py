"""Requests that wait, the most urgent first: by priority, then in order of arrival."""

import heapq

from runtime.request import Request


def order(request: Request) -> tuple[int, int]:
    """Sorts requests by urgency."""
    return request.priority, request.id


class Waiting:
    """A queue of requests. Taking any of them out, also from the middle, keeps the order."""

    def __init__(self) -> None:
        """Empty."""
        self._heap: list[tuple[int, int]] = []
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        """Whether this very request waits."""
        return self._requests.get(request.id) is request

    def push(self, request: Request) -> None:
        """Let a request wait."""
        heapq.heappush(self._heap, order(request))
        self._requests[request.id] = request

    def head(self) -> Request | None:
        """The most urgent one, or None."""
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)  # was taken out from the middle
        return None

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._requests[request.id]
        if self._heap and self._heap[0][1] == request.id:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + 16:  # most were taken from the middle
            self._heap = sorted(order(r) for r in self._requests.values())
