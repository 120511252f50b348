"""Are the parts of real weights those that `vcpo.mismatch` assumes? `python -m lab.real_parts RUN [--json]`

RUN is a run's folder with weights (save_weights=true trainer.save_freq=1). vLLM, in bfloat16, samples long responses
with the policy that the run began with; transformers computes their log-probs in float32 with that policy and each
later one, so that arithmetic and lag are known apart. Of SmolLM2-135M and four later policies this takes half an hour
on 2 cores. It prints

- the mean square of a token's log-ratio on fresh data, v, by position, and with output heads in float32;
- how heavy the tails of the lag part are;
- the right factor of the learning rate, of the lag part alone, beside the one that is told.

Parts of a response are taken for responses, so that short ones are many. A half of them is the fresh batch that a run
begins with, and the other half is stale.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm

from lab.long_responses import told
from lab.stability.report import show_tables
from lab.stability.tables import Table
from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo import Mismatch
from vcpo.ess import ess_ratio
from vcpo.mismatch import expected_ess_ratio, jumps, squared_log_ratios

QUESTIONS = (
    "Explain step by step how to compute 347 + 586, and then how to check the result.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Think aloud, and try a second way.",
    "Write a story about a lighthouse keeper who finds a map.",
    "Which is larger, 3/7 or 4/9? Show all steps, then invent five similar problems and solve them.",
    "Describe how bread is made, from the grain to the table.",
    "Prove that the sum of two odd numbers is even, and give many examples.",
    "Write a Python program that prints the prime numbers below 100, and explain each line.",
    "What would happen if the Moon were twice as far away? Discuss tides, eclipses and the calendar.",
)
LENGTHS = (512, 1024, 2048)


@dataclass(frozen=True)
class Factors:
    """The factor of the learning rate for responses of one length at one lag."""

    tokens: int
    lag: int
    responses: int
    right: float
    """The root of the ESS ratio of the lag part alone."""
    normal: float
    """What `right` would be if the lag part were normal, with the same mean square per token."""
    whole: float
    told: float


def lagged_policies(run: Path) -> dict[int, Path]:
    """Return the Hugging Face folders of a run's policies by the number of updates, the first policy's at 0.

    Raises:
        ValueError: the folder has no configuration, or no weights.
    """
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run}: no folder of a run (config.yaml)")
    first = Path(OmegaConf.load(run / "config.yaml").actor_rollout_ref.model.path)
    found = {int(folder.name.rpartition("_")[2]): folder for folder in (run / "weights").glob("step_*")}
    if not found:
        raise ValueError(f"{run}: no weights; make the run with save_weights=true trainer.save_freq=1")
    return {0: first} | dict(sorted(found.items()))


def sample(model: Path, responses: int, tokens: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Return (prompt, response, recorded log-probs) of each response, by vLLM in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sampled.json"
        command = [sys.executable, "-c", "from lab import real_parts; real_parts.write_samples()"]
        subprocess.run([*command, str(model), str(responses), str(tokens), str(out)], check=True)
        return [(*row,) for row in json.loads(out.read_text())]


def write_samples() -> None:
    """What the process of `sample` does: argv has the model, responses, tokens and the file to write."""
    model, responses, tokens, out = sys.argv[1:]
    from verl_vcpo.cpu import environment

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB: no response is begun again for lack of room
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    environment.apply()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import verl  # noqa: F401  # before vLLM, as in a run
    from vllm import LLM, SamplingParams

    each = -(-int(responses) // len(QUESTIONS))
    engine = LLM(model, dtype="bfloat16", max_model_len=int(tokens) + 256, max_num_seqs=int(responses), seed=1)
    sampling = SamplingParams(n=each, temperature=1.0, max_tokens=int(tokens), ignore_eos=True, logprobs=0)
    outputs = engine.chat([[{"role": "user", "content": text}] for text in QUESTIONS], sampling)
    rows = []
    for output in outputs:
        for one in output.outputs:
            recorded = [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)]
            rows.append((output.prompt_token_ids, list(one.token_ids), recorded))
    Path(out).write_text(json.dumps(rows[: int(responses)]))


@torch.inference_mode()
def log_probs(model: Path, rows: Sequence[Any], dtype: torch.dtype, head: torch.dtype, name: str) -> Tensor:
    """[B, T] float64 of the responses, by transformers: the body in `dtype`, the output head in `head`."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    weight = policy.get_output_embeddings().weight.to(head)
    found = []
    for prompt, response, _ in tqdm(rows, desc=name, file=sys.stderr):
        hidden = policy.base_model(torch.tensor([[*prompt, *response]])).last_hidden_state[0, len(prompt) - 1 : -1]
        of_all = torch.nn.functional.linear(hidden.to(head), weight).float().log_softmax(dim=-1)
        found.append(of_all.gather(1, torch.tensor(response)[:, None])[:, 0].double())
    return torch.stack(found)


