"""One command for an accelerator: rehearsed on a CPU, resumed, and what it does with a failure."""

import inspect
import json
import re
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread

import pytest
from tqdm import tqdm

from toolkit.bench.accelerator.checks import KernelCheck, kernel_checks
from toolkit.bench.accelerator.record_all import (
    _checked_kernel,
    _failure,
    _is_done,
    _watched,
    record_all,
)
from toolkit.measure import read_records, write_records

MEASUREMENTS = Path(__file__).parents[2] / "data/measurements"


def test_a_kernel_that_is_wrong_or_nan_has_no_record():
    right = _checked_kernel(KernelCheck("x", lambda: 0.01, 0.02), "kernel cuda x")
    assert [(x.value, x.check) for x in right] == [(0.01, "passed")]
    for error in (0.03, float("nan")):
        with pytest.raises(ValueError, match=r"wanted at most 0\.02"):
            _checked_kernel(KernelCheck("x", lambda error=error: error, 0.02), "kernel cuda x")


def test_what_failed_is_done_and_says_why():
    failed = _failure("kernel cuda x", "it stopped")
    assert failed.name == "kernel cuda x | failed: it stopped"
    assert failed.check == "absent"
    assert _is_done("kernel cuda x", [failed])
    assert not _is_done("kernel cuda", [failed])


def test_every_kernel_has_a_check():
    names = [check.name for check in kernel_checks("cuda")]
    assert len(set(names)) == len(names)
    assert {"gdn gradients", "kda gradients", "mla step"} < set(names)
    assert {x.name.split()[-1] for x in kernel_checks("tpu")} == {"values", "gradients", "step"}


def test_a_machine_without_an_accelerator_is_refused(tmp_path, capsys):
    with pytest.raises(RuntimeError, match=r"no GPU or TPU here: wanted .*--interpret cuda"):
        record_all(tmp_path / "x.json")
    with pytest.raises(ValueError, match="got 'rocm' on platform 'cpu', wanted one of cuda, tpu"):
        record_all(tmp_path / "x.json", interpret="rocm")
    with pytest.raises(RuntimeError, match="nothing could be begun"):
        record_all(tmp_path / "x.json", minutes=0, interpret="cuda")
    assert "not begun in 0 minutes; the same command goes on" in capsys.readouterr().err


def test_the_bar_moves_while_the_other_process_works(tmp_path):
    write_records(tmp_path / "x.json", [_failure("first", "it stopped")])
    with tqdm(total=2) as bar, Popen([sys.executable, "-c", "input()"], stdin=PIPE) as child:
        thread = Thread(
            target=_watched, args=(child, tmp_path / "x.json", ["first", "b"], bar, 0.05)
        )
        thread.start()
        while thread.is_alive() and bar.n == 0:
            thread.join(0.05)
        assert (bar.n, child.poll()) == (1, None)
        child.communicate(b"\n")
        thread.join()


@pytest.mark.slow
def test_a_rehearsal_ends_in_a_file_and_is_not_repeated(tmp_path):
    path = tmp_path / "rehearsal.json"
    found = record_all(path, only="kernel cuda mla step", interpret="cuda")
    assert [x.name for x in found] == ["kernel cuda mla step | relative error"]
    assert found[0].check == "passed"
    before = path.read_bytes()
    assert record_all(path, only="kernel cuda mla step", interpret="cuda") == found
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_rehearsal_that_is_killed_leaves_no_process(tmp_path):
    """The process that measures keeps the pipe open for as long as it lives."""
    path, only = tmp_path / "rehearsal.json", "kernel cuda gdn gradients"
    call = f"record_all(Path({str(path)!r}), only={only!r}, interpret='cuda')"
    imports = (
        "from pathlib import Path; from toolkit.bench.accelerator.record_all import record_all"
    )
    command = [sys.executable, "-c", f"{imports}; {call}"]
    with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as parent:
        assert any(line.strip() == only for line in parent.stdout)
        parent.kill()
        parent.communicate(timeout=10)
    assert not path.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_whole_rehearsal_passes(platform, tmp_path):
    path = tmp_path / "rehearsal.json"
    found = record_all(path, only="kernel", minutes=60, interpret=platform)
    assert len(found) == len(list(kernel_checks(platform)))
    assert {x.check for x in found} == {"passed"}, [x.name for x in found if x.check != "passed"]


@pytest.mark.parametrize("path", sorted(MEASUREMENTS.glob("*/*.json")), ids=lambda x: x.stem)
def test_files_that_were_sent_are_records_of_a_commit(path):
    records = read_records(path)
    assert records
    assert len({x.device.split(", ")[0] for x in records}) == 1, "one machine a file"
    assert all(re.match("[0-9a-f]{7,40}", x.commit) for x in records), "no commit"


