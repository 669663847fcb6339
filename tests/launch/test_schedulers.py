"""Examples for schedulers say what they mean: their commands are the launcher's, their names fit each other."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def options(words: list[str]) -> Any:
    """Returns torchrun's options of a command, without 'rekindle run'."""
    from torch.distributed.run import get_args_parser

    assert words[:2] == ["rekindle", "run"]
    return get_args_parser().parse_args(words[2:])


def test_the_batch_script_asks_for_a_spare_node_and_outlives_the_loss_of_one() -> None:
    text = (EXAMPLES / "slurm/train.sbatch").read_text()
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert asked.keys() >= {"no-kill", "requeue"} and asked["ntasks-per-node"] == "1"
    command = re.search(r"srun --no-kill \S+ (rekindle run .*)", text.replace("\\\n", " "))
    (train,) = re.findall(r"^train=(\d+)$", text, re.MULTILINE)
    assert command and int(asked["nodes"]) == int(train) + 1
    args = options(shlex.split(command[1].replace("$train", train)))
    assert args.nnodes == train and args.rdzv_endpoint.startswith("$head:") and args.training_script == "train.py"


def test_the_pods_of_the_manifest_meet_at_the_name_of_the_first() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes/job.yaml").read_text())
    assert (service["kind"], job["apiVersion"], job["kind"]) == ("Service", "batch/v1", "Job")
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    args = options([*container["command"], *container["args"]])
    assert args.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:{container['ports'][0]['containerPort']}"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert service["spec"]["selector"] == rule["labelSelector"]["matchLabels"] == {"job-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(args.nnodes) + 1
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes.keys() == set(mounts.values()) and volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
