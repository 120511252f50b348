"""Mixtures of experts: what packed norms depend on in Megatron's layers of experts, routers and dispatchers."""

from tests.upstream.reach import How, Place, Reach

_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
_MOE = "megatron.core.transformer.moe"
_ALLTOALL = f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher"

EXPERTS = Place(
    "verl/verl_vcpo/actor/norms/experts.py",
    "Which methods of the dispatcher a token passes on its way to an expert, that these need no more than a tensor of "
    "rows, and that the second dispatch replaces all that the first has left in the dispatcher.",
    (
        Reach("TappedMoELayer", How.SUBCLASSES, f"{_MOE}.moe_layer:MoELayer", "", "`__class__` of a module is set"),
        Reach("TappedMoELayer.preprocess", How.OVERRIDES, f"{_MOE}.moe_layer:MoELayer.preprocess", "", "before it"),
        Reach(
            "TappedMoELayer.routed_experts_compute",
            How.OVERRIDES,
            f"{_MOE}.moe_layer:MoELayer.routed_experts_compute",
            "",
            "around it",
        ),
        *(
            Reach("TappedMoELayer", How.NAMES, f"{_MOE}.moe_layer:MoELayer", called, "a step of the forward")
            for called in (
                "self.preprocess(hidden_states, probs, routing_map)",
                "self.token_dispatcher.dispatch_preprocess(",
                "self.token_dispatcher.token_dispatch(hidden_states, probs)",
                "self.routed_experts_compute(dispatched_input, probs)",
                "self.token_dispatcher.dispatch_postprocess(hidden_states, probs)",
            )
        ),
        Reach(
            "_dispatch_numbers", How.CALLS, f"{_ALLTOALL}.dispatch_preprocess", "hidden_states, routing_map, probs", ""
        ),
        Reach(
            "_dispatch_numbers",
            How.CALLS,
            f"{_ALLTOALL}.token_dispatch",
            "permutated_local_input_tokens, permuted_probs",
            "rows and weights",
        ),
        Reach(
            "_dispatch_numbers",
            How.CALLS,
            f"{_ALLTOALL}.dispatch_postprocess",
            "global_input_tokens, global_probs",
            "rows by expert, and how many each has",
        ),
        Reach("linear_layers", How.USES, f"{_MOE}.experts:SequentialMLP.local_experts", "", "MLPs"),
        Reach("linear_layers", How.USES, f"{_MOE}.experts:TEGroupedMLP.linear_fc1", "", "and linear_fc2"),
        Reach("linear_layers", How.NAMES, "megatron.core.transformer.mlp", "self.linear_fc1", "and linear_fc2"),
        Reach("TappedRouter", How.SUBCLASSES, f"{_MOE}.router:TopKRouter", "", "`__class__` of a module is set"),
        Reach("TappedRouter.gating", How.OVERRIDES, f"{_MOE}.router:TopKRouter.gating", "", "with a detached weight"),
        Reach(
            "TappedRouter",
            How.CALLS,
            f"{_MOE}.moe_utils:router_gating_linear",
            "inp, weight, bias, router_dtype",
            "as theirs does",
        ),
        *(
            Reach("TappedRouter", How.NAMES, f"{_MOE}.router", text, "the layout and format of its rows")
            for text in ("self.tp_group", "self.config.moe_router_dtype == 'fp32'", "== 'fp64'")
        ),
        Reach("TappedSharedExpert", How.SUBCLASSES, f"{_MOE}.shared_experts:SharedExpertMLP", "", "as above"),
        Reach(
            "TappedSharedExpert.forward",
            How.OVERRIDES,
            f"{_MOE}.shared_experts:SharedExpertMLP.forward",
            "",
            "theirs runs without the gate",
        ),
        *(
            Reach("TappedSharedExpert", How.NAMES, f"{_MOE}.shared_experts", text, "the gate")
            for text in ("self.use_shared_expert_gate", "self.gate_weight", "output * gate_score")
        ),
        *(
            Reach("NOT_PACKED_EXPERTS", How.USES, f"{_CONFIG}.{name}", f"= {value!r}", "what packed norms cannot do")
            for name, value in (
                ("moe_z_loss_coeff", None),
                ("moe_expert_capacity_factor", None),
                ("moe_pad_expert_input_to_capacity", False),
                ("moe_router_padding_for_quantization", False),
                ("moe_router_enable_expert_bias", False),
                ("moe_shared_expert_overlap", False),
                ("overlap_moe_expert_parallel_comm", False),
                ("moe_latent_size", None),
                ("moe_use_legacy_grouped_gemm", False),
                ("add_bias_linear", True),
            )
        ),
        Reach("obstacle", How.USES, f"{_CONFIG}.moe_router_load_balancing_type", "= 'aux_loss'", "a name or a list"),
        Reach("obstacle", How.USES, f"{_CONFIG}.moe_aux_loss_coeff", "= 0.0", "a number or a list"),
        Reach("obstacle", How.USES, f"{_CONFIG}.moe_token_dispatcher_type", "= 'allgather'", "alltoall"),
        *(
            Reach("obstacle", How.NAMES, f"{_MOE}.router", f'"{name}"', "a loss")
            for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")
        ),
    ),
)
