"""`ckptstore completion`: a script that teaches a shell the command line, and the tags of the store
at hand."""

from argparse import Namespace

from ckptstore.cli.exits import Exit
from ckptstore.cli.parser import build
from ckptstore.cli.screen import Screen

TAGS = "latest $(ckptstore tag --names 2>/dev/null)"
PREAMBLE = {
    "bash": f'_ckptstore_refs() {{ compgen -W "{TAGS}" -- "$1"; }}',
    "zsh": f"_ckptstore_refs() {{ compadd {TAGS} }}",
    "fish": "function _ckptstore_refs; echo latest; ckptstore tag --names 2>/dev/null; end",
}
REFS = {"bash": "_ckptstore_refs", "zsh": "_ckptstore_refs", "fish": "(_ckptstore_refs)"}


def run(args: Namespace, screen: Screen) -> Exit:
    import shtab

    parser = build()
    for part in (parser, *parser.commands.values()):
        for action in part._actions:  # argparse has no public list of them
            if action.dest in ("store", "path"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # how shtab is told
            elif action.dest in ("ref", "refs", "a", "b", "delete"):
                action.complete = REFS  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell=args.shell, preamble=PREAMBLE[args.shell])
    screen.out.write(script.rstrip("\n") + "\n")
    return Exit.OK
