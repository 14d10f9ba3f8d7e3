"""Run every check that a change must pass: lint, format, types, tests.

`python -m tools.check [PYTEST_ARGS ...]` stops at the first check that fails, with its exit code.
Further arguments go to pytest.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands(pytest_args: list[str]) -> tuple[tuple[str, ...], ...]:
    """The checks in order, each as module name and arguments."""
    return (
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        # Left alone it would look for a `python` on PATH, not for the one that runs us.
        ("basedpyright", "--pythonpath", sys.executable),
        ("pytest", "-q", *pytest_args),
    )


def main(pytest_args: list[str]) -> int:
    """Run the checks; the exit code of the first that fails, else 0."""
    for command in commands(pytest_args):
        print(f"== {' '.join(command)}", flush=True)
        start_s = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode
        verdict = "ok" if code == 0 else f"failed with exit code {code}"
        print(f"-- {command[0]}: {verdict}, {time.perf_counter() - start_s:.1f} s", flush=True)
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
