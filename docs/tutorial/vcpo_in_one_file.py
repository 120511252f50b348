# %% [markdown]
# # VCPO in one file
#
# A policy trained on rollouts that are 32 updates old collapses. This file shows the collapse, the number that
# announces it, and the two controls with which VCPO prevents it, each written out in a few lines of torch. The policy
# is a language model of 0.19 million parameters that solves Countdown (reach 13 from 2, 5 and 6); the lag simulator
# makes every batch exactly as old as asked for.
#
# `python docs/tutorial/vcpo_in_one_file.py` runs everything and writes the figure to `outputs/tutorial/`.
# `jupytext --to notebook` makes a notebook of it.

# %%
import os
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor

from recipe.lag_simulator.batch import Batch
from recipe.lag_simulator.main import compose
from recipe.lag_simulator.norms import block_gradients, squared_norms, weighted_gradient
from recipe.lag_simulator.policy import Policy, Taps
from recipe.lag_simulator.simulator import Simulator
from recipe.lag_simulator.update import Update, kl, sampled_log_probs
from recipe.warm_start.train import main as warm_start
from scripts.prepare_data import main as prepare_data
from vcpo import VCPOConfig, estimate

SCALE = float(os.environ.get("SCALE", 1))  # 0.02 for a look at whether everything runs
LAG, STEPS, LESSONS = 32, round(150 * SCALE), round(900 * SCALE)
OUT = Path("outputs/tutorial")

# %% [markdown]
# ## A first policy
#
# Random problems, and a model that was shown some right answers: it solves a quarter of the held-out problems. RL is to
# teach it the rest.

# %%
if not (OUT / "data" / "meta.json").is_file():
    prepare_data(["countdown", "--out", f"{OUT}/data"])
size = ["--layers", "2", "--heads", "2", "--steps", f"{LESSONS}", "--correct-fraction", "0.4", "--samples", "4"]
warm_start(["--data", f"{OUT}/data", "--out", f"{OUT}/model", *size])


# %% [markdown]
# ## What a stale batch knows
#
# The samplers recorded the log-probability $\log\mu$ of every token they drew. The policy has moved since. How much, is
# the sequence's **importance weight**: $w_i = \exp \sum_t (\log\pi(t) - \log\mu(t))$. On fresh rollouts it is 1.
#
# Where weights differ, a few sequences decide the update. The **effective sample size** counts how many:
# $\rho = \frac{1}{B} \frac{(\sum_i w_i)^2}{\sum_i w_i^2}$ is 1 where all B sequences count alike, and 1/B where one
# sequence has all the weight.


# %%
def ess_ratio(log_w: Tensor) -> float:
    """rho of [B] log-weights. The largest weight is made 1, so that no exponential overflows."""
    w = (log_w - log_w.max()).exp()
    return (w.sum().square() / w.square().sum() / len(w)).item()


# %% [markdown]
# ## The two controls
#
# 1. **Step size.** A batch of $\rho B$ effective sequences has more noise than one of B. Adam's step does not shrink by
#    itself, so the learning rate is multiplied by $\sqrt\rho$.
# 2. **Baseline.** The update is $\frac{1}{B} \sum_i a_i (R_i - b) g_i$, with $a_i = \min(w_i, 8)$ and $g_i$ the
#    gradient of sequence i's mean log-probability. Its variance is a parabola in $b$, least at
#    $b^* = \sum_i a_i^2 \lVert g_i \rVert^2 R_i / \sum_i a_i^2 \lVert g_i \rVert^2$, over the samples of a prompt.
#    With equal weights and norms, $b^*$ is the mean reward, which GRPO subtracts.


# %%
def optimal_baseline(reward: Tensor, weight: Tensor, squared_norm: Tensor) -> Tensor:
    """b*: all [prompts, samples] -> [prompts, 1]."""
    influence = weight.square() * squared_norm
    return (influence * reward).sum(dim=1, keepdim=True) / influence.sum(dim=1, keepdim=True)


