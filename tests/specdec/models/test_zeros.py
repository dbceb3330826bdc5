from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specdec.models.zeros import zeros

CPU = torch.device("cpu")
STATM = Path("/proc/self/statm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4)])
def test_it_is_zeros_that_can_be_written(shape, dtype):
    made = zeros(shape, dtype, CPU)
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.dtype == dtype
    made += 1
    assert torch.equal(made, torch.ones(shape, dtype=dtype))


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells how much memory is in use")
def test_writing_a_little_here_and_there_takes_little_memory():
    def resident_bytes():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pool = zeros((256, 1 << 20), torch.float32, CPU)  # 1 GiB
    before = resident_bytes()
    pool[:, ::524_288] = 1.0  # a number every 2 MiB
    assert resident_bytes() - before < 64 << 20


def test_too_much_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes"):
        zeros((1 << 40, 1 << 10), torch.float32, CPU)
