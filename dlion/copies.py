"""What a device copies to the host by itself."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Copy:
    """One copy, under way."""

    values: Tensor
    written: torch.Event | None

    @staticmethod
    def of(values: Tensor) -> "Copy":
        """Begin to copy; `values` may change afterwards."""
        on_device = values.device.type != "cpu"
        there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=on_device)
        there.copy_(values, non_blocking=True)
        written = torch.Event(values.device) if on_device else None
        if written is not None:
            written.record(torch.accelerator.current_stream(values.device))  # else of the current device's
        return Copy(there, written)

    def arrived(self) -> Tensor:
        """The copy; it waits for the device to have come so far, and no further."""
        if self.written is not None:
            self.written.synchronize()
        return self.values

    def heard(self) -> list[Any]:
        """Its numbers; likewise."""
        return self.arrived().tolist()


def carried(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or a copy of it on `device`; what leaves an accelerator goes into pinned memory, at its full rate."""
    leaves = device.type == "cpu" and tensor.device.type != "cpu"
    return Copy.of(tensor).arrived() if leaves else tensor.to(device)
