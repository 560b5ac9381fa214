"""Find the parts of a JSON schema that it refers to."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from mie.errors import RequestError, printable, shown
from mie.structured.keywords import Schema, listed, mapping_of

VALUES = ("const", "enum", "default", "example", "examples")
"""Keywords with values that are not schemas. Names in these values are not keywords."""

DYNAMIC = ("$dynamicRef", "$recursiveRef")
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")

_MAX_POINTER = 200
_OLD_DRAFTS = tuple(f"draft-{number:02}/schema" for number in (3, 4, 6, 7))


_NOT_PARTS = (*VALUES, *DEPENDENT, "properties", "patternProperties", "$defs", "definitions")
"""Keywords with other objects than schemas that constrain a value."""


class PlacedError(RequestError):
    """A refusal of a schema, with the place of the reason in the schema."""


class References:
    """Resolves the references of one schema. References to other documents are refused."""

    def __init__(self, root: dict[str, Any]) -> None:
        """Index the identifiers and anchors of a schema."""
        self._root = root
        self._bases: dict[int, str] = {}  # of each object, by its identity
        # The parent of each object and list, and the step from it, by identity.
        self._steps: dict[int, tuple[Any, str]] = {}
        self._named: dict[str, Any] = {}
        num_resources = 0
        multiples = set()
        left: list[tuple[Any, str]] = [(root, "")]
        for node, base in left:
            if isinstance(node, list):
                left += [(each, base) for each in node]
                self._steps |= {id(each): (node, str(i)) for i, each in enumerate(node)}
            elif isinstance(node, dict):
                for name in ("id", "$id"):
                    if isinstance(node.get(name), str):
                        base = _joined(base, node[name])
                        self._named.setdefault(base, node)
                        num_resources += node is not root
                for name in ("$anchor", "$dynamicAnchor"):
                    if isinstance(node.get(name), str):
                        self._named.setdefault(f"{urldefrag(base).url}#{node[name]}", node)
                if isinstance(node.get("multipleOf"), (int, float)):
                    multiples.add(node["multipleOf"])
                self._bases[id(node)] = urldefrag(base).url
                left += [(value, base) for name, value in node.items() if name not in VALUES]
                self._steps |= {id(value): (node, name) for name, value in node.items()}
        self._has_one_resource = num_resources == 0
        self._is_old = str(root.get("$schema")).rstrip("#").endswith(_OLD_DRAFTS)
        self._alone: dict[int, dict[str, Any]] = {}  # references without their siblings
        self.has_multiples = len(multiples) > 1
        """Whether the schema demands multiples of several numbers."""

    def placed(self, error: RequestError, node: Any) -> RequestError:
        """Return an error with the JSON pointer of a schema, unless it has one."""
        is_known = node is self._root or (isinstance(node, dict) and id(node) in self._steps)
        if isinstance(error, PlacedError) or not is_known:
            return error
        return PlacedError(f"{error}; see {self.pointer(node)}")

    def pointer(self, node: Any) -> str:
        """Return the JSON pointer of a part of the schema, as ``$ref`` has it."""
        steps: list[str] = []
        while node is not self._root:
            node, step = self._steps[id(node)]
            steps.append(step.replace("~", "~0").replace("/", "~1"))
        return printable("/".join(["#", *reversed(steps)]), _MAX_POINTER)

    def parts(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the schemas in a schema, and the schema that it refers to."""
        target = self.target(node)
        left = [target, *(value for name, value in node.items() if name not in _NOT_PARTS)]
        for name in ("properties", "patternProperties", *DEPENDENT):
            left += mapping_of(node, name).values()
        for each in left:
            if isinstance(each, list):
                left += each
            elif isinstance(each, dict):
                yield each

    def effective(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of an object that have effect.

        Until draft 7, keywords beside ``$ref`` are ignored.
        """
        if not self._is_old or "$ref" not in node:
            return node
        if id(node) not in self._alone:
            alone = self._alone[id(node)] = {"$ref": node["$ref"]}
            self._bases[id(alone)] = self._bases.get(id(node), "")
        return self._alone[id(node)]

    def in_place(self, schema: Schema) -> Iterator[tuple[str, Any]]:
        """Return the other schemas of the same value, and their keywords."""
        schema = self.effective(schema)
        for name in ("allOf", "anyOf", "oneOf"):
            for each in listed(schema, name):
                yield name, each
        for name in DEPENDENT:
            for each in mapping_of(schema, name).values():
                if isinstance(each, dict):
                    yield name, each
        for name in ("then", "else"):
            if "if" in schema and name in schema:
                yield name, schema[name]
        target = self.target(schema)
        if target is not None:
            yield "$ref", target

    def target(self, node: dict[str, Any]) -> Any:
        """Return the schema that an object refers to, or None if it refers to none.

        Raises:
            RequestError: the reference leads nowhere or to another document.
        """
        name = next((each for each in ("$ref", *DYNAMIC) if each in node), None)
        if name is None:
            return None
        reference = node[name]
        if not isinstance(reference, str):
            raise RequestError(f"has a {name} that is not a string: {shown(reference)}")
        if name in DYNAMIC and not self._has_one_resource:  # it may lead to several places
            raise RequestError(f"uses {name!r} in several resources, which is not supported")
        uri, fragment = urldefrag(_joined(self._bases.get(id(node), ""), reference))
        places = [uri, ""] if reference.startswith("#") else [uri]
        for place in places:  # many schemas that name themselves mean the whole by "#"
            found = self._found(place, unquote(fragment))
            if isinstance(found, (dict, bool)):
                return found
        raise RequestError(
            f"refers to {shown(reference)}, which is not in the schema (write it into $defs; other "
            "documents are not read)"
        )

    def _found(self, uri: str, fragment: str) -> Any:
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{uri}#{fragment}")
        node: Any = self._named.get(uri, None if uri else self._root)
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and step.isdecimal() and len(step) < 9:
                node = node[int(step)] if int(step) < len(node) else None
            else:
                node = node.get(step) if isinstance(node, dict) else None
        return node


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:  # such as an address of IPv6 without an end
        raise RequestError(f"refers to {shown(reference)}, which is no URI: {error}") from error
