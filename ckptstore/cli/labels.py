"""Which metrics and links do the options of a command give a commit?"""

from collections.abc import Sequence

from ckptstore.cli.call import UsageError


def metrics_of(texts: Sequence[str]) -> dict[str, float]:
    """The metrics that `--metric` gives."""
    metrics: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise UsageError(
                f"{text!r} is not a metric: wanted NAME=VALUE such as loss=2.31"
            ) from error
        if metrics.setdefault(name, value) != value:
            raise UsageError(
                f"two values for the metric {name!r}, {metrics[name]} and {value}; it takes one"
            )
    return metrics


def links_of(texts: Sequence[str]) -> dict[str, str]:
    """The links that `--link` gives."""
    links: dict[str, str] = {}
    for text in texts:
        name, found, link = text.partition("=")
        if not (name and found and link):
            raise UsageError(f"{text!r} is not a link: wanted NAME=TEXT such as wandb=https://…")
        if links.setdefault(name, link) != link:
            raise UsageError(f"two links are called {name!r}; each needs a name")
    return links
