"""The `ckptstore` command from its arguments to its exit code: every error becomes one line on
standard error."""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from ckptstore.cli.exits import Exit, exit_of
from ckptstore.cli.parser import build, parse
from ckptstore.cli.screen import Screen
from ckptstore.cli.table import printable
from ckptstore.core.text import redact
from ckptstore.errors import CkptStoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    asked = Namespace(
        json="--json" in words, debug="--debug" in words
    )  # what is known before the line is understood
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()  # whoever read it has seen enough
        return Exit.OK
    except KeyboardInterrupt as error:
        _discard_output()
        return _fail(error, Namespace(json=False, debug=asked.debug))
    except Exception as error:
        return _fail(error, asked)


def _run(words: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # a name that is no Unicode is no reason to fail
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        args = parse(words)
        if args.command is None:
            build().print_help()
            return Exit.USAGE
    except SystemExit:  # --help and --version have printed what was wanted
        return Exit.OK
    _log_to_stderr(debug=args.debug)
    code: int = import_module(f"ckptstore.cli.{args.module}").run(args, Screen(json=args.json))
    return code


def _open_closed_streams() -> None:
    """Whoever started the command with `>&-` or `2>&-`, as daemons do, wants no output and no
    failure.

    First the numbers up to 2 are taken, lest a file of the store get one that some library prints
    to.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # as long as the process


def _log_to_stderr(*, debug: bool) -> None:
    import logging

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return _printable_lines(super().format(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("ckptstore: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("ckptstore").setLevel(logging.DEBUG if debug else logging.WARNING)


def _fail(error: BaseException, asked: Namespace) -> Exit:
    code = exit_of(error)
    message = redact(_message(error))  # whatever was typed in the wrong place
    if asked.debug:
        import traceback

        print(
            _printable_lines(redact("".join(traceback.format_exception(error)))),
            end="",
            file=sys.stderr,
        )
    print(f"ckptstore: {printable(message)}", file=sys.stderr)
    try:
        if asked.json:
            Screen(json=True).document(
                {
                    "error": {
                        "kind": type(error).__name__,
                        "message": message,
                        "exit_code": int(code),
                    }
                }
            )
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return code


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _discard_output() -> None:
    """Send what is still buffered nowhere, or Python would wait for its reader, or complain, on
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, CkptStoreError):
        return "; ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return (
        f"this should not have happened: {type(error).__name__}: {error}; run it again with "
        "--debug and report what it prints"
    )
