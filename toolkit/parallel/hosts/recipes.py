"""What to submit, on clusters whose own launcher starts and watches the processes.

Each recipe is text: read it, fill in the names in capitals, submit it. All processes write to one
folder, which every host must see. SLURM and Cloud TPU are found by jax itself; where they are not
(Kubernetes, Ray) the recipe sets what `join_processes` reads. One process that dies ends the job
everywhere, and the job is started again where the cluster can do that.

Sources: jax documentation, "Introduction to multi-controller JAX"; documentation of sbatch and
srun, JobSet (jobset.sigs.k8s.io), Ray (placement groups), gcloud compute tpus.
"""

import shlex
from collections.abc import Sequence
from textwrap import dedent

from toolkit._checks import checked

_MOST = 100_000


@checked
def launch_recipe(command: Sequence[str], cluster: str, *, hosts: int = 2, devices: int = 8) -> str:
    """The text that starts a command as one jax job on a cluster.

    A `toolkit train` is told how many processes must be there, so that a job which is not whole
    does not start.

    Args:
        command: the program and its arguments, such as ["toolkit", "train", "run"].
        cluster: "slurm", "kubernetes" (JobSet), "ray" or "tpu" (Cloud TPU VMs).
        hosts: machines.
        devices: GPUs of each machine; a TPU host knows its own.

    Returns:
        A batch script, a manifest, a Python program, or a command line.

    Raises:
        ValueError: an empty command, an unknown cluster, or a number out of range.

    Example:
        >>> print(launch_recipe(["toolkit", "train", "run"], "tpu", hosts=4))
        gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \\
          --command='toolkit train run --processes 4'
        <BLANKLINE>
    """
    if not command or not all(isinstance(word, str) and word for word in command):
        raise ValueError(f"command: got {command!r}, wanted a program and its arguments")
    if cluster not in _RECIPES:
        raise ValueError(f"cluster: got {cluster!r}, wanted one of {', '.join(_RECIPES)}")
    for name, value in (("hosts", hosts), ("devices", devices)):
        if not 1 <= value <= _MOST:
            raise ValueError(f"{name}: got {value}, wanted 1 to {_MOST}")
    return _RECIPES[cluster](list(command), hosts, devices)


def _slurm(command: list[str], hosts: int, devices: int) -> str:
    # jax gives each task of a node the one GPU of its local number: one task per GPU.
    return dedent(f"""\
        #!/bin/bash
        #SBATCH --job-name=NAME
        #SBATCH --nodes={hosts}
        #SBATCH --ntasks-per-node={devices}
        #SBATCH --gpus-per-node={devices}
        #SBATCH --time=HOURS:00:00
        #SBATCH --requeue
        #SBATCH --signal=TERM@120
        srun --kill-on-bad-exit=1 {_words(command, hosts * devices)}
        """)


def _kubernetes(command: list[str], hosts: int, devices: int) -> str:
    words = ", ".join(f'"{_escaped(word)}"' for word in _counted(command, hosts))
    own_number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return dedent(f"""\
        apiVersion: jobset.x-k8s.io/v1alpha2
        kind: JobSet
        metadata:
          name: NAME
        spec:
          failurePolicy:
            maxRestarts: 10
          replicatedJobs:
          - name: host
            replicas: 1
            template:
              spec:
                backoffLimit: 0
                completionMode: Indexed
                completions: {hosts}
                parallelism: {hosts}
                template:
                  spec:
                    restartPolicy: Never
                    containers:
                    - name: toolkit
                      image: IMAGE
                      command: [{words}]
                      env:
                      - name: JAX_COORDINATOR_ADDRESS
                        value: NAME-host-0-0.NAME:8476
                      - name: JAX_NUM_PROCESSES
                        value: "{hosts}"
                      - name: JAX_PROCESS_ID
                        valueFrom:
                          fieldRef:
                            fieldPath: {own_number}
                      resources:
                        limits:
                          nvidia.com/gpu: {devices}
                      volumeMounts:
                      - name: runs
                        mountPath: /runs
                    volumes:
                    - name: runs
                      persistentVolumeClaim:
                        claimName: CLAIM
        """)


def _ray(command: list[str], hosts: int, devices: int) -> str:
    return dedent(f"""\
        import os, socket, subprocess
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

        COMMAND = {_counted(command, hosts)!r}

        @ray.remote(num_cpus=1, num_gpus={devices})
        class Host:
            def address(self):
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    return f"{{ray.util.get_node_ip_address()}}:{{probe.getsockname()[1]}}"

            def run(self, address, index):
                job = {{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "{hosts}",
                       "JAX_PROCESS_ID": str(index)}}
                subprocess.run(COMMAND, env=os.environ | job, check=True)

        ray.init()
        bundles = [{{"CPU": 1, "GPU": {devices}}}] * {hosts}
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        hosts = [
            Host.options(scheduling_strategy=Place(group, index)).remote()
            for index in range({hosts})
        ]
        address = ray.get(hosts[0].address.remote())
        running = [host.run.remote(address, index) for index, host in enumerate(hosts)]
        while running:  # the first failure ends this program, and with it every actor
            done, running = ray.wait(running)
            ray.get(done)
        """)


def _tpu(command: list[str], hosts: int, devices: int) -> str:
    return (
        "gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \\\n"
        f"  --command={shlex.quote(_words(command, hosts))}\n"
    )


_RECIPES = {"slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray, "tpu": _tpu}


def _counted(command: list[str], processes: int) -> list[str]:
    is_ours = command[:2] == ["toolkit", "train"] and "--processes" not in command
    return [*command, "--processes", str(processes)] if is_ours else command


def _words(command: list[str], processes: int) -> str:
    return shlex.join(_counted(command, processes))


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')
