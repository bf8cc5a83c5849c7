"""Random shapes of trees, and their properties by definition."""

from hypothesis import strategies as st


@st.composite
def parent_lists(draw, most=140):
    """Draws any valid tree in level order: each node lies in the level of the node before it, or in the next."""
    parents, depths = [-1], [0]
    for node in range(1, draw(st.integers(1, most))):
        allowed = [p for p in range(node) if depths[p] in (depths[-1] - 1, depths[-1])]
        parents.append(allowed[draw(st.integers(0, len(allowed) - 1))])
        depths.append(depths[parents[-1]] + 1)
    return parents


def ancestors(parents, node):
    while node >= 0:
        yield node
        node = parents[node]
