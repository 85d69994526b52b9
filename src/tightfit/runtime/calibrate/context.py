"""Memory of a CUDA process outside torch's allocator, measured in a process of its own.

`python -m tightfit.runtime.calibrate.context` prints the bytes of the process it runs in.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch.nn import functional

from tightfit.core.units import GIB, MIB
from tightfit.hardware.nvml import read_driver

MODULE = "tightfit.runtime.calibrate.context"
TIMEOUT_SECONDS = 60.0
LEAST_BYTES, MOST_BYTES = 32 * MIB, 4 * GIB
"""Outside of this range, another process allocated or freed memory meanwhile."""


def measure_context() -> tuple[int | None, str]:
    """The bytes, or None and the reason."""
    # NVML orders GPUs by PCI bus; CUDA must do so too.
    environ = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            capture_output=True,
            text=True,
            env=environ,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"the CUDA context: {error}"
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode != 0 or not last[0].isdecimal():
        lines = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return None, f"the CUDA context: {lines[0][:200]}"
    size = int(last[0])
    if not LEAST_BYTES <= size <= MOST_BYTES:
        return None, "the CUDA context: the GPU is in use by others"
    return size, ""


def probe_context_bytes() -> int:
    """GPU memory of this process outside torch's allocator after a training step."""
    before = _free_bytes()
    device = torch.device("cuda", 0)
    _train_once(device)
    torch.cuda.synchronize(device)
    return before - _free_bytes() - torch.cuda.memory_reserved(device)


def _free_bytes() -> int:
    reading = read_driver()
    if not reading.gpus:
        raise RuntimeError(reading.fault or "NVML shows no GPU")
    return reading.gpus[0].free_bytes


def _train_once(device: torch.device) -> None:
    """Load the kinds of kernels of a step: products, attention, norms, loss, update."""
    is_new = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if is_new else torch.float16
    layer = torch.nn.Linear(256, 256, device=device, dtype=dtype)
    plain = torch.nn.Linear(256, 256, device=device)
    weights = [*layer.parameters(), *plain.parameters()]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for _ in range(2):
        x = torch.randn(2, 4, 64, 64, device=device, dtype=dtype, requires_grad=True)
        y = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        z = layer(functional.silu(y.transpose(1, 2).reshape(2, 64, 256)))
        z = functional.layer_norm(z.float(), (256,)) + plain(z.float())
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
        labels = torch.zeros(128, dtype=torch.long, device=device)
        loss = functional.cross_entropy(z.reshape(128, 256), labels)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizer.step()


if __name__ == "__main__":
    print(probe_context_bytes())
