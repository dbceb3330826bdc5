"""What a replica of the target makes, in a process that nothing was set for."""

from __future__ import annotations

import os
import subprocess
import sys

from cluster.config.environment import VLLM_SETTINGS

WORKER = """
import json, os
import torch
torch.set_num_threads(1)
from cluster.config.app import AppArgs
from deployments.workers import _target_backend

target = {"engine": "vllm", "engine_args": {"enforce_eager": True}, "kv_cache_memory": "64MiB"}
model = _target_backend(AppArgs.model_validate({"target": target, "max_model_len": 256}), 1.0, print, print)

from vllm import envs
assert model.max_model_len == 256
assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING and envs.VLLM_CPU_OMP_THREADS_BIND == "nobind"
assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
model.close()
"""


def test_a_replica_sets_what_vllm_reads() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VLLM_SETTINGS}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
