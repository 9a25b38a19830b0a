"""Which run of a tracker, and which commit of git, does a checkpoint come from? (docs/trackers.md)

    store.commit(app_state, step=step, links=trackers.links())

Libraries that the process has not imported are not imported here.
"""

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from ckptstore import Store
from ckptstore.errors import Corrupt, NotFound
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugin.text import redact

GIT_TIMEOUT_S = 5.0


def links(**more: str) -> dict[str, str]:
    """Links of a commit that is made now, for `commit(…, links=links())`.

    They are, as far as there is one: `wandb` (the run's URL, or `wandb://ENTITY/PROJECT/ID` of an
    offline run), `mlflow` (`runs:/ID`) with `mlflow_url` where a server tracks, `trackio`
    (`trackio://PROJECT/RUN`), `git` (the commit of the working directory, with `-dirty` where files
    differ from it) and `git_remote`. `more` adds links, or replaces these.

    Example:
        >>> store.commit(app_state, step=step, links=links(job=os.environ["SLURM_JOB_ID"]))
    """
    return {**_git(), **_wandb(), **_mlflow(), **_trackio(), **more}


def commits_of(store: Store, link: str) -> list[Snapshot]:
    """The commits that have `link` among their links, newest first: from a run to its checkpoints.

    Reads the document of every commit of the store. Damaged commits are left out.
    """
    found = []
    for info in store.log():
        with suppress(Corrupt, NotFound):
            snapshot = store.checkout(info.id)
            if link in snapshot.links.values():
                found.append(snapshot)
    return found


def _wandb() -> dict[str, str]:
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or run.disabled:
        return {}
    url = None if run.offline else run.url
    return {"wandb": url or f"wandb://{run.path}"}


def _mlflow() -> dict[str, str]:
    mlflow: Any = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow else None
    if run is None:
        return {}
    found = {"mlflow": f"runs:/{run.info.run_id}"}
    server = mlflow.get_tracking_uri()
    if urlsplit(server).scheme in ("http", "https"):
        place = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        found["mlflow_url"] = f"{_without_user(server).rstrip('/')}/{place}"
    return found


def _trackio() -> dict[str, str]:
    variables: Any = sys.modules.get("trackio.context_vars")
    run = variables.current_run.get() if variables else None
    if run is None:
        return {}
    return {"trackio": f"trackio://{quote(run.project, safe='')}/{quote(run.name, safe='')}"}


def _git() -> dict[str, str]:
    """What git says of the working directory; nothing without git or outside a repository."""
    commit = _ask_git("rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _ask_git("status", "--porcelain", "--untracked-files=no")
    found = {"git": commit if changed == "" else f"{commit}-dirty"}
    if remote := _ask_git("config", "--get", "remote.origin.url"):
        found["git_remote"] = _without_user(remote)
    return found


def _ask_git(*words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["git", *words],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
        return asked.stdout.strip()
    return None


def _without_user(url: str) -> str:
    """A URL without user and password, which nobody wants in a store for good."""
    parts = urlsplit(url)
    if not parts.scheme or "@" not in parts.netloc:
        return redact(url)
    return redact(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
