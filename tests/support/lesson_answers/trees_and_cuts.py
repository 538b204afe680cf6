"""Answers to the exercises on trees and cuts."""

import itertools

RIGHT, LEFT, DOWN, UP = (0, 1), (0, -1), (1, 0), (-1, 0)


def bound(links, ranks, inside):
    out = sum(rate for (a, b), rate in links.items() if a in inside and b not in inside)
    return ranks * out / sum(node < ranks for node in inside)


def both_ways(links, ranks, inside):
    crossing = sum(rate for (a, b), rate in links.items() if (a in inside) != (b in inside))
    return ranks * crossing / sum(node < ranks for node in inside)


def inward(links, ranks, inside):
    return bound({(b, a): rate for (a, b), rate in links.items()}, ranks, inside)


def find_cut(links, ranks, *, sizes=None, kinds=None):
    nodes = sorted({node for link in links for node in link})
    found = []
    for size in sizes or range(1, len(nodes)):
        for each in itertools.combinations(kinds(nodes, ranks) if kinds else nodes, size):
            if 0 < sum(node < ranks for node in each) < ranks:
                found.append((bound(links, ranks, set(each)), each))
    return set(min(found)[1])


def all_but_one(links, ranks):
    """Only the sets that leave one rank out."""
    nodes = {node for link in links for node in link}
    sets = [nodes - {rank} for rank in range(ranks)]
    return min(sets, key=lambda inside: bound(links, ranks, inside))


def ranks_only(links, ranks):
    """Switches are never inside."""
    return find_cut(links, ranks, sizes=range(1, ranks), kinds=lambda nodes, ranks: range(ranks))


def moved(root, steps):
    """Edges (from offset, way), moved to the root."""
    row, column = divmod(root, 3)

    def place(offset):
        return (row + offset[0]) % 3 * 3 + (column + offset[1]) % 3

    return [(place(start), place((start[0] + way[0], start[1] + way[1]))) for start, way in steps]


NEAR = [((0, 0), RIGHT), ((0, 0), DOWN), ((0, 0), LEFT), ((0, 0), UP)]


def tree(root):
    return moved(root, [*NEAR, (RIGHT, DOWN), (DOWN, LEFT), (LEFT, UP), (UP, RIGHT)])


def rows_first(root):
    """Along the row, then all columns: rows carry 2 edges, columns 6."""
    return moved(root, [*NEAR, (RIGHT, DOWN), (LEFT, DOWN), (LEFT, UP), (RIGHT, UP)])


def one_way(root):
    """Both corners of a side by the same direction: rows and columns even, directions not."""
    return moved(root, [*NEAR, (RIGHT, DOWN), (LEFT, DOWN), (UP, LEFT), (UP, RIGHT)])


def around(root):
    """A snake along the rows."""
    return [((root + step) % 9, (root + step + 1) % 9) for step in range(8)]


ANSWERS = {
    "bound": (
        bound,
        [
            (both_ways, "both ways"),
            (inward, "that come in"),
            (lambda n, r, s: bound(n, r, s) * sum(x < r for x in s) / len(s), "hold no part"),
            (lambda n, r, s: r * r / bound(n, r, s), "Upside down"),
            (lambda n, r, s: bound(n, r, s) / r, "one rank's part"),
            (lambda n, r, s: bound(n, r, s) * sum(x < r for x in s) / r, "not yet"),
            (lambda n, r, s: 1.0, "Of one rank of a star it is 1200 GB/s"),
            (lambda n, r, s: "fast", "wanted a number"),
        ],
    ),
    "find_cut": (
        find_cut,
        [
            (all_but_one, "are not the only ones"),
            (lambda n, r: find_cut(n, r, sizes=[1]), "are not the only ones"),
            (ranks_only, "Switches can be inside"),
            (lambda n, r: set(range(r)), "holds all ranks"),
            (lambda n, r: set(), "holds no rank"),
            (lambda n, r: {99}, "nodes are 0 to"),
            (lambda n, r: 3, "a set of nodes"),
        ],
    ),
    "tree": (
        tree,
        [
            (rows_first, "not equally busy"),
            (one_way, "do more than others"),
            (around, "is no cable"),
            (lambda root: tree(0), "starts where nothing has arrived yet"),
            (lambda root: tree(root)[::-1], "starts where nothing"),
            (lambda root: tree(root)[:-1], "does not reach"),
            (lambda root: tree(root) + tree(root)[:1], "a second time"),
            (lambda root: [1, 2], "pairs"),
        ],
    ),
}
