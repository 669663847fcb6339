"""Has torchtitan train its debug model of Llama 3 on GPUs, and survive faults. In a checkout of torchtitan:

    cp .../examples/train_torchtitan.py .
    torchrun --nproc-per-node 8 -m torchtitan.train --module train_torchtitan --config debugmodel

Kill it in any way you like, and start it again by the same command: it goes on behind the last completed step.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from rekindle.integrations.torchtitan import RekindleCheckpointManager


def debugmodel() -> Trainer.Config:
    config = llama3_debugmodel()
    config.training.steps = 1000
    config.checkpoint = RekindleCheckpointManager.Config(enable=True, interval=1)
    return config
