"""Reads with DCP's own reader what was exported of a checkpoint that Rekindle's writer has made."""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

here = Path(sys.argv[1])
whole = torch.load(here / "whole.pt", weights_only=True)
found = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole.items()}}
dcp.load(found, storage_reader=dcp.FileSystemReader(str(here / "exported")))
assert whole and all(torch.equal(found["model"][name], tensor) for name, tensor in whole.items())
print("alike")
