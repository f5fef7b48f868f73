"""What a simulation assumes of machines: public figures, and how much of them is reached.

Figures of NVIDIA's data sheets for the SXM modules: dense bf16 tensor-core and fp32 rates, memory
rate and size, NVLink in one direction; and one InfiniBand port a GPU of the generation that is
built around them (HDR 200, NDR 400 Gbit/s).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU (or processor) and its links; rates a second."""

    name: str
    bf16_flops: float
    fp32_flops: float
    memory_rate: float
    """Bytes a second of its memory."""
    memory: float
    """Bytes of its memory."""
    link_rate: float
    """Bytes a second sent to GPUs of the same node."""
    network_rate: float
    """Bytes a second sent to other nodes."""
    per_node: int = 8


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the rates that are reached, and latencies; assumed unless they were fitted."""

    compute: float = 0.40
    memory: float = 0.75
    link: float = 0.70
    network: float = 0.75
    link_latency_s: float = 3e-6
    """Of one hop between GPUs of a node."""
    network_latency_s: float = 8e-6
    """Of one hop between nodes."""
    decode_overhead_s: float = 20e-6
    """Of a layer for each generated token, where no kernel is bound by memory."""


TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware("A100", 312e12, 19.5e12, 2.039e12, 80e9, 300e9, 25e9),
        Hardware("H100", 989e12, 67e12, 3.35e12, 80e9, 450e9, 50e9),
        Hardware("H200", 989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9),
        Hardware("B200", 2250e12, 80e12, 8.0e12, 180e9, 900e9, 50e9),
    )
}
"""By name."""
