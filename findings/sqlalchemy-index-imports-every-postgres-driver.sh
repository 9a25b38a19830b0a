#!/usr/bin/env bash
# SQLAlchemy 2.1.9: one keyword of an Index imports every PostgreSQL driver's module.
#
# Guess before the run: `postgresql_where=` is kept until a PostgreSQL dialect compiles the index; a
# program that only talks to SQLite pays nothing for it.
# Seen: the constructor looks the dialect up to check the keyword, and the package of that dialect
# imports its modules for all drivers, none of which is installed here: 60 ms of a command line
# tool that starts in 200.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sqlalchemy==2.1.9
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import sqlalchemy
from sqlalchemy import Column, Index, Integer, MetaData, Table, text

drivers = ("asyncpg", "pg8000", "psycopg", "psycopg2")
heavy = {f"sqlalchemy.dialects.postgresql.{driver}" for driver in drivers}
before = heavy & set(sys.modules)
table = Table("t", MetaData(), Column("n", Integer))
Index("plain", table.c.n)
plain = heavy & set(sys.modules)
Index("partial", table.c.n, postgresql_where=text("n > 0"))
after = heavy & set(sys.modules)
print("SQLAlchemy", sqlalchemy.__version__)
print("imported before:", sorted(before), "- after a plain index:", sorted(plain))
print("imported after an index with postgresql_where:", sorted(after))
sys.exit(not (before == plain == set() and after == heavy))
PYTHON
