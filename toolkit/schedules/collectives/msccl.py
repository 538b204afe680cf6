"""Programs as XML files that MSCCL, RCCL and their successors run on GPUs, and back."""

import collections
import xml.etree.ElementTree as ET

from toolkit._checks import checked
from toolkit.schedules.collectives.program import Message, Program

_NAMES = {"all-gather": "allgather", "reduce-scatter": "reduce_scatter", "all-reduce": "allreduce"}
_MOST_STEPS = 256  # of a thread block, in MSCCL


@checked
def to_msccl(program: Program) -> str:
    """Write a program as MSCCL XML, in place, with one thread block per sender and receiver.

    A step waits for the one before it that wrote its chunk on the same GPU ("depid", "deps").

    Args:
        program: of an "all-gather", "reduce-scatter" or "all-reduce".

    Returns:
        The file's contents. A pair of GPUs with more than 256 messages gets several channels.

    Source: https://github.com/Azure/msccl, the runtime's parser of algorithms.

    Example:
        >>> to_msccl(to_program(forest(ring(4))))[:12]
        '<algo name="'
    """
    if program.collective not in _NAMES:
        raise ValueError(f"program: MSCCL has no {program.collective!r}; want {', '.join(_NAMES)}")
    chunks, buffer = len(program.owners), "i" if program.collective == "reduce-scatter" else "o"
    steps: dict[tuple[int, str, int, int], list[dict]] = {}  # GPU, way, peer, channel
    last: dict[tuple[int, int], dict] = {}  # GPU, chunk -> the step that wrote it
    sent: collections.Counter = collections.Counter()

    def add(gpu: int, way: str, peer: int, channel: int, kind: str, chunk: int) -> dict:
        block = steps.setdefault((gpu, way, peer, channel), [])
        step = {
            "type": kind, "chunk": chunk, "after": last.get((gpu, chunk)),
            "block": (gpu, way, peer, channel), "position": len(block), "awaited": False,
        }  # fmt: skip
        if step["after"]:
            step["after"]["awaited"] = True
        block.append(step)
        return step

    for chunk, source, target, is_sum in (message for each in program.rounds for message in each):
        channel = sent[source, target] // _MOST_STEPS
        sent[source, target] += 1
        add(source, "send", target, channel, "s", chunk)
        step = add(target, "recv", source, channel, "rrc" if is_sum else "r", chunk)
        last[target, chunk] = step
    number = {}
    for block in sorted(steps):
        number[block] = sum(other[0] == block[0] for other in number)
    channels = 1 + max((block[3] for block in steps), default=0)
    algorithm = ET.Element(
        "algo", name=program.name, proto="Simple", nchannels=str(channels),
        nchunksperloop=str(chunks), ngpus=str(program.ranks), coll=_NAMES[program.collective],
        inplace="1", outofplace="0", minBytes="0", maxBytes="0",
    )  # fmt: skip
    per_rank = chunks // program.ranks
    sizes = {"i_chunks": chunks, "o_chunks": chunks, "s_chunks": 0}
    if program.collective != "all-reduce":
        sizes["i_chunks" if buffer == "o" else "o_chunks"] = per_rank
    for gpu in range(program.ranks):
        sizes_in_words = {name: str(size) for name, size in sizes.items()}
        of_gpu = ET.SubElement(algorithm, "gpu", {"id": str(gpu), **sizes_in_words})
        for block in sorted(block for block in steps if block[0] == gpu):
            _, way, peer, channel = block
            ends = {"send": "-1", "recv": "-1", way: str(peer)}
            thread_block = ET.SubElement(
                of_gpu, "tb", {"id": str(number[block]), **ends, "chan": str(channel)}
            )
            for step in steps[block]:
                after = step["after"]
                ET.SubElement(
                    thread_block, "step", s=str(step["position"]), type=step["type"],
                    srcbuf=buffer, srcoff=str(step["chunk"]), dstbuf=buffer,
                    dstoff=str(step["chunk"]), cnt="1",
                    depid=str(number[after["block"]] if after else -1),
                    deps=str(after["position"] if after else -1), hasdep=str(int(step["awaited"])),
                )  # fmt: skip
    ET.indent(algorithm)
    return ET.tostring(algorithm, encoding="unicode")


