"""Experiments on one CUDA device, for ``bench/gpu.py``: their list, their processes, and what each of them does."""
