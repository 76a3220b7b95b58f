"""Machines with their compute and copy rates, from data sheets and reports. None was measured here.

Rates of links are commonly seen rates of pinned copies, not those of the bus: 12 of 15.75 GB/s on
PCIe 3.0 x16, 25 of 31.5 on PCIe 4.0, 55 of 63 on PCIe 5.0. `flops` are dense, of bfloat16 (float16 on Volta), and
`single_flops` of float32 outside of tensor cores, as PyTorch multiplies unless told otherwise. Disks, `latency` and
`both_ways` are assumptions: a common NVMe drive, 10 µs a copy, a tenth lost when both ways run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from actstore.plan.solver.chain import Links

GBPS = 1e6  # bytes in a millisecond
TFLOPS = 1e9  # operations in a millisecond


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and the node it is in.

    Attributes
    ----------
    links : rates of one device alone
    node : rates that all devices of a node share: host memory, switches, the disk. Devices that copy at the same
        time share them evenly
    latency : ms that a link needs for each copy beyond its bytes
    both_ways : part of its rate that each direction of a link keeps while the other direction runs
    beside_copies : part of its speed that compute keeps while a copy runs
    flops : operations of bfloat16 in a millisecond, at best
    single_flops : operations of float32 in a millisecond, at best
    memory_rate : bytes in a millisecond that the device reads or writes in its own memory, at best
    memory : bytes of the device
    """

    links: Links = field(default_factory=Links)
    node: Links = field(default_factory=Links)
    latency: float = 0.0
    both_ways: float = 1.0
    beside_copies: float = 1.0
    flops: float = inf
    single_flops: float = inf
    memory_rate: float = inf
    memory: float = inf


def _gpu(links: Links, node: Links, tflops: float, single_tflops: float, memory_gbps: float, memory: float) -> Hardware:
    """Return a GPU with the assumptions about copies that all share."""
    return Hardware(
        links,
        node,
        latency=0.01,
        both_ways=0.9,
        flops=tflops * TFLOPS,
        single_flops=single_tflops * TFLOPS,
        memory_rate=memory_gbps * GBPS,
        memory=memory,
    )


_PCIE4 = Links(25 * GBPS, 25 * GBPS, 5 * GBPS, 6.5 * GBPS)
_ONE_DISK = Links(disk_out=5 * GBPS, disk_back=6.5 * GBPS)

# NVIDIA H100 data sheet, SXM5: 989 TFLOPS, 67 of float32, 3.35 TB/s, 80 GB, PCIe 5.0. Disk: two drives.
H100_SXM = _gpu(
    Links(55 * GBPS, 55 * GBPS, 12 * GBPS, 13 * GBPS),
    Links(disk_out=12 * GBPS, disk_back=13 * GBPS),
    989, 67, 3350, 80e9,
)  # fmt: skip

# NVIDIA A100 data sheet, 80 GB PCIe: 312 TFLOPS, 19.5 of float32, 1,935 GB/s, PCIe 4.0.
A100_PCIE = _gpu(_PCIE4, _ONE_DISK, 312, 19.5, 1935, 80e9)

# NVIDIA A100 data sheet, 80 GB SXM: as above, but 2,039 GB/s. On a DGX A100 two devices share the PCIe 4.0 x16 of one
# switch: eight have 100 GB/s together.
A100_SXM = _gpu(_PCIE4, Links(100 * GBPS, 100 * GBPS, 5 * GBPS, 6.5 * GBPS), 312, 19.5, 2039, 80e9)

# NVIDIA GH200 data sheet, 96 GB: 990 TFLOPS, 67 of float32, 4 TB/s. The link is NVLink-C2C, 450 GB/s each way on paper;
# on one machine copies out reached 170 GB/s and copies back 411.
GH200 = _gpu(Links(170 * GBPS, 411 * GBPS, 5 * GBPS, 6.5 * GBPS), _ONE_DISK, 990, 67, 4000, 96e9)

# NVIDIA Ada white paper, RTX 4090: 165.2 TFLOPS (accumulating in float32), 82.6 of float32, 1,008 GB/s, 24 GB, PCIe
# 4.0.
RTX_4090 = _gpu(_PCIE4, _ONE_DISK, 165.2, 82.6, 1008, 24e9)

# NVIDIA Titan V page: 110 TFLOPS of float16, 5,120 cores at 1.455 GHz, 652.8 GB/s, 12 GB, PCIe 3.0 x16.
TITAN_V = _gpu(
    Links(12 * GBPS, 12 * GBPS, 2 * GBPS, 3 * GBPS),
    Links(disk_out=2 * GBPS, disk_back=3 * GBPS),
    110,
    14.9,
    652.8,
    12e9,
)

PRESETS = {
    "H100 SXM": H100_SXM,
    "A100 PCIe": A100_PCIE,
    "A100 SXM": A100_SXM,
    "GH200": GH200,
    "RTX 4090": RTX_4090,
    "Titan V": TITAN_V,
}
