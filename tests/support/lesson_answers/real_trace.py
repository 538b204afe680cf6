"""Answers to the exercises on traces."""


def busy(events):
    total, reached = 0, float("-inf")
    for _, start, end in sorted(events, key=lambda event: event[1]):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def self_time(events):
    own, stack = {}, []
    for name, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        while stack and stack[-1][1] <= start:
            stack.pop()
        own[name] = own.get(name, 0) + end - start
        if stack:
            own[stack[-1][0]] -= end - start
        stack.append((name, end))
    return own


def exposed(messages, compute):
    both = [("", *span) for span in (*messages, *compute)]
    return busy(both) - busy([("", *span) for span in compute])


def lengths(events):
    return sum(end - start for _, start, end in events)


def totals(events):
    return {name: lengths([e for e in events if e[0] == name]) for name, *_ in events}


def less_all_inside(events):
    own = totals(events)
    for name, start, end in events:
        for other, first, last in events:
            if other != name and start <= first and last <= end:
                own[name] -= last - first
    return own


def last_only(events):
    return self_time(
        [e for e in events if e[1] >= max(start for n, start, _ in events if n == "step")]
    )


ANSWERS = {
    "busy": (
        busy,
        [
            (lengths, "counts once"),
            (
                lambda events: (
                    max(e[2] for e in events) - min(e[1] for e in events) if events else 0
                ),
                "gaps do not count",
            ),
            (lambda events: 0, "Go by start"),
            (lambda events: None, "Not written yet"),
        ],
    ),
    "self_time": (
        self_time,
        [
            (totals, "with what runs inside it"),
            (less_all_inside, "its own children are inside it"),
            (last_only, "both times"),
            (lambda events: 3, "wanted a dict"),
            (lambda events: {name: 0 for name, *_ in events}, "less what runs directly"),
        ],
    ),
    "exposed": (
        exposed,
        [
            (
                lambda messages, compute: sum(end - start for start, end in messages),
                "hidden or not",
            ),
            (
                lambda messages, compute: sum(exposed([one], compute) for one in messages),
                "cost their time once",
            ),
            (lambda messages, compute: 0, "less what the products cover"),
        ],
    ),
}
