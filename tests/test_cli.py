"""The command line as a person meets it: what it prints, how it fails, how it resumes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from toolkit.cli import commands as cli


@pytest.fixture
def toolkit(monkeypatch, capsys):
    """Run `toolkit ...` in this process: (exit status, standard output, standard error)."""
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["toolkit", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_ctrl_c_while_jax_is_imported_ends_without_a_traceback(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text(
        "print('here', flush=True); import time; time.sleep(60)"
    )
    command = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "info"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "here\n"
    command.send_signal(signal.SIGINT)
    assert command.communicate()[1] == ""
    assert command.returncode == -signal.SIGINT


def test_a_reader_who_has_seen_enough_is_no_error():
    command = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "experiment", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.communicate()[1] == b""
    assert command.returncode == 141


def test_info_prints_versions_devices_and_memory(toolkit):
    status, out, _ = toolkit("info")
    assert status == 0
    for word in ("jax", "device", "memory", "cores"):
        assert word in out


@pytest.mark.slow
def test_train_resumes_and_generate_continues_a_prompt(toolkit, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 40)
    common = ["train", tmp_path / "run", "--text", text, "--pattern", "gdn full", "--width", 32,
              "--batch", 4, "--sequence-length", 32, "--loops", 1]  # fmt: skip
    status, out, _ = toolkit(*common, "--steps", 20)
    assert status == 0
    assert "held-out loss" in out
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["corpus"]["files"][0]["sha256"]

    status, again, _ = toolkit(*common, "--steps", 20)
    assert status == 0
    assert re.search(r"loss ([\d.]+)", again).group(1) == re.search(r"loss ([\d.]+)", out).group(1)

    status, _, err = toolkit(*common[:-1], 2, "--steps", 20)
    assert status == 2
    assert "loops" in err

    status, out, _ = toolkit("generate", tmp_path / "run", "--prompt", "the ", "--length", 12)
    assert status == 0
    assert out.startswith("the ")

    file = tmp_path / "models/small.safetensors"
    status, out, _ = toolkit("export", tmp_path / "run", file, "--dtype", "float32")
    assert status == 0
    assert str(file) in out
    facts = json.loads(file.with_suffix(".json").read_text())
    assert facts["result"]["steps"] == 20
    assert facts["corpus"]["sha256"] == record["corpus"]["sha256"]
    greedy = ("--prompt", "the ", "--length", 12, "--temperature", 0)
    assert toolkit("generate", file, *greedy) == toolkit("generate", tmp_path / "run", *greedy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "RUN", "--pattern", "gdn fulll"], ["pattern", "fulll", "full"]),
        (["train", "RUN", "--text", "RUN/missing.txt"], ["missing.txt"]),
        (["train", "RUN", "--width", "130"], ["width", "130"]),
        (["generate", "RUN"], ["directory", "run.json"]),
        (["export", "RUN", "model.bin"], ["path", "model.bin", ".safetensors"]),
        (["bench", "nothing"], ["suites", "nothing", "gdn"]),
        (["explain", "--mesh", "data"], ["mesh='data'", "data=4,model=2"]),
        (["explain", "--scheme", "zero4"], ["scheme", "zero4"]),
        (["tour", "--steps", "3"], ["steps", "3"]),
        (["lab", "--port", "99999999"], ["port", "99999999"]),
    ],
)
def test_bad_input_gets_a_readable_error(toolkit, tmp_path, arguments, words):
    status, _, err = toolkit(*(str(a).replace("RUN", str(tmp_path)) for a in arguments))
    assert status == 2
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train RUN --pattern full --sliding-window 8", "window: got options of it"),
        ("train RUN --pattern gdn --attention-output-gate", "full: got options of it"),
        ("train RUN --set looped.window.sliding_window=8", "window: got options of it"),
        ("train RUN --text RUN --corpus code", "corpus: got 'code' beside text"),
        ("train RUN --simulated-devices 8", "simulated_devices: got 8 with layout 'single'"),
        ("train RUN --layout data --cores 2", "cores: got 2 with a layout"),
        ("train RUN --optimizer sgd --b2 0.9", "b2: got 0.9, and 'sgd' has none"),
        ("train RUN --optimizer lion --eps 0.1", "eps: got 0.1, and 'lion' has none"),
        ("train RUN --router-z 0.1", "router_z: got 0.1, and feed_forwards has no 'moe'"),
        ("train RUN --weights", "weights: got ()"),
        ("train RUN --weights 1 2", "weights: got 2 for 1 texts"),
        ("plan --lengths", "lengths: got none"),
        ("plan --decode 8 --memory 3", "memory: got --memory 3.0 with --decode"),
        ("plan --chips h100:4+a100:8 --save FILE", "save: got --save FILE with --chips"),
        ("plan --weights float8", "weights: got --weights float8 without --decode"),
        ("plan --collectives ring", "collectives: got --collectives ring without --topology"),
        ("plan --verify v5e:2x2 --chips v5e:4x4", "chips: got --chips v5e:4x4 with v5e:2x2 to"),
        ("plan --recipe llama-3-405b --batch 4", "batch: got --batch 4 with --recipe"),
        ("explain --plan FILE --loops 3", "loops: got --loops 3 with --plan"),
        ("bench gdn --minutes 3", "minutes: got --minutes 3.0 without --all"),
        ("bench gdn --all", "suites: got --suites ('gdn',) with --all"),
        ("bench --recorded FILE --rounds 3", "rounds: got --rounds 3 with --recorded"),
        ("experiment --list --seeds 3", "seeds: got --seeds 3 with --list"),
        ("compare RUN --recorded --seeds 9", "seeds: got --seeds 9 with --recorded"),
        ("evaluate RUN FILE --rows 3", "rows: got --rows 3 with files of rows alone"),
        ("launch --hosts 3 -- echo", "hosts: got --hosts 3 without --cluster"),
        ("launch --cluster slurm --dry-run --processes 3 -- echo", "processes: got --processes 3"),
        ("plan-collective a100:2x8 --root 3", "root: got 3 with all-reduce"),
        ("audit-sparse RUN --text FILE --budget", "budget: got none"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(toolkit, tmp_path, line, named):
    status, _, err = toolkit(*line.replace("RUN", str(tmp_path)).split())
    assert status == 2
    assert named in err


def test_a_port_in_use_is_named(toolkit):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = toolkit("lab", "--port", port)
    assert status == 2
    assert f"port: {port}" in err


def test_plan_collective_prints_the_certificate_and_writes_msccl(toolkit, tmp_path):
    file = tmp_path / "algorithm.xml"
    status, out, _ = toolkit(
        "plan-collective", "dgx1", "--op", "all-gather", "--size", "64MB", "--msccl", file
    )
    assert status == 0
    assert "171.43 GB/s = 1200/7" in out
    assert file.read_text().startswith("<algo")
    for arguments, complaint in (
        (("ring:8", "--size", "much"), "size must be a number of bytes"),
        (("v9:4x4",), "not a TPU of the table"),
        (("ring:8", "--root", "9", "--op", "reduce"), "root must be 0 to 7; got 9"),
    ):
        status, _, err = toolkit("plan-collective", *arguments)
        assert status == 2
        assert complaint in err
        assert len(err.splitlines()) == 1