@dataclass
class Tutorial:
    """What a step makes of a batch: GRPO, and of the three corrections those that are switched on."""

    weights: bool = False
    step_size: bool = False
    baseline: bool = False

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        return {}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        taps = Taps(batch.separate)  # common beginnings of sequences are not shared: each has a gradient of its own
        log_prob = sampled_log_probs(policy, batch, taps)  # [B, T]
        score = (log_prob * batch.mask).sum(dim=1) / batch.mask.sum(dim=1)  # [B]: the gradient of score_i is g_i
        gradients = block_gradients(score, taps)
        squared_norm = squared_norms(gradients)  # [B] from one backward, without forming any g_i
        log_prob = log_prob.detach()
        log_w = ((log_prob - batch.rollout_log_prob).double() * batch.mask).sum(dim=1)  # [B]

        prompts = len(batch.group.unique())
        reward, norm = batch.reward.view(prompts, -1), squared_norm.view(prompts, -1)  # [prompts, samples]
        a = log_w.exp().clamp(max=8).view(prompts, -1) if self.weights else torch.ones_like(reward)
        b = optimal_baseline(reward, a, norm) if self.baseline else reward.mean(dim=1, keepdim=True)
        spread = reward.std(dim=1, keepdim=True, unbiased=False)
        advantage = torch.where(spread > 1e-6, (reward - b) / spread, 0.0)  # equal rewards: nothing to learn
        coefficient = (a * advantage).flatten() / len(batch)  # [B]: the update is sum_i coefficient_i g_i
        rho = ess_ratio(log_w)
        multiplier = rho**0.5 if self.step_size else 1.0

        if self.weights and self.step_size and self.baseline:  # then this is what vcpo.estimate computes
            ours = estimate(VCPOConfig(), log_w, batch.reward, batch.group, squared_norm=squared_norm)
            torch.testing.assert_close(coefficient, ours.coefficient, atol=1e-6, rtol=1e-4)
            assert abs(multiplier - ours.step_size_multiplier) < 1e-6
        return Update(
            gradient=weighted_gradient(-coefficient, gradients, policy),  # of the loss: optimizers go downhill
            lr_multiplier=multiplier,
            log_prob=log_prob,
            ess_ratio=rho,
            baseline=b.mean().item(),
            kl=kl(log_prob, batch),
        )


# %% [markdown]
# ## Four runs
#
# The same policy, seed and learning rate, which is three times the rate that suits this lag. `none` at lag 0 is what
# synchronous training reaches; `none` at lag 32 is the collapse. Truncated weights alone come next, and VCPO last.


# %%
def train(method: Tutorial, lag: int) -> pd.DataFrame:
    """One row per step, step 0 being the start."""
    rows = [f"data.{name}_files={OUT}/data/{name}.parquet" for name in ("train", "val")]
    length = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=10", f"async.lag={lag}"]
    config = compose(["+task=countdown_lag", f"actor_rollout_ref.model.path={OUT}/model", *rows, *length])
    simulator = Simulator([config])
    simulator.runs[0].method = method
    return pd.DataFrame(simulator.run()[0])


torch.set_num_threads(1)
runs = {}
for name, method, lag in (
    ("synchronous: none, lag 0", Tutorial(), 0),
    (f"none, lag {LAG}", Tutorial(), LAG),
    (f"weights, lag {LAG}", Tutorial(weights=True), LAG),
    (f"VCPO, lag {LAG}", Tutorial(weights=True, step_size=True, baseline=True), LAG),
):
    runs[name] = train(method, lag)
    accuracy = runs[name]["val_accuracy"].dropna()
    print(f"{name}: accuracy {accuracy.iloc[0]:.1%} -> {accuracy.iloc[-1]:.1%}")

# %% [markdown]
# ## What to look at
#
# This is what `python docs/tutorial/vcpo_in_one_file.py` printed and drew on 2026-11-23, in 3 minutes on 2 cores that
# had other work. It is one seed: other seeds, lags and methods are in [stability](../measurements/stability.md).
#
# | run | accuracy before | after 150 steps |
# |---|---|---|
# | synchronous: none, lag 0 | 26.2 % | 48.0 % |
# | none, lag 32 | 26.2 % | 5.3 % |
# | weights, lag 32 | 26.2 % | 28.7 % |
# | VCPO, lag 32 | 26.2 % | 39.1 % |
#
# ![Accuracy, ESS ratio, KL and gradient norm of the four runs](vcpo.png)
#
# - **Without a correction** the ESS ratio falls to nearly 1/B within 20 steps: each update is that of one or two
#   sequences. KL, the distance between policy and rollouts, grows with it, and accuracy falls to almost nothing.
# - **Truncated weights** bound what one sequence can do. The ratio still falls, KL grows, and accuracy with them.
# - **With both controls** the ratio dips too. Each dip shortens the step that would have made it worse: it recovers.

# %%
figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
for axis, (metric, title, scale) in zip(
    axes.flat,
    (
        ("val_accuracy", "Accuracy (held out)", "linear"),
        ("ess_ratio", "ESS ratio", "linear"),
        ("kl", "KL(rollout || policy) per token, nats", "symlog"),
        ("grad_norm", "Gradient norm", "linear"),
    ),
    strict=True,
):
    for name, curve in runs.items():
        shown = curve[["step", metric]].dropna()
        axis.plot(shown["step"], shown[metric], label=name)
    axis.set(title=title, yscale=scale)
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
for axis in axes[1]:
    axis.set_xlabel("optimizer step")
figure.savefig(OUT / "vcpo.png", dpi=110)
print(f"Figure: {OUT / 'vcpo.png'}")