def factors(recorded: Tensor, fresh: Tensor, of_lag: dict[int, Tensor]) -> list[Factors]:
    """The factors of all lengths and lags.

    Args:
        recorded: [B, T] log-probs of the sampler.
        fresh: [B, T] those of the same policy by the trainer's arithmetic.
        of_lag: [B, T] those of later policies, by their lag.
    """
    found = []
    half = len(recorded) // 2
    for tokens in (tokens for tokens in LENGTHS if tokens <= recorded.shape[1]):
        parts = recorded.shape[1] // tokens

        def cut(of: Tensor, parts: int = parts, tokens: int = tokens) -> Tensor:
            return of[:, : parts * tokens].reshape(-1, tokens)

        first = cut(fresh[:half]), cut(recorded[:half])
        for lag, of in of_lag.items():
            mu, exact, pi = (cut(x[half:]) for x in (recorded, fresh, of))
            of_part = pi - exact
            mismatch = Mismatch()
            mismatch.update(*_facts(*first, 0))
            measured = mismatch.update(*_facts(pi, mu, lag))
            weight = (pi - mu).sum(dim=1)
            length = torch.full((len(mu),), tokens)
            found.append(
                Factors(
                    tokens,
                    lag,
                    len(mu),
                    math.sqrt(ess_ratio(of_part.sum(dim=1))),
                    math.sqrt(expected_ess_ratio(of_part.square().mean().item(), length)),
                    *(told(weight, part, measured.lag if measured else None) for part in ("whole", "lag")),
                )
            )
    return found


def _facts(log_prob: Tensor, sampled: Tensor, lag: int) -> tuple[Tensor, ...]:
    """What `Mismatch.update` takes of responses that one version sampled."""
    log_ratio = log_prob - sampled
    squares = squared_log_ratios(log_ratio).sum(dim=1)
    tokens = torch.full((len(log_ratio),), log_ratio.shape[1])
    fresh = torch.stack([tokens, squares], dim=1) * (lag == 0)
    return log_ratio.sum(dim=1), jumps(log_ratio), tokens, squares, fresh


def tables(found: Sequence[Factors], fresh: dict[str, Tensor], of_lag: dict[int, Tensor]) -> list[Table]:
    """Three tables: v by position and head, the tails of the lag part, and the factors.

    Args:
        found: of `factors`.
        fresh: [B, T] log-ratios at lag 0, by what computed them.
        of_lag: [B, T] the lag part of log-ratios, by the lag.
    """
    edges = [0, 128, 512, 1024, 2048]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b <= next(iter(fresh.values())).shape[1]]
    of_v = [
        [name, *(f"{d[:, a:b].square().mean():.2e}" for a, b in spans), f"{d.square().mean():.2e}"]
        for name, d in fresh.items()
    ]
    tails = []
    for lag, d in of_lag.items():
        square = d.square().flatten().sort(descending=True).values
        largest = square[: len(square) // 100].sum() / square.sum()
        kurtosis = square.square().mean() / square.mean() ** 2
        row = f"{square.mean().sqrt():.4f}", f"{100 * largest:.0f} %", f"{kurtosis:.0f}", f"{square[0].sqrt():.2f}"
        tails.append([str(lag), *row])
    rows = [
        [str(of.tokens), str(of.lag), str(of.responses)]
        + [f"{x:.2f}" for x in (of.right, of.normal, of.whole, of.told, of.told / of.right)]
        for of in found
    ]
    return [
        Table("v: mean square of a fresh token's log-ratio", ["of", *(f"{a}-{b}" for a, b in spans), "all"], of_v),
        Table(
            "The lag part of a token's log-ratio",
            ["lag", "RMS", "square in the largest 1 %", "kurtosis", "largest"],
            tails,
        ),
        Table(
            "Factor of the learning rate",
            ["tokens", "lag", "responses", "right", "normal", "whole", "told", "told / right"],
            rows,
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Sample, compute, print. Returns the exit code, 2 where the run cannot be used."""
    parser = OneLineParser(prog="python -m lab.real_parts", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--responses", type=whole_number(4), default=48, help="default: %(default)s")
    parser.add_argument("--tokens", type=whole_number(512), default=2048, help="of a response (default: %(default)s)")
    parser.add_argument("--lags", nargs="+", type=whole_number(1), help="default: all weights")
    parser.add_argument("--json", action="store_true", help="print the factors as one JSON line, last")
    arguments = parser.parse_args(argv)
    try:
        policies = lagged_policies(arguments.run)
        if missing := set(arguments.lags or ()) - set(policies):
            raise ValueError(f"--lags {min(missing)}: {arguments.run} has weights of {[*policies][1:]}")
    except (ValueError, OSError) as error:
        print(f"real_parts: {error}", file=sys.stderr)
        return 2
    rows = sample(policies[0], arguments.responses, arguments.tokens)
    recorded = torch.tensor([log_prob for _, _, log_prob in rows], dtype=torch.float64)
    exact, rounded = torch.float32, torch.bfloat16
    fresh = log_probs(policies[0], rows, exact, exact, "first policy")
    of_lag = {
        lag: log_probs(policies[lag], rows, exact, exact, f"lag {lag}")
        for lag in arguments.lags or [lag for lag in policies if lag]
    }
    at_lag_0 = {"vLLM in bfloat16": fresh - recorded}
    for name, head in (("transformers in bfloat16", rounded), ("the same, output head in float32", exact)):
        at_lag_0[name] = fresh - log_probs(policies[0], rows, rounded, head, name)
    found = factors(recorded, fresh, of_lag)
    show_tables(tables(found, at_lag_0, {lag: of - fresh for lag, of in of_lag.items()}))
    if arguments.json:
        print(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    run_command(main)
