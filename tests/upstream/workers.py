"""The trainer's processes: what our Megatron actor and its worker depend on in verl's."""

from tests.upstream.reach import How, Place, Reach

ENGINES = "verl.workers.engine.megatron.transformer_impl"
ENGINE, HEAD = f"{ENGINES}:MegatronEngine", f"{ENGINES}:MegatronEngineWithLMHead"
WORKERS = "verl.workers.engine_workers"
TU = "verl.utils.tensordict_utils"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
AGENT = "verl.experimental.agent_loop.agent_loop"

ACTOR = Place(
    "verl/verl_vcpo/actor/megatron_actor.py",
    "`BaseEngine.train_batch`, `MegatronEngine.forward_backward_batch`, and what `TrainingWorker` does with outputs.",
    (
        Reach("VCPOMegatronEngine", How.SUBCLASSES, HEAD, "", "the actor"),
        Reach(
            "VCPOMegatronEngine",
            How.REGISTERS,
            "verl.workers.engine:EngineRegistry.register",
            "model_type, backend, device='cuda', vendor",
            "chosen by VERL_ENGINE_VENDOR",
        ),
        Reach(
            "ENGINE_VENDOR", How.NAMES, "verl.workers.engine.base:EngineRegistry", '"VERL_ENGINE_VENDOR"', "chooses it"
        ),
        Reach("VCPOMegatronEngine.__init__", How.OVERRIDES, f"{ENGINE}.__init__", "", "state of ours"),
        Reach("VCPOMegatronEngine.initialize", How.OVERRIDES, f"{ENGINE}.initialize", "", "taps the modules"),
        Reach(
            "VCPOMegatronEngine.train_batch",
            How.OVERRIDES,
            "verl.workers.engine.base:BaseEngine.train_batch",
            "",
            "the VCPO update. Theirs also repairs multimodal position ids, which `TrainingWorker` does before",
        ),
        Reach("VCPOMegatronEngine.forward_step", How.OVERRIDES, f"{HEAD}.forward_step", "", "tells the collector"),
        Reach("VCPOMegatronEngine.to", How.OVERRIDES, f"{ENGINE}.to", "", "the optimizer's state stays on the host"),
        Reach(
            "VCPOMegatronEngine.optimizer_step", How.OVERRIDES, f"{ENGINE}.optimizer_step", "", "and comes for the step"
        ),
        Reach(
            "VCPOMegatronEngine.optimizer_step",
            How.CALLS,
            "verl.utils.megatron_utils:load_megatron_optimizer",
            "optimizers",
            "what verl calls before an update",
        ),
        Reach(
            "VCPOMegatronEngine.optimizer_step",
            How.CALLS,
            "verl.utils.megatron_utils:offload_megatron_optimizer",
            "optimizers",
            "as above",
        ),
        Reach("VCPOMegatronEngine.save_checkpoint", How.OVERRIDES, f"{ENGINE}.save_checkpoint", "", "vcpo.json"),
        Reach("VCPOMegatronEngine.load_checkpoint", How.OVERRIDES, f"{ENGINE}.load_checkpoint", "", "vcpo.json"),
        Reach(
            "train_batch", How.CALLS, f"{ENGINE}.forward_backward_batch", "data, loss_function, forward_only=False", ""
        ),
        Reach(
            "_measure", How.CALLS, "verl.workers.engine.base:BaseEngine.infer_batch", "data", "log-probs without a loss"
        ),
        Reach("train_batch", How.CALLS, f"{ENGINE}.optimizer_zero_grad", "", "clears the gradient buffers too"),
        Reach("train_batch", How.CALLS, f"{ENGINE}.optimizer_step", "", "clips; returns the norm"),
        Reach(
            "packed, per_trajectory", How.CALLS, f"{ENGINE}.get_data_parallel_rank", "", "without context parallelism"
        ),
        Reach("packed, per_trajectory", How.CALLS, f"{ENGINE}.get_data_parallel_size", "", "as above"),
        Reach("train_batch", How.CALLS, f"{ENGINE}.is_mp_src_rank_with_outputs", "", "who has the outputs"),
        Reach("train_batch", How.USES, f"{ENGINE}.module", "", "a list of Megatron's model chunks"),
        Reach("train_batch", How.USES, f"{ENGINE}.optimizer", "", "its `param_groups`: the step size"),
        Reach("_why_not_packed", How.USES, f"{ENGINE}.engine_config", "", "what packed norms cannot do"),
        Reach("_why_not_packed", How.USES, f"{ENGINE}.model_config", "", "as above; whether weights are tied"),
        Reach("_why_not_packed", How.USES, f"{ENGINE}.tf_config", "", "as above"),
        Reach("_why_not_packed", How.USES, f"{ENGINE}.peft_cls", "", "as above"),
        Reach(
            "train_batch",
            How.NAMES,
            f"{WORKERS}:ActorRolloutRefWorker.init_model",
            "partial(ppo_loss, config=",
            "`config`",
        ),
        Reach(
            "train_batch",
            How.NAMES,
            f"{WORKERS}:TrainingWorker.train_mini_batch",
            "chain.from_iterable(val)",
            "lists only",
        ),
        Reach(
            "losses", How.NAMES, f"{ENGINE}.forward_backward_batch", "dp_size=self.get_data_parallel_size()", "a factor"
        ),
        Reach(
            "losses", How.NAMES, f"{HEAD}.postprocess_micro_batch_func", 'loss * data["num_micro_batch"]', "a factor"
        ),
        Reach(
            "_pass", How.NAMES, f"{ENGINE}.forward_backward_batch", "tu.assign_non_tensor(micro_batch", "micro-batches"
        ),
    ),
)

