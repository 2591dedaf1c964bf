"""A radix tree over token sequences: which earlier call does a prompt agree with, and how far?

An edge holds a run of tokens, so a rollout of T turns has about T nodes, whatever its length in
tokens. Nodes keep their identity when an edge is split, so a search or an insertion may start at
any node that is known to lie on its path: an append-only chain is inserted in the number of its
distinct tokens, not in the square of it. Nothing recurses, for chains can be deep.
"""

from __future__ import annotations

from token_id_capture.tokens import TokenIds

_NO_TOKENS = TokenIds()


class PrefixTreeNode:
    """The end of an edge. ``label`` has the ``depth - above.depth`` tokens of that edge.

    ``call`` is the latest inserted sequence that ends here (None: none does), ``first`` the
    earliest one that passes through here or ends here.
    """

    __slots__ = ("above", "branches", "call", "depth", "first", "label")

    def __init__(self, above: PrefixTreeNode | None, label: TokenIds, first: int) -> None:
        self.above = above
        self.label = label
        self.depth: int = len(label) + (above.depth if above is not None else 0)
        self.branches: dict[int, PrefixTreeNode] = {}
        self.call: int | None = None
        self.first = first

    def at_most(self, depth: int) -> PrefixTreeNode:
        """The nearest node at or above this one that is not deeper than ``depth`` tokens."""
        node = self
        while node.depth > depth and node.above is not None:
            node = node.above
        return node

    def ending_call(self) -> int | None:
        """The call of the longest inserted sequence that ends at or above this node."""
        node: PrefixTreeNode | None = self
        while node is not None and node.call is None:
            node = node.above
        return None if node is None else node.call


class PrefixTree:
    """Sequences are inserted under growing numbers, the *calls*."""

    def __init__(self) -> None:
        self.root = PrefixTreeNode(None, _NO_TOKENS, 0)

    def locate(self, tokens: TokenIds, start: PrefixTreeNode) -> tuple[PrefixTreeNode, PrefixTreeNode, int]:
        """Follow ``tokens`` as far as the tree agrees with them, from a node on their path.

        Returns ``(reached, below, depth)``: the last node that was reached whole, the number of
        leading tokens that agree with the tree, and the node at whose end the edge ends on which
        the agreement stops (``reached`` itself if it stops between two edges).
        """
        reached = start
        while reached.depth < len(tokens):
            below = reached.branches.get(tokens[reached.depth])
            if below is None:
                break
            agreed = below.label.common_prefix_length(tokens[reached.depth : below.depth])
            if agreed < len(below.label):
                return reached, below, reached.depth + agreed
            reached = below
        return reached, reached, reached.depth

    def insert(self, call: int, tail: TokenIds, start: PrefixTreeNode) -> PrefixTreeNode:
        """Add the sequence that leads to ``start`` and continues with ``tail``; return its end."""
        node = start
        while tail:
            below = node.branches.get(tail[0])
            if below is None:
                below = node.branches[tail[0]] = PrefixTreeNode(node, tail, call)
                tail = _NO_TOKENS
            else:
                agreed = below.label.common_prefix_length(tail)
                if agreed < len(below.label):
                    below = self._split(below, agreed)
                tail = tail[agreed:]
            node = below
        node.call = call
        return node

    @staticmethod
    def _split(lower: PrefixTreeNode, length: int) -> PrefixTreeNode:
        """Put a node after the first ``length`` tokens of the edge that ends at ``lower``."""
        above = lower.above
        assert above is not None, "the root has no edge"
        upper = PrefixTreeNode(above, lower.label[:length], lower.first)
        above.branches[lower.label[0]] = upper
        lower.above = upper
        lower.label = lower.label[length:]
        upper.branches[lower.label[0]] = lower
        return upper
