"""The settings of training a language model, whatever the model and its text."""

import dataclasses

from toolkit.training import Recipe

SCHEMES = ("data", "zero1", "zero2", "zero3", "tensor", "ring", "zigzag", "ulysses")
HOW_IT_RUNS = (
    "layout", "tensor_devices", "context_devices", "loss_chunks", "block_chunks", "accumulate",
    "device_batch", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "keep",
    "scan_layers",
)  # fmt: skip
"""Fields of a run that affect only where, in which parts and how often something is done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(Recipe):
    """How a language model is trained: a `Recipe`, and what concerns text, experts and devices.

    Attributes:
        batch: sequences per step.
        sequence_length: tokens (bytes of a text) per sequence.
        weights: of each text: its share of the sequences, in any unit. Every text is then read in
            windows that do not overlap, in an order drawn for each epoch; the end of each is held
            out, and the held-out loss is the mean by these weights. None: texts are joined.
        validation: a file, folder or token array of held-out text; None holds out the end of each
            file of the text.
        balance: weight of the balance loss, in models with a mixture of experts; the loss that is
            evaluated is without it.
        router_z: weight of the router z-loss, which keeps routers' logits small.
        bias_rate: by how much each step moves the biases that choose experts towards even loads
            (balance without a loss), in models with `moe.choice_bias`; 1e-3 in DeepSeek-V3.
        init_from: a run or a published checkpoint whose model, with its tokenizer, is trained on: a
            folder, or "owner/name". None draws a model.
        seed: seed of the initialisation and of the order of the data.
        layout: "single" (one device), or over all devices a scheme of `toolkit.parallel.layout`:
            "data", "zero1", "zero2", "zero3", "tensor", or one of the former with "+tensor"; or
            "ring", "zigzag", "ulysses", which shard time, likewise. The batch must be a multiple of
            the data parallel devices.
        tensor_devices: devices that share each head-wise cut under "tensor"; the others are data
            parallel.
        context_devices: devices that share each sequence under "ring", "zigzag" or "ulysses".
        device_batch: most sequences that a device computes at once; the gradient is accumulated
            over as many passes as this takes, so that a run goes on with the same batch on fewer
            devices. None: no limit.
        loss_chunks: parts of time whose logits are computed one after the other, for large
            vocabularies: less memory, a third more work in the head.
        block_chunks: pieces of each sequence in the backward pass of every block (StreamBP): less
            memory, a third more work.
        scan_layers: trace layers that repeat once, so that the program does not grow with depth; a
            step then copies the parameters. None: on accelerators, under layout "single".
        evaluate_every: steps between evaluations; None for an eighth of the run.
        checkpoint_every: steps between checkpoints; None for an eighth of the run.
        checkpoint_minutes: also save after this number of minutes without a checkpoint.
        keep: checkpoints kept, the newest.

    Example:
        >>> settings = TrainingSettings(steps=10, batch=8, device_batch=1)
        >>> settings.passes(devices=2)
        4
    """

    batch: int = 16
    sequence_length: int = 256
    weights: tuple[float, ...] | None = None
    validation: str | None = None
    balance: float = 0.01
    router_z: float = 0.0
    bias_rate: float = 0.0
    init_from: str | None = None
    seed: int = 0
    layout: str = "single"
    tensor_devices: int = 1
    context_devices: int = 1
    device_batch: int | None = None
    loss_chunks: int = 1
    block_chunks: int = 1
    scan_layers: bool | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    keep: int = 3

    def __post_init__(self):
        if isinstance(self.weights, list):  # as JSON and TOML have it
            object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        super().__post_init__()
        if self.layout != "single" and not {*self.layout.split("+")} <= {*SCHEMES}:
            known = ", ".join(SCHEMES)
            raise ValueError(
                f"layout: got {self.layout!r}, wanted single, or {known} joined by '+'"
            )
        for name, schemes in (("tensor", SCHEMES[4:5]), ("context", SCHEMES[5:])):
            devices = getattr(self, f"{name}_devices")
            if (devices > 1) != bool({*schemes} & {*self.layout.split("+")}):
                raise ValueError(
                    f"{name}_devices: got {devices} and layout {self.layout!r}; wanted 2 or more "
                    f"with {' or '.join(map(repr, schemes))}, and 1 without"
                )
        sizes = ("batch", "sequence_length", "tensor_devices", "context_devices", "loss_chunks")
        optional = ("device_batch", "evaluate_every", "checkpoint_every")
        for name in (*sizes, "block_chunks", "keep", *optional):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: got {value}, wanted at least 1")
        if self.checkpoint_minutes is not None and self.checkpoint_minutes <= 0:
            raise ValueError(
                f"checkpoint_minutes: got {self.checkpoint_minutes}, wanted more than 0"
            )
        for name in ("loss_chunks", "block_chunks"):
            chunks = getattr(self, name)
            if self.sequence_length % chunks or chunks > 1 < self.context_devices:
                raise ValueError(
                    f"{name}: got {chunks}, wanted a divisor of {self.sequence_length} "
                    "(sequence_length), and 1 under a layout that cuts time"
                )
        if self.sequence_length % self.context_devices:
            raise ValueError(
                f"sequence_length: got {self.sequence_length}, wanted a multiple of "
                f"{self.context_devices} context_devices"
            )
        for name in ("balance", "router_z", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 0 or more")
        if self.weights is not None:
            if not self.weights or min(self.weights) < 0 or not sum(self.weights):
                raise ValueError(f"weights: got {self.weights}, wanted numbers above 0 (or 0)")
            if self.validation is not None:
                raise ValueError(
                    "validation: got a file with weights; wanted none, for texts' ends"
                )
        if self.learning_rate == "search" and self.device_batch is not None:
            raise ValueError("device_batch: a search of the learning rate takes whole batches")

    def passes(self, devices: int = 1) -> int:
        """Passes per update on this number of data parallel devices: `accumulate`, or as many as
        `device_batch` takes."""
        rows, rest = divmod(self.batch, devices)
        if rest:
            raise ValueError(f"batch: got {self.batch}, wanted a multiple of {devices} devices")
        most = rows if self.device_batch is None else self.device_batch
        wanted = max(self.accumulate, -(-rows // most))
        fitting = [n for n in range(wanted, rows + 1) if rows % n == 0]
        if not fitting or (self.device_batch is None and fitting[0] != wanted):
            raise ValueError(
                f"accumulate: got {self.accumulate}, wanted a divisor of the {rows} sequences of "
                "a device"
            )
        return fitting[0]
