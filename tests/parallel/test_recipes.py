"""Recipes for clusters: read by the parsers of their formats, and run where a stub can stand in."""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from toolkit.parallel import launch_recipe

TRAIN = ["toolkit", "train", "a run", "--layout", "zero3"]
CLUSTERS = {"slurm": 32, "kubernetes": 4, "ray": 4, "tpu": 4}  # processes on four hosts
PLACEHOLDERS = {
    **{"HOURS": "12", "PRODUCT": "NVIDIA-H100-80GB-HBM3", "ZONE": "us-central2-b"},
    **{"NAME": "a-name", "IMAGE": "image", "CLAIM": "claim"},
}
# Of sbatch's options: what its manual page says a value looks like.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([\w-]+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "output": r"[\w%./-]+",
    "open-mode": r"append|truncate",
    "requeue": None,
    "signal": r"([RB]{1,2}:)?\w+(@\d+)?",
}


def filled(cluster, command=TRAIN, **options):
    recipe = launch_recipe(command, cluster, hosts=4, **options)
    for name, value in PLACEHOLDERS.items():
        recipe = re.sub(rf"\b{name}\b", value, recipe)
    return recipe


@pytest.fixture
def stub(tmp_path):
    """Writes a program onto the path: it notes its arguments, then does as it is given."""

    def write(name, then):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/{name}.calls\n{then}\n')
        path.chmod(0o755)
        return lambda: (tmp_path / f"{name}.calls").read_text().splitlines()

    return write


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_recipes_count_processes_of_our_own_command(cluster):
    assert re.search(rf"--processes\W+{CLUSTERS[cluster]}\b", filled(cluster))
    assert "--processes" not in launch_recipe(["python", "mine.py"], cluster)


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ("slurm", "for attempt in $(seq 0 7)"),
        ("kubernetes", "maxRestarts: 7"),
        ("ray", "HOSTS, RESTARTS = 4, 7"),
        ("tpu", "for attempt in $(seq 0 7)"),
    ],
)
def test_restarts_reach_every_cluster(cluster, line):
    assert line in filled(cluster, restarts=7)


def test_slurm_options_are_ones_that_sbatch_reads():
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", filled("slurm"), re.MULTILINE)
    assert filled("slurm").count("#SBATCH") == len(options)
    for name, value in options:
        pattern = SBATCH[name]
        assert not value if pattern is None else re.fullmatch(pattern, value), name
    assert {"cpus-per-task", "requeue", "signal"} <= {name for name, _ in options}


@pytest.mark.parametrize(
    ("statuses", "restarts", "ended", "steps"),
    [("0", 2, 0, 1), ("1 1 0", 2, 0, 3), ("1 1 0", 1, 1, 2), ("130", 2, 0, 1)],
)
def test_slurm_starts_a_failed_step_again(
    stub, environment, tmp_path, statuses, restarts, ended, steps
):
    calls = stub("srun", f'all=({statuses}); exit ${{all[$(wc -l < "$0.calls") - 1]}}')
    requeues = stub("scontrol", "exit 0")
    recipe = filled("slurm", restarts=restarts)
    script = subprocess.run(["bash"], input=recipe, text=True, env=environment)
    assert script.returncode == ended
    assert len(calls()) == steps
    assert all("--cpus-per-task=" in call and "toolkit train a run" in call for call in calls())
    if statuses == "130":  # asked to stop before the time was up
        assert requeues() == ["requeue 42"]


def test_kubernetes_saves_on_its_claim_and_has_memory_to_share():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load(filled("kubernetes", restarts=3))
    (job,) = manifest["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][2] == "a run"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts[container["workingDir"]]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert pod["nodeSelector"]
    # The first pod of the only job, by the name that JobSet gives it in the network of the set.
    address = next(e["value"] for e in container["env"] if e["name"] == "JAX_COORDINATOR_ADDRESS")
    assert address == "a-name-host-0-0.a-name:8476"


def test_kubernetes_manifests_follow_the_schema():
    yaml = pytest.importorskip("yaml")
    schema = pytest.importorskip("kubernetes_validate")
    manifest = yaml.safe_load(filled("kubernetes"))
    # The set has no schema in the package; its fields are those of the custom resource.
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(manifest["spec"]) == {"failurePolicy", "replicatedJobs"}
    (job,) = manifest["spec"]["replicatedJobs"]
    assert set(job) == {"name", "replicas", "template"}
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
    schema.validate(whole, "1.33", strict=True)
    whole["spec"]["completionModes"] = "Indexed"
    with pytest.raises(schema.ValidationError):
        schema.validate(whole, "1.33", strict=True)


def test_a_tpu_host_goes_on_without_its_ssh_and_starts_again(stub, environment, tmp_path):
    """The words that reach a worker are run by a shell whose whole session is then killed."""
    start, follow = filled("tpu", ["mine", "a run"], restarts=3).split("\ngcloud")
    assert "tail -f a-name.log" in follow
    command = shlex.split(start)
    assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a-name"]
    words = command[-1].removeprefix("--command=")
    calls = stub("mine", f"sleep 0.5; [ $(wc -l < {tmp_path}/mine.calls) -ge 3 ]")
    session = subprocess.Popen(
        ["bash", "-c", f"{words}\nsleep 60"], cwd=tmp_path, env=environment, start_new_session=True
    )
    while not (tmp_path / "mine.calls").exists():
        assert session.poll() is None
        time.sleep(0.02)
    os.killpg(session.pid, signal.SIGHUP)
    session.wait()
    deadline = time.monotonic() + 60
    while len(calls()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.5)  # the third went well, so there is no fourth
    assert calls() == ["a run"] * 3


# Two hosts of one GPU each, as Ray counts them: nothing here asks for a real one.
LOCAL_RAY = """
import os, runpy, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=8, num_gpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
runpy.run_path(sys.argv[1])
"""
# Fails the first time on the second host, while the first would wait for an hour.
RAY_CHILD = """
import os, pathlib, sys, threading, time
from toolkit.parallel.hosts.processes import _die_with_supervisor
folder, index = pathlib.Path(sys.argv[1]), os.environ["JAX_PROCESS_ID"]
threading.Thread(target=_die_with_supervisor, daemon=True).start()
is_first = not (folder / index).exists()
with (folder / index).open("a") as file:
    print(os.getpid(), file=file)
while is_first and not (folder / "0").exists():
    time.sleep(0.05)
time.sleep(3600 if is_first and index == "0" else 1)
sys.exit(is_first)
"""


def test_the_program_for_ray_can_be_read():
    ast.parse(filled("ray"))


@pytest.mark.nightly
def test_ray_starts_again_and_leaves_no_child(tmp_path):
    pytest.importorskip("ray")
    folder, recipe = tmp_path / "processes", tmp_path / "recipe.py"
    folder.mkdir()
    command = [sys.executable, "-c", RAY_CHILD, str(folder)]
    recipe.write_text(launch_recipe(command, "ray", hosts=2, devices=1, restarts=1))
    subprocess.run([sys.executable, "-c", LOCAL_RAY, str(recipe)], check=True, timeout=240)
    for name in ("0", "1"):
        processes = (folder / name).read_text().split()
        assert len(processes) == 2
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(int(process), 0)


def test_unknown_clusters_and_sizes_are_refused():
    with pytest.raises(ValueError, match="'slurm', 'kubernetes', 'ray', 'tpu'"):
        launch_recipe(TRAIN, "cloud")
    for name, value in (("hosts", 0), ("devices", 0), ("restarts", -1)):
        with pytest.raises(ValueError, match=f"{name}: got {value}"):
            launch_recipe(TRAIN, "slurm", **{name: value})
