"""Bad settings end before a process starts: exit code 2, one line that names the setting and the fix."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings import agent_loop, consistency, logger
from recipe.fully_async_policy.settings import values as settings
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.validate import validate
from tests.recipe.refused import ACTOR, MEGATRON, MODEL, REWARD, ROLLOUT, composed, hydras_compose, quick_compose, run

pytestmark = pytest.mark.usefixtures("nothing_starts")

LOOP, TURNS = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.multi_turn"

WRONG = [
    # names and choices
    ("asinc.lag=1", "asinc.lag=1: there is no such setting; did you mean async.lag?"),
    ("async.lagg=1", "async.lagg=1: there is no such setting; did you mean async.lag?"),
    ("trainer.total_trainig_steps=9", "did you mean trainer.total_training_steps?"),
    ("lr=-1", "lr=-1: there is no such setting; did you mean actor_rollout_ref.actor.optim.lr?"),
    ("actor.strategy=fsdp", "did you mean actor_rollout_ref.actor.strategy?"),
    ("trainer.total_steps=9", "did you mean trainer.total_training_steps?"),
    ("async.lag==4", "async.lag==4: give async.lag=4"),
    ("async.lag:4", "async.lag:4: a setting needs a value; give async.lag=4"),
    ("async.lag=\N{MINUS SIGN}3", "has characters of a word processor; give async.lag=-3"),
    (f"{ACTOR}.optim.lr=1,5e-5", f"a decimal has a point, {ACTOR}.optim.lr=1.5e-5"),
    ("lr=1,5e-5", "a decimal has a point, lr=1.5e-5; and there is no such setting; did you mean actor_rollout_ref"),
    (f"{ACTOR}.optim.lr=5", "optim.lr=5: every step of Adam would change each weight by more than 1"),
    ("method=vcop", "method=vcop: there is no such method; did you mean vcpo or vcpo_opob? docs/reference/methods.md"),
    ("hardware=tpu", "hardware=tpu: there is no such hardware"),
    ("trainer.test_freq", "trainer.test_freq: a setting needs a value"),
    ("data.train_files=a.parquet,b.parquet", "give a list, data.train_files=[a.parquet,b.parquet]"),
    ("reward_model.enable=true", "reward_model.enable=true: nothing reads it; leave it out; the lag-k trainer has no"),
    ("reward_model={reward_manager:dapo}", "nothing reads it; give reward.reward_manager.name=VALUE"),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.len=4", "give reward.reward_kwargs.overlong_buffer_cfg.len=4"),
    ("reward_model.reward_manager=dapo", "nothing reads it; give reward.reward_manager.name=dapo"),
    ("custom_reward_function.path=a.py", "give reward.custom_reward_function.path=a.py"),
    ("+method=vcpo", "+method=vcpo: method is chosen already; leave it out, or give method=vcpo"),
    ("+task=gsm8k", "+task=gsm8k: task is chosen already; leave it out, or give task=gsm8k"),
    ("reasoning_gym.tasks={gcd:1}", "only a task of reasoning-gym reads it (+task=reasoning_gym, +task=sums)"),
    ("data.reasoning_gym.tasks.gcd=1", "data.reasoning_gym.tasks.gcd=1: there is no such setting"),
    ("hydra.run.dir=x", "hydra.run.dir=x: Hydra only composes here; leave it out; run_dir is the run's folder"),
    ("hydra={run:{dir:x}}", "hydra={run:{dir:x}}: Hydra only composes here"),
    ("hydra.searchpath=[file:///x]", "leave it out; run_dir is the run's folder, --config-dir a folder of presets"),
    ("~async.lag", "async.lag: is missing"),
    ("trainer.experiment_name=1128", "is not read as text; quote it: 'trainer.experiment_name=\"...\"'"),
    ("async=3", "async=3"),
    # parts of verl that the lag-k trainer does not have
    ("model_engine=dp", "model_engine=dp: the lag-k trainer is built on Megatron alone; set it to megatron"),
    (f"{ACTOR}.strategy=fsdp", "strategy=fsdp: the lag-k trainer is built on Megatron alone; set it to megatron"),
    (f"{ROLLOUT}.name=sglang", "rollout.name=sglang: the samplers are vLLM's; set it to vllm"),
    (f"{ROLLOUT}.checkpoint_engine.backend=naive", "backend=naive: does not reach samplers with devices of their own"),
    (f"{ROLLOUT}.checkpoint_engine.backend=nccl", "backend=nccl: does not reach samplers"),
    ("trainer.v1.trainer_mode=sync", "trainer_mode=sync: verl's other trainers know no bound of the lag"),
    ("actor_rollout_ref.hybrid_engine=true", "hybrid_engine=true: trainer and samplers have devices of their own"),
    (
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
        "enable_switch=true: lent GPUs have samplers without the limits of async.*; give rollout.n_gpus_per_node more",
    ),
    ("trainer.v1.separate_async.parameter_sync_step=4", "parameter_sync_step=4: samplers get new weights after every"),
    ("reward.reward_model.enable=true", "reward_model.enable=true: the lag-k trainer has no devices for a reward"),
    (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_rank=8: Megatron's adapters have the rank {MODEL}.lora.rank; set it to 0"),
    (f"{MODEL}.lora.merge=false", f"{MODEL}.lora.merge=false: has no effect with"),
    (f"{MODEL}.lora.rank=4 {MODEL}.lora.merge=false", "rollout.load_format=dummy: with"),
    (f"{MODEL}.lora.type=dora", f"{MODEL}.lora.type=dora: Megatron-Bridge merges and exports no other adapters"),
    (f"{MODEL}.lora.rank=4 {MODEL}.lora.target_modules=linear_qkv", "target_modules=linear_qkv: give a list of names"),
    (f"{MODEL}.lora.adapter_path=adapter", "model.lora.adapter_path=adapter: a run makes its own adapters"),
    (f"{MODEL}.lora.alpha=8", f"{MODEL}.lora.alpha=8: has no effect with"),
    (f"{ACTOR}.megatron.dtype=float16", "gradient norms with it; did you mean bfloat16?"),
    (f"{ACTOR}.megatron.vanilla_mbridge=true", "vanilla_mbridge=true: verl gives up the package mbridge"),
    (f"{ROLLOUT}.quantization=fp8", "quantization=fp8: no run of the lag-k trainer has had another; set it to null"),
    (f"{ROLLOUT}.data_parallel_size=2", f"data_parallel_size=2: {ROLLOUT}.n_gpus_per_node makes more samplers; set"),
    ("data.image_key=image", "data.image_key=image: the models that are trained read text alone"),
    (f"{ACTOR}.qat.enable=true", "qat.enable=true: no run of the lag-k trainer has had another; set it to false"),
    ("skip.rollout.enable=true", "skip.rollout.enable=true: no run of the lag-k trainer has had another; set it to"),
    (f"{MODEL}.use_liger=true", "use_liger=true: has no effect with method=vcpo_capped: Megatron's engines do not"),
    # of one that refers to another section, and names of which a part alone is known
    ("method=a2c critic.megatron.dtype=x", f"critic.megatron is {MEGATRON}; give {MEGATRON}.dtype"),
    (f"{ROLLOUT}.mtp.enable=true", f"{ROLLOUT}.mtp is {MODEL}.mtp; give {MODEL}.mtp.enable"),
    ("grad.enable=true", "grad.enable=true: there is no such setting; --print-config prints all settings"),
    # numbers
    ("async.lag=-1", "async.lag=-1: give a number of policy updates"),
    ("async.lag=two", "async.lag=two: give a number of policy updates"),
    ("async.lag=101", "async.lag=101: more than trainer.total_training_steps=100"),
    ("async.on_deadline=drop", "async.on_deadline=drop: choose one of wait, reissue"),
    ("async.on_failure=retry", "async.on_failure=retry: choose one of end, skip"),
    ("async.on_failure=skip async.max_skipped=0", "async.max_skipped=0: give a share above 0, at most 1"),
    (
        "async.max_skipped=0.1",
        "async.max_skipped=0.1: has no effect with method=vcpo_capped: only async.on_failure=skip",
    ),
    ("data.level_mark=0.5", "data.level_mark=0.5: has no effect with method=vcpo_capped: without data.levels there is"),
    ("vcpo.step_size_rule=none vcpo.ess_part=whole", "with vcpo.step_size_rule=none the step does not follow the ESS"),
    ("async.truncated=masked", "async.truncated=masked: did you mean mask? choose one of train, mask, drop, penalty"),
    ("async.truncated=penalty", "async.truncated=penalty: needs async.overlong_buffer_len, a number of tokens up to"),
    ("async.truncated=penalty async.overlong_buffer_len=0", "overlong_buffer_len=0: give a whole number of at least"),
    (
        "async.overlong_buffer_len=8",
        "overlong_buffer_len=8: has no effect with method=vcpo_capped: only async.truncated=penalty reads",
    ),
    ("async.truncated=drop method=a2c", "async.truncated=drop: a critic's loss divides by the tokens left"),
    ("async.sampler_timeout_s=0", "async.sampler_timeout_s=0: give a number of seconds"),
    ("async.trajectory_timeout_s=null", "async.trajectory_timeout_s=null: give a number of seconds"),
    ("async.exact_lag=2", "async.exact_lag=2: give true or false"),
    ("trainer.total_training_steps=0", "total_training_steps=0: give a whole number of at least 1"),
    ("trainer.total_training_steps=null", "total_training_steps=null: the run would last 100000 epochs"),
    ("trainer.test_freq=0", "trainer.test_freq=0: give a whole number of at least 1, or -1 for never"),
    ("samples_every=-1", "samples_every=-1: give a number of steps, 0 (never) or more"),
    ("save_model=1", "save_model=1: give true or false"),
    (
        "save_weights=true",
        "save_weights=true: has no effect with method=vcpo_capped: with trainer.save_freq=-1 no checkpoint",
    ),
    ("trainer.max_actor_ckpt_to_keep=2", "no checkpoint is written; give trainer.save_freq=10, or leave it out"),
    (
        "trainer.val_only=true trainer.val_before_train=false",
        "trainer.val_only=true: only validates before training, which trainer.val_before_train=false leaves",
    ),
    ("trainer.resume_mode=atuo", "trainer.resume_mode=atuo: did you mean auto?"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path=null"),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere/global_step_3",
        "trainer.resume_from_path=/nowhere/global_step_3: ",
    ),
    ("trainer.logger=[swanlab]", "trainer.logger=swanlab: the package swanlab is not installed"),
    ("trainer.logger=[tensorbord]", "trainer.logger=tensorbord: did you mean tensorboard?"),
    (f"{ACTOR}.optim.lr=-1", "optim.lr=-1: give a number, 0 or more"),
    (f"{ACTOR}.optim.lr_decay_style=cosin", "lr_decay_style=cosin: did you mean cosine?"),
    (f"{ACTOR}.optim.lr_warmup_steps=100", "lr_warmup_steps=100: the warm-up has to end before"),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio=1", "lr_warmup_steps_ratio=1: give a share"),
    (f"{ROLLOUT}.n=abc", "rollout.n=abc: give a whole number of at least 1"),
    (f"{ROLLOUT}.n=1", "rollout.n=1: vcpo.baseline=opob_capped, vcpo.norm_by_std=True compare"),
    (f"{ACTOR}.megatron.router_replay.mode=R2", "router_replay.mode=R2: R2 needs a pass that a lag-k run leaves out"),
    (f"{ACTOR}.megatron.router_replay.mode=R3", f"replay=false: {ACTOR}.megatron.router_replay.mode=R3 replays"),
    (f"{ROLLOUT}.enable_rollout_routing_replay=true", "replay=true: nothing reads the experts"),
    (
        f"{ROLLOUT}.enable_rollout_routing_replay=true {ROLLOUT}.moe_load_balance_metrics_interval=10",
        "replay=true: vLLM's build for CPUs returns no experts",
    ),
    (f"{ROLLOUT}.calculate_log_probs=false", "calculate_log_probs=false: importance weights"),
    (f"{ROLLOUT}.gpu_memory_utilization=3", "gpu_memory_utilization=3: give a share above 0, at most 1"),
    (f"{ROLLOUT}.val_kwargs.top_p=2", "val_kwargs.top_p=2: give a share above 0, at most 1"),
    # lengths and sizes
    ("data.max_response_length=0", "data.max_response_length=0: give a whole number of at least 1"),
    (
        "data.max_response_length=4096",
        "rollout.max_model_len=128: data.max_prompt_length=64 and data.max_response_leng",
    ),
    (f"data.max_response_length=4096 {ROLLOUT}.max_model_len=null", "has 4160 tokens, and the model has 512 positions"),
    (f"{ROLLOUT}.max_model_len=1024", "rollout.max_model_len=1024: the model has 512 positions"),
    ("data.max_prompt_length=2", "data.max_prompt_length=2: a prompt of"),
    ("data.train_batch_size=32", "data.train_batch_size=32: data.train_files has 16 prompts, less than one batch"),
    ("data.train_max_samples=8", "data.train_batch_size=16: data.train_max_samples leaves 8 prompts"),
    (f"{ACTOR}.ppo_mini_batch_size=5", "ppo_mini_batch_size=5: does not divide"),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu=7", "ppo_micro_batch_size_per_gpu=7: does not divide"),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", "tensor_model_parallel_size=2: does not divide"),
    # what VCPO's update and the loop exclude
    ("method=vcpo vcpo.baseline=best", "vcpo.baseline='best': choose one of"),
    ("vcpo.truncation=-2", "vcpo.truncation=-2: give a number"),
    ("method=vcpo vcpo.opob_weights=best", "vcpo.opob_weights='best': choose one of"),
    (
        f"method=vcpo_published {ACTOR}.loss_agg_mode=seq-mean-token-sum",
        "vcpo.opob_weights=published: the authors' weights are of loss_agg_mode=seq-mean-token-mean",
    ),
    ("method=vcpo vcpo.norms.how=best", "vcpo.norms.how='best'"),
    (f"{ACTOR}.stabilizer.quantile=1.5 method=sat", "stabilizer.quantile=1.5: give a number in [0, 1]"),
    (f"{ACTOR}.stabilizer.beta=abc method=oapl", "stabilizer.beta='abc': give a number of at least 0"),
    (f"{ACTOR}.policy_loss.loss_mode=vanila method=ppo", "loss_mode=vanila"),
    ("algorithm.adv_estimator=grop method=none", "algorithm.adv_estimator=grop: did you mean grpo?"),
    (f"{ACTOR}.checkpoint.async_save=true", "async_save=true: the folder would be taken for whole"),
    (f"{ACTOR}.shuffle=true", "shuffle=true: it would split the samples of a prompt"),
    (f"{ACTOR}.use_kl_loss=true", "use_kl_loss=True: VCPO's update has no such term"),
    (f"{ACTOR}.loss_agg_mode=token-mean", "loss_agg_mode='token-mean'"),
    ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward=true: VCPO's update uses raw rewards"),
    ("reward.reward_manager.name=remote", "reward.reward_manager.name=remote: a custom reward function has"),
    ("reward.reward_manager.name=rate_limited", "gives a response the reward 0 where the function fails or is late; u"),
    # settings that nothing of ours reads
    ("data.val_batch_size=0", "data.val_batch_size=0: give a whole number of at least 1"),
    ("data.filter_overlong_prompts_workers=0", "filter_overlong_prompts_workers=0: give a whole number of at least 1"),
    (f"{ACTOR}.optim.betas=0.9", "optim.betas=0.9: give two numbers, 0 or more and below 1"),
    (f"{ROLLOUT}.dtype=float8", "rollout.dtype=float8: did you mean float"),
    (f"{ROLLOUT}.max_num_batched_tokens=16", "max_num_batched_tokens=16: a sampler takes max_num_seqs="),
    (f"{ROLLOUT}.response_length=5", "rollout.response_length=5: data.max_response_length=32 decides; leave it out"),
    ("trainer.resume_from_path=/nowhere", "resume_from_path=/nowhere: has no effect with trainer.resume_mode=disable"),
    ("ray_kwargs.ray_init.num_cpus=0", "ray_init.num_cpus=0: give a whole number of at least 1"),
    ("+ray_kwargs.ray_init.num_cpu=2", "ray_init.num_cpu=2: ray.init has no such setting; did you mean num_cpus?"),
    ("trainer.nnodes=2", "trainer.nnodes=2: a Ray that the run starts has one node; set it to 1, or join a cluster"),
    # agent loops and tools
    (f"{LOOP}=tool", "default_agent_loop=tool: choose one of single_turn_agent, tool_agent"),
    (f"{LOOP}=simpletir", "default_agent_loop=simpletir: add +agent=simpletir"),
    (f"{LOOP}=tool_agent {TURNS}.function_tool_path=no.py", "function_tool_path=no.py: no such file; give the file"),
    (f"{LOOP}=tool_agent {TURNS}.tool_config_path=no.yaml", "tool_config_path=no.yaml: no such file; give the file"),
    (f"{LOOP}=tool_agent {TURNS}.format=hermess", "multi_turn.format=hermess: did you mean hermes?"),
    (f"{LOOP}=tool_agent {TURNS}.max_assistant_turns=0", "max_assistant_turns=0: give a whole number of at least 1"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=/no.yaml", "agent_loop_config_path=/no.yaml: no such file; give pkg://"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=/etc/hostname", "agent_loop_config_path=/etc/hostname: is no list"),
    # files and folders
    ("trainer.default_local_dir=/etc/hostname/x", "trainer.default_local_dir=/etc/hostname/x: /etc/hostname is a file"),
    ("data.custom_cls.path=no.py", "data.custom_cls.path=no.py: no such file; give the file of the dataset's class"),
    ("data.train_files=nowhere.parquet", "data.train_files=nowhere.parquet: no such file"),
    ("data.train_files=/nowhere/*.parquet", "data.train_files=/nowhere/*.parquet: no file matches"),
    ("data.train_files=7", "data.train_files=7: give a file, or a list of files"),
    ("data.train_files=/etc", "data.train_files=/etc: is a folder; name its files, such as '/etc/*.parquet'"),
    ("data.train_files=/etc/hostname", "data.train_files=/etc/hostname: verl reads files named .parquet"),
    ("data.val_files=[]", "data.val_files=[]: give at least one file"),
    ("data.shares=[1]", "data.shares=[1]: data.train_files is one file; leave it out, or give a list of files"),
    ("data.shares=[1,2] data.train_files=[a,b,c]", "shares=[1, 2]: give a share for each of the 3 data.train_files"),
    ("data.shares=half data.train_files=[a,b]", "data.shares=half: give a share above 0 of each train file, [0.7,0.3]"),
    ("data.shares=[1,2] data.train_files=[a,b] data.seed=null", "data.shares=[1, 2]: needs data.seed"),
    ("data.shares=[1,2] data.train_files=[a,b] data.custom_cls.path=no.py", "data.custom_cls=no.py reads the files"),
    ("data.train_files=~/data/rlhf/gsm8k/train.parquet", "~ is not replaced here"),
    (f"{MODEL}.path=nowhere", "actor_rollout_ref.model.path=nowhere: no such folder"),
    (f"{MODEL}.path=/etc", "actor_rollout_ref.model.path=/etc: the folder has no config.json"),
    ("run_dir=/etc/hostname/x", "run_dir=/etc/hostname/x: /etc/hostname is a file; give another folder"),
    (
        "run_dir=/tmp/a=b",
        """run_dir=/tmp/a=b: has characters that Hydra keeps for itself; quote the value: 'run_dir="/tm""",
    ),
    (
        "run_dir=/tmp/a,b",
        """run_dir=/tmp/a,b: a comma separates values; give a list, run_dir=[/tmp/a,b], or quote the""",
    ),
    ("run_dir=~/run", f"run_dir=~/run: ~ is not replaced here; give run_dir={Path.home()}/run"),
    (f"{REWARD}.path=no.py", "it does not load: there is no file no.py; give the function's file"),
    (f"{REWARD}.path=pkg://no.reward", "it does not load: it raises ModuleNotFoundError: No module named 'no'; mend"),
    (f"{REWARD}.path=/etc/hostname", "it does not load: /etc/hostname is no Python file; give the function's file"),
    (
        f"{REWARD}.name=compute",
        f"{REWARD}.path=pkg://recipe.tasks.reward .name=compute: it does not load: there is no function "
        "compute, but compute_score; name the function",
    ),
    (f"{REWARD}.name=null", f"{REWARD}.name=null: give the function's name"),
]


