"""Answers to the exercises on a pipeline of eight devices."""


def ticks(orders, *, lag=1, waits=True, start=0, at_once=False):
    found, at, now = {}, [0] * len(orders), 0
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        ran = {}
        for device, order in enumerate(orders):
            if at[device] == len(order):
                continue
            kind, i = order[at[device]]
            step = -1 if kind == "F" else 1
            needs = [("F", i, device)] if kind == "B" else []
            if 0 <= device + step < len(orders):
                needs.append((kind, i, device + step))
            is_ready = all(
                one in found and (at_once or one[2] == device or found[one] + lag <= now)
                for one in needs
            )
            if is_ready or not waits:
                (found if at_once else ran)[kind, i, device] = now
                at[device] += 1
        found |= ran
        now += 1
    return {task: tick + start for task, tick in found.items()}


def places(order):
    held = most = 0
    for kind, _ in order:
        if kind == "F":
            held += 1
            most = max(most, held)
        else:
            held -= 1
    return most


def early(device, devices, microbatches, each=2):
    ahead = min(each * (devices - 1 - device), microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches):
        if i + ahead < microbatches:
            order.append(("F", i + ahead))
        order.append(("B", i))
    return order


ANSWERS = {
    "ticks": (
        ticks,
        [
            (lambda orders: ticks(orders, waits=False), "Nobody waits for anybody"),
            (lambda orders: ticks(orders, lag=2), "can be used in the very next one"),
            (lambda orders: ticks(orders, at_once=True), "A device that comes later in your loop"),
            (lambda orders: ticks(orders, start=1), "counted from 0"),
            (lambda orders: {}, "must return a dict"),
            (lambda orders: dict.fromkeys(ticks(orders), 3), "is in tick 0, not in 3"),
        ],
    ),
    "places": (
        places,
        [
            (lambda order: sum(kind == "F" for kind, _ in order), "a backward frees a place"),
            (lambda order: places(order) - 1, "One too few"),
            (lambda order: 3, "1F1B, device 0 holds up to 4, not 3"),
        ],
    ),
    "early": (
        early,
        [
            (lambda d, p, m: early(d, p, m, each=1), "and 1F1B at"),
            (lambda d, p, m: [(k, i) for k in "FB" for i in range(m)], "15 fit"),
            (lambda d, p, m: early(d, p, m)[:-1], "B15@0 is missing"),
            (lambda d, p, m: early(d, p, m)[::-1], "waits for ever"),
            (lambda d, p, m: early(d, p, m, each=2 if d < 2 else 1), "is possible"),
            (lambda d, p, m: ["F0"], "wanted pairs such as"),
        ],
    ),
}
