"""The tap of a model for per-sequence gradients.

Megatron's own layers are in modules.py, Transformer Engine's in te_modules.py, mixtures of experts in experts.py.
"""

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_te_version

from verl_vcpo.actor.taps import experts
from verl_vcpo.actor.taps.modules import (
    ColumnParallelLinear,
    RowParallelLinear,
    Tap,
    Tapped,
    TappedLinear,
    TappedNorm,
    VocabParallelEmbedding,
    adds_bias_elsewhere,
    is_norm_of_heads,
)

_TAPPED: dict[type, type] = {
    layers.ColumnParallelLinear: ColumnParallelLinear,
    layers.RowParallelLinear: RowParallelLinear,
    layers.VocabParallelEmbedding: VocabParallelEmbedding,
    **experts.TAPPED,
}


def plug_in(chunks: list[torch.nn.Module]) -> Tap:
    """Tap a model: its linear layers, embedding and norms give gradients to the tap's collector, while there is one.

    Returns:
        The tap. A tap whose `untapped` names a gradient that cannot be collected must not get a collector.
    """
    tap = Tap()
    for name, module in _modules(chunks):
        if not adds_bias_elsewhere(module):
            module.__class__ = _TAPPED.get(type(module), type(module))
        if isinstance(module, Tapped):
            module.tap = tap
        if isinstance(module, TappedLinear):
            module.is_head = name.endswith("output_layer")
        if isinstance(module, TappedNorm):
            module.heads = is_norm_of_heads(name)
    of_te = HAVE_TE and any(_is_of_te(module) for _, module in _modules(chunks))
    if of_te:
        tap.layers = f"the layers of Transformer Engine {get_te_version()}"
    tap.untapped = (_plug_in_te(chunks, tap) if of_te else None) or _left_over(chunks)
    return tap


def _modules(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Return (name, module) of all modules."""
    return [pair for chunk in chunks for pair in chunk.named_modules()]


def _plug_in_te(chunks: list[torch.nn.Module], tap: Tap) -> str | None:
    """Tap Transformer Engine's layers. Returns why a layer's gradients cannot be collected, or None."""
    try:
        from verl_vcpo.actor.taps import te_check, te_modules

        of_experts = experts.layers_of_experts(chunks)
        wrong = te_check.what_is_wrong(grouped=bool(of_experts))
        if wrong is None:
            return te_modules.plug_in(chunks, tap, of_experts)
    except Exception as error:  # of another version than the pinned one: it may raise anything
        wrong = f"{type(error).__name__}: {error}"
    return f"{tap.layers} give no usable gradients: {wrong}"


def _is_of_te(module: torch.nn.Module) -> bool:
    """Return True for layers of Transformer Engine with parameters; its attention, which local layers use, has none."""
    if not any(True for _ in module.parameters(recurse=False)):
        return False
    return any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__)


def _left_over(chunks: list[torch.nn.Module]) -> str | None:
    """Return a trained parameter that belongs to no tapped module, in words; None if there is none."""
    tapped = {
        parameter
        for _, module in _modules(chunks)
        if isinstance(module, Tapped) or isinstance(getattr(module, "wgrad_store", None), Tapped)
        for parameter in module.parameters(recurse=False)
    }
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter not in tapped:
                    return f"{name}.{key} belongs to a {type(module).__module__}.{type(module).__name__}"
    return None
