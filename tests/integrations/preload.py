"""What the ranks of these tests import: seconds for each of them, if the server that forks them had not done it."""

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor  # noqa: F401

import rekindle.integrations.dcp  # noqa: F401