@checked
def from_msccl(text: str) -> Program:
    """Read MSCCL XML: run its thread blocks with their dependencies, and note the messages.

    Args:
        text: the file's contents; in place, with sends ("s"), receives ("r"), receives that add
            ("rrc") and waits ("nop") of whole chunks at one offset.

    Returns:
        A `Program`, which `program_faults` checks; the owners of an all-reduce's chunks, of which
        the file says nothing, are the ranks in order.

    Raises:
        ValueError: for other steps, or thread blocks that wait for each other for ever.

    Example:
        >>> again = from_msccl(to_msccl(to_program(forest(ring(4)))))
        >>> program_faults(again)
        []
    """
    try:
        root = ET.fromstring(text)
        collective = {short: name for name, short in _NAMES.items()}[root.attrib["coll"]]
        ranks, chunks = int(root.attrib["ngpus"]), int(root.attrib["nchunksperloop"])
        blocks = {
            (int(gpu.attrib["id"]), int(block.attrib["id"])): block
            for gpu in root.iter("gpu")
            for block in gpu.iter("tb")
        }
        steps = {key: [_step(step) for step in block] for key, block in blocks.items()}
    except (ET.ParseError, KeyError) as error:
        raise ValueError(f"text is not MSCCL XML: {type(error).__name__} {error}") from None
    if not ranks or not chunks or chunks % ranks:
        raise ValueError(f"text: {chunks} chunks are no multiple of {ranks} GPUs")
    done = dict.fromkeys(steps, 0)
    receivers = {
        (int(block.attrib["recv"]), gpu, block.attrib["chan"]): (gpu, number)
        for (gpu, number), block in blocks.items()
        if block.attrib["recv"] != "-1"
    }
    rounds = []
    while any(done[key] < len(steps[key]) for key in steps):
        before, now, moved, busy = dict(done), [], [], set()

        def ready(key, before=before):
            """A thread block's next step, if what it waits for was done in an earlier round."""
            if before[key] == len(steps[key]):
                return None
            step = steps[key][before[key]]
            awaited = (key[0], step["depid"])
            waits = step["depid"] >= 0 and before.get(awaited, 0) <= step["deps"]
            return None if waits else step

        for key, block in blocks.items():
            step = ready(key)
            if step and step["type"] == "nop":
                moved.append((key,))
            if not step or step["type"] != "s":
                continue
            target = int(block.attrib["send"])
            other = receivers.get((key[0], target, block.attrib["chan"]))
            arrival = ready(other) if other else None
            if arrival is None or arrival["type"] not in ("r", "rrc"):
                continue
            if arrival["chunk"] != step["chunk"]:
                raise ValueError(
                    f"text: GPU {key[0]} sends chunk {step['chunk']}, and GPU {target} expects "
                    f"{arrival['chunk']}"
                )
            if (key[0], target) not in busy:  # by another channel
                busy.add((key[0], target))
                now.append(Message(step["chunk"], key[0], target, arrival["type"] == "rrc"))
                moved.append((key, other))
        if not moved:
            stuck = next(key for key in steps if done[key] < len(steps[key]))
            raise ValueError(f"text: thread block {stuck[1]} of GPU {stuck[0]} waits for ever")
        for key in (key for pair in moved for key in pair):
            done[key] += 1
        if now:
            rounds.append(tuple(now))
    owners = tuple(chunk * ranks // chunks for chunk in range(chunks))
    name = root.attrib.get("name", "MSCCL")
    return Program(name, collective, ranks, owners, tuple(rounds))


def _step(element: ET.Element) -> dict:
    found = element.attrib
    if found["type"] not in ("s", "r", "rrc", "nop"):
        raise ValueError(f"text: a step of type {found['type']!r}; want s, r, rrc or nop")
    if found["type"] != "nop" and (found["srcoff"] != found["dstoff"] or found["cnt"] != "1"):
        raise ValueError("text: a step that moves a chunk to another offset, or several chunks")
    chunk, depid, deps = (int(found[name]) for name in ("srcoff", "depid", "deps"))
    return {"type": found["type"], "chunk": chunk, "depid": depid, "deps": deps}
