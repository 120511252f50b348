"""After the training: what the trained model, its evaluation and the records of a run depend on in verl and vLLM."""

from tests.upstream.reach import How, Place, Reach

MODEL = "verl.workers.config.model:HFModelConfig"
BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
AGENT = "verl.experimental.agent_loop.agent_loop"

FOLDER = Place(
    "verl/verl_vcpo/actor/hugging_face.py",
    "What `MegatronCheckpointManager` writes beside the weights: this is the same.",
    (
        Reach(
            "save_hugging_face",
            How.CALLS,
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine.get_per_tensor_param",
            "",
            "as for the samplers",
        ),
        Reach("write_folder", How.USES, f"{MODEL}.hf_config", "", "written"),
        Reach("write_folder", How.USES, f"{MODEL}.generation_config", "= None", "written"),
        Reach("write_folder", How.CALLS, f"{MODEL}.get_processor", "", "the tokenizer of a text model; written"),
    ),
)

SAMPLES = Place(
    "verl/verl_vcpo/report/sample_log.py, actor/sequence_weights.py",
    "Under which names agent loops store a trajectory.",
    (
        Reach("samples_of", How.CALLS, "transfer_queue:kv_batch_get", "keys, partition_id, select_fields", ""),
        Reach("samples_of", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"prompts"', "a field"),
        Reach("samples_of", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"responses"', "a field"),
        Reach("samples_of", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"extra_fields"', "a field"),
        Reach(
            "_sessions", How.NAMES, "verl.trainer.ppo.v1.agent_loop_tq", 'kwargs["session_id"]', "a field: the sample"
        ),
        Reach("_sessions", How.NAMES, "verl.trainer.ppo.v1.agent_loop_tq", "field.update(kwargs)", "stored with it"),
    ),
)

OVERVIEW = Place(
    "verl/verl_vcpo/report/overview.py, tests/kit/wandb_file.py",
    "That `PPOTrainer.fit` makes the loggers before it evaluates, and logs a step once; the format of W&B's file.",
    (
        Reach("LagKTrainer.overview", How.NAMES, f"{BASE}.fit", "self.logger = Tracking(", "made in `fit`"),
        Reach("Overview", How.CALLS, "verl.utils.tracking:Tracking.log", "data, step, backend", "to two loggers"),
        Reach("Overview", How.NAMES, "verl.utils.tracking:Tracking", 'self.logger["wandb"] = wandb', "the module"),
        Reach("CURVES", How.NAMES, "verl.trainer.ppo.metric_utils", '"response_length/mean"', "a metric"),
        Reach("Overview.step", How.CALLS, "wandb:Run.alert", "title, text, level, wait_duration", "`wandb.alert`"),
        Reach("Overview.samples", How.CALLS, "wandb:Run.log", "data, step", "`wandb.log`"),
        Reach("Overview.samples", How.CALLS, "wandb:Table", "columns, data", ""),
        Reach("finish", How.CALLS, "verl.utils.tracking:Tracking.finish", "exit_code", "before W&B's process ends"),
        Reach("finish", How.CALLS, "wandb:teardown", "", "ends W&B's process"),
        Reach("offline_run", How.USES, "wandb.proto.wandb_internal_pb2:Record", "", "a record of W&B's file"),
    ),
)

EXPORT = Place(
    "recipe/export.py",
    "Where a checkpoint has the Hugging Face weights.",
    (
        Reach("_WEIGHTS", How.CALLS, "verl.utils.megatron_utils:get_hf_model_checkpoint_path", "checkpoint_path", ""),
        Reach("_WEIGHTS", How.NAMES, "verl.utils.megatron_utils", '"huggingface"', "the folder"),
        Reach("_SHARDS", How.NAMES, "verl.utils.megatron_utils", '"dist_ckpt"', "Megatron's own shards"),
    ),
)

CONVERSION = Place(
    "recipe/shards.py",
    "How `MegatronEngine` loads shards when it is built.",
    (
        Reach("convert", How.CALLS, "verl.workers.config:HFModelConfig", "path, override_config", ""),
        Reach("convert", How.CALLS, "verl.workers.config:McoreCheckpointConfig", "", ""),
        Reach("convert", How.CALLS, "verl.workers.config:McoreOptimizerConfig", "lr, total_training_steps", ""),
        Reach(
            "convert",
            How.NAMES,
            "verl.workers.engine.megatron.transformer_impl",
            "self.engine_config.dist_checkpointing_path",
            "loaded into any layout",
        ),
        Reach(
            "_convert",
            How.NAMES,
            "verl.utils.megatron_utils",
            "transformer_config.json",
            "`params_dtype` of the shards",
        ),
    ),
)

EVALUATION = Place(
    "recipe/evaluate/sampling.py",
    "How `SingleTurnAgentLoop.run` makes the prompt's tokens, and what a reward manager gets: these are repeated.",
    (
        Reach("answers_of", How.CALLS, "verl.utils:hf_tokenizer", "name_or_path", "the tokenizer as verl loads it"),
        Reach(
            "answers_of",
            How.CALLS,
            "verl.trainer.ppo.utils:create_rl_dataset",
            "data_paths, data_config, tokenizer, processor, is_train, max_samples",
            "the validation's rows",
        ),
        Reach(
            "_prompts",
            How.CALLS,
            "verl.utils.tokenizer.continuous_token_wiring:create_continuous_token_builder",
            "tokenizer, hf_model_type, chat_template_kwargs",
            "`build_initial_tokens`",
        ),
        Reach("_prompts", How.NAMES, f"{AGENT}:AgentLoopBase", "prompt_ids[-prompt_length:]", "how prompts are cut"),
        Reach(
            "_engine",
            How.CALLS,
            "vllm:LLM",
            "model, tensor_parallel_size, dtype, seed, enforce_eager",
            "",
        ),
        Reach("answers_of", How.CALLS, "vllm:SamplingParams", "n, temperature, top_p, top_k, max_tokens", ""),
        Reach("sampling", How.NAMES, "vllm.envs", "VLLM_ENABLE_V1_MULTIPROCESSING", "0: in this process"),
        Reach(
            "_scored",
            How.CALLS,
            "verl.trainer.ppo.reward:load_reward_manager",
            "config, tokenizer",
            "the trainer's reward",
        ),
        Reach(
            "_scored",
            How.CALLS,
            "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.run_single",
            "data",
            "`reward_score`, `reward_extra_info`",
        ),
        Reach("_item", How.NAMES, AGENT, '"__num_turns__"', "a field of what the manager gets"),
    ),
)

COMMAND = Place(
    "recipe/vllm.py, recipe/fully_async_policy/launch/session.py, recipe/fully_async_policy/settings/names.py",
    "The entry point of the command `vllm`; where verl's loggers write; what names an open section may have.",
    (
        Reach("_options_of_vllm", How.CALLS, "vllm.entrypoints.cli.serve:cmd_init", "", "the options of `vllm serve`"),
        Reach("_options_of_vllm", How.CALLS, "vllm.utils.argparse_utils:FlexibleArgumentParser", "", "as verl does"),
        Reach("_why_not_in", How.USES, "vllm.engine.arg_utils:AsyncEngineArgs", "", "engine_kwargs.vllm"),
        Reach(
            "_why_not_in", How.USES, "megatron.core.transformer:TransformerConfig", "", "override_transformer_config"
        ),
        Reach(
            "_why_not_in",
            How.USES,
            "megatron.core.distributed:DistributedDataParallelConfig",
            "",
            "override_ddp_config",
        ),
        Reach("_why_not_in", How.USES, "megatron.core.optimizer:OptimizerConfig", "", "override_optimizer_config"),
        Reach("_why_not_in", How.USES, "ray:init", "", "ray_kwargs.ray_init"),
        Reach("main", How.CALLS, "vllm.entrypoints.cli.main:main", "", "the command"),
        Reach("ray_session", How.NAMES, "verl.utils.tracking", "VERL_FILE_LOGGER_PATH", "trainer.logger=[file]"),
        Reach("ray_session", How.NAMES, "verl.utils.tracking", "TENSORBOARD_DIR", "trainer.logger=[tensorboard]"),
    ),
)

PLACES = (FOLDER, SAMPLES, OVERVIEW, EXPORT, CONVERSION, EVALUATION, COMMAND)
