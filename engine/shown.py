"""Values that users gave, as messages show them: short, and never the cause of another error."""

import math
import reprlib

_LONG = 10**40
_DIGITS_PER_BIT = math.log10(2)


class _Short(reprlib.Repr):
    """Python itself refuses to print integers of more than a few thousand digits."""

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < _LONG:
            return repr(x)
        digits = int(x.bit_length() * _DIGITS_PER_BIT) + 1
        return f"{'-' if x < 0 else ''}<integer of about {digits} digits>"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """`value` for a message: whole if it is short."""
    return _SHORT.repr(value)
