"""The precision that stages compute in: float32, or bfloat16 by the rules of autocast.

Weights, losses, MCL's choice, statistics and sums stay in float32.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from mheads.common.errors import UserError

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
CAPPED = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
TRIAL = """
import torch
x, w = torch.randn(32, 32, 8, 8), torch.randn(32, 32, 3, 3, requires_grad=True)
with torch.autocast("cpu", torch.bfloat16):
    y = torch.nn.functional.conv2d(x, w).flatten(1)
    y = y @ torch.randn(y.shape[1], 16)
y.float().sum().backward()
"""


def reason_against(precision: str, device: torch.device) -> str | None:
    """Why this device cannot compute in this precision, and what to do; None if it can."""
    if precision == "float32" or device.type != "cpu":
        return None
    features = torch.cpu.get_capabilities()
    if features.get("amx_bf16"):
        return _try_bf16()
    if features.get("avx512_bf16"):
        return None
    return (
        "this CPU has no instructions for bfloat16 (AVX512_BF16 or AMX), and without them it is 10 to 100 times slower "
        "than float32: use precision=float32"
    )


def check_precision(precision: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises a UserError if a network with weights of `dtype` cannot be trained in this precision on this device."""
    if precision != "float32" and dtype != torch.float32:
        raise UserError(
            f"precision = {precision} keeps weights in float32, and those of this network are {dtype}: use "
            "precision=float32, which leaves them as they are",
            key="precision",
        )
    if reason := reason_against(precision, device):
        raise UserError(f"precision = {precision}: {reason}", key="precision")


@functools.cache
def _try_bf16() -> str | None:
    """Some virtual machines announce AMX and lack it, and the first instruction ends the process: another one tries."""
    trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True)
    if trial.returncode == 0:
        return None
    return (
        f"a trial in bfloat16 ended with exit code {trial.returncode}: this machine announces AMX and seems to lack "
        f"it; set {CAPPED} in the environment, or use precision=float32"
    )