@pytest.mark.parametrize(("wrong", "expected"), WRONG, ids=[wrong for wrong, _ in WRONG])
def test_a_wrong_setting(good: dict[str, str], capsys: pytest.CaptureFixture[str], wrong: str, expected: str) -> None:
    given = wrong.split(" ")
    names = {each.partition("=")[0] for each in given}
    line = run({**good, **({"run_dir": good["run_dir"]})}, capsys, *given)
    assert expected in line
    assert any(name.strip("+~").rpartition(".")[2] in line for name in names)


def test_spaces_and_a_long_dash(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "async.lag = 8: give it without spaces, async.lag=8" in run(good, capsys, "async.lag = 8")
    assert "begins with a long dash; give --dry-run" in run(good, capsys, "\N{EN DASH}dry-run")


def test_the_tables_shortcut_is_hydras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    some = [
        "async.lag=0.5",
        "data.train_files=[a,b]",
        "run_dir=/tmp/x",
        f"{ACTOR}.clip_ratio_low=null",
        f"{ROLLOUT}.n=4",
    ]
    some += ["+task=countdown", "trainer.experiment_name=same"]
    quick = quick_compose(some)
    assert quick is not None and OmegaConf.to_yaml(quick) == OmegaConf.to_yaml(hydras_compose(some))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "data.train_files: not given; begin with +task=NAME"),
        (["+task=countdwn"], "+task=countdwn: there is no such task; did you mean countdown? choose one of calculate"),
        (["task=countdown"], "task=countdown: write +task=countdown"),
    ],
)
def test_a_wrong_task(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    kept = {name: good[name] for name in ("run_dir", f"{MODEL}.path")}
    lengths = ["trainer.n_gpus_per_node=1", "data.max_prompt_length=64", "data.max_response_length=32"]
    assert expected in run(kept, capsys, *arguments, *lengths)


def test_loggers_and_backends_are_verls() -> None:
    from verl import checkpoint_engine
    from verl.utils.tracking import Tracking

    assert sorted(logger.PACKAGES) == sorted(Tracking.supported_backend)
    sources = [file.read_text() for file in Path(checkpoint_engine.__file__).parent.glob("*.py")]
    registered = {name for text in sources for name in re.findall(r'Registry\.register\("(\w+)"\)', text)}
    assert registered == {"naive", *consistency.BACKENDS, consistency.CHANGES_ALONE}
    from verl.experimental.agent_loop import agent_loop as loops
    from verl.experimental.agent_loop import tool_parser

    folder = Path(loops.__file__).parent
    sources = [file.read_text() for file in folder.glob("*.py")]
    registered = {name for text in sources for name in re.findall(r'^@register\("(\w+)"\)', text, re.MULTILINE)}
    assert registered == set(agent_loop.VERLS)
    parsers = re.findall(r'^@ToolParser.register\("([\w-]+)"\)', Path(tool_parser.__file__).read_text(), re.MULTILINE)
    assert sorted(parsers) == sorted(settings.TOOL_FORMATS)


def test_weights_that_reach_no_sampler_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "gpu")
    config = main.compose(["+task=gsm8k", f"{ROLLOUT}.checkpoint_engine.backend=naive"])
    with pytest.raises(SettingError, match=r"backend=naive: does not reach samplers .*; choose one of nccl, nixl"):
        validate(config, files=False)


