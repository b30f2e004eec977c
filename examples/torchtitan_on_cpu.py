"""Let torchtitan 0.3.0 train without a GPU: import this before torchtitan, to try an example."""

import torch
from torch.distributed.fsdp import FSDPModule


class _Properties:
    name, total_memory = "CPU", 1 << 34


torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_properties = lambda device=None: _Properties
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None


_divide = FSDPModule.set_gradient_divide_factor


def _divide_on_gloo(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    _divide(module, factor)


FSDPModule.set_gradient_divide_factor = _divide_on_gloo
