"""Scripts to submit to clusters whose own launcher starts and watches the processes.

Fill in the names in capitals and submit the recipe. All processes write to one folder, which every
host must see. jax detects SLURM and Cloud TPU; for Kubernetes and Ray the recipe sets what
`join_processes` reads. If a process dies, the job ends everywhere and the recipe restarts it up to
`restarts` times. A process that is asked to stop saves first, for which every recipe leaves two
minutes, and ends with status 130.

Sources: jax documentation, "Introduction to multi-controller JAX"; documentation of sbatch and
srun, JobSet (jobset.sigs.k8s.io), Kubernetes (Pod, emptyDir), Ray (placement groups), gcloud
compute tpus.
"""

import shlex
from collections.abc import Sequence
from textwrap import dedent

from toolkit._checks import check_choice, checked

_MOST = 100_000
_SAVE_SECONDS = 120
_STOPPED = 130  # the status of a run that was asked to stop, and has saved
_PROCESSORS = 8  # per process on SLURM and Ray, to read data


@checked
def launch_recipe(
    command: Sequence[str], cluster: str, *, hosts: int = 2, devices: int = 8, restarts: int = 0
) -> str:
    """Write the script that starts a command as one jax job on a cluster.

    `toolkit train` gets the expected number of processes, so that an incomplete job does not start.

    Args:
        command: the program and its arguments, such as ["toolkit", "train", "run"].
        cluster: "slurm", "kubernetes" (JobSet), "ray" or "tpu" (Cloud TPU VMs).
        hosts: number of machines.
        devices: GPUs of each machine; a TPU host knows its own.
        restarts: how often to restart the job after a failure.

    Returns:
        A batch script, a manifest, a Python program, or a command line.

    Example:
        >>> print(launch_recipe(["toolkit", "train", "run"], "slurm", hosts=4).splitlines()[3])
        #SBATCH --ntasks-per-node=8
    """
    if not command or not all(isinstance(word, str) and word for word in command):
        raise ValueError(f"command: got {command!r}, wanted a program and its arguments")
    check_choice("cluster", cluster, _RECIPES)
    for name, value in (("hosts", hosts), ("devices", devices), ("restarts", restarts)):
        least = 0 if name == "restarts" else 1
        if not least <= value <= _MOST:
            raise ValueError(f"{name}: got {value}, wanted {least} to {_MOST}")
    return _RECIPES[cluster](list(command), hosts, devices, restarts)


def _slurm(command: list[str], hosts: int, devices: int, restarts: int) -> str:
    # jax gives each task of a node the one GPU of its local number: one task per GPU. srun asks
    # for processors again, since those of sbatch do not reach a step.
    return dedent(f"""\
        #!/bin/bash
        #SBATCH --job-name=NAME
        #SBATCH --nodes={hosts}
        #SBATCH --ntasks-per-node={devices}
        #SBATCH --gpus-per-node={devices}
        #SBATCH --cpus-per-task={_PROCESSORS}
        #SBATCH --mem=0
        #SBATCH --time=HOURS:00:00
        #SBATCH --output=%x-%j.log
        #SBATCH --open-mode=append
        #SBATCH --requeue
        #SBATCH --signal=TERM@{_SAVE_SECONDS}
        for attempt in $(seq 0 {restarts}); do
            srun --kill-on-bad-exit=1 --cpus-per-task={_PROCESSORS} \\
                {_words(command, hosts * devices)}
            status=$?
            case $status in
                0) exit 0 ;;
                {_STOPPED}) exec scontrol requeue "$SLURM_JOB_ID" ;;  # saved before the time was up
            esac
        done
        exit $status
        """)


def _kubernetes(command: list[str], hosts: int, devices: int, restarts: int) -> str:
    words = ", ".join(f'"{_escaped(word)}"' for word in _counted(command, hosts))
    own_number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return dedent(f"""\
        apiVersion: jobset.x-k8s.io/v1alpha2
        kind: JobSet
        metadata:
          name: NAME
        spec:
          failurePolicy:
            maxRestarts: {restarts}
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
                    terminationGracePeriodSeconds: {_SAVE_SECONDS}
                    nodeSelector:
                      nvidia.com/gpu.product: PRODUCT
                    containers:
                    - name: toolkit
                      image: IMAGE
                      workingDir: /runs
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
                      - name: shared-memory
                        mountPath: /dev/shm
                    volumes:
                    - name: runs
                      persistentVolumeClaim:
                        claimName: CLAIM
                    - name: shared-memory
                      emptyDir:
                        medium: Memory
        """)


def _ray(command: list[str], hosts: int, devices: int, restarts: int) -> str:
    return dedent(f"""\
        import os, socket, subprocess
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

        COMMAND = {_counted(command, hosts)!r}
        HOSTS, RESTARTS = {hosts}, {restarts}

        @ray.remote(num_cpus={_PROCESSORS}, num_gpus={devices})
        class Host:
            def address(self):
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    return f"{{ray.util.get_node_ip_address()}}:{{probe.getsockname()[1]}}"

            def run(self, address, index):
                job = {{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(HOSTS),
                       "JAX_PROCESS_ID": str(index), "TOOLKIT_SUPERVISED": "1"}}
                # When this actor dies the pipe closes, which `join_processes` ends the process by.
                process = subprocess.Popen(COMMAND, env=os.environ | job, stdin=subprocess.PIPE)
                if process.wait():
                    raise subprocess.CalledProcessError(process.returncode, COMMAND)

        ray.init()
        bundles = [{{"CPU": {_PROCESSORS}, "GPU": {devices}}}] * HOSTS
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        for attempt in range(RESTARTS + 1):
            hosts = [
                Host.options(scheduling_strategy=Place(group, index)).remote()
                for index in range(HOSTS)
            ]
            try:
                address = ray.get(hosts[0].address.remote())
                running = [host.run.remote(address, index) for index, host in enumerate(hosts)]
                while running:
                    done, running = ray.wait(running)
                    ray.get(done)
                break
            except ray.exceptions.RayError:
                if attempt == RESTARTS:
                    raise
            finally:  # the first failure ends every actor, and what it started
                for host in hosts:
                    ray.kill(host)
        """)


def _tpu(command: list[str], hosts: int, devices: int, restarts: int) -> str:
    # Each host starts its process again by itself: all fail together, and join each other anew.
    loop = (
        f"for attempt in $(seq 0 {restarts}); do {_words(command, hosts)} && break; "
        f"[ $? -eq {_STOPPED} ] && break; done"
    )
    detached = f"nohup setsid bash -c {shlex.quote(loop)} >> NAME.log 2>&1 < /dev/null &"
    ssh = "gcloud compute tpus tpu-vm ssh NAME --zone=ZONE"
    return (
        f"{ssh} --worker=all \\\n  --command={shlex.quote(detached)}\n"
        f"{ssh} --worker=0 --command='tail -f NAME.log'\n"
    )


_RECIPES = {"slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray, "tpu": _tpu}


def _counted(command: list[str], processes: int) -> list[str]:
    is_ours = command[:2] == ["toolkit", "train"] and "--processes" not in command
    return [*command, "--processes", str(processes)] if is_ours else command


def _words(command: list[str], processes: int) -> str:
    return shlex.join(_counted(command, processes))


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')
