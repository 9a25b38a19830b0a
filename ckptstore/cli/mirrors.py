"""`ckptstore push`, `pull`, `clone`: commits to and from other stores."""

from contextlib import AbstractContextManager

from ckptstore.cli.call import Answer, Call, Exit, NoStore
from ckptstore.cli.screen import fields_of, to_json
from ckptstore.errors import NotFound
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.mirrors import MirrorOptions, choose, mirror, other_end
from ckptstore.plugin.model import default_threads


def push(call: Call) -> Answer:
    args = call.args
    source = call.open(*args.refs)
    like = source if args.create else None
    target = other_end(args.other, like=like, index=args.to_index)
    return _mirror(call, source, _opened(call, target, "; --create makes it"))


def pull(call: Call) -> Answer:
    return _mirror(call, _source_store(call), call.open())


def clone(call: Call) -> Answer:
    args = call.args
    args.refs, args.ancestors, args.tags, args.force, args.dry_run = (), False, True, False, False
    source = _source_store(call)
    target = other_end(args.to, like=source, index=args.to_index)
    return _mirror(call, source, _opened(call, target), holds=True)


def _source_store(call: Call) -> StoreHandle:
    args = call.args
    return _opened(call, other_end(args.other, read_only=True, index=args.from_index))


def _opened(call: Call, end: AbstractContextManager[StoreHandle], advice: str = "") -> StoreHandle:
    """The other store, open for the rest of the call."""
    try:
        return call.stack.enter_context(end)
    except NotFound as error:
        raise NoStore(f"{error}{advice}") from error


def _mirror(call: Call, source: StoreHandle, target: StoreHandle, *, holds: bool = False) -> Answer:
    args = call.args
    threads = call.threads(default_threads())
    wanted = choose(source, args.refs, run=args.run, ancestors=args.ancestors)
    options = MirrorOptions(args.tags, args.force, args.verify, holds=holds)
    spread = call.spread()
    with call.screen.progress() as shown:
        done = mirror(
            source,
            target,
            wanted,
            options,
            threads,
            dry_run=args.dry_run,
            progress=shown,
            spread=spread and spread(source, target),
        )
    code = Exit.DAMAGED if done.damaged else Exit.OK
    document = {
        "source": source.url,
        "target": target.url,
        "dry_run": args.dry_run,
        "plan": {**to_json(done.plan), "load": done.load},
        **fields_of(done, "sent", "chunks", "raw_bytes", "stored_bytes"),
        "damaged": [{"commit": commit, "why": why} for commit, why in done.damaged],
    }
    return Answer(document, [f"{source.url} → {target.url}", done], done.problems, code)
