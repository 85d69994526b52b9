"""What llama.cpp computes on here: its GPUs and the number of CPU threads that serves it best."""

from __future__ import annotations

import os

import psutil

from tightfit.hardware.machine import read_machine


def list_gpus() -> tuple[str, ...]:
    """GPUs that this build of llama.cpp can use, as it names them: `CUDA0`, `Metal`, ..."""
    import xllamacpp

    kinds = xllamacpp.ggml_backend_dev_type
    graphic = (kinds.GGML_BACKEND_DEVICE_TYPE_GPU, kinds.GGML_BACKEND_DEVICE_TYPE_IGPU)
    return tuple(
        str(device["name"]) for device in xllamacpp.get_device_info() if device["type"] in graphic
    )


def choose_threads(asked: int | None) -> int:
    """The physical cores this process may use.

    A second thread on one core only makes the others wait: llama.cpp's threads meet after
    every operation. OMP_NUM_THREADS, where set, is taken as the user's word.
    """
    if asked is not None:
        return asked
    stated = os.environ.get("OMP_NUM_THREADS", "").strip()
    if stated.isascii() and stated.isdigit() and 0 < int(stated[:6]) <= 512:
        return int(stated)
    usable = read_machine().num_usable_cores
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
