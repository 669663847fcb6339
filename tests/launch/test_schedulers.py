"""Examples for schedulers say what they mean: their commands are the launcher's, their names fit each other.

Manifests are of the schemas of Kubernetes and JobSet, as Kubeflow's models have them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"


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


def test_the_page_shows_the_batch_script() -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```$", (DOCS / "slurm.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block == (EXAMPLES / "slurm/train.sbatch").read_text()


def manifest(of: str) -> Any:
    """Returns the example, or the page's manifest of one pod."""
    yaml = pytest.importorskip("yaml")
    if of == "jobset":
        return yaml.safe_load((EXAMPLES / "kubernetes/jobset.yaml").read_text())
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "kubernetes.md").read_text(), re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block)


def check_schema(manifest: Any) -> None:
    """Raises ValueError for a manifest with a field that Kubernetes or JobSet has not, or a value of another type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
        ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    }
    read = kinds[manifest["apiVersion"], manifest["kind"]].from_dict(manifest).to_dict()
    if not has_all(read, manifest):
        raise ValueError("what is read has not all that is written")


def has_all(read: Any, written: Any) -> bool:
    """True if nothing that is written was left out in reading. Defaults may have come."""
    if isinstance(written, dict):
        return all(key in read and has_all(read[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(read) == len(written) and all(map(has_all, read, written))
    return bool(read == written)


def fields(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each field and each item: what it is in, and its key there. Maps with keys of the user's own have none."""
    for key, inner in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
        yield value, key
        if isinstance(inner, (dict, list)) and key not in ("matchLabels", "limits"):
            yield from fields(inner)


@pytest.mark.parametrize("of", ["jobset", "job"])
def test_manifests_are_of_the_schema(of: str) -> None:
    """Each misspelt field is told from it, and each value of another type."""
    whole = manifest(of)
    check_schema(whole)
    wrong = 0
    for place, key in [*fields(whole["spec"])]:
        right = place[key]
        if isinstance(place, dict):
            place[f"{key}s"] = place.pop(key)
            with pytest.raises(ValueError):
                check_schema(whole)
            place[key] = place.pop(f"{key}s")
        if not isinstance(right, (dict, list)):
            place[key] = str(right) if isinstance(right, int) else True
            with pytest.raises(ValueError):
                check_schema(whole)
            place[key] = right
            wrong += 1
    check_schema(whole)
    assert wrong > 10


def test_the_pods_of_the_manifest_meet_at_the_name_of_the_first() -> None:
    whole = manifest("jobset")
    (replicated,) = whole["spec"]["replicatedJobs"]
    spec, name = replicated["template"]["spec"], whole["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    args = options([*container["command"], *container["args"]])
    (port,) = container["ports"]
    # JobSet's names: of the set, of the replicated job, number of the job, number of the pod; then that of its service.
    assert args.rdzv_endpoint == f"{name}-{replicated['name']}-0-0.{name}:{port['containerPort']}"
    assert whole["spec"]["network"]["enableDNSHostnames"] and replicated["replicas"] == 1
    (rule,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(args.nnodes) + 1


@pytest.mark.parametrize("of", ["jobset", "job"])
def test_pods_have_memory_for_snapshots_and_time_to_go(of: str) -> None:
    spec = manifest(of)["spec"]
    pod = (spec["replicatedJobs"][0]["template"]["spec"] if of == "jobset" else spec)["template"]["spec"]
    (container,) = pod["containers"]
    options([*container["command"], *container["args"]])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes.keys() == set(mounts.values()) and volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert pod["restartPolicy"] == "OnFailure" and pod["terminationGracePeriodSeconds"] > 25  # gasp_deadline
