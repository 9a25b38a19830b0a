"""Is an argument a valid number? If not, the error names the argument and the wanted value."""

from numbers import Real

from ckptstore.errors import InvalidInput


def check_number(
    name: str,
    value: object,
    wanted: str,
    *,
    least: float = 0,
    most: float = float("inf"),
    whole: bool = False,
) -> None:
    """Raise `InvalidInput` unless `value` is a number from `least` to `most`, `whole` if so asked;
    `wanted` is what the message asks for. numpy's numbers are numbers, True and texts are not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (
        is_number
        and least <= value <= most  # type: ignore[operator]  # typeshed has no order of Real
        and (not whole or value == int(value))  # type: ignore[call-overload]
    ):
        raise InvalidInput(f"{name} is {value!r:.80}; wanted {wanted}")
