"""`ckptstore watch`: what a store takes in, as it happens."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_document, commit_text, first_line
from ckptstore.cli.screen import Part, columns, to_json
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.mirrors import all_commits, plan_between
from ckptstore.plugin.model import CommitInfo
from ckptstore.plugin.text import SECOND_NS, Table, bytes_text, count_text, seconds_text
from ckptstore.plugin.upkeep import Activity, activities, free_bytes

SHOWN = 12
"""Commits on the screen; rates are of these."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A store at one moment. `lag` counts commits that the mirror lacks."""

    commits: Sequence[CommitInfo]
    writers: Sequence[Activity]
    free: int | None
    lag: int | None

    @property
    def rate(self) -> float | None:
        """Bytes a second that the last commits added; None for fewer than two."""
        if len(self.commits) < 2:
            return None
        took_s = (self.commits[0].time_ns - self.commits[-1].time_ns) / SECOND_NS
        return sum(info.new_bytes for info in self.commits[:-1]) / took_s if took_s > 0 else None


def watch(call: Call) -> Answer:
    args = call.args
    store = call.open()
    mirror = None
    if args.mirror is not None:
        mirror = call.stack.enter_context(closing(StoreHandle(args.mirror, read_only=True)))
    last = max((info.n for info in store.queries().log(limit=1)), default=0)
    told = 0
    with suppress(KeyboardInterrupt), _live(call) as show:
        while True:
            new = _since(store, last)
            last = max([last, *(info.n for info in new)])
            told += len(new)
            if show:
                show(_page(store, _look(store, mirror), told))
            else:
                for info in new:
                    _tell(call, info)
            if args.count is not None and told >= args.count:
                break
            time.sleep(args.every)
    return Answer({"commits": told}, [f"{count_text(told, 'new commit')}"])


def _since(store: StoreHandle, last: int) -> list[CommitInfo]:
    """The commits behind entry `last`, oldest first."""
    some = SHOWN
    while True:
        found = store.queries().log(limit=some)
        new = [info for info in found if info.n > last]
        if len(new) < some:
            return new[::-1]
        some *= 4


def _look(store: StoreHandle, mirror: StoreHandle | None) -> Seen:
    lag = None
    if mirror is not None:
        try:
            mirror.log.replay(refresh=True)
            wanted = all_commits(store.log.replay(refresh=True))
            lag = len(plan_between(store, mirror, wanted).commits)
        except CkptStoreError:
            lag = -1  # the mirror is away
    commits = store.queries().log(limit=SHOWN)
    return Seen(commits, activities(store), free_bytes(store), lag)


def _tell(call: Call, info: CommitInfo) -> None:
    if call.screen.json:
        print(json.dumps(to_json(commit_document(info)), allow_nan=False), flush=True)
        return
    metrics = "".join(f", {name} {value:g}" for name, value in info.metrics.items())
    size = f"{bytes_text(info.logical_bytes)}, {bytes_text(info.new_bytes)} new"
    call.screen.print([f"{commit_text(info)}: {size}{metrics}"])


def _page(store: StoreHandle, seen: Seen, told: int) -> list[Part]:
    rows = [
        (
            *(info.id, info.step, info.run, info.time_ns),
            *(info.logical_bytes, info.new_bytes, first_line(info.message)),
        )
        for info in seen.commits
    ]
    page: list[Part] = [f"{store.url}: {count_text(told, 'new commit')}; Ctrl-C ends"]
    page.append(Table(columns("commit", "step", "run", "time", "logical", "new", "message"), rows))
    if seen.rate is not None:
        page.append(f"rate     {bytes_text(round(seen.rate))}/s over the last commits")
    if seen.free is not None:
        text = f"disk     {bytes_text(seen.free)} free"
        if seen.rate:
            text += f", full in {seconds_text(seen.free / seen.rate)} at this rate"
        page.append(text)
    if seen.lag is not None:
        text = "does not answer" if seen.lag < 0 else f"lacks {count_text(seen.lag, 'commit')}"
        page.append(f"mirror   {text}")
    for each in seen.writers:
        quiet = f", still for {seconds_text(each.still_s)}" if each.still_s else ""
        page.append(f"writing  {each.info.what} on {each.info.host}, pid {each.info.pid}{quiet}")
    if not seen.writers:
        page.append("writing  nobody")
    return page


@contextmanager
def _live(call: Call) -> Iterator[Callable[[list[Part]], None] | None]:
    """On a terminal, a function that shows a page in place of the last one."""
    if not call.screen.terminal:
        yield None
        return
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise InvalidInput(f"watch on a terminal: {error}; install ckptstore[watch]") from error

    def show(page: list[Part]) -> None:
        assert call.screen.terminal
        now = replace(call.screen.terminal, width=live.console.width, now_ns=time.time_ns())
        call.screen.terminal = now
        lines: Any = "\n".join(line for part in page for line in call.screen.lines(part))
        live.update(Text.from_ansi(lines, no_wrap=True), refresh=True)

    with Live(console=Console(file=sys.stdout), auto_refresh=False, transient=False) as live:
        yield show
