"""The only place that pickles and unpickles; needs `allow_pickle=True`."""

import pickle
from typing import Any

from ckptstore.errors import InvalidInput

# Fixed, so that equal objects keep giving equal bytes when Python's default moves on.
_PROTOCOL = 4


def dump(value: Any) -> bytes:
    """`value` pickled; `InvalidInput` if it cannot be."""
    try:
        return pickle.dumps(value, protocol=_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"a {type(value).__qualname__} cannot be pickled: {error}; register it with "
            "ckptstore.register_value"
        ) from error


def load(data: bytes | memoryview) -> Any:
    """The object pickled in `data`. Runs whatever code `data` says: only for stores that the caller
    trusts."""
    return pickle.loads(data)
