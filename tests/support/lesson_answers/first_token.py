"""Answers to the exercises on serving."""


def planned(order=lambda job: (job.output, job.arrival), counted=True, writes=True, floor=1):
    def plan(waiting, reading, writing, budget, reserve):
        rows = [job.number for job in writing]
        left, pieces = budget - len(rows) * counted, []
        for job in reading:
            tokens = min(left, job.prompt - job.read)
            if tokens >= floor:
                pieces.append((job.number, tokens))
                left -= tokens
        for job in sorted(waiting, key=order):
            if left < floor or reserve(job.number) is None:
                break
            tokens = min(left, job.prompt)
            pieces.append((job.number, tokens))
            left -= tokens
        return pieces, rows if writes or not pieces else []

    return plan


def without_room(waiting, reading, writing, budget, reserve):
    rows = [job.number for job in writing]
    return [(job.number, 1) for job in waiting], rows


def whole_prompts(waiting, reading, writing, budget, reserve):
    rows = [job.number for job in writing]
    return [(job.number, job.prompt) for job in waiting if reserve(job.number) is not None], rows


def pools(prompts, length, read, send, insert, step):
    texts = []
    for row, prompt in enumerate(prompts):
        token, cache = read(prompt)
        insert(row, send(cache), token)
        texts.append([token])
    for _ in range(length - 1):
        for text, token in zip(texts, step(), strict=True):
            text.append(token)
    return texts


def changed(sent=True, rows=True, first=True, again=False):
    def other(prompts, length, read, send, insert, step):
        def put(row, cache, token):
            insert(row if rows else 0, cache, token)

        if again:
            for prompt in prompts:
                read(prompt)
        texts = pools(prompts, length, read, send if sent else lambda cache: cache, put, step)
        return texts if first else [[*text[1:], 0] for text in texts]

    return other


def row_by_row(prompts, length, read, send, insert, step):
    texts = pools(prompts[:1], 1, read, send, insert, step)
    for _ in prompts:
        for _ in range(length - 1):
            step()
    return texts


ANSWERS = {
    "plan": (
        planned(),
        [
            (planned(order=lambda job: job.arrival), "frees its slot soonest"),
            (planned(counted=False), "rows count, too"),
            (planned(writes=False), "no stall"),
            (planned(floor=0), "A piece of 0 tokens"),
            (without_room, "has no slot"),
            (whole_prompts, "tokens in a turn of 64"),
            (lambda *given: ([], [job.number for job in given[2]]), "it starves"),
            (lambda *given: [], "two lists"),
        ],
    ),
    "pools": (
        pools,
        [
            (changed(sent=False), "send it first"),
            (changed(rows=False), "not the texts"),
            (changed(first=False), "first token is missing"),
            (changed(again=True), "6 prompts were read"),
            (row_by_row, "one writes a token of every row"),
        ],
    ),
}
