"""Is the program that a plugin works with one of those that it was tested with?"""

import re

from ckptstore.errors import InvalidInput


def check_version(name: str, installed: str, oldest: tuple[int, int], package: str) -> None:
    """Raise `InvalidInput` for a version before `oldest`, the first that was tested."""
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < oldest:
        raise InvalidInput(
            f"{name} {installed} is not supported: wanted {oldest[0]}.{oldest[1]} or newer; "
            f"pip install --upgrade {package}"
        )
