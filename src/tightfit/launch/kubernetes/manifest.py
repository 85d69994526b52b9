"""Objects as a YAML file for kubectl."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from tightfit.launch.kubernetes.pod import Document

_FIRST = ("apiVersion", "kind", "metadata", "spec", "name")


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, and no aliases for what is said twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def write_manifest(objects: Sequence[Document], *, comment: str = "") -> str:
    """One document per object, in the order in which they are applied."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    documents = (
        yaml.dump(_in_order(one), Dumper=_Dumper, sort_keys=False, width=1000) for one in objects
    )
    return head + "---\n".join(documents)


def _in_order(thing: object) -> object:
    """What a thing is comes before what is in it."""
    if isinstance(thing, dict):
        keys = [key for key in _FIRST if key in thing]
        keys += [key for key in thing if key not in _FIRST]
        return {key: _in_order(thing[key]) for key in keys}
    return [_in_order(item) for item in thing] if isinstance(thing, list) else thing
