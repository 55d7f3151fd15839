"""The training with Megatron-core: --tp ranks share each layer, --pp stages share the layers, the others are replicas.

torchrun --nproc-per-node 2 with_megatron.py --model gpt_tiny -b 16 -s 20 --tp 2
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dlojz.libraries import course_training
from dlojz.libraries.megatron_adapter import cuda_is_the_cpu, load_weights, model_options, table_options


def forward_step(batches: Iterator[Any], model: nn.Module, device: torch.device) -> tuple[Tensor, Any]:
    """Pass one micro-batch through this rank's stage; returns the losses, and their mean for the last stage."""
    tokens_BT, targets_BT = (tensor.to(device) for tensor in next(batches))
    length = tokens_BT.shape[1]
    positions_BT = torch.arange(length, device=device).expand_as(tokens_BT)
    later_11TT = torch.ones(1, 1, length, length, device=device).triu(1).bool()  # True is masked
    # Losses (B, T) on the last stage; on any other its hidden states, which the schedule sends on.
    losses_BT = model(tokens_BT, positions_BT, later_11TT, labels=targets_BT)

    def mean(losses_BT: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses_BT.mean()
        return loss, loss.detach().clone()  # the schedule divides the loss itself by the number of micro-batches

    return losses_BT, mean


def known_to_all(losses: Sequence[Tensor], number: int, device: torch.device) -> Tensor:
    """Broadcast the micro-batches' losses, which only the last stage has."""
    step_losses = torch.stack(list(losses)) if losses else torch.zeros(number, device=device)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        # Who: the stages of a pipeline. What: the losses of a step. How much: 4 bytes per micro-batch.
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(step_losses, source, group=parallel_state.get_pipeline_model_parallel_group())
    return step_losses


def main(words: Sequence[str] | None = None) -> nn.Module:
    """Train as the command line says; returns the trained model of this rank."""
    parser = course_training.parser()
    parser.add_argument("--tp", type=int, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, help="stages of the pipeline")
    args = parser.parse_args(words)
    device = course_training.device(args)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with cuda_is_the_cpu():  # nothing, where there is a GPU
        return train(args, device)


def train(args: Any, device: torch.device) -> nn.Module:
    """Train in the process groups that are set up."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout to draw
    lab_model = course_training.build_model(args).network
    config = TransformerConfig(
        **model_options(lab_model),
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        **table_options(lab_model),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    load_weights(model, lab_model)
    del lab_model  # of which this rank keeps its part
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(device))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=args.lr, weight_decay=args.weight_decay, clip_grad=0.0), [model]
    )
    batches = iter(
        course_training.data_loader(
            args, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        )
    )

    forward_backward = get_forward_backward_func()
    for _ in range(args.steps):
        # The gradients are in DDP's buffer, which the optimizer's `zero_grad` does not reach.
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=partial(forward_step, device=device),
            data_iterator=batches,
            model=model,
            num_microbatches=args.accumulation,
            seq_length=args.sequence_length or model.module.max_sequence_length,
            micro_batch_size=args.batch_size,
            forward_only=False,
        )
        optimizer.step()
        for loss in known_to_all(losses, args.accumulation, device):
            course_training.report(loss)
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
