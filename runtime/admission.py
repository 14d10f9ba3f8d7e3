"""Whether a waiting request can begin. Host data only."""

from collections.abc import Iterable
from typing import NamedTuple

from runtime.pages import Pages, spare
from runtime.prefix import Hit
from runtime.request import Request


class Gain(NamedTuple):
    """What would come free if some running requests were preempted. At most: pages are shared."""

    slots: int = 0
    history: int = 0
    window: int = 0


NOTHING = Gain()


def gain(victims: Iterable[Request]) -> Gain:
    """What these running requests hold."""
    helds = [r.held for r in victims if r.held is not None]
    return Gain(len(helds), sum(len(h.history) for h in helds), sum(len(h.window) for h in helds))


def fits(
    pages: Pages, running: Iterable[Request], request: Request, hit: Hit, free: Gain = NOTHING
) -> bool:
    """Whether `request` can begin with `hit` and all that run can still finish their prompts.

    Beyond that some pages are left to generate into: see `pages.spare`.
    """
    if pages.slots.available + free.slots < 1:
        return False
    need = pages.need(len(request.tokens))
    history = need.history - len(hit.history) + pages.history.unowned(hit.history)
    window = max(need.window - len(hit.window), 0) + pages.window.unowned(hit.window)
    count = 0
    for other in running:
        assert other.held is not None
        count += 1
        ahead = pages.need(len(other.tokens))
        generates = len(other.tokens) - other.held.length <= 1
        most = min(ahead.window, pages.decode_width) if generates else ahead.window
        history += max(ahead.history - len(other.held.history), 0)
        window += max(most - len(other.held.window), 0)
    more = spare(count)
    return (
        history + more <= pages.history.available + free.history
        and window + more <= pages.window.available + free.window
    )
