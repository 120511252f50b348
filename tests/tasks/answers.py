"""Answers that break careless verifiers."""

# too deep, or too large a number: some of these would be computed for ever
ENDLESS = [
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "100000000!",
    "(" * 100 + "1" + ")" * 100,
    "{" * 200 + "}" * 200,
]
# too long, or not text that can be parsed
ODD = [
    "9**9**9**9",
    "\\frac{" * 80 + "1" + "}{2}" * 10,
    "\\sqrt{" * 80 + "2" + "}" * 80,
    "9" * 500,
    "9" * 100_000,
    "\\boxed{" * 50,
    "__import__('os').system('kill -9 $PPID')",
    "\0\ud800\N{GREEK SMALL LETTER PI}",
]