def test_the_notebook_runs_the_command_and_reads_the_file():
    cells = json.loads((MEASUREMENTS / "record.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "!toolkit bench --all --record accelerator.json --minutes 30" in code
    assert any('read_records("accelerator.json")' in cell for cell in code)
    assert inspect.signature(record_all).parameters["minutes"].default == 30


def test_the_page_of_results_says_what_was_recorded():
    """Every time of the table, in its column's contender, to the digits that are written."""
    records = read_records(MEASUREMENTS / "nvidia-h100/accelerator.json")
    seconds = {x.name: x.value for x in records}
    short = {
        "Gated DeltaNet": "gdn", "Mamba-2": "mamba2", "Kimi Delta Attention": "kda",
        "Gated linear attention": "gla", "DeltaNet": "delta",
    }  # fmt: skip
    page = (MEASUREMENTS.parents[1] / "docs/results.md").read_text()
    contenders = ["toolkit, pallas", "toolkit, xla", "flash-linear-attention"]
    count = 0
    for name, direction, *cells in re.findall(
        r"\| ([\w -]+), (forward[\w ]*) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", page
    ):
        direction = direction.replace(" and ", "+")
        case = f"{short[name]} {direction} B=2 T=16384 H=16 D=128 bfloat16 | 1 cores | "
        for contender, cell in zip(contenders, cells, strict=True):
            if not cell.endswith(" ms"):
                continue
            # Before the kernel was the default, the plain call was XLA's.
            found = seconds.get(case + contender, seconds.get(case + "toolkit"))
            assert f"{1e3 * found:.3g}" == f"{float(cell[:-3]):.3g}", (case, contender)
            count += 1
    assert count == 21
    kernels = [x for x in records if x.name.startswith("kernel cuda ")]
    assert [x.check for x in kernels] == ["passed"] * 34
    assert "All 34 kernels were right" in page
    days = {(x.date[:10], x.versions["jax"]) for x in records}
    assert days == {("2026-11-26", "0.11.2"), ("2026-11-27", "0.11.2")}
    for name, kernel, xla in (("mamba2", 1.08, 0.570), ("gdn", 1.14, 0.817)):
        case = f"{name} step B=512 H=16 D=128 float32 | 1 cores | "
        assert 1e3 * seconds[case + "toolkit, pallas"] == pytest.approx(kernel, abs=6e-3)
        assert 1e3 * seconds[case + "toolkit, xla"] == pytest.approx(xla, abs=6e-4)
    case = "mamba2 step B=512 H=16 D=128 float32 | 1 cores | state read and written once"
    assert 1e3 * seconds[case] == pytest.approx(0.538, abs=6e-4)
    softmax = "softmax forward+backward causal B=4 T=4096 H=16/4 D=128 bfloat16 | 1 cores | "
    latent = "latents of 576, H=16 B=8 context=32768 bfloat16 | 1 cores | "
    for name, milliseconds in {
        softmax + "toolkit, cudnn": 2.6, softmax + "toolkit": 30.8, softmax + "jax.nn, xla": 26.2,
        latent + "toolkit, pallas": 0.24, latent + "toolkit, xla": 0.40,
        latent + "jax.nn.dot_product_attention": 0.38,
    }.items():  # fmt: skip
        assert 1e3 * seconds[name] == pytest.approx(milliseconds, rel=0.02), name
    ratios = {}
    for system, ours, xla in (
        ("quest", 0.191, 0.174), ("tactic", 0.208, 0.217), ("hata", 0.963, 0.982),
        ("pqcache", 0.948, 0.929), ("tactic to mass 0.9", None, None),
    ):  # fmt: skip
        case = f"{system}, B=1 H=32/8 D=128 context=131072 bfloat16 | 1 cores | "
        gathered = seconds[f"{case}{system}, gathered by xla"]
        ratios[system] = seconds[case + "dense"] / gathered
        if ours is not None:
            assert seconds[f"{case}{system}, pallas"] * 1e3 == pytest.approx(ours, abs=6e-4)
            assert gathered * 1e3 == pytest.approx(xla, abs=6e-4)
            assert gathered / seconds[f"{case}{system}, pallas"] < 1.045
    assert [round(ratios[x], 1) for x in ("quest", "tactic")] == [2.1, 1.6]
    assert max(ratios[x] for x in ("hata", "pqcache", "tactic to mass 0.9")) < 1
    sale = "sale prefill, B=1 H=32/8 D=128 context=131072 bfloat16 | 1 cores | "
    assert [round(1e3 * seconds[sale + x]) for x in ("sale, pallas", "dense")] == [413, 249]
