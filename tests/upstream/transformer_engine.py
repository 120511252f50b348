"""Gradients out of Transformer Engine's layers: compared only where it is installed, and in tests/actor/te."""

from tests.upstream.reach import How, Place, Reach

_MODULES = "transformer_engine.pytorch.module"
_OPS = "transformer_engine.pytorch.ops.basic"
_TE = "transformer_engine.pytorch"

LAYERS = Place(
    "verl/verl_vcpo/actor/norms/te_modules.py",
    "What the backwards of `linear.py` and `layernorm_linear.py` do around `wgrad_store.put`: nothing else may form a "
    "gradient of weight and bias, and the norm's backward comes after it.",
    (
        *(
            Reach(
                "Store",
                How.NAMES,
                f"{_MODULES}.{name}",
                "ctx.wgrad_store.put([" + tensors + ", grad_output], wgrad_gemm)",
                "replaced on every layer; asked in the backward only",
            )
            for name, tensors in (("linear", "inputmat_total"), ("layernorm_linear", "ln_out_total"))
        ),
        *(
            Reach("Store", How.NAMES, f"{_MODULES}.{name}", "ctx.wgrad_store.delay_wgrad_compute()", "as above")
            for name in ("linear", "layernorm_linear")
        ),
        Reach(
            "Store",
            How.NAMES,
            f"{_MODULES}.grouped_linear",
            "ctx.wgrad_store.put([inputmats, grad_output, wgrad_list], grouped_gemm_wgrad)",
            "as above; the third list is returned to autograd",
        ),
        Reach("Store", How.NAMES, f"{_MODULES}.grouped_linear", "ctx.wgrad_store.delay_wgrad_compute()", "as above"),
        Reach("Store", How.NAMES, f"{_TE}:GroupedLinear", 'f"weight{i}"', "a parameter's name"),
        Reach("Store", How.USES, f"{_TE}:GroupedLinear.num_gemms", "", "the number of experts"),
        *(
            Reach("Store", How.USES, f"{_TE}:{layer}.{name}", "", "the layer's")
            for layer in ("Linear", "LayerNormLinear", "GroupedLinear")
            for name in ("wgrad_store", "use_bias", "apply_bias", "parallel_mode")
        ),
        *(
            Reach("Store", How.NAMES, f"{_TE}:{layer}", f'"{name}"', "a parameter's name")
            for layer in ("Linear", "LayerNormLinear")
            for name in ("weight", "bias")
        ),
        *(
            Reach("Extension", How.NAMES, f"{_TE}:LayerNormLinear", name, "the fused norm's")
            for name in ('"layer_norm_weight"', '"layer_norm_bias"', "self.sequence_parallel = ")
        ),
        Reach("_obstacle", How.USES, f"{_TE}:Linear.gemm_bias_unfused_add", "", "a bias of a row-parallel layer"),
        Reach("extension", How.USES, f"{_MODULES}:layernorm_linear.tex", "", "replaced: norms' backwards are seen"),
        Reach("Extension", How.NAMES, f"{_MODULES}.layernorm_linear", "dgrad, dgamma = tex.rmsnorm_bwd(", "called so"),
        Reach("Extension", How.NAMES, f"{_MODULES}.layernorm_linear", "dgrad, dgamma, dbeta = tex.layernorm_bwd(", ""),
        Reach("TappedRMSNorm", How.SUBCLASSES, f"{_TE}:RMSNorm", "", "`__class__` of a module is set"),
        Reach("TappedLayerNorm", How.SUBCLASSES, f"{_TE}:LayerNorm", "", "as above"),
        Reach("_TappedNorm", How.CALLS, f"{_TE}:RMSNorm.op_backward", "ctx, grad_output", "and overrides it"),
        Reach("_TappedNorm", How.CALLS, f"{_TE}:LayerNorm.op_backward", "ctx, grad_output", "and overrides it"),
        Reach("_TappedNorm", How.NAMES, f"{_OPS}.rmsnorm", "x, rstdevs = ctx.saved_tensors", "its order"),
        Reach("_TappedNorm", How.NAMES, f"{_OPS}.layer_norm", "x, means, rstdevs = ctx.saved_tensors", "its order"),
    ),
    only="transformer_engine",
)

CHECK = Place(
    "verl/verl_vcpo/actor/norms/te_check.py",
    "How the layers are built: the check builds one of each kind.",
    (
        Reach(
            "what_is_wrong",
            How.CALLS,
            f"{_TE}:Linear",
            "in_features, out_features, init_method, bias, params_dtype, device",
            "a small one",
        ),
        Reach(
            "what_is_wrong",
            How.CALLS,
            f"{_TE}:LayerNormLinear",
            "in_features, out_features, init_method, bias, normalization, params_dtype, device",
            "a small one",
        ),
        Reach(
            "what_is_wrong",
            How.CALLS,
            f"{_TE}:GroupedLinear",
            "num_gemms, in_features, out_features, init_method, bias, params_dtype, device",
            "a small one, for a mixture of experts",
        ),
        Reach("_backward", How.CALLS, f"{_TE}:GroupedLinear.forward", "inp, m_splits", "rows of each expert"),
    ),
    only="transformer_engine",
)

STAND_IN = Place(
    "tests/kit/te_on_cpu.py",
    "Which names of the compiled extension the modules call, with which arguments in which order.",
    (
        Reach("_accept_cpu", How.USES, f"{_TE}:optimizers", "", "without its CUDA kernels"),
        Reach("_accept_cpu", How.USES, f"{_TE}:utils._empty_tensor", "", "replaced: on the CPU"),
        Reach("_accept_cpu", How.USES, f"{_TE}.cpp_extensions:gemm.get_cublas_workspace", "", "replaced"),
        Reach("_accept_cpu", How.USES, f"{_TE}.cpp_extensions:gemm.get_sm_count", "", "replaced"),
        Reach("_accept_cpu", How.USES, f"{_MODULES}:base.TransformerEngineBaseModule", "", "asks for CUDA"),
        Reach("_accept_cpu", How.USES, f"{_MODULES}:linear.get_dummy_wgrad", "", "replaced: NaN"),
        Reach("_accept_cpu", How.USES, f"{_MODULES}:grouped_linear.get_dummy_wgrad", "", "as above"),
        Reach("te_general_grouped_gemm", How.NAMES, f"{_TE}.cpp_extensions.gemm", "tex.te_general_grouped_gemm(", "so"),
        Reach("install", How.NAMES, "transformer_engine.common", "NVTE_PROJECT_BUILDING", "loads no library"),
    ),
    only="transformer_engine",
)

STACK = Place(
    "tests/kit/te_stack.py",
    "The layer specification that mbridge builds: attention is exchanged.",
    (
        Reach("TEQwen2Bridge", How.SUBCLASSES, "mbridge.models.qwen2:Qwen2Bridge", "", "registered in place of ours"),
        Reach("TEQwen3Bridge", How.SUBCLASSES, "mbridge.models.qwen3:Qwen3Bridge", "", "as above"),
        Reach("TEQwen3MoEBridge", How.SUBCLASSES, "mbridge.models.qwen3moe:Qwen3MoEBridge", "", "as above"),
    ),
    only="transformer_engine",
)

PLACES = (LAYERS, CHECK, STAND_IN, STACK)
