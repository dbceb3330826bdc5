"""Functions of fixed operations: close to the libraries', and in kernels the same bits as in torch."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels import fixed
from specdec.sampling.noise import gumbel
from tests.specdec.kernels.interpreter import interpreted

EXTREMES = [0, 1, 2, 2**30, 2**31 - 1, 2**31, 3 * 2**30 - 1, 3 * 2**30, 3 * 2**30 + 2, 2**32 - 2, 2**32 - 1]


def some_words() -> torch.Tensor:
    words = torch.randint(0, 2**32, (2**15,), generator=torch.Generator().manual_seed(1))
    words[: len(EXTREMES)] = torch.tensor(EXTREMES)
    return words


def some_scaled() -> torch.Tensor:
    scaled = -torch.rand(2**12, generator=torch.Generator().manual_seed(2)) * 40
    scaled[:5] = torch.tensor([0.0, -1e-9, -88.0, -1e30, -torch.inf])
    return scaled


def test_log_is_the_logarithm() -> None:
    values = torch.cat((torch.rand(10_000) * 23 + 1e-9, torch.logspace(-37, 38, 10_000), torch.tensor([0.5**0.5, 1.0])))
    torch.testing.assert_close(fixed.log(values).double(), values.double().log(), rtol=1.2e-7, atol=1e-12)


def test_gumbel_is_the_noise_of_its_word() -> None:
    words = some_words()
    expected = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    torch.testing.assert_close(fixed.gumbel(words).double(), expected, rtol=0, atol=2e-6)


def test_mass_is_the_exponential() -> None:
    scaled = some_scaled()
    expected = scaled.double().exp() * 2.0**fixed.MASS_BITS
    torch.testing.assert_close(fixed.mass(scaled).double(), expected, rtol=1.2e-7, atol=1.0)
    assert fixed.mass(torch.zeros(1)).item() == 2**fixed.MASS_BITS


@interpreted
def test_kernels_give_the_same_bits() -> None:
    from tests.specdec.kernels.probes import all_three

    words, scaled = some_words()[:4096], some_scaled()
    values = torch.rand(4096, generator=torch.Generator().manual_seed(3)) * 23 + 1e-9
    outs = torch.empty(4096), torch.empty(4096), torch.empty(4096, dtype=torch.int64)
    all_three[(1,)](words, values, scaled, *outs, SIZE=4096)
    for out, expected in zip(outs, (fixed.gumbel(words), fixed.log(values), fixed.mass(scaled)), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 + 12345, 70_000), (2**64 - 1, 2**31 - 1)])
@interpreted
def test_noise_in_kernels_is_that_of_the_sampler(seed: int, position: int) -> None:
    from tests.specdec.kernels.probes import noise

    out, signed = torch.empty(512), seed - (1 << 64) * (seed >> 63)
    noise[(2,)](out, torch.tensor([signed]), torch.tensor([position], dtype=torch.int32), CALLS=64)
    assert torch.equal(out, gumbel([seed], [position], 512, "cpu")[0])
