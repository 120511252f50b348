"""Gradients, layers, weights: what our engine depends on in Megatron and mbridge."""

from tests.upstream.experts import EXPERTS
from tests.upstream.reach import How, Place, Reach

MPU, LAYERS = "megatron.core.parallel_state", "megatron.core.tensor_parallel.layers"
DDP = "megatron.core.distributed:DistributedDataParallel"
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
RANDOM = "megatron.core.tensor_parallel.random"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
BRIDGE, LLM_BRIDGE = "mbridge.core.bridge:Bridge", "mbridge.core.llm_bridge:LLMBridge"
LLAMA = "mbridge.models.llama"

GROUPS = tuple(
    Reach("(several files)", How.CALLS, f"{MPU}:{name}", "", "parallel groups, sizes and ranks")
    for name in (
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "get_embedding_group",
        "get_expert_data_parallel_group",
        "get_expert_data_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_expert_tensor_and_model_parallel_group",
        "get_expert_tensor_parallel_world_size",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_and_context_parallel_group",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_virtual_pipeline_model_parallel_world_size",
        "is_rank_in_embedding_group",
    )
)

GRADIENTS = Place(
    "verl/verl_vcpo/actor/norms/per_trajectory.py, norms/update.py, norms/collector.py",
    "When Megatron reduces gradients over ranks and stages (`finalize_model_grads`), and what it adds in a backward.",
    (
        *GROUPS,
        Reach(
            "_squared_norms",
            How.CALLS,
            "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate",
            "param",
            "",
        ),
        Reach(
            "_squared_norms", How.CALLS, "megatron.core.transformer.module:param_is_not_shared", "param", "counted once"
        ),
        Reach(
            "_squared_norms", How.NAMES, "megatron.core.distributed.param_and_grad_buffer", "param.main_grad", "buffers"
        ),
        Reach("_is_expert", How.NAMES, LAYERS, '"allreduce"', "the mark of an expert's parameter"),
        Reach("(several files)", How.CALLS, "megatron.core.utils:get_model_config", "model", "the TransformerConfig"),
        Reach(
            "_sum_over_token_ranks",
            How.REPLACES,
            f"{DDP}.finish_grad_sync",
            "",
            "on the instance, for one measurement: sums over the ranks of one sequence, not over data-parallel ones",
        ),
        Reach("_without_reduction", How.CALLS, f"{DDP}.no_sync", "", "no reduction that starts in the backward"),
        Reach("_sum_over_token_ranks", How.USES, f"{DDP}.buffers", "", "with `grad_data`"),
        Reach("_sum_over_token_ranks", How.USES, f"{DDP}.expert_parallel_buffers", "", "as above"),
        Reach("_why_not_packed", How.USES, f"{DDP}.ddp_config", "", "`overlap_grad_reduce`"),
        *(
            Reach(
                "_SWITCHED_OFF",
                How.REPLACES,
                f"{CONFIG}.{name}",
                "",
                "regularisers and reductions, off for a measurement",
            )
            for name in ("no_sync_func", "grad_sync_func", "moe_aux_loss_coeff", "moe_z_loss_coeff")
        ),
        Reach("_SWITCHED_OFF", How.REPLACES, f"{CONFIG}.moe_router_enable_expert_bias", "", "as above"),
        Reach("_finalized_once", How.REPLACES, f"{CONFIG}.finalize_model_grads_func", "", "once, after the last pass"),
        Reach(
            "_finalized_once",
            How.CALLS,
            "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            "model",
            "what is put off: it needs nothing that the next pass changes",
        ),
        Reach("_copies", How.USES, f"{CONFIG}.microbatch_group_size_per_vp_stage", "", "interleaved pipelines"),
        Reach(
            "_pass",
            How.NAMES,
            "megatron.core.pipeline_parallel.schedules",
            "forward_step_func(",
            "output, loss function",
        ),
    ),
)

