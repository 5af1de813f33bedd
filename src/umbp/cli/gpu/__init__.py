"""`umbp check-gpu`: whether copies between a GPU and the pool move the right bytes at the right time, and how
fast. Needs torch for the GPU and this package, no vLLM."""

from umbp.cli.gpu.command import check_gpu

__all__ = ["check_gpu"]