def test_a_batch_that_data_parallel_ranks_cannot_share(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    three_ranks = {"trainer.n_gpus_per_node": "3", "data.train_batch_size": "4"}
    assert "times rollout.n=8 is 32 sequences" in run({**good, **three_ranks}, capsys)


def test_virtual_stages_with_an_odd_number_of_micro_batches(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {
        "trainer.n_gpus_per_node": "2",
        f"{MEGATRON}.pipeline_model_parallel_size": "2",
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": "2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": "128",
    }
    assert "virtual pipeline stages need a multiple" in run({**good, **stages}, capsys)


@pytest.mark.parametrize(
    "legal",
    [
        {f"{ROLLOUT}.temperature": "0.7"},
        {f"{ROLLOUT}.temperature": "1.0", f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        {f"{ROLLOUT}.val_kwargs.temperature": "0", f"{ROLLOUT}.val_kwargs.top_p": "0.9"},
        {f"{ROLLOUT}.val_kwargs.top_k": "20", f"{ACTOR}.optim.lr": "0", "async.lag": "0.5"},
        {"trainer.total_training_steps": "null", "trainer.total_epochs": "2", "trainer.logger": "console"},
        {f"{REWARD}.path": "null", "data.seed": "null", "trainer.test_freq": "-1"},
        {"data.max_prompt_length": "2", "data.truncation": "left"},
        {"run_dir": "'/tmp/a=b,~c'", "+async.lag": "1", "data.apply_chat_template_kwargs.enable_thinking": "false"},
    ],
)
def test_what_is_legal_passes(good: dict[str, str], legal: dict[str, str]) -> None:
    validate(composed({**good, **legal}))


def test_a_kept_cache_that_is_freed(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"async.kv_cache": "keep", f"{ROLLOUT}.free_cache_engine": "true"}
    assert "free_cache_engine=true frees the cache" in run({**good, **kept}, capsys)


def test_lags_that_contradict_each_other(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    synchronous = {"async.lag": "0", "async.on_deadline": "reissue"}
    assert "async.on_deadline=reissue: at async.lag=0" in run({**good, **synchronous}, capsys)
    fraction = {"async.lag": "0.5", "async.exact_lag": "true"}
    assert "async.exact_lag=true: needs a whole async.lag" in run({**good, **fraction}, capsys)


def test_a_loss_that_hides_the_scores(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    per_token = {f"+{MEGATRON}.override_transformer_config.calculate_per_token_loss": "true"}
    assert "calculate_per_token_loss=true" in run({**good, **per_token}, capsys)
    norm = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
    assert "loss_scale_factor=None" in run({**good, **norm}, capsys)


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    assert "python -m recipe.fully_async_policy.main +task=countdown" in capsys.readouterr().out
