"""RUNS ON THE NODE: parse the output of `systemctl show`."""

from __future__ import annotations

from typing import Dict, List


def properties(text: str) -> Dict[str, str]:
    """
    Return {name: value} from the lines "Name=value" of one unit.

    >>> properties("Id=a.service\\nEnvironment=A=1\\n")
    {'Id': 'a.service', 'Environment': 'A=1'}
    """
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def show_each(text: str) -> List[Dict[str, str]]:
    """
    Return the properties of several units in the order of the text.

    In the text, an empty line separates the blocks of the units.
    """
    return [properties(block) for block in text.split("\n\n") if block.strip()]
