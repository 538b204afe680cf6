"""Load on loopback: no request is lost or mixed up, memory does not grow, a kill is survived."""

import gc
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import psutil
import pytest
from served import NAME, ask, complete, events, served, tiny_model, wait_until

from toolkit.looped import generate, save_model

pytest.importorskip("uvicorn")
CLIENTS = 8
MOST_GROWTH = 32e6  # bytes, from a third of the requests to the end
MOST_SECONDS = 1800


def soak(service, wanted, count, until):
    """Random requests from several clients, some of which vanish; what went wrong."""
    texts, sizes = list(wanted), []

    def client(number):
        draw, faults = random.Random(number), []
        for turn in range(count // CLIENTS):
            if time.monotonic() > until:
                return [*faults, "out of time"]
            if number == 0 and turn % max(1, count // CLIENTS // 10) == 0:
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss)
            prompt, seed, length = draw.choice(texts)
            body = {"model": NAME, "prompt": prompt, "max_tokens": length, "seed": seed}
            if draw.random() < 0.05:
                # Sends half a request, or a whole one that it does not wait for.
                with socket.create_connection(("127.0.0.1", service.port)) as gone:
                    gone.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
            body["stream"] = is_stream = draw.random() < 0.3
            status, answer = ask(service.port, "/v1/completions", body)
            if is_stream and status == 200:
                found = "".join(piece["choices"][0]["text"] for piece in events(answer))
            else:
                found = answer["choices"][0]["text"] if status == 200 else f"status {status}"
            if found != wanted[prompt, seed, length]:
                faults.append((prompt, seed, length, found))
        return faults

    with ThreadPoolExecutor(CLIENTS) as pool:
        faults = [fault for faults in pool.map(client, range(CLIENTS)) for fault in faults]
    return faults, sizes


def wanted_texts(prompts, seeds, length):
    model, wanted = tiny_model(), {}
    for prompt in prompts:
        for seed in range(seeds):
            tokens = jnp.asarray([list(prompt.encode())])
            key = jax.random.key(seed)
            [text] = generate(model, tokens, length, temperature=1.0, key=key)
            for cut in (1, length // 2, length):
                raw = bytes(text.tolist()[:cut])
                wanted[prompt, seed, cut] = raw.decode(errors="replace")
    return wanted


@pytest.mark.parametrize(
    "count", [80, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)])]
)
def test_no_request_is_lost_or_mixed_up_and_memory_does_not_grow(count):
    wanted = wanted_texts(["One", "One more", "Another one", "The tenth"], seeds=4, length=24)
    with served(tiny_model(), pages=24) as service:
        faults, sizes = soak(service, wanted, count, time.monotonic() + MOST_SECONDS)
        assert not faults
        _, text = ask(service.port, "/metrics")
        assert f'toolkit_requests_total{{reason="length"}} {float(count)}' in text
        wait_until(lambda: not service.engine.progress)
        assert not service.worker._open
        assert service.engine.pages.available == 24
    if count >= 10_000:
        assert sizes[-1] - sizes[len(sizes) // 3] < MOST_GROWTH, sizes


def start(file, port):
    command = [sys.executable, "-m", "toolkit", "serve", str(file), "--port", str(port)]
    command += ["--capacity", "64", "--page", "8", "--slots", "2", "--name", NAME, "--grace", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert f"serving {NAME} at http://127.0.0.1:{port}/v1" in line
    return process


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_a_killed_server_starts_again_on_its_port_and_a_signal_lets_requests_end(tmp_path):
    file, port = tmp_path / "tiny.safetensors", free_port()
    save_model(tiny_model(), file)
    first = start(file, port)
    try:
        text = complete(port)["choices"][0]["text"]
        long = {"model": NAME, "prompt": "One", "max_tokens": 60, "seed": 0, "stream": True}
        with ThreadPoolExecutor(4) as pool:
            cut = [pool.submit(ask, port, "/v1/completions", long) for _ in range(4)]
            first.kill()
            for future in cut:
                future.exception()  # whatever became of them, they end
    finally:
        first.kill()
        first.communicate()
    second = start(file, port)
    try:
        assert complete(port)["choices"][0]["text"] == text
        taken = subprocess.run(
            [sys.executable, "-m", "toolkit", "serve", str(file), "--port", str(port)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert taken.returncode == 2
        assert "in use" in taken.stderr
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) in (0, -signal.SIGTERM)
    finally:
        second.kill()
        second.communicate()