MODULES = Place(
    "verl/verl_vcpo/actor/norms/modules.py",
    "The forward of the linear layers and of the embedding: ours repeats the latter, and the frozen-weight product.",
    (
        Reach(
            "ColumnParallelLinear",
            How.SUBCLASSES,
            f"{LAYERS}:ColumnParallelLinear",
            "",
            "`__class__` of a module is set",
        ),
        Reach("ColumnParallelLinear.forward", How.OVERRIDES, f"{LAYERS}:ColumnParallelLinear.forward", "", "the bias"),
        Reach(
            "ColumnParallelLinear._forward_impl",
            How.OVERRIDES,
            f"{LAYERS}:ColumnParallelLinear._forward_impl",
            "",
            "product",
        ),
        Reach("RowParallelLinear", How.SUBCLASSES, f"{LAYERS}:RowParallelLinear", "", "as above"),
        Reach("RowParallelLinear.forward", How.OVERRIDES, f"{LAYERS}:RowParallelLinear.forward", "", "the bias"),
        Reach(
            "RowParallelLinear._forward_impl", How.OVERRIDES, f"{LAYERS}:RowParallelLinear._forward_impl", "", "product"
        ),
        Reach("VocabParallelEmbedding", How.SUBCLASSES, f"{LAYERS}:VocabParallelEmbedding", "", "as above"),
        Reach("VocabParallelEmbedding.forward", How.OVERRIDES, f"{LAYERS}:VocabParallelEmbedding.forward", "", "rows"),
        Reach(
            "TappedLinear",
            How.NAMES,
            f"{LAYERS}:ColumnParallelLinear.forward",
            "sequence_parallel=",
            "called by keyword",
        ),
        Reach(
            "TappedLinear",
            How.CALLS,
            f"{LAYERS}:linear_with_frozen_weight",
            "input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group",
            "the product whose backward forms no weight gradient",
        ),
        *(
            Reach(
                "VocabParallelEmbedding", How.USES, f"{LAYERS}:VocabParallelEmbedding.{name}", "", "which rows are here"
            )
            for name in ("vocab_start_index", "vocab_end_index", "reduce_scatter_embeddings", "tp_group")
        ),
        Reach("RowParallelLinear", How.USES, f"{LAYERS}:RowParallelLinear.skip_bias_add", "", "set, for one call"),
        Reach(
            "VocabParallelEmbedding",
            How.CALLS,
            "megatron.core.tensor_parallel.mappings:reduce_from_tensor_model_parallel_region",
            "input_, group",
            "",
        ),
        Reach(
            "VocabParallelEmbedding",
            How.CALLS,
            "megatron.core.tensor_parallel.mappings:reduce_scatter_to_sequence_parallel_region",
            "input_, group",
            "",
        ),
    ),
)

TAPPING = Place(
    "verl/verl_vcpo/actor/norms/tapping.py",
    "Names of modules, and whether Megatron still finds Transformer Engine where it is installed.",
    (
        Reach("plug_in", How.NAMES, "megatron.core.models.gpt.gpt_model", "self.output_layer", "the head's name"),
        Reach("plug_in", How.NAMES, "megatron.core.transformer.attention", "self.q_layernorm", "a norm's name"),
        Reach("plug_in", How.NAMES, "megatron.core.transformer.attention", "self.k_layernorm", "a norm's name"),
        Reach("_why_not_packed", How.USES, f"{CONFIG}.num_moe_experts", "= None", "whether there are experts"),
        Reach("_plug_in_te", How.CALLS, "megatron.core.utils:get_te_version", "", "for a message"),
        *(
            Reach("_why_not_packed", How.USES, f"{CONFIG}.{name}", f"= {value!r}", "what packed norms cannot do")
            for name, value in (("fp8", None), ("fp4", None), ("tp_comm_overlap", False), ("cuda_graph_impl", "none"))
        ),
        Reach("_why_not_packed", How.USES, f"{CONFIG}.softmax_type", "= 'vanilla'", "learnable: it has parameters"),
    ),
)

