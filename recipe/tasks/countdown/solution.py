"""A solution of a Countdown problem, by trying all."""

from fractions import Fraction

MOST_NUMBERS = 4
"""Five take seconds, six minutes."""
_Term = tuple[Fraction, str]


def solve(target: int, numbers: list[int]) -> str | None:
    """An expression that uses every number once and equals the target; None: there is none, or too many numbers."""
    if len(numbers) > MOST_NUMBERS:
        return None
    return _solve([(Fraction(number), str(number)) for number in numbers], target)


def _solve(terms: list[_Term], target: int) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, a in enumerate(terms):
        for j, b in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for joined in _joined(a, b, both_orders=i < j):
                if found := _solve([*rest, joined], target):
                    return found
    return None


def _joined(a: _Term, b: _Term, both_orders: bool) -> list[_Term]:
    """What two terms make; sum and product, which are the same in both orders, in one of them only."""
    (x, left), (y, right) = a, b
    made = [(x - y, f"({left}-{right})")]
    if y:
        made.append((x / y, f"({left}/{right})"))
    if both_orders:
        made += [(x + y, f"({left}+{right})"), (x * y, f"({left}*{right})")]
    return made
