"""An option that is given twice: its values are added up, or it is refused in words. No value is
dropped in silence."""

from argparse import Action
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckptstore.cli.call import UsageError
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import Parser, build, parse
from tests.cli.running import call

ADDED_UP = {
    "log": {"--metric", "--run", "--tag"},
    "tag": {"--delete"},
    "forget": {"--keep-best", "--thin"},
    "stats": {"--keep-best", "--thin"},
    "repair": {"--from"},
    "release": {"--except-in"},
    "import": {"--metric", "--tag"},
    "adopt": {"--link", "--metric", "--tag"},
    "export": {"--select"},
    "follow": {"--select"},
    "history": {"--ref"},
    "plot": {"--run"},
    "parted": {"--select"},
    "verify": {"--keys"},
    "average": {"--metric", "--select", "--tag"},
}
SEVERAL_STORES = "ui"
"""The command whose further `--store` is another store; they are kept beside the first."""
"""Options of which each further value adds something; all other options with a value are refused
when given twice."""

SAMPLES = ("1", "2", "1%", "2%", "64KiB", "128KiB", "1h", "2h")


def _options(parser: Parser) -> Iterator[Action]:
    """The options of one command that take a value."""
    return (action for action in parser._actions if action.option_strings and action.nargs != 0)


def _values(parser: Parser, option: Action) -> tuple[str, str]:
    """Two values that the option accepts."""
    if option.choices:
        first, second, *_ = option.choices
        return str(first), str(second)
    kind = option.type or str
    accepted = [sample for sample in SAMPLES if _accepts(parser, option, sample)]
    assert len(accepted) >= 2, f"give two values that {kind} takes to SAMPLES"
    return accepted[0], accepted[1]


def _accepts(parser: Parser, option: Action, sample: str) -> bool:
    try:
        parser._get_value(option, sample)
    except Exception:
        return False
    return True


def _operands(parser: Parser) -> list[str]:
    """What the command needs besides options."""
    needed = [
        action
        for action in parser._actions
        if not action.option_strings and action.nargs not in ("?", "*")
    ]
    return [str(next(iter(action.choices))) if action.choices else "operand" for action in needed]


def _cases() -> list[tuple[str, str]]:
    return [
        (command, max(option.option_strings, key=len))
        for command, parser in build(COMMANDS).commands.items()
        for option in _options(parser)
    ]


def test_every_command_and_its_options_are_tried() -> None:
    cases = _cases()
    assert {
        ("export", "--select"),
        ("log", "--since"),
        ("gc", "--store"),
        ("tag", "--delete"),
    } <= set(cases)
    assert {
        command: names
        for command in dict(cases)
        if (names := {n for c, n in cases if c == command} & _adding(command))
    } == ADDED_UP


def _adding(command: str) -> set[str]:
    """The command's options that keep a list."""
    parser = build(COMMANDS).commands[command]
    return {
        max(o.option_strings, key=len)
        for o in _options(parser)
        if type(o).__name__ in ("_AppendAction", "_ExtendAction")
    }


@pytest.mark.parametrize(("command", "name"), _cases())
def test_a_second_value_is_added_or_refused(command: str, name: str) -> None:
    parser = build(COMMANDS).commands[command]
    option = next(action for action in parser._actions if name in action.option_strings)
    first, second = _values(parser, option)
    words = [command, *_operands(parser), name, first, name, second]
    if (command, name) == (SEVERAL_STORES, "--store"):
        args = parse(COMMANDS, words)
        assert (args.store, args.more_stores) == (first, [second])
        return
    if name in ADDED_UP.get(command, ()):
        found = getattr(parse(COMMANDS, words), option.dest)
        flat = [value for each in found for value in (each if isinstance(each, list) else [each])]
        assert flat == [parser._get_value(option, first), parser._get_value(option, second)]
    else:
        with pytest.raises(UsageError, match=rf"{name} is given twice.*ckptstore {command} --help"):
            parse(COMMANDS, words)


@pytest.mark.parametrize(
    "words",
    [
        ("-s", "a", "log", "-s", "b"),
        ("-s", "a", "-s", "b", "log"),
        ("--index", "a", "log", "--index", "b"),
    ],
)
def test_a_common_option_before_and_behind_the_command_is_given_twice(
    words: tuple[str, ...],
) -> None:
    with pytest.raises(UsageError, match="is given twice"):
        parse(COMMANDS, words)


def test_stores_before_and_behind_a_command_of_several_are_added_up() -> None:
    args = parse(COMMANDS, ["-s", "a", "ui", "-s", "b", "-s", "c"])
    assert (args.store, args.more_stores) == ("a", ["b", "c"])


def test_the_refusal_says_which_option_and_both_values(made_store: Path) -> None:
    result = call("-s", str(made_store), "log", "--since", "1h", "--since", "2h")
    assert (result.code, result.out) == (2, "")
    assert (
        result.err
        == "ckptstore: --since is given twice, with '1h' and '2h'; it takes one value; see "
        "`ckptstore log --help`\n"
    )


def test_an_export_has_what_any_select_names(made_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    words = ("--select", "model/layers.1.weight", "--select", "model/layers.2*")
    result = call("-s", str(made_store), "export", "100", str(target), *words)
    assert result.code == 0, result.err
    assert load_file(target).keys() == {f"layers.{i}.weight" for i in (1, 2, *range(20, 30))}


def test_every_select_must_name_something(made_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    result = call(
        "-s",
        str(made_store),
        "export",
        "100",
        str(target),
        "--select",
        "model",
        "--select",
        "modle",
    )
    assert (result.code, target.exists()) == (1, False)
    assert "has no leaves 'modle'" in result.err


def test_the_log_lists_what_any_tag_or_run_names(made_store: Path) -> None:
    def steps(*words: str) -> list[int]:
        return [
            commit["step"]
            for commit in call("-s", str(made_store), "log", "--json", *words).document["commits"]
        ]

    assert steps("--tag", "best", "--tag", "prod") == [210, 300]
    assert steps("--run", "main", "--run", "tune") == [220, 210, 300, 200, 100]
    assert steps("--run", "tune", "--run", "main", "--tag", "prod", "-n", "1") == [210]
    assert (
        "no commit of run 'mian'"
        in call("-s", str(made_store), "log", "--run", "tune", "--run", "mian").err
    )


def test_tags_of_every_delete_are_removed(store: Path) -> None:
    assert call("-s", str(store), "tag", "-d", "best", "-d", "prod").code == 0
    assert call("-s", str(store), "tag", "--names").out.split() == ["tune/first"]


def test_a_metric_of_two_values_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("x")
    result = call(
        "-s",
        str(store),
        "import",
        str(tmp_path / "model"),
        "--metric",
        "loss=1",
        "--metric",
        "loss=2",
    )
    assert result.code == 2
    assert "two values for the metric 'loss', 1.0 and 2.0" in result.err
