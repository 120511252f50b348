"""Answers that break careless verifiers: too deep, too large, too long, or not text that can be parsed."""

HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "100000000!",
    "(" * 100 + "1" + ")" * 100,
    "{" * 200 + "}" * 200,
    "\\frac{" * 80 + "1" + "}{2}" * 10,
    "\\sqrt{" * 80 + "2" + "}" * 80,
    "9" * 500,
    "9" * 100_000,
    "x" * 500,
    "\\boxed{" * 50,
    "__import__('os').system('kill -9 $PPID')",
    "\0\ud800\N{GREEK SMALL LETTER PI}",
]