LOCAL = Place(
    "verl/verl_vcpo/actor/local_layers.py",
    "The names of the layer specification's parts.",
    (
        Reach(
            "RMSNorm", How.SUBCLASSES, "torch.nn:RMSNorm", "", "as Megatron builds a norm: (config, hidden_size, eps)"
        ),
        Reach("RMSNorm.__init__", How.OVERRIDES, "torch.nn:RMSNorm.__init__", "", "the parameter's mark"),
        Reach("RMSNorm.forward", How.OVERRIDES, "torch.nn:RMSNorm.forward", "", "in TappedNorm"),
        Reach(
            "layer_spec",
            How.CALLS,
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
            "num_experts, qk_layernorm, normalization",
            "Megatron's own layers",
        ),
        *(
            Reach(
                "layer_spec",
                How.USES,
                f"megatron.core.transformer.transformer_layer:TransformerLayerSubmodules.{n}",
                "",
                "set",
            )
            for n in ("input_layernorm", "pre_mlp_layernorm", "self_attention", "mlp")
        ),
        *(
            Reach(
                "layer_spec", How.USES, f"megatron.core.transformer.attention:SelfAttentionSubmodules.{name}", "", "set"
            )
            for name in ("core_attention", "q_layernorm", "k_layernorm")
        ),
        Reach("layer_spec", How.USES, "megatron.core.transformer.spec_utils:ModuleSpec.submodules", "", "set"),
        Reach(
            "block_spec",
            How.CALLS,
            "megatron.core.transformer.transformer_block:TransformerBlockSubmodules",
            "layer_specs, layer_norm",
            "a stage's layers",
        ),
        Reach(
            "block_spec",
            How.CALLS,
            "megatron.core.transformer.transformer_block:get_num_layers_to_build",
            "config, vp_stage",
            "a stage's layers",
        ),
        Reach("RMSNorm", How.USES, f"{CONFIG}.sequence_parallel", "= False", "whose gradient is summed over ranks"),
        Reach("RMSNorm", How.USES, f"{CONFIG}.params_dtype", "", "of the weight"),
        Reach("layer_spec", How.USES, f"{CONFIG}.qk_layernorm", "= False", "Qwen3"),
    ),
)

ATTENTION = Place(
    "verl/verl_vcpo/actor/varlen_attention.py",
    "The arguments with which Megatron's `SelfAttention` builds and calls its core attention.",
    (
        Reach("VarlenAttention", How.SUBCLASSES, "megatron.core.transformer.module:MegatronModule", "", "a module"),
        Reach(
            "VarlenAttention.__init__",
            How.OVERRIDES,
            "megatron.core.transformer.module:MegatronModule.__init__",
            "",
            "",
        ),
        Reach("VarlenAttention.forward", How.OVERRIDES, "torch.nn:Module.forward", "", "see the next row"),
        Reach(
            "VarlenAttention",
            How.CALLS,
            "megatron.core.transformer.dot_product_attention:DotProductAttention",
            "config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, "
            "cp_comm_type=None, pg_collection=None",
            "the module that it stands in for: the same arguments",
        ),
        Reach(
            "VarlenAttention.forward",
            How.CALLS,
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            "query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None",
            "the same arguments",
        ),
        *(
            Reach("VarlenAttention", How.USES, f"megatron.core.packed_seq_params:PackedSeqParams.{name}", "", "offsets")
            for name in ("qkv_format", "cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q")
        ),
        Reach(
            "VarlenAttention",
            How.CALLS,
            "megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups",
            "required_pgs",
            "the group of context parallelism",
        ),
        Reach(
            "VarlenAttention",
            How.CALLS,
            "megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region",
            "input_, tensor_parallel_output_grad=True, group",
            "its backward sums the ranks' gradients",
        ),
        Reach("VarlenAttention", How.USES, f"{CONFIG}.attention_dropout", "", "refused where not 0"),
        Reach("VarlenAttention", How.USES, f"{CONFIG}.window_size", "= None", "refused"),
        Reach("VarlenAttention", How.USES, f"{CONFIG}.kv_channels", "", "the softmax's scale"),
    ),
)

