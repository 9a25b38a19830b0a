"""The `ckptstore` command, from its arguments to its exit code. Every error becomes one line on
standard error."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module

from ckptstore.cli.call import Answer, Call, Exit, UsageError, exit_of
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.interrupts import end_at_once, told
from ckptstore.cli.parser import Operation, build, parse
from ckptstore.cli.screen import ERASE, Screen
from ckptstore.errors import CkptStoreError
from ckptstore.plugin.text import printable, redact


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is ours
        end_at_once()
    _open_closed_streams()
    # All that is known before the words are parsed.
    asked = Namespace(json="--json" in words, debug="--debug" in words)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough.
        _discard_output()
        return Exit.OK
    except KeyboardInterrupt as error:
        _discard_output()
        told.set()
        return _fail(error, Namespace(json=False, debug=asked.debug))
    except Exception as error:
        return _fail(error, asked)


def _run(words: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A name that is not Unicode is printed with escapes.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        args = parse(COMMANDS, words)
    except SystemExit:  # --help has printed its answer
        return Exit.OK
    if args.version:
        return _print_versions(Screen(json=args.json))
    if args.command is None:
        build(COMMANDS).print_help()
        return Exit.USAGE
    _log_to_stderr(debug=args.debug)
    operation: Operation = args.operation
    module, _, name = operation.run.rpartition(".")
    run: Callable[[Call], Answer] = getattr(import_module(f"ckptstore.{module}"), name)
    screen = Screen(json=args.json)
    call = Call(args, screen)
    with call.stack:
        with screen.working("" if operation.draws else f"ckptstore {operation.name}"):
            try:
                answer = run(call)
            except KeyboardInterrupt as error:
                if commit := call.made():  # it was too late: nobody must make it again
                    raise KeyboardInterrupt(f"commit {commit} was made before") from error
                raise
            except UsageError as error:
                error.command = f"ckptstore {operation.name}"
                raise
            store = {"store": call.url} if call.url else {}
            screen.document({**store, **answer.document})
            screen.print(answer.page)
            for problem in answer.problems:
                screen.complain(problem)
        answer.then()
    return answer.code


def _print_versions(screen: Screen) -> Exit:
    from ckptstore.cli.version import versions

    found = versions()
    screen.document(found)
    screen.print([f"ckptstore {found['ckptstore']}"])
    return Exit.OK


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, as daemons start commands: without output, but
    without failing.

    File descriptors up to 2 are taken first, so that no file of the store gets one to which a
    library prints.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # as long as the process


def _log_to_stderr(*, debug: bool) -> None:
    import logging

    erase = ERASE if sys.stderr.isatty() else ""  # a line of progress may be there

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return erase + _printable_lines(super().format(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("ckptstore: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("ckptstore").setLevel(logging.DEBUG if debug else logging.WARNING)


def _fail(error: BaseException, asked: Namespace) -> Exit:
    code = exit_of(error)
    message = redact(_message(error))  # it may repeat a password typed in the wrong place
    if asked.debug:
        import traceback

        trace = redact("".join(traceback.format_exception(error)))
        print(_printable_lines(trace), end="", file=sys.stderr)
    print(f"ckptstore: {printable(message)}", file=sys.stderr)
    details = {"kind": type(error).__name__, "message": message, "exit_code": code}
    try:
        Screen(json=asked.json).document({"error": details})
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return code


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _discard_output() -> None:
    """Discard buffered output: on exit Python would wait for its reader, or complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "; ".join(["interrupted", *map(str, error.args)])
    if isinstance(error, CkptStoreError):
        return "; ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return (
        f"this should not have happened: {type(error).__name__}: {error}; run it again with "
        "--debug and report what it prints"
    )
