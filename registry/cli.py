"""The command `dsv4`: picks the subcommand, and turns failures into one line and an exit code.

Exit codes: 0 done; 1 done, and what was looked at is damaged; 2 the caller must change something,
told in one line; 130 interrupted; 141 the reader of our output went away.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

# Each has a module `registry.cli_<name>` with `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = (
    ("generate", "generate text from a checkpoint"),
    ("explain", "say what would run, and why"),
    ("cache", "list, verify or remove compiled graphs kept on disk"),
)
_LONGEST = 4000  # characters of a message
PACKAGES = ("dsv4", "compiler", "runtime", "registry")


class _Parser(argparse.ArgumentParser):
    """Errors in arguments are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _version() -> str:
    try:
        return importlib.metadata.version("dsv4")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source"


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `command` only: its module alone is imported."""
    anywhere = _Parser(add_help=False)
    quiet = argparse.SUPPRESS
    anywhere.add_argument("-v", "--verbose", action="store_true", default=quiet, help="log more")
    anywhere.add_argument("--debug", action="store_true", default=quiet, help="show tracebacks")
    parser = _Parser(prog="dsv4", description="DeepSeek V4.", parents=[anywhere])
    parser.add_argument("--version", action="version", version=f"dsv4 {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, told in COMMANDS:
        sub = commands.add_parser(name, help=told, description=told, parents=[anywhere])
        if name == command:
            module = importlib.import_module(f"registry.cli_{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


@contextlib.contextmanager
def _logs(verbose: bool) -> Iterator[None]:
    """Our packages' INFO lines on stderr while a command runs, if wanted."""
    if not verbose:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def _run(words: Sequence[str]) -> int:
    command = next((w for w in words if w in dict(COMMANDS)), None)
    args = _parser(command).parse_args(words)
    with _logs(getattr(args, "verbose", False)):
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    return code


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's exit stays quiet."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _one_line(error: BaseException) -> str:
    told = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    told = told.encode("utf-8", "backslashreplace").decode() or type(error).__name__
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]}... (cut; --debug shows all)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a terminal without UTF-8 gets escapes, not errors
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(words)
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if "--debug" in words or (isinstance(error, RuntimeError) and not memory):
            raise
        told = "not enough memory for this model and these lengths" if memory else _one_line(error)
        with contextlib.suppress(OSError, AttributeError):  # stderr may be full or closed
            sys.stderr.write(f"dsv4: error: {told}\n")
            sys.stderr.flush()
        return 2


if __name__ == "__main__":
    sys.exit(main())
