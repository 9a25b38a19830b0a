"""A command of `ckptstore`: its call, its answer, and the words for commits."""

from ckptstore.cli.call import VARIABLE, Answer, Call, Exit, UsageError
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.commits import (
    commit_document,
    commit_text,
    config_text,
    document_of,
    find_in_one_run,
    find_proven,
    first_line,
    reader_of,
    schemas_of,
    short,
    size_text,
    step_text,
    tell_run,
)
from ckptstore.cli.labels import links_of, metrics_of
from ckptstore.cli.parser import KINDS, arguments, parse_best, parse_moment
from ckptstore.cli.screen import Hint, Part, columns, fields_of, to_json
from ckptstore.core.environment import run_or_default, threads_or_default
