"""What goes into one step: who gets how many rows, and the pages for them. Host data only."""

from collections.abc import Callable

from runtime.pages import Held, Pages
from runtime.plan import Work
from runtime.request import Request
from runtime.rules import Rules

_made = tuple.__new__  # of a NamedTuple: three times as fast as its own, for every row of a step


class Filling:
    """One step while it is put together: `works` by request, in the order of the step."""

    def __init__(
        self,
        pages: Pages,
        rules: Rules,
        running: list[Request],
        preempt: Callable[[Request], None],
        begin: Callable[[Request], None],
    ) -> None:
        """`running`: the most urgent first; `preempt` takes one out of it and frees its pages.

        `begin` is told of every request before its first chunk is planned.
        """
        self._pages, self._rules = pages, rules
        self._running, self._preempt, self._begin = running, preempt, begin
        self._ahead = int(rules.depth > 0)  # the draft module's row of the token after the last
        self.works: dict[int, Work] = {}

    def decodes(self) -> None:
        """One row of every request that generates, and its drafts."""
        for request in tuple(self._running):
            held = request.held
            if held is not None and len(request.tokens) - held.length == 1:
                self._last(request, held, 1)

    def prompts(self) -> None:
        """Chunks of prompts, the most urgent first, in what room is left."""
        owing = [r for r in self._running if r.id not in self.works]
        if not owing:
            return
        left = self._rules.budget - sum(w.rows for w in self.works.values())
        for i, request in enumerate(owing):
            if request.held is None:
                continue  # preempted meanwhile
            if left <= 0:
                break
            self._begin(request)
            most = min(self._rules.chunk, left)
            owed = len(request.tokens) - request.computed
            if owed > most and any(
                len(r.tokens) - r.computed <= left - left // 2 for r in owing[i + 1 :]
            ):
                most = min(most, max(left // 2, 1))
            left -= self._prompt(request, _whole(request, min(owed, most), left))

    def _prompt(self, request: Request, count: int) -> int:
        """Plan the next `count` tokens, or what there are pages for; how many rows they are."""
        held = request.held
        assert held is not None
        owed = len(request.tokens) - held.length
        if count == owed and self._last(request, held, count):
            return self.works[request.id].rows
        count = min(count, owed - 1)
        if count < 1:
            return 0
        ahead = self._ahead
        if not self._grow(request, count, ahead):
            count = min(count, self._pages.room(held) - ahead)
            if count < 1:
                return 0
            took = self._pages.append(held, count, ahead)
            assert took, "there was room"
        start = held.length
        self.works[request.id] = Work(
            id=request.id,
            start=start,
            tokens=tuple(request.tokens[start : start + count]),
            drafts=(),
            wanted=0,
            slot=held.slot,
            following=request.tokens[start + count],
            propose=0,
            reach=start + count + ahead,
            sampling=request.sampling,
            logprobs=None,
        )
        return count

    def _last(self, request: Request, held: Held, count: int) -> bool:
        """Plan the last `count` tokens of a request with its drafts; False if pages are short."""
        start, proposal, record = held.length, request.proposal, request.drafted
        drafts, q = ((), None) if proposal is None else (proposal.tokens, proposal.q)
        rows = count + len(drafts)
        # What it may take once this step has brought it a token.
        propose = record.next_depth(request.room - len(request.tokens)) if record else 0
        ahead = 0
        if self._ahead:
            ahead = min(propose or self._ahead, request.room - start - rows)
        if not self._pages.append(held, rows, ahead) and not self._grow(request, rows, ahead):
            return False
        self.works[request.id] = _made(
            Work,
            (
                request.id,
                start,
                tuple(request.tokens[start:]),
                drafts,
                1 + len(drafts),
                held.slot,
                -1,
                propose,
                start + rows + ahead,
                request.sampling,
                request.logprobs,
                q,
            ),
        )
        return True

    def alone(self, request: Request) -> None:
        """The next tokens of one request, and of no other."""
        assert request.held is not None
        owed, left = len(request.tokens) - request.computed, self._rules.budget
        self._prompt(request, _whole(request, min(owed, self._rules.chunk, left), left))

    def _grow(self, request: Request, count: int, ahead: int) -> bool:
        """Own the pages of more tokens, if need be those of less urgent requests."""
        held = request.held
        assert held is not None
        while not self._pages.append(held, count, ahead):
            victim = self._running[-1]
            if victim is request:
                return False
            self._preempt(victim)
            self.works.pop(victim.id, None)
        return True


def _whole(request: Request, count: int, left: int) -> int:
    """`count`, or one less if these are its last tokens and its drafts have no room behind them."""
    proposal, owed = request.proposal, len(request.tokens) - request.computed
    drafts = len(proposal.tokens) if proposal is not None else 0
    return count - 1 if count == owed and count + drafts > left else count