NAMES_OF_WEIGHTS = tuple(
    Reach(f"{ours}.{name}", How.OVERRIDES, f"{theirs}.{name}", "", why)
    for ours, base in (
        ("LocalQwen2Bridge", "mbridge.models.qwen2:Qwen2Bridge"),
        ("LocalQwen3Bridge", BRIDGE),
        ("LocalLlamaBridge", BRIDGE),
    )
    for name, theirs, why in (
        ("_adjust_mapping_for_shared_weights", base, "theirs changes a dictionary of the class"),
        ("_weight_name_mapping_mcore_to_hf", BRIDGE, "theirs takes `pre_mlp_layernorm` for an MLP's weight"),
        ("_get_transformer_layer_spec", LLM_BRIDGE, "transformer_impl=local"),
        ("_OTHER_MAPPING", BRIDGE, "names that Transformer Engine fuses"),
    )
)

BRIDGES = Place(
    "verl/verl_vcpo/actor/bridge.py",
    "Which models mbridge registers, and how it maps names of weights.",
    (
        Reach("LocalQwen2Bridge", How.SUBCLASSES, "mbridge.models.qwen2:Qwen2Bridge", "", "Qwen2, Qwen2.5"),
        Reach("LocalQwen3Bridge", How.SUBCLASSES, "mbridge.models.qwen3:Qwen3Bridge", "", "Qwen3, dense"),
        Reach("LocalLlamaBridge", How.SUBCLASSES, f"{LLAMA}:LLaMABridge", "", "Llama; LlamaBridge is between them"),
        Reach("LocalQwen2Bridge", How.REGISTERS, "mbridge.core:register_model", "model_types", "in place of mbridge's"),
        *NAMES_OF_WEIGHTS,
        Reach("UnfusedNames", How.CALLS, f"{BRIDGE}._weight_name_mapping_other", "name", "of norms"),
        Reach("UnfusedNames", How.USES, f"{BRIDGE}._DIRECT_MAPPING", "", "copied for each instance"),
        Reach("_LocalLayers", How.NAMES, LLM_BRIDGE, "self.has_vp_stage", "set, as theirs does"),
        Reach("_LocalLayers", How.USES, f"{CONFIG}.transformer_impl", "= 'transformer_engine'", "asks for `local`"),
        Reach("ATTENTION", How.USES, "megatron.core.extensions.transformer_engine:HAVE_TE", "", "whose attention"),
        Reach(
            "ATTENTION",
            How.CALLS,
            "megatron.core.extensions.transformer_engine:TEDotProductAttention",
            "config, layer_number, attn_mask_type, attention_type",
            "on GPUs",
            only="transformer_engine",
        ),
        Reach(
            "ATTENTION", How.USES, "megatron.core.extensions.transformer_engine:TEDotProductAttention", "", "imported"
        ),
    ),
)

LLAMA_BRIDGE = Place(
    "verl/verl_vcpo/actor/llama.py",
    "Whether mbridge builds the scaled positions of Llama 3.1 by itself; the constants of Megatron's scaling.",
    (
        Reach("LlamaBridge", How.SUBCLASSES, f"{LLAMA}:LLaMABridge", "", "with scaled positions"),
        Reach(
            "LlamaBridge._get_gptmodel_args",
            How.OVERRIDES,
            f"{LLAMA}:LLaMABridge._get_gptmodel_args",
            "",
            "the scaling",
        ),
        Reach("LlamaBridge", How.USES, f"{BRIDGE}.hf_config", "", "rope_parameters"),
    ),
)

POSITIONS = Place(
    "verl/verl_vcpo/actor/rotary.py",
    "Constants of Megatron's scaling of rotary positions.",
    (
        Reach(
            "scaling",
            How.CALLS,
            "megatron.core.models.gpt.gpt_model:GPTModel",
            "config, transformer_layer_spec, vocab_size, max_sequence_length, rope_scaling, rope_scaling_factor, "
            "seq_len_interpolation_factor",
            "through mbridge, which gives the first four",
        ),
        Reach(
            "_OF_MEGATRON",
            How.CALLS,
            "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding._apply_scaling",
            "freqs, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192",
            "defaults that nobody changes",
        ),
    ),
)

PLACES = (GRADIENTS, MODULES, TAPPING, EXPERTS, LOCAL, ATTENTION, BRIDGES, LLAMA_BRIDGE, POSITIONS)
