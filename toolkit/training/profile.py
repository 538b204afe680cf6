"""A profiler's trace of chosen updates, for XProf, TensorBoard or Perfetto."""

import os
from pathlib import Path

import jax


class StepTrace:
    """Trace updates first + 1 .. last of the first process's devices into `directory/profile`.

    A resumed run beyond `first` traces the rest.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: str | os.PathLike | None):
        if steps is not None and directory is None:
            raise ValueError("profile: got steps to trace and no directory, wanted both")
        self.steps = steps if jax.process_index() == 0 else None
        self.directory = None if directory is None else Path(directory) / "profile"
        self.is_running = False

    def before(self, step: int) -> None:
        """Start the trace if the next update is the first to be traced."""
        if self.steps is not None and not self.is_running and step in range(*self.steps):
            jax.profiler.start_trace(str(self.directory))
            self.is_running = True

    def after(self, step: int) -> None:
        """Write the trace if the last finished update was the last to be traced."""
        if self.steps is not None and step >= self.steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace so far."""
        if self.is_running:
            jax.profiler.stop_trace()
            self.is_running = False


def parsed_steps(text: str | None) -> tuple[int, int] | None:
    """'10:13' as (10, 13)."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"profile: got {text!r}, wanted two steps such as 10:13")
    return int(first), int(last)