RESUME = Place(
    "verl/verl_vcpo/actor/resume.py",
    "Where `DistributedOptimizer` takes the step from without Transformer Engine, and where it puts the step.",
    (
        Reach("Resumable", How.SUBCLASSES, HEAD, "", "mixed in before the engine"),
        *(
            Reach(f"Resumable.{name}", How.OVERRIDES, f"{ENGINE}.{name}", "", "torch's Adam")
            for name in ("save_checkpoint", "load_checkpoint")
        ),
        Reach("load_checkpoint", How.USES, f"{ENGINE}.checkpoint_mananager", "", "verl's spelling"),
        Reach(
            "load_checkpoint",
            How.USES,
            "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager"
            ".use_checkpoint_opt_param_scheduler",
            "",
            "the schedule goes on at the checkpoint's step",
        ),
        Reach("_adams", How.USES, "megatron.core.optimizer:DistributedOptimizer", "", "torch's Adam inside"),
        Reach("_adams", How.NAMES, "megatron.core.optimizer.optimizer", "chained_optimizers", "of experts"),
        Reach("load_checkpoint", How.NAMES, DISTRIBUTED, 'param_group["step"] = step', "where the step is loaded"),
        Reach("_begin_states", How.NAMES, DISTRIBUTED, "assert len(steps) == 1", "why Adam needs a state before"),
        Reach("_begin_states", How.NAMES, "torch.optim.adam", 'state["exp_avg_sq"]', "Adam's state: a name"),
    ),
)

CRITIC = Place(
    "verl/verl_vcpo/actor/value_engine.py",
    "Nothing: the class has no code.",
    (
        Reach("ValueEngine", How.SUBCLASSES, f"{ENGINES}:MegatronEngineWithValueHead", "", "the critic"),
        Reach(
            "ValueEngine",
            How.REGISTERS,
            "verl.workers.engine:EngineRegistry.register",
            "model_type, backend, device='cuda', vendor",
            "chosen by VERL_ENGINE_VENDOR",
        ),
    ),
)

