"""Answers to the exercises on killed workers."""

import math
import random

_REMEMBERS = random.Random(0)


def save(disk, data):
    disk.write("new", data)
    disk.sync("new")
    disk.rename("new", "state")


def without_sync(disk, data):
    disk.write("new", data)
    disk.rename("new", "state")


def removed_first(disk, data):
    disk.write("new", data)
    disk.sync("new")
    disk.remove("state")
    disk.rename("new", "state")


def in_place(disk, data):
    disk.write("state", data)
    disk.sync("state")


def aside(disk, data):
    disk.write("new", data)
    disk.sync("new")


ANSWERS = {
    "batch_at": (
        lambda step, seed, data, size: random.Random(f"{seed} {step}").sample(data, size),
        [
            (lambda step, seed, data, size: _REMEMBERS.sample(data, size), "when it is asked for"),
            (
                lambda step, seed, data, size: random.Random(seed).sample(data, size),
                "Some steps have the same batch",
            ),
            (lambda step, seed, data, size: data[step * size :][:size], "Another seed"),
            (lambda step, seed, data, size: [-step - 1] * size, "that data does not have"),
            (lambda step, seed, data, size: data[:2], "wanted 6"),
        ],
    ),
    "save": (
        save,
        [
            (in_place, "“state” holds 'NEW-'"),
            (without_sync, "“state” holds 'NEW-'"),
            (removed_first, "“state” is gone"),
            (aside, "After a save that ended, “state” holds 'OLD-STATE'"),
            (lambda disk, data: disk.rename("new", "state"), "save raised FileNotFoundError: new"),
            (lambda disk, data: [disk.sync("state") for _ in range(99)], "four are enough"),
            (lambda disk, data: None, "Not written yet"),
        ],
    ),
    "best_interval": (
        lambda save, between: math.sqrt(2 * save * between),
        [
            (lambda save, between: math.sqrt(save * between), "is possible"),
            (lambda save, between: 600.0, "saving every 600 s loses"),
            (lambda save, between: between, "saving every 36,000 s"),
            (lambda save, between: 0, "is no interval"),
        ],
    ),
}
