"""`ckptstore follow`: each commit of a run, as it comes, as a line, a file, a call."""

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.cli.call import VARIABLE, Answer, Call
from ckptstore.cli.commits import commit_document, commit_text
from ckptstore.cli.screen import to_json
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.plugin.files import check_path, scratch_for
from ckptstore.plugin.handles import StoreHandle, find_commit
from ckptstore.plugin.model import CommitId, CommitInfo
from ckptstore.plugin.text import bytes_text, count_text

if TYPE_CHECKING:
    from ckptstore import Store

REF, FILE = "CKPTSTORE_REF", "CKPTSTORE_FILE"
"""What a command finds the commit and the file by."""

STDERR = 2


def follow(call: Call) -> Answer:
    """Tell of the commit that the ref names now, and of each that it names later, until Ctrl-C."""
    args = call.args
    if args.output is not None:
        check_path(Path(args.output))
    store = call.open(args.ref)
    snapshots = None if args.output is None else call.training_store(store)
    told, known = 0, None
    with suppress(KeyboardInterrupt):
        while args.count is None or told < args.count:
            found = _newest(store, args.ref, args.run)
            if found is None or found == known:
                time.sleep(args.every)
                continue
            try:
                info = store.queries().commit(found)
                written = None if snapshots is None else _write(call, snapshots, found)
            except (NotFound, Corrupt):
                if _newest(store, args.ref, args.run) in (None, found):
                    raise
                continue  # a gc may have deleted it meanwhile
            known, told = found, told + 1
            if args.command_line is not None:
                _run(call, store, info)
            _tell(call, info, written)
    return Answer({"commits": told}, [count_text(told, "commit")])


def _newest(store: StoreHandle, ref: str, run: str) -> CommitId | None:
    """The commit that the ref names; None for a run without commits, or a tag that is yet to
    come."""
    store.log.replay(refresh=True)
    try:
        return find_commit(store, ref, run).id
    except NotFound:
        return None


def _write(call: Call, snapshots: "Store", commit: CommitId) -> int:
    """Replace the file by one of the commit, which gets its name when it is complete. Returns its
    size."""
    from ckptstore.interop.formats.exports import export

    target = Path(call.args.output)
    with scratch_for(target) as new:
        snapshot = snapshots.checkout(commit)
        done = export(snapshot, new, format="safetensors", select=call.args.select or "*")
        new.replace(target)
    return done.bytes


def _tell(call: Call, info: CommitInfo, written: int | None) -> None:
    if call.screen.json:
        print(json.dumps(to_json(commit_document(info)), allow_nan=False), flush=True)
        return
    wrote = "" if written is None else f", {bytes_text(written)} written"
    metrics = "".join(f", {name} {value:g}" for name, value in info.metrics.items())
    call.screen.print([f"{commit_text(info)}: {bytes_text(info.logical_bytes)}{wrote}{metrics}"])


def _run(call: Call, store: StoreHandle, info: CommitInfo) -> None:
    args = call.args
    environment = {**os.environ, VARIABLE: str(store.place), REF: info.id}
    if args.output is not None:
        environment[FILE] = os.path.abspath(args.output)
    out = STDERR if call.screen.json else None  # standard output has the documents alone
    with call.screen.left_to_others():
        done = subprocess.run(
            args.command_line, shell=True, env=environment, stdout=out, check=False
        )
    if done.returncode:
        raise Unavailable(
            f"the command of --exec ended with {done.returncode} for {commit_text(info)}; when it "
            "works again, repeat"
        )
