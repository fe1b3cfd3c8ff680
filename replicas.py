"""What torch refuses to do without accelerators, done for real on the CPU, so that tests can prove those paths on any machine."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import common


class WithLoss(nn.Module):
    """The network with its per-sample loss, so that a replica computes it where its outputs are.

    Without it, all outputs are gathered on the first device, which then needs more memory than the rest and computes every loss.
    """

    def __init__(self, args: Namespace, net: nn.Module, task: Namespace, device: torch.device) -> None:
        super().__init__()
        self.args, self.net, self.task, self.device = args, net, task, device

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        with common.autocast(self.args, self.device):  # again: nn.DataParallel's threads forget the chosen type (bf16 became fp16)
            return self.task.per_sample_loss(self.net(inputs), targets)


class DataParallel(nn.DataParallel):
    """`nn.DataParallel` over the accelerators, or over N replicas on the CPU, where torch itself would pass straight through to the module.

    `forward` stays torch's; on the CPU its four device steps are replaced by copies of what they do. Each replica has its own
    random stream, replica r that of rank r of a DDP run: seeded alike, all replicas would drop the same units.
    """

    def __init__(self, module: nn.Module, replicas: int, device: torch.device) -> None:
        if device.type == "cpu":
            nn.Module.__init__(self)
            self.module, self.dim, self.device_ids = module, 0, list(range(replicas))
            self.output_device = self.src_device_obj = device
        else:
            super().__init__(module, range(replicas))
        self.on_cpu = device.type == "cpu"

    def scatter(self, inputs: tuple, kwargs: dict[str, Any], device_ids: list[int]) -> tuple[tuple, tuple]:
        if not self.on_cpu:
            return super().scatter(inputs, kwargs, device_ids)
        return (pieces := _chunk(inputs, len(device_ids))), tuple({} for _ in pieces)

    def replicate(self, module: nn.Module, device_ids: list[int]) -> list:
        """Parameters are shared, so that gradients add up in them; replica 0 updates the module's buffers, the rest have copies."""
        if not self.on_cpu:
            return super().replicate(module, device_ids)
        buffers = dict(module.named_buffers())
        return [{name: buffer.clone() if r else buffer for name, buffer in buffers.items()} for r, _ in enumerate(device_ids)]

    def parallel_apply(self, replicas: list, inputs: tuple, kwargs: tuple) -> list:
        seed = torch.initial_seed()
        if not self.on_cpu:
            accelerator = torch.get_device_module(self.src_device_obj)
            for r, index in enumerate(self.device_ids):
                with accelerator.device(index):
                    accelerator.manual_seed(seed + r)
            return super().parallel_apply(replicas, inputs, kwargs)
        outputs = []
        for r, (buffers, piece) in enumerate(zip(replicas, inputs)):
            common.seed_generators(seed + r)
            outputs.append(functional_call(self.module, buffers, piece))
        return outputs

    def gather(self, outputs: list, output_device: Any) -> Any:
        if not self.on_cpu:
            return super().gather(outputs, output_device)
        return torch.cat(outputs)


def _chunk(values: Any, most: int) -> tuple[Any, ...]:
    """Cut the tensors of nested values as `nn.DataParallel` does: along the first dimension by `torch.chunk`, into `most` or fewer."""
    counts = []
    common.map_tensors(lambda tensor: counts.append(len(tensor.chunk(most))), values)
    return tuple(common.map_tensors(lambda tensor, r=r: tensor.chunk(most)[r], values) for r in range(counts[0]))


class AllReduceSum(torch.autograd.Function):
    """Sum over all ranks, with the gradient summed over all ranks too: every rank's loss depends on every rank's input."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`nn.SyncBatchNorm` for CPU tensors, which torch's own refuses: statistics over the global batch, by differentiable all-reduce.

    [n, C, ...] -> [n, C, ...]; n may differ between ranks. Source: Ioffe and Szegedy, arXiv:1502.03167, over all ranks' samples.
    """

    def _check_input_dim(self, value: Tensor) -> None:
        if value.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {value.dim()}")

    def forward(self, value: Tensor) -> Tensor:
        self._check_input_dim(value)
        if not self.training or not (dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(value)
        dims = [0, *range(2, value.dim())]
        shape = [1, -1] + [1] * (value.dim() - 2)
        given, value = value.dtype, value.to(torch.promote_types(value.dtype, torch.float32))  # sums overflow in half precision
        count = torch.full((1,), value.numel() / value.shape[1], dtype=value.dtype)
        total = AllReduceSum.apply(torch.cat([value.sum(dims), count]))
        mean, n = total[:-1] / total[-1], total[-1].item()
        centred = value - mean.view(shape)
        variance = AllReduceSum.apply(centred.square().sum(dims)) / n
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_((variance * (n / (n - 1))).to(self.running_var.dtype), factor)  # unbiased, as nn.BatchNorm keeps it
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        return (normalised * self.weight.view(shape) + self.bias.view(shape) if self.affine else normalised).to(given)


def convert_sync_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module with every BatchNorm synchronised over the ranks; parameter and buffer names stay."""
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.__class__ = SyncBatchNorm  # the same parameters, buffers and settings under another forward
    return module
