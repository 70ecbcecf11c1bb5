"""Problems whose answer is a number, such as GSM8K's."""

import re
from decimal import Decimal

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, which may have commas between thousands."""
    return [Decimal(one.replace(",", "")) for one in NUMBER.findall(text)]


def last_number(text: str) -> Decimal | None:
    """The last number, such as an answer after ####."""
    return next(reversed(numbers_in(text)), None)
