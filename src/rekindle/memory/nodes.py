"""Records the nodes of a start and the addresses of their agents, ``nodes.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_integers, check_texts, loads
from rekindle.format.lineage import check_id
from rekindle.format.names import MAX_RANKS
from rekindle.format.receipt import read_file
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import replace_file

__all__ = ["LONGEST_TEXT", "SECRET_BYTES", "Node", "Nodes", "describe_node", "ranges"]

SECRET_BYTES = 32
"""Size of the secret by which the agents of a start know each other."""
LONGEST_TEXT = 255
"""Characters of a name, an address or a domain."""


@dataclass(frozen=True)
class Node:
    """One node of a start."""

    name: str
    """Name for people, different on each node: that of the host, and a number where several have the same."""
    host: str
    """Address on which its agent listens; empty if it doesn't."""
    port: int
    """Port on which its agent listens; 0 if it doesn't. Such a node is in no mesh."""
    ranks: list[int]
    """Ranks on it, in order."""
    domain: str = ""
    """Name of what fails together with it, such as its rack; empty if that is unknown."""

    @staticmethod
    def from_json(value: Any) -> Node:
        """Reads a node from JSON. Raises ValueError, TypeError or KeyError when a field is missing or malformed."""
        name, host, domain = check_texts([value["name"], value["host"], value["domain"]])
        if not name or max(len(name), len(host), len(domain)) > LONGEST_TEXT:
            raise ValueError("a name, an address or a domain is too long, or missing")
        ranks = list(check_integers(value["ranks"], MAX_RANKS, MAX_RANKS - 1))
        if not ranks or ranks != sorted(set(ranks)):
            raise ValueError("the ranks of a node are missing, or not in order")
        return Node(name, host, check_integer(value["port"], 0, 65535), ranks, domain)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one start, as each of them knows them. They stay the same until the start ends."""

    start: str
    """Id of the incarnation. A record of another start says nothing about this one."""
    generation: int
    """Generation of the start when its ranks met."""
    secret: bytes = field(repr=False)
    """Secret of the start, by which its agents know each other."""
    own: int
    """Number of this node in ``nodes``."""
    nodes: list[Node]
    """All nodes, those of a domain side by side."""

    @property
    def here(self) -> Node:
        """This node."""
        return self.nodes[self.own]

    @property
    def partner(self) -> int:
        """Number of the node that keeps copies for this one: half of all nodes away, so of another domain if it can
        be."""
        return (self.own + len(self.nodes) // 2) % len(self.nodes)

    @property
    def source(self) -> int:
        """Number of the node that this one keeps copies for: the one whose partner it is."""
        return (self.own - len(self.nodes) // 2) % len(self.nodes)

    def node_of(self, rank: int) -> Node:
        """Returns the node of a rank of the start."""
        return next(node for node in self.nodes if rank in node.ranks)

    def write(self, job: JobDir) -> None:
        """Replaces the record in the job's directory, also whenever somebody removes it while this process trains.

        Only this user can read it. Raises OSError.
        """
        job.keep_beside(job.paths.nodes, self.write)
        fields = {**asdict(self), "secret": self.secret.hex()}
        replace_file(job.paths.nodes, [json.dumps(fields).encode()])

    @staticmethod
    def read(job: JobDir) -> Nodes | None:
        """Returns the record that the newest start on several nodes left; None if there is none.

        Raises FormatError when it is malformed, OSError when it can't be read.
        """
        path = job.paths.nodes
        try:
            return _from_json(loads(read_file(path)))
        except FileNotFoundError:
            return None
        except FormatError:  # it names the file
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{path}: {error}") from error


def describe_node(name: str, ranks: Iterable[int]) -> str:
    """Returns a node's name and ranks, for a sentence."""
    numbers = list(ranks)
    return f"node {name} (rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)})"


def ranges(numbers: Iterable[int]) -> str:
    """Returns whole numbers in words, such as "0-3, 8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _from_json(value: Any) -> Nodes:
    """Reads a record from JSON. Raises ValueError, TypeError or KeyError when a field is missing or malformed."""
    if type(value["nodes"]) is not list:
        raise ValueError("its nodes are not a list")
    nodes = [Node.from_json(node) for node in value["nodes"]]
    secret = bytes.fromhex(value["secret"])
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"its secret has not {SECRET_BYTES} bytes")
    ranks = [rank for node in nodes for rank in node.ranks]
    if len({node.name for node in nodes}) < len(nodes) or len(set(ranks)) < len(ranks):
        raise ValueError("two nodes have one name, or one rank")
    return Nodes(
        start=check_id(value["start"]),
        generation=check_integer(value["generation"]),
        secret=secret,
        own=check_integer(value["own"], 0, len(nodes) - 1),
        nodes=nodes,
    )
