"""All programs of one function: a sealed one per bucket of a ladder, and which a batch goes to."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from compiler.ladder import Bucket, Ladder
from compiler.program import Program
from dsv4.batch import Batch, Need, Shape, shape_of

log = logging.getLogger(__name__)


class Programs:
    """Callable like the function: the last argument is the batch, and its shape finds the program.

    Batches of a ladder's shapes run; another shape is an error in strict mode, and is otherwise
    compiled at once, with a warning, and counted.
    """

    def __init__(
        self, ladder: Ladder, seal: Callable[[Bucket], Program], *, strict: bool = True
    ) -> None:
        """`seal` makes the program of one bucket."""
        self.ladder, self.strict = ladder, strict
        self.late = 0  # programs made for a batch that none was made for
        self._seal = seal
        self._programs: dict[Shape, Program] = {}

    def make(self) -> Iterable[Program]:
        """Make the programs of the ladder, one at a time; tells of each when it is ready."""
        for bucket in self.ladder.buckets:
            made = self._programs[bucket.shape] = self._seal(bucket)
            yield made

    def fit(self, need: Need) -> Shape:
        """The shape to pad a step to. Raises ValueError as `Ladder.pick`."""
        return self.ladder.pick(need).shape

    def __call__(self, *args: Any) -> Any:
        """Run the program of the batch's shape."""
        batch = args[-1]
        assert isinstance(batch, Batch), "the last argument of a step is its batch"
        shape = shape_of(batch)
        program = self._programs.get(shape)
        if program is None:
            program = self._late(shape)
        return program(*args)

    def _late(self, shape: Shape) -> Program:
        if self.strict:
            raise ValueError(
                f"no program was made for {shape}: pad the batch to a shape that `fit` gives, or "
                f"make the programs with strict=False"
            )
        log.warning("compiling while serving: no program was made for %s", shape)
        self.late += 1
        made = self._programs[shape] = self._seal(Bucket("late", shape))
        return made
