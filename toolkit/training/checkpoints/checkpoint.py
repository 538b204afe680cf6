"""Checkpoints that survive a kill at any moment, and detect damage.

orbax writes in the background and gives a checkpoint its integer name only when it is complete,
so the previous one stays valid after an interrupted save. This file adds what orbax leaves to its
user: a record of the tree and of the run beside the arrays, a fallback past a damaged directory,
and errors that say which path and why.
"""

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import jax

from toolkit._checks import checked
from toolkit._files import read_sealed_json, sealed_json
from toolkit.training.checkpoints.abandoned_reads import Refused, first_line, quiet_abandoned_reads
from toolkit.training.checkpoints.identity import (
    as_json,
    bound_as,
    checksums,
    describe,
    named_leaves,
    state_bytes,
)
from toolkit.training.checkpoints.locks import HeldError, locked
from toolkit.training.checkpoints.same_run import RESIDUALS, other_replicas, require_same_run

State = TypeVar("State")

# Space for the index files that orbax writes beside the arrays.
_OVERHEAD_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used for this run; names path and reason."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was set aside and an older one takes its place."""


class Checkpoints:
    """The newest few checkpoints of one run, in one directory.

    A checkpoint is a directory named by its step, written in the background and renamed into
    place when complete. Arrays are stored whole, and restored with the template's sharding. One
    process at a time writes: it holds `trainer.lock` until it closes or dies. Any number may read
    meanwhile, and a reader changes nothing.

    Attributes:
        directory: their folder.
        keep: how many are kept; older ones are deleted after a newer one is complete.
        is_read_only: whether this is a reader.

    Example:
        >>> with Checkpoints("run") as checkpoints:
        ...     checkpoints.save(10, {"w": jnp.ones(3)}, {"seed": 0})
        ...     state, run = checkpoints.restore_latest({"w": jnp.zeros(3)}, {"seed": 0})
        >>> state["w"].tolist()
        [1.0, 1.0, 1.0]
    """

    @checked
    def __init__(self, directory: str | os.PathLike, keep: int = 3, *, is_read_only: bool = False):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory).absolute()
        try:
            str(self.directory).encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"{str(self.directory)!r} cannot hold checkpoints: its name is not UTF-8"
            ) from None
        self.keep = keep
        self.is_read_only = is_read_only
        self._needed_bytes = 0
        self._lock = ExitStack()
        if not is_read_only:
            self._take_over()
        try:
            self._manager = self._open()
        except BaseException:
            self._lock.close()
            raise

    def _take_over(self) -> None:
        """Become the directory's only writer, and remove unfinished work of an earlier one."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self._lock.enter_context(locked(self.directory / "trainer.lock"))
        except OSError as error:
            raise CheckpointError(
                f"cannot use {str(self.directory)!r} for checkpoints: {error.strerror}"
            ) from error
        except HeldError as error:
            raise CheckpointError(
                f"{str(self.directory)!r} is being trained by {error.holder}; "
                "wait for it, stop it, or give this run another directory"
            ) from None
        if jax.process_index() == 0:
            for unfinished in self.directory.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, metadata: dict[str, Any] | None = None) -> None:
        """Start writing a checkpoint; returns once the arrays are copied, before they are on disk.

        The arrays may be donated as soon as this returns. A step that already has a checkpoint is
        skipped: training is deterministic, so it holds the same numbers.

        Args:
            step: updates made so far; names the directory.
            state: pytree of arrays, sharded or not.
            metadata: JSON-able description of the run, compared by `restore_latest`.

        Raises:
            CheckpointError: when the disk is too full for the state, or when this save or the one
                before failed.

        Cost: One copy of the state to the host, then bytes(state) of writing in the background.
        """
        import orbax.checkpoint as ocp

        run = as_json(metadata or {})
        if step in self._manager.all_steps():
            return
        self.require_free_space(state)
        record = {"run": run, "arrays": describe(state), "checksums": checksums(state)}
        try:
            is_saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(named_leaves(state)),
                    record=ocp.args.JsonSave({"sealed": sealed_json(record).decode()}),
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(error) from error
        if not is_saved:
            raise CheckpointError(
                f"checkpoint {self._path(step)} was not written: its directory already holds step "
                f"{self._manager.latest_step()}.\nGive this run a directory of its own."
            )

    def restore_latest(
        self, template: State, expected: dict[str, Any] | None = None,
        also: Sequence[dict[str, Any]] = (), resize: Callable[[Any], Any] | None = None,
    ) -> tuple[State, dict[str, Any]] | None:  # fmt: skip
        """Read the newest usable checkpoint.

        A checkpoint that is damaged, or belongs to another run, is refused: with a
        `CheckpointWarning` it is renamed to `<step>.refused`, and the one before it is used. If
        none is left, an error is raised, so that no run silently starts again or continues another.

        Args:
            template: a state of this run, whose structure, dtypes and shardings the result has;
                arrays that are uncommitted in the template stay so.
            expected: metadata that must agree with the checkpoint's, key by key.
            also: other metadata with which it may agree instead.
            resize: what replicas remember of an exchange of gradients, saved on another number of
                them -> the same for the template; None refuses another number. A template without
                a state of the exchange leaves it out.

        Returns:
            (state, metadata), or None if there has never been a checkpoint here.

        Raises:
            CheckpointError: when every checkpoint was refused; says why, and what differs.

        Cost: Reads bytes(state), each device its own part.
        """
        self.wait()
        refused: list[str] = []
        for step in reversed(self.steps()):
            try:
                record = self._read_record(step)
                other = other_replicas(record["arrays"], template, resize is not None)
                require_same_run(record, template, expected, also, other)
                state = self._read_state(step, template, record["checksums"], other, resize)
            except Refused as reason:
                refused.append(f"{self._path(step)}: {reason}")
                continue
            for line in refused:
                warnings.warn(
                    f"refused checkpoint {line}.\nUsing step {step} instead.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            if refused and not self.is_read_only:
                self._set_aside(newer_than=step)
            return state, record["run"]
        if refused:
            older = f" ({len(refused) - 1} older ones too)" if len(refused) > 1 else ""
            raise CheckpointError(
                f"refused checkpoint {refused[0]}{older}.\n"
                "Use the settings of that run, or another directory for this one."
            )
        return None

    def newest_metadata(self) -> dict[str, Any] | None:
        """The metadata of the newest checkpoint, None without one; CheckpointError if damaged."""
        steps = self.steps()
        try:
            return self._read_record(steps[-1])["run"] if steps else None
        except Refused as reason:
            raise CheckpointError(f"checkpoint {self._path(steps[-1])}: {reason}") from None

    def wait(self) -> None:
        """Wait until the last save is on disk; CheckpointError if it failed (the previous one is
        valid).
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # orbax re-raises whatever its writer thread met
            raise self._failure(error) from error

    def close(self) -> None:
        """Finish the current save and stop the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._lock.close()

    def _open(self) -> Any:
        # orbax logs every phase and repeats every failure through absl; failures are raised as
        # well, and reported from here.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        import orbax.checkpoint as ocp

        if self.is_read_only:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, enable_async_checkpointing=True
            )
        return ocp.CheckpointManager(self.directory, options=options)

    def _path(self, step: int) -> str:
        return str(self.directory / str(step))

    def _read_record(self, step: int) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        if not (self.directory / str(step) / "record").is_dir():
            raise Refused("it has no record (an empty or foreign directory)")
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
            )
            record = read_sealed_json(restored.record["sealed"].encode(), "its record")
            if not {"run", "arrays", "checksums"} <= record.keys():
                raise Refused("its record was not written by this library")
        except Refused:
            raise
        except Exception as error:  # orbax raises many types for damaged files
            raise Refused(f"its record is unreadable ({first_line(error)})") from error
        return record

    def _read_state(
        self, step: int, template: State, saved: dict[str, int], other: dict[str, Any],
        resize: Callable[[Any], Any] | None,
    ) -> State:  # fmt: skip
        import orbax.checkpoint as ocp

        named = named_leaves(template) | other
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, named)
        with quiet_abandoned_reads():
            try:
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
                )
            except Exception as error:  # tensorstore and orbax raise many types for damaged files
                raise Refused(f"its arrays are unreadable ({first_line(error)})") from None
        found = checksums(restored.state)
        if changed := [name for name in named if found[name] != saved.get(name)]:
            raise Refused(f"array {changed[0]!r} is not what was saved (its checksum differs)")
        named = named_leaves(template)
        if resize is not None and other.keys() & named.keys():
            own: Any = template
            names = [name for name in named if name.startswith(RESIDUALS)]
            old = jax.tree.unflatten(
                jax.tree.structure(own.exchange_state.residuals),
                [restored.state[name] for name in names],
            )
            new = jax.tree.leaves(resize(old))
            restored.state.update(zip(names, new, strict=True))
        leaves = [bound_as(like, restored.state[name]) for name, like in named.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def _set_aside(self, newer_than: int) -> None:
        """Rename refused directories, whose integer names would prevent saving their step again."""
        damaged = [step for step in self.steps() if step > newer_than]
        self._manager.close()
        if jax.process_index() == 0:
            for step in damaged:
                source = self.directory / str(step)
                target = source.with_name(f"{step}.refused")
                shutil.rmtree(target, ignore_errors=True)
                source.rename(target)
        self._manager = self._open()

    def require_free_space(self, state: Any) -> None:
        """Refuse a disk without space for one more checkpoint, before training starts."""
        self._needed_bytes = needed = state_bytes(state) + _OVERHEAD_BYTES
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise CheckpointError(
                f"no space for a checkpoint in {self.directory}: it needs {needed:,} bytes, "
                f"{free:,} are free.\nFree some space and start again; earlier checkpoints are "
                "untouched."
            )

    def _failure(self, error: BaseException) -> CheckpointError:
        is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        free = shutil.disk_usage(self.directory).free
        full = f"the disk is full (it needs {self._needed_bytes:,} bytes, {free:,} are free)"
        reason = full if is_full else first_line(error)
        return CheckpointError(
            f"could not write a checkpoint in {self.directory}: {reason}.\n"
            "The previous checkpoint is untouched."
        )
