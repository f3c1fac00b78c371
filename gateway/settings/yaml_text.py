"""YAML as people write it, read in one way: the configuration, the worlds of simulations, the traffic of loads.

An alias (`*name`) says once more what stands elsewhere. Lists of aliases of lists of aliases are gigabytes in a hundred
bytes to whoever walks them ("billion laughs"), so what aliases may repeat is bounded.

libyaml reads: every process of ours reads the configuration, for which the loader in Python takes ten times as long.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import yaml

MOST_REPEATED: Final = 1_000_000
"""Characters that aliases may repeat, a value being one at least: far more than anybody writes by hand."""
DEEPEST: Final = 200
"""Levels, with those of aliases: what walks a document calls itself for each, and libyaml alone would take 1000."""
TOO_DEEP: Final = "not taken: it is nested too deeply"


class YamlFault(ValueError):
    """A text that is not taken; its words go on from a file's name and a colon."""


def read_yaml(text: str) -> Any:
    """What the text says. Raises `YamlFault`."""
    document, _ = read_with_nodes(text)
    return document


def read_with_nodes(text: str) -> tuple[Any, yaml.Node | None]:
    """What the text says, and its nodes, which know their lines; None of nothing. Raises `YamlFault`."""
    with _told():
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.CSafeLoader)
        _check_size(node)
        return yaml.load(text, Loader=yaml.CSafeLoader), node


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except YamlFault:
        raise
    except RecursionError as error:
        raise YamlFault(TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:  # the second: a date or a number that is none
        raise YamlFault(f"not valid YAML: {' '.join(str(error).split())}") from error


def _check_size(root: yaml.Node | None) -> None:
    own: dict[int, int] = {}  # characters, by node
    whole: dict[int, int | None] = {}  # with all that its aliases repeat; None while it is looked at
    levels: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in whole:
            whole[id(node)] = None
            own[id(node)] = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            whole[id(node)] = own[id(node)] + sum(map(size, _children(node)))
            levels[id(node)] = 1 + max((levels[id(child)] for child in _children(node)), default=0)
        if (known := whole[id(node)]) is None:
            raise YamlFault(f"not taken: line {node.start_mark.line + 1}: an alias stands in what it repeats")
        return known

    if root is not None and size(root) - sum(own.values()) > MOST_REPEATED:
        raise YamlFault(f"not taken: its aliases repeat more than {MOST_REPEATED:,} characters")
    if root is not None and levels[id(root)] > DEEPEST:
        raise YamlFault(TOO_DEEP)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
