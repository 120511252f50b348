"""Weight updates of vLLM's CPU worker; vLLM gets the class by name, as `worker_extension_cls`.

vLLM repacks linear weights on CPU and empties the originals, so verl's plain `load_weights` finds nothing to load
into: the update has to go through vLLM's layer-wise reload. That reload alone leaves two kinds of layers with the
weights that vLLM started with: experts, and an output layer that is tied to the embedding, which is not sent.
"""

from typing import Any

import numpy as np
import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from verl_vcpo.cpu.weight_file import weights_of
from verl_vcpo.samplers.vllm_worker import LagKWorkerExtension

# verl's loader of adapters calls the method by the name that the GPUs' vLLM has.
WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
_sample_tokens = CPUModelRunner.sample_tokens


def _without_seeds_of_parts(runner: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Draw the token that vLLM throws away after a part of a prompt from no request's own generator.

    vLLM sets the generator of a request with a seed (async.deterministic) back by its offset, which none on CPU has.
    """
    generators = runner.input_batch.generators
    in_parts = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    kept = {index: generators.pop(index) for index in map(int, in_parts) if index in generators}
    try:
        return _sample_tokens(runner, *args, **kwargs)
    finally:
        generators |= kept


CPUModelRunner.sample_tokens = _without_seeds_of_parts

_RECEIVE_TIMEOUT_MS = 300_000

DEVICE_REASONS = {
    "CPUWorkerExtension.update_weights_from_ipc": "vLLM's CPU kernels repack weights; CUDA IPC needs a GPU",
}


class _Receiver(BucketedWeightReceiver):
    """verl's receiver with a limit on the wait for the next weights, in case their sender has died."""

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket.setsockopt(zmq.RCVTIMEO, _RECEIVE_TIMEOUT_MS)

    def receive_weights(self, on_bucket_received: Any) -> None:
        try:
            super().receive_weights(on_bucket_received=on_bucket_received)
        except zmq.Again:
            raise TimeoutError(
                f"vLLM's worker waited {_RECEIVE_TIMEOUT_MS / 1000:g} s for the next weights on {self.zmq_handle}: "
                "their sender died"
            ) from None


class CPUWorkerExtension(LagKWorkerExtension):
    """The worker extension with the reload that CPU weights need."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = True
    ) -> None:
        """Replace all weights of the served model, or its adapters, by those that the trainer sends.

        Raises:
            TimeoutError: the sender stopped.
        """
        model = self.model_runner.model
        receiver = _Receiver(zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm)
        if peft_config:
            self._replace_adapters(receiver, peft_config)
            return

        def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            model.load_weights(weights_of(weights))

        with set_current_vllm_config(self.vllm_config):
            _forget_packed_experts(model)
            initialize_layerwise_reload(model)
            receiver.receive_weights(on_bucket_received=load)
            finalize_layerwise_reload(model, self.model_config)
        _repack_tied_heads(model)

    def _replace_adapters(self, receiver: _Receiver, peft_config: dict[str, Any]) -> None:
        adapters: dict[str, torch.Tensor] = {}
        receiver.receive_weights(on_bucket_received=lambda sent, is_last: adapters.update(weights_of(sent)))
        self.remove_lora(VLLM_LORA_INT_ID)
        self._update_weights(list(adapters.items()), peft_config=peft_config, base_sync_done=True)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Take the kernel from each layer of experts: vLLM packs experts that it loads only where there is none yet."""
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            layer.quant_method.moe_kernel = None


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the output layer's weight again where it is the embedding's: vLLM's packed copy has older weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = [layer.weight for layer in layers if not isinstance(layer, ParallelLMHead)]
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and any(layer.weight is weight for weight in embeddings):
            layer.quant_method.process_weights_after_loading(layer)
