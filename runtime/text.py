"""Text that grows token by token: only whole characters, and nothing that may be a stop string."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # token ids -> text

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens decoded again for context: enough for rules that look at neighbours


class Detokenizer:
    """Text of a token sequence, in pieces that concatenate to the text of the whole.

    A character whose bytes are not all there yet decodes to replacement characters at the end (one,
    or one per byte); they are held back until the next tokens complete it or show it is broken.
    """

    def __init__(self, decode: Decode) -> None:
        """`decode` turns token ids into text, bytes that are no text into U+FFFD."""
        self._decode = decode
        self._ids: list[int] = []  # a suffix of the sequence
        self._given = 0  # characters of its text that were given out

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = text.rstrip(_BROKEN)
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        if len(self._ids) >= 2 * _CONTEXT and text == whole:
            self._ids = self._ids[-_CONTEXT:]
            self._given = len(self._decode(self._ids))
        return new

    def close(self) -> str:
        """What is still held back: an incomplete character at the very end, as U+FFFD."""
        return self._decode(self._ids)[self._given :] if self._ids else ""


class Stops:
    """Cuts text before the first stop string, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string that was found, if any.

        The earliest stop string wins, the longest among those at the same place.
        """
        held = self._held + text
        found = [(held.find(s), -len(s), s) for s in self._stops if s in held]
        if found:
            at, _, stop = min(found)
            self._held = ""
            return held[:at], stop
        keep = self._partial(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0

    def close(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Detokenisation and stop strings of one request."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        """See `Detokenizer` and `Stops`."""
        self._detokenizer = Detokenizer(decode)
        self._stops = Stops(stops)

    def push(self, token: int) -> tuple[str, str | None]:
        """Text that can be shown after this token, and the stop string found, if any."""
        return self._stops.push(self._detokenizer.push(token))

    def close(self) -> tuple[str, str | None]:
        """The rest, when the request ends for another reason."""
        text, stop = self._stops.push(self._detokenizer.close())
        return (text, stop) if stop else (text + self._stops.close(), None)
