"""A contestant in a process of its own, asked by lines of JSON. Standard library and torch only.

The child's standard output is its protocol and nothing else: whatever its libraries print there is
sent to standard error, which the parent keeps in a log file.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.bench.case import Case


class Contestant(Protocol):
    """What every contestant can do."""

    def hello(self) -> dict[str, Any]:
        """Versions, threads, how it computes, and what was done to make it run."""
        ...

    def logits(self, prompt: list[int], token: int, steps: int) -> Any:
        """Logits [1 + steps, V] after the prompt, and after each of `steps` times `token`."""
        ...

    def prepare(self, case: Case) -> str | None:
        """Get ready to run a case; or why it cannot be measured."""
        ...

    def run(self) -> dict[str, float]:
        """One sample, as `sample` makes it."""
        ...

    def release(self) -> None:
        """Forget the case."""
        ...


def reserve_output() -> int:
    """A descriptor of the real standard output; from here on prints go to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def serve(contestant: Contestant, output: int) -> None:
    """Answer the parent until it closes our input."""
    with os.fdopen(output, "w") as out:
        for line in sys.stdin:
            name, values = json.loads(line)
            if name in ("logits", "reference"):
                import torch  # here and not above: the parent needs none of it

                file = values.pop("file")
                torch.save(getattr(contestant, name)(**values).float(), file)
                answer = None
            elif name == "prepare":
                answer = contestant.prepare(Case(**values))
            else:
                answer = getattr(contestant, name)(**values)
            print(json.dumps({"answer": answer}), file=out, flush=True)


class Remote:
    """The parent's end of one contestant."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        """Start it. It answers `hello` when it is ready; `log` takes what it prints."""
        self.name, self.log = name, log
        with log.open("w") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env={**os.environ, **env},
            )

    def ask(self, method: str, **values: Any) -> Any:
        """Call a method there. Raises RuntimeError with the end of its log if it died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps([method, values]) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            told = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
            raise RuntimeError(f"{self.name} ended: {' / '.join(told[-2:]) or 'it said nothing'}")
        return json.loads(line)["answer"]

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def timed(fn: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def sample(steps: Callable[[], list[float]]) -> dict[str, float]:
    """One sample of steps that return their seconds, per step.

    `step_s`: mean of those; `whole_s`: with all that happens around them; `cpu_s`: processor time
    of this process in all of them; `cores`: that over wall time, to see that nobody runs on fewer
    cores than the others.
    """
    cpu, begin = time.process_time(), time.perf_counter()
    seconds = steps()
    whole_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "step_s": sum(seconds) / len(seconds),
        "whole_s": whole_s / len(seconds),
        "cpu_s": cpu_s,
        "cores": cpu_s / whole_s,
    }
