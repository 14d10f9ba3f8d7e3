"""What `dsv4 generate` is asked to record (--trace, --metrics), and where it is written."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.metrics import Metrics
    from runtime.trace import Trace
    from runtime.watch import Watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    add = parser.add_argument
    add(
        "--trace",
        metavar="FILE",
        help="write a timeline for chrome://tracing and Perfetto, and a table on stderr; slower",
    )
    add("--metrics", metavar="FILE", help="write counters in Prometheus' text format")


@dataclasses.dataclass(frozen=True)
class Observation:
    """Who watches, and the files to write."""

    trace: "Trace | None"
    trace_file: Path | None
    metrics: "Metrics | None"
    metrics_file: Path | None

    @property
    def watchers(self) -> "tuple[Watch, ...]":
        """For the engine."""
        return tuple(w for w in (self.trace, self.metrics) if w is not None)

    @contextmanager
    def span(self, number: int) -> Iterator[None]:
        """Record what is done meanwhile as a step of the start-up."""
        with self.trace.span(number) if self.trace is not None else nullcontext():
            yield

    def ready(self) -> None:
        """Record that requests can run."""
        if self.trace is not None:
            self.trace.mark(9)

    def write(self) -> None:
        """Write the files, and the table."""
        if self.metrics is not None and self.metrics_file is not None:
            self.metrics_file.write_text(self.metrics.text(), encoding="utf-8")
        if self.trace is not None and self.trace_file is not None:
            with self.trace_file.open("w", encoding="utf-8") as file:
                json.dump(self.trace.chrome(), file)
            print(self.trace.table(), file=sys.stderr)


def observe(args: argparse.Namespace, model_name: str) -> Observation:
    """Begin. Raises ValueError, before anything is loaded, for a file that cannot be written."""
    trace, metrics = None, None
    named = [Path(name).resolve() for name in (args.trace, args.metrics) if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"--trace and --metrics are both {args.trace}; name two files")
    for name in ("trace", "metrics"):
        if getattr(args, name) is not None:
            _check_writable(f"--{name}", getattr(args, name))
    if args.trace is not None:
        from runtime.trace import Trace

        trace = Trace()
    if args.metrics is not None:
        from runtime.metrics import Metrics

        metrics = Metrics(model_name)
    return Observation(
        trace=trace,
        trace_file=Path(args.trace) if args.trace is not None else None,
        metrics=metrics,
        metrics_file=Path(args.metrics) if args.metrics is not None else None,
    )


def _check_writable(option: str, name: str) -> None:
    """Open the file for writing, and leave everything as it was."""
    file = Path(name).resolve()  # what a link points to, so that the link itself stays
    there = file.exists()
    try:
        if not name:
            raise OSError("the name is empty")
        if there and not file.is_file() and not file.is_char_device():
            raise OSError("it is no file")
        file.open("ab").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {name!r} cannot be written ({error.strerror or error}); name a file in a "
            f"folder that exists"
        ) from None
