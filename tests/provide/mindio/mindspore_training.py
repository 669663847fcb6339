"""Trains a small net with MindSpore, and goes on from its newest checkpoint: argv are the directory, epochs, and the
epoch after which it is killed, or 0. Knows nothing of Rekindle."""

import os
import re
import signal
import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint
from mindspore.train.serialization import _ckpt_fs

directory, epochs, killed_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS = 4


class Killed(Callback):
    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def newest() -> "tuple[int, str | None]":
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [(int(match[1]), name) for name in names if (match := re.search(r"-(\d+)_\d+\.ckpt$", name))]
    return max(found, default=(0, None))


ms.set_seed(7)
random = np.random.default_rng(7)
data = [(random.normal(size=8).astype(np.float32), random.normal(size=4).astype(np.float32)) for _ in range(4 * STEPS)]
net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 4))
optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
model = Model(net, nn.MSELoss(), optimizer)
start, name = newest()
if name is not None:
    found = ms.load_checkpoint(os.path.join(directory, name))
    assert not ms.load_param_into_net(net, found)[0] and not ms.load_param_into_net(optimizer, found)[0]
dataset = GeneratorDataset(data, ["x", "y"], shuffle=False).batch(4)
config = CheckpointConfig(save_checkpoint_steps=STEPS, keep_checkpoint_max=2)
callbacks = [ModelCheckpoint("net", directory, config), Killed()]
model.train(epochs, dataset, callbacks=callbacks, dataset_sink_mode=False, initial_epoch=start)
assert _ckpt_fs.backend == os.environ.get("EXPECTED_BACKEND", "basic"), _ckpt_fs.backend
weights = {param.name: param.asnumpy() for param in (*net.get_parameters(), *optimizer.get_parameters())}
np.savez(os.path.join(directory, f"end-{start}.npz"), **weights)
