"""What a cluster lacks for the bundles of slots, in words: how many of which kind, which resource, on which node. Pure.

The text is for people who decide whether to add a node, to end another job, or to ask for less. So it lists each node
with the resources that it has left. What is free is only a snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.actors.graph.slot_plan import Strategy


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Bundles that are to be reserved together. `labels`: for each one, what it is for. `name` is for the dashboard."""

    name: str
    bundles: Sequence[Mapping[str, float]]
    labels: Sequence[str]
    strategy: Strategy
    detached: bool = False
    """Whether they outlive the script that asks for them."""

    @property
    def needs(self) -> list[Need]:
        """Each bundle, with what it is for."""
        return [Need.of(bundle, label) for bundle, label in zip(self.bundles, self.labels, strict=True)]

    @property
    def one_node(self) -> bool:
        """Whether all must be on one node."""
        return self.strategy == "STRICT_PACK"


NODES_SHOWN_MAX = 8
_MEMORY = "memory"
_SLACK = 1e-6
"""Ray's amounts are sums of ten-thousandths."""

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node that lives: what it has left, and what it has in all."""

    name: str
    free: Amounts
    total: Amounts


@dataclass(frozen=True, slots=True)
class Need:
    """A bundle that has no node: what it reserves, and for what."""

    bundle: tuple[tuple[str, float], ...]
    label: str

    @classmethod
    def of(cls, bundle: Amounts, label: str) -> Need:
        """A bundle as Ray describes it."""
        return cls(tuple(sorted((kind, float(amount)) for kind, amount in bundle.items() if amount)), label)


def missing_room(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> str:
    """What these bundles wait for. `one_node`: all of them must be on one."""
    counts = Counter(needs)
    what = " and ".join(f"{_count(n)} of {amounts_text(dict(b.bundle))} for {b.label}" for b, n in counts.items())
    verb = "has" if len(needs) == 1 else "have"
    return f"{what} {verb} no node. {why_no_room(needs, nodes, one_node=one_node)}"


def why_no_room(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> str:
    """Return why these bundles have no node, and what the nodes have left of what they need."""
    return f"{_why(needs, nodes, one_node)}. {_where(needs, nodes)}"


def never_fits(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> bool:
    """Whether these bundles could not be had on these nodes if nothing else ran there. False where that is not sure."""
    asked = _sum(needs)
    totals = [node.total for node in nodes]
    if one_node and not any(_holds(total, asked) for total in totals):
        return True
    each = all(any(_holds(total, dict(need.bundle)) for total in totals) for need in set(needs))
    return not each or any(amount > _all_of(kind, totals) + _SLACK for kind, amount in asked.items())


def amounts_text(amounts: Amounts) -> str:
    """Resources in words: "1 CPU + 0.5 GPU"."""
    return " + ".join(_amount(kind, amount) for kind, amount in sorted(amounts.items()))


def _why(needs: Sequence[Need], nodes: Sequence[NodeRoom], one_node: bool) -> str:
    """What stands against it: the first cause for each resource."""
    asked, causes = _sum(needs), []
    for kind in sorted(asked):
        each = max(dict(need.bundle).get(kind, 0.0) for need in needs)
        total, free = ([getattr(node, what).get(kind, 0.0) for node in nodes] for what in ("total", "free"))
        if not any(total):
            causes.append(f"no node has any {_kind(kind)}")
        elif max(total) + _SLACK < each:
            causes.append(f"no node has {_amount(kind, each)}, not even when it is empty")
        elif sum(total) + _SLACK < asked[kind]:
            causes.append(f"all nodes together have {_amount(kind, sum(total))}, and {asked[kind]:g} are needed")
        elif sum(free) + _SLACK < asked[kind]:
            needed = _amount(kind, asked[kind])
            causes.append(f"{needed} needed, and {_amount(kind, sum(free))} free of {_amount(kind, sum(total))}")
        elif max(free) + _SLACK < each:
            causes.append(f"{_amount(kind, each)} needed on one node, and no node has more than {max(free):g} free")
    if one_node and len(needs) > 1 and not any(_holds(node.free, asked) for node in nodes):
        causes.append(f"they must be on one node (strict_pack), and none has {amounts_text(asked)} free")
    if not causes:
        causes.append("no node has all of a bundle free at once")
    text = "; ".join(causes)
    return text[0].upper() + text[1:]


def _where(needs: Sequence[Need], nodes: Sequence[NodeRoom]) -> str:
    kinds = sorted(_sum(needs))
    shown = [
        f"{node.name}: " + ", ".join(_left(kind, node.free.get(kind, 0.0), node.total.get(kind, 0.0)) for kind in kinds)
        for node in sorted(nodes, key=lambda node: node.name)[:NODES_SHOWN_MAX]
    ]
    more = len(nodes) - len(shown)
    tail = f"; and {more} more" if more else ""
    return f"Free on the nodes that live ({len(nodes)}): {'; '.join(shown)}{tail}" if nodes else "No node lives"


def _count(number: int) -> str:
    return "1 bundle" if number == 1 else f"{number} bundles"


def _sum(needs: Sequence[Need]) -> dict[str, float]:
    asked: Counter[str] = Counter()
    for need in needs:
        asked.update(dict(need.bundle))
    return dict(asked)


def _all_of(kind: str, nodes: Sequence[Amounts]) -> float:
    return sum(node.get(kind, 0.0) for node in nodes)


def _holds(node: Amounts, asked: Amounts) -> bool:
    return all(node.get(kind, 0.0) + _SLACK >= amount for kind, amount in asked.items())


def _kind(kind: str) -> str:
    return "memory" if kind == _MEMORY else kind


def _number(kind: str, amount: float) -> str:
    return f"{amount / 2**20:,.0f}" if kind == _MEMORY else f"{round(amount, 4):g}"


def _amount(kind: str, amount: float) -> str:
    return f"{_number(kind, amount)} {'MiB of memory' if kind == _MEMORY else kind}"


def _left(kind: str, free: float, total: float) -> str:
    return f"{_number(kind, free)} of {_amount(kind, total)}"