BATCH = Place(
    "verl/verl_vcpo/actor/{mini_batch,losses}.py, actor/norms/{per_trajectory,layout}.py",
    "Field names of the batch, and how `verl/models/mcore/util.py` aligns and splits sequences: `layout` repeats it.",
    (
        Reach("mini_batch", How.NAMES, "verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopOutput", "who writes the fields"),
        Reach("_is_padding", How.NAMES, "verl.trainer.ppo.padding_utils", 'f"pad{uuid.uuid4().hex}"', "uid of padding"),
        Reach("mini_batch", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"rollout_log_probs"', "a field"),
        Reach("mini_batch", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"rm_scores"', "a field: raw rewards"),
        Reach("mini_batch", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"response_mask"', "a field"),
        Reach("losses", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"prompts"', "a field"),
        Reach("losses", How.NAMES, f"{AGENT}:AgentLoopOutput.as_dict", '"responses"', "a field"),
        Reach("layout", How.NAMES, "verl.trainer.ppo.v1.agent_loop_tq", 'field["input_ids"]', "a field"),
        Reach("layout", How.NAMES, ENGINE, "forced_max_seqlen=global_max_seqlen", "padded length of a micro-batch"),
        Reach(
            "layout",
            How.NAMES,
            "verl.models.mcore.util:preprocess_thd_engine",
            "align_size = tp_size * cp_size * cp_layout_factor",
            "the alignment that `layout` repeats",
        ),
        Reach(
            "_select", How.NAMES, "verl.workers.engine.utils", '"micro_batch_size_per_gpu"', "has to divide the rows"
        ),
        Reach(
            "losses", How.CALLS, "verl.workers.utils.padding:no_padding_2_padding", "tensor, data", "nested to [B, T]"
        ),
        Reach("note_longest_response", How.NAMES, "verl.workers.utils.padding", '"max_response_len"', "spares a wait"),
        Reach(
            "tests/kit/actor",
            How.CALLS,
            "verl.workers.utils.losses:ppo_loss",
            "config, model_output, data",
            "a partial",
        ),
        Reach("(several files)", How.CALLS, f"{TU}:get", "tensordict, key", ""),
        Reach("(several files)", How.CALLS, f"{TU}:get_non_tensor_data", "data, key, default", ""),
        Reach("(several files)", How.CALLS, f"{TU}:assign_non_tensor", "tensor_dict", ""),
        Reach("(several files)", How.CALLS, f"{TU}:assign_non_tensor_data", "tensor_dict, key, val", ""),
        Reach("(several files)", How.CALLS, f"{TU}:assign_non_tensor_stack", "tensor_dict, key, val", ""),
        Reach("(several files)", How.CALLS, f"{TU}:index_select_tensor_dict", "batch, indices", ""),
        Reach("_select", How.CALLS, f"{TU}:nested_tensor_from_tensor_list", "tensors, ragged_idx", "rows of a pass"),
        Reach("tests.kit", How.CALLS, f"{TU}:get_tensordict", "tensor_dict, non_tensor_dict", "batches for one engine"),
        Reach("lab", How.CALLS, "megatron.core.parallel_state:initialize_model_parallel", "", "one process"),
        Reach("lab", How.CALLS, f"{TU}:concat_tensordict", "data", ""),
        Reach(
            "(several files)", How.CALLS, "verl.utils.device:get_device_id", "", "the device's number; `cpu` on a CPU"
        ),
    ),
)

WORKER = Place(
    "verl/verl_vcpo/actor/engine_workers.py",
    "Which worker classes the trainer's roles map to, and how they find the engine's class.",
    (
        Reach(
            "VCPOActorWorker",
            How.SUBCLASSES,
            "verl.experimental.separation.engine_workers:DetachActorWorker",
            "",
            "the worker of the separate-async trainer",
        ),
        Reach(
            "VCPOActorWorker.init_model",
            How.OVERRIDES,
            f"{WORKERS}:ActorRolloutRefWorker.init_model",
            "",
            "chooses our engine first",
        ),
        Reach("VCPOActorWorker", How.USES, f"{WORKERS}:ActorRolloutRefWorker.checkpoint_engine", "", "`stage_weights`"),
        Reach("VCPOActorWorker", How.USES, f"{WORKERS}:ActorRolloutRefWorker.actor", "", "its `engine`"),
        Reach("VCPOCriticWorker", How.SUBCLASSES, f"{WORKERS}:TrainingWorker", "", "the critic's worker"),
        Reach(
            "VCPOCriticWorker.__init__",
            How.OVERRIDES,
            f"{WORKERS}:TrainingWorker.__init__",
            "",
            "chooses our engine first",
        ),
        Reach("VCPOCriticWorker", How.USES, "verl.workers.config:TrainingWorkerConfig", "", "its argument"),
        Reach(
            "(dispatch)",
            How.CALLS,
            "verl.single_controller.base.decorator:register",
            "dispatch_mode, blocking=True",
            "which ranks a call goes to",
        ),
        Reach("(dispatch)", How.USES, "verl.single_controller.base.decorator:Dispatch.ONE_TO_ALL", "", "all ranks"),
        Reach("_choose_engines", How.CALLS, "verl.utils.device:get_device_name", "", "cpu or cuda"),
    ),
)

CONFIG = Place(
    "verl/verl_vcpo/actor/actor_settings.py",
    "Terms and regimes that verl's update has gained: VCPO's refuses what it does not have.",
    (
        Reach("VCPOActorConfig", How.SUBCLASSES, "verl.workers.config:McoreActorConfig", "", "a dataclass"),
        Reach(
            "VCPOActorConfig.__post_init__",
            How.OVERRIDES,
            "verl.workers.config:McoreActorConfig.__post_init__",
            "",
            "checks",
        ),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.megatron", "", "settings it refuses"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.policy_loss", "", "as above"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.loss_agg_mode", "", "as above"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.loss_scale_factor", "", "as above"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.shuffle", "= False", "as above"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.use_kl_loss", "= False", "as above"),
        Reach("VCPOActorConfig", How.USES, "verl.workers.config:McoreActorConfig.entropy_coeff", "= 0", "as above"),
        Reach(
            "_check_gradients",
            How.USES,
            "verl.workers.config:McoreEngineConfig.dynamic_context_parallel",
            "= False",
            "",
        ),
        Reach("_check_gradients", How.USES, "verl.workers.config:McoreEngineConfig.use_megatron_fsdp", "= False", ""),
        Reach(
            "config/*.yaml", How.CALLS, "verl.utils.config:omega_conf_to_dataclass", "config", "`_target_` of a setting"
        ),
        Reach(
            "tests/kit/actor", How.CALLS, "verl.workers.config:HFModelConfig", "path, model_type, load_tokenizer", ""
        ),
        Reach("tests/kit/actor", How.CALLS, "verl.workers.config:McoreCheckpointConfig", "", ""),
        Reach(
            "tests/kit/resumption",
            How.CALLS,
            "verl.workers.config:McoreCriticConfig",
            "ppo_micro_batch_size_per_gpu, cliprange_value",
            "",
        ),
        Reach("tests/kit/resumption", How.NAMES, "verl.workers.utils.losses:value_loss", '"returns"', "a field"),
        Reach(
            "tests/kit/actor",
            How.CALLS,
            "verl.workers.config:McoreOptimizerConfig",
            "lr, total_training_steps, weight_decay, lr_warmup_steps, clip_grad, override_optimizer_config",
            "",
        ),
    ),
)

PLACES = (ACTOR, RESUME, CRITIC, BATCH, WORKER, CONFIG)
