"""Cards that plans know: what drivers report of their memory, and what their data sheets say of their speed."""

import dataclasses
import re
from collections.abc import Mapping

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Card:
    """An accelerator.

    Attributes:
        memory_mib: Memory that its driver reports, with error correction on where the card has it.
        half_tflops, single_tflops: Dense matrix multiplication in 16 bits with 32-bit sums, and in 32 bits (TF32 where the
            card has it), in TFLOP/s.
        memory_gb_per_s: Bandwidth of its memory, in GB/s.
        link_gb_per_s: Bandwidth of its link to the host, in one direction.
        peer_gb_per_s: The same to another card, where that is not the link to the host.
    """

    memory_mib: int
    half_tflops: float
    single_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    peer_gb_per_s: float | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory that its driver reports."""
        return self.memory_mib * _MIB


# Memory is what nvidia-smi and rocm-smi print: a card of "24 GB" has 24 GiB, not 24e9 bytes, less what error correction
# takes. `torch.cuda.get_device_properties` reports up to 3 % less, since the driver keeps a part: BUDGET_SHARE allows for it.
# Rates are those of NVIDIA's and AMD's data sheets, without sparsity. Consumer cards add up in 32 bits at half of the rate
# for sums in 16. Of an MI250X, a program sees one of two dies.
CARDS: Mapping[str, Card] = {
    "t4": Card(15_360, 65, 8.1, 320, 16),
    "v100-16gb": Card(16_384, 125, 15.7, 900, 16, 150),
    "v100-32gb": Card(32_768, 125, 15.7, 900, 16, 150),
    "a10": Card(23_028, 125, 62.5, 600, 32),
    "a10g": Card(23_028, 70, 35, 600, 32),
    "a40": Card(46_068, 149.7, 74.8, 696, 32),
    "a100-40gb": Card(40_960, 312, 156, 1555, 32, 300),
    "a100-80gb": Card(81_920, 312, 156, 2039, 32, 300),
    "l4": Card(23_034, 121, 60, 300, 32),
    "l40s": Card(46_068, 362, 183, 864, 32),
    "h100-80gb": Card(81_559, 989, 495, 3350, 64, 450),
    "h100-pcie": Card(81_559, 756, 378, 2000, 64),
    "h100-nvl": Card(95_830, 835, 417, 3938, 64, 300),
    "gh200": Card(97_871, 989, 495, 4000, 450),
    "h200": Card(143_771, 989, 495, 4800, 64, 450),
    "b200": Card(183_359, 2250, 1100, 8000, 64, 900),
    "rtx2080ti": Card(11_264, 53.8, 13.4, 616, 16),
    "rtx3060": Card(12_288, 25.6, 12.8, 360, 32),
    "rtx3080": Card(10_240, 59.5, 29.8, 760, 32),
    "rtx3090": Card(24_576, 71, 35.6, 936, 32),
    "rtx4060ti-16gb": Card(16_380, 44.1, 22.1, 288, 16),
    "rtx4080": Card(16_376, 97.5, 48.7, 717, 32),
    "rtx4090": Card(24_564, 165, 82.6, 1008, 32),
    "rtx5070ti": Card(16_303, 87.9, 43.9, 896, 64),
    "rtx5080": Card(16_303, 112.6, 56.3, 960, 64),
    "rtx5090": Card(32_607, 209.5, 104.8, 1792, 64),
    "rtxa5000": Card(24_564, 111, 55.6, 768, 32),
    "rtxa6000": Card(49_140, 155, 77.4, 768, 32),
    "rtx6000ada": Card(49_140, 364, 182, 960, 32),
    "rtxpro6000": Card(97_887, 503.8, 251.9, 1792, 64),
    "mi210": Card(65_520, 181, 45.3, 1638, 32, 150),
    "mi250x": Card(65_520, 191.5, 47.9, 1638, 36, 200),
    "mi300x": Card(196_592, 1307, 653.7, 5300, 64, 448),
    "rx7900xtx": Card(24_560, 122.8, 61.4, 960, 32),
}

# Names of drivers that say more than the model.
_PRINTED = {
    "a100sxm440gb": "a100-40gb",
    "a100pcie40gb": "a100-40gb",
    "a100sxm480gb": "a100-80gb",
    "a10080gbpcie": "a100-80gb",
    "h10080gbhbm3": "h100-80gb",
    "gh200480gb": "gh200",
    "rtx4060ti": "rtx4060ti-16gb",
    "rtx6000adageneration": "rtx6000ada",
    "rtxpro6000blackwellworkstationedition": "rtxpro6000",
    "rtxpro6000blackwellmaxqworkstationedition": "rtxpro6000",
    "rtxpro6000blackwellserveredition": "rtxpro6000",
    "v100sxm216gb": "v100-16gb",
    "v100pcie16gb": "v100-16gb",
    "v100sxm232gb": "v100-32gb",
    "v100pcie32gb": "v100-32gb",
}
_MAKERS = re.compile("nvidia|geforce|tesla|amd|instinct|radeon|[^a-z0-9]")


def card_name(text: str) -> str | None:
    """The key of ``CARDS`` for a name as people write it or as a driver prints it, such as ``NVIDIA GeForce RTX 4090``; None
    if it is none of them.
    """
    plain = _MAKERS.sub("", text.lower())
    known = {_MAKERS.sub("", name): name for name in CARDS} | _PRINTED
    return known.get(plain)
